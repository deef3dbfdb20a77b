"""What both model runners promise, one case each: a table that both are held to.

A case says what is run; ``checks.py`` says what must come out. ``host`` is Model Runner V1,
``device`` is Model Runner V2, here under Triton's interpreter, where a token takes a second:
what is large runs on the host alone, with a small case of the same promise for both.
"""

import importlib.util
import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import pytest
from vllm.sampling_params import RepetitionDetectionParams

from tests import reasoning_parser
from vllm_triforce.config.draft_sources import SOURCES, SOURCES_V2
from vllm_triforce.selection import POLICIES

HAS_SUFFIX = importlib.util.find_spec("arctic_inference") is not None
SLOW = "takes minutes in Triton's interpreter; '{}' holds the device to this promise"


@dataclass(frozen=True)
class Request:
    """A stretch of the model's text (``models.py``), continued."""

    start: int
    length: int
    params: Mapping | Callable = field(default_factory=dict)
    """Of ``SamplingParams``; greedy and past the end of text unless they say otherwise. Or what
    makes them of stock vLLM's usual completion."""
    adapter: int = 0
    """One of the model's LoRA adapters; 0 is none."""
    turn_after: "Request | None" = None
    """Before its stretch come that request's prompt and stock vLLM's answer."""
    images: tuple[int, ...] = ()
    """Seeds of images, negative ones of videos, spread over its stretch."""


Round = tuple[Request, ...]


@dataclass(frozen=True)
class Case:
    name: str
    promise: str
    rounds: tuple[Round, ...]
    """Batches, one after the other, in one engine."""
    checks: tuple[str, ...] = ("stock",)
    model: str = "pair"
    source: str = "draft_model"
    """Where level 1's tokens come from."""
    drafts_by_target: bool = False
    """Whether the draft model is the target."""
    level2_model: str = ""
    """A dtype, or one of the model's checkpoints (``models.py``)."""
    keys: Mapping = field(default_factory=dict)
    """TriForce's."""
    engine: Mapping = field(default_factory=dict)
    every: int = 0
    """A request joins every so many steps; 0: all at once."""
    is_session: bool = False
    """True if a round's requests are the pieces of one session's input."""
    dice: int = 0
    """Not 0: what each request proposes, and how, is drawn anew in every step from this seed."""
    disturbance: tuple = ()
    """What is broken in the first round. ``nan LEVEL PASS REQUESTS``: a NaN in the first request's
    hidden state, keys and values too, in one pass of a level in which so many requests take part.
    ``recovered from the whole``: the published code's mistake."""
    at_least: Mapping[str, int] = field(default_factory=lambda: {"num_level2_accepted": 1})
    """Counters of TriForce that must have moved, over all rounds, or nothing was tested; a case
    without says why."""
    ties: float = 0.0
    """The share of requests that may part from stock vLLM where that is proven undecided."""
    skip: Mapping[str, str] = field(default_factory=dict)
    """Why a runner, by name, does not run the case."""

    def __post_init__(self) -> None:
        if unknown := set(self.skip) - {"host", "device"}:
            raise ValueError(f"case {self.name!r}: no runner is called {unknown}")


def slow(stand_in: str) -> dict:
    return {"device": SLOW.format(stand_in)}


def requests(*lengths: int, step: int = 0, adapters: tuple[int, ...] = (), **params) -> Round:
    """Prompts that begin alike, as a conversation's do, or so far from each other in the text."""
    return tuple(
        Request(step * i, length, params, adapter)
        for i, (length, adapter) in enumerate(zip(lengths, adapters or itertools.repeat(0)))
    )


def three(*params: Mapping, max_tokens: int) -> Round:
    """Requests that ask for something each. The third has slots beyond those of the block that the
    others end in."""
    prompts = (0, 400), (100, 270), (300, 318)
    return tuple(
        Request(*prompt, {**own, "max_tokens": max_tokens}) for prompt, own in zip(prompts, params)
    )


# Both runners; three chunks for a prompt of 520 tokens, four requests at a time.
SMALL = dict(
    max_model_len=1024,
    max_num_batched_tokens=256,
    max_num_seqs=4,
    kv_cache_memory_bytes=128 << 20,
    # Each answer's own figures, which must add up to what is counted.
    per_request_spec_decode_metrics="detailed",
)
GATE = 200
DRAFT = dict(retrieval_budget=128, min_context=GATE, num_recent_tokens=100)
LOOKUP = dict(retrieval_budget=128, min_context=GATE)


def _small(source: str, *, engine: Mapping = SMALL, **keys) -> dict:
    own = DRAFT if source in ("draft_model", "head") else LOOKUP
    return dict(source=source, keys=own | keys, engine=engine)


def _by_source(source: str) -> list[Case]:
    """What is promised of every source of drafts, also of one that is added; one engine each."""
    small = _small(source)
    if source not in SOURCES_V2:
        small["skip"] = {"device": f"V2 drafts on the device, and {source!r} has no side there"}
    if source == "suffix" and not HAS_SUFFIX:
        small["skip"]["host"] = "arctic-inference is not installed"
    return [
        Case(
            f"greedy-{source}",
            "Greedy output is stock vLLM's, alone and in a batch of unequal lengths that is read "
            "in chunks; requests below min_context are not speculated on, those above are.",
            (requests(90, max_tokens=10), requests(520, 90, 400, max_tokens=10)),
            ("stock", "gate"),
            **small,
            at_least={"num_level2_accepted": 1, "num_level1_drafted": 1, "num_level3_steps": 1},
        ),
        Case(
            f"ends-{source}",
            "A proposal never goes past what a request may reach: max_tokens and max_model_len end "
            "it inside a proposal as they end stock vLLM's, and stop nobody else.",
            tuple(requests(1002, 1017, 1019, 1022, max_tokens=m) for m in (1, 2, 5, None)),
            **small,
        ),
        Case(
            f"straight to the full pass-{source}",
            "Level 1's tokens may go straight to the full pass; output does not change.",
            (requests(90, 700, 400, max_tokens=32),),
            **{**small, "keys": {"retrieval_budget": 128, "levels": "1,3"}},
            at_least={"num_direct_proposals": 2},
        ),
        Case(
            f"chosen while running-{source}",
            "Greedy output is stock vLLM's for all choices of the controller.",
            (requests(90, 700, 400, max_tokens=32),),
            **{**small, "keys": {"retrieval_budget": 128, "adaptive": True}},
            at_least={},  # the controller may find that nothing pays on this machine
        ),
        Case(
            f"crossing the gate-{source}",
            "Nothing is proposed before a request has min_context tokens, something after.",
            tuple((Request(3000, GATE - 10, {"max_tokens": m}),) for m in (8, 32)),
            ("stock", "crossed"),
            **small,
        ),
    ]


def _dice() -> list[Case]:
    """On the host the controller's choices are as good as dice, and what is measured with them
    tells more (tests/engine/test_adaptive.py)."""
    skip = {"host": "it decides by itself; 'chosen while running' holds it to this promise"}
    every_way = {"num_direct_proposals": 2, "num_level2_passes": 2, "num_level2_accepted": 1}
    greedy = "Greedy output is stock vLLM's for any plan of each request in each step."
    batch = (requests(90, 520, 400, 300, max_tokens=16),)
    return [
        Case(
            "dice-greedy",
            greedy,
            batch,
            dice=1,
            **_small("draft_model"),
            skip=skip,
            at_least=every_way,
        ),
        Case("head-dice", greedy, batch, dice=1, **_small("head"), skip=skip),
        Case(
            "dice-sampled",
            "Sampled tokens have exactly the target's distribution for any plan of each request in "
            "each step.",
            _eight(MIXED, 34),
            ("stock", "calibrated", "both accepted and rejected"),
            dice=2,
            **_of_eight(),
            skip=skip,
            at_least=every_way,
        ),
    ]


def _in_pass() -> list[Case]:
    """Selection inside level 2's passes, by requests above and below the budget: by kernels, as the
    policy is named (tests/v2/engine.py)."""
    skip = {"host": "all of its cases select in this way"}
    return [
        Case(
            "in pass-greedy",
            "Greedy output is stock vLLM's with selection inside level 2's passes, in a batch "
            "that changes.",
            (requests(90, 520, 400, max_tokens=10),),
            **_small("draft_model", selection="retrieval", min_context=0),
            skip=skip,
        ),
        Case(
            "in pass-sampled",
            "Sampled tokens have exactly the target's distribution with selection inside level "
            "2's passes.",
            _eight(MIXED, 34),
            ("stock", "calibrated", "both accepted and rejected"),
            **_of_eight(selection="retrieval"),
            skip=skip,
        ),
    ]


def _copies() -> list[Case]:
    """Level 2 by a copy of the target, over the target's KV cache."""
    greedy = "Greedy output is stock vLLM's with any copy of the target as level 2."
    sampled = "Sampled tokens have exactly the target's distribution with any copy as level 2."
    return [
        *(
            Case(
                f"copy-greedy-{name}",
                greedy,
                (requests(520, 90, 400, max_tokens=10),),
                level2_model=name,
                **_small("draft_model"),
            )
            for name in ("bfloat16", "int8")
        ),
        Case(
            "copy-adapters",
            "The copy drafts without a request's adapter, and the output is the adapter's.",
            (requests(260, 240, 250, adapters=(1, 2, 0), max_tokens=10),),
            level2_model="bfloat16",
            **_small("prompt_lookup", engine=SMALL | ADAPTERS),
        ),
        *(
            Case(
                f"copy-sampled-{name}",
                sampled,
                _eight((dict(temperature=1.0), NARROW, dict(temperature=0), NARROW), 34),
                ("stock", "calibrated"),
                level2_model=name,
                **_of_eight(),
                at_least={"num_level2_drafted": 40, "num_level3_rejections": 1},
            )
            for name in ("bfloat16", "random")
        ),
    ]


def _policies() -> list[Case]:
    """Level 2 by itself, and every policy but the paper's, which all other cases have."""
    return [
        Case(
            "level 2 by itself",
            "Level 2 may propose without level 1, a token in each of its passes; output does not "
            "change.",
            (requests(520, 400, max_tokens=9),),
            **_small("prompt_lookup", levels="2,3"),
            at_least={"num_level2_passes": 5, "num_level2_accepted": 1},
        ),
        *(
            Case(
                f"policy-{policy}",
                "Greedy output is stock vLLM's with every selection policy.",
                (requests(520, 400, max_tokens=14),),
                ("stock", "policy"),
                **_small("prompt_lookup", selection=policy),
                at_least={"num_level2_passes": 5},
            )
            for policy in sorted(set(POLICIES) - {"retrieval"})
        ),
    ]


# By level: behind the first proposals, as soon as all three requests take part in one.
NAN_PASS = {1: 7, 2: 4}
ONE_ANSWER = {"temperature": 1.0, "top_k": 1}
# By name: each request's parameters, the level, and the case that holds the device to it.
NAN = {
    "greedy-1": (({},) * 3, 1, ""),
    "greedy-2": (({},) * 3, 2, "nan-greedy-1"),
    "sampled-1": ((ONE_ANSWER,) * 3, 1, ""),
    "sampled-2": ((ONE_ANSWER,) * 3, 2, ""),
    "mixed-1": (({}, ONE_ANSWER, ONE_ANSWER), 1, "nan-sampled-1"),
}


def _nan() -> list[Case]:
    """What comes behind is as if nothing had been, and the neighbours have gone on."""
    return [
        Case(
            f"nan-{name}",
            "A NaN in a level's logits ends the request's speculation and changes no output, of "
            "this request or of those beside it and after it.",
            (three(*params, max_tokens=22),) * 2,
            ("stock", "nan"),
            disturbance=("nan", level, NAN_PASS[level], len(params)),
            **_small("draft_model"),
            skip=slow(stand_in) if stand_in else {},
        )
        for name, (params, level, stand_in) in NAN.items()
    ]


# What is forced has two tokens, of which the second ends reasoning.
REASONING = {
    "reasoning_parser": reasoning_parser.NAME,
    "reasoning_parser_plugin": reasoning_parser.__file__,
    "reasoning_config": reasoning_parser.forcing("\n    return"),
}
# Of the text, where reasoning begins and does not end soon.
REASONING_PLACES = (1363, 1577, 2340, 2849)


def _reasoning() -> list[Case]:
    def thinking(lengths, behind, params) -> Round:
        """Prompts that end so many tokens behind the beginning of reasoning."""
        return tuple(
            Request(place + 1 + more - length, length, own)
            for place, length, more, own in zip(REASONING_PLACES, lengths, behind, params)
        )

    def budgets(*tokens: int | None, max_tokens: int) -> list[dict]:
        # Runner V2 alone begins a new budget with a beginning within reasoning, and V1 does not
        # take the parser's end for one.
        bias = {reasoning_parser.START: -100, reasoning_parser.END: -100}
        own = dict(max_tokens=max_tokens, logit_bias=bias)
        return [own | dict(thinking_token_budget=budget) for budget in tokens]

    ending = dict(logit_bias={reasoning_parser.END: 4}, max_tokens=20, ignore_eos=False)
    code = ending | structured(regex=ANSWER)
    engine = SMALL | REASONING
    return [
        Case(
            "thinking budgets",
            "A request's thinking_token_budget ends its own reasoning where it ends in stock vLLM: "
            "beside drafts of others, and on Runner V2 inside what is accepted.",
            (
                thinking((180,) * 4, (0, 2, 1, 3), budgets(None, 5, 1, 9, max_tokens=11)),
                thinking((300, 195, 210, 260), (1, 0, 2, 0), budgets(4, 8, None, 0, max_tokens=12)),
            ),
            ("stock", "reasoning ended"),
            **_small("draft_model", engine=engine),
        ),
        Case(
            "grammar behind reasoning",
            "A grammar holds from the token that ends reasoning, wherever in a run it is accepted.",
            (
                thinking(
                    (300, 250, 270, 210),
                    (1, 0, 2, 0),
                    [code, code | ONE_ANSWER, code, code | dict(repetition_penalty=1.1)],
                ),
            ),
            ("stock", "grammar from the end of reasoning"),
            **_small("draft_model", engine=engine),
        ),
    ]


def _turn(usual) -> dict:
    """Ends at the first token of a run, where level 2 is right: the proposals before it are as long
    as may be, and the first step gives one token more."""
    proposed = 6
    return {"max_tokens": 40, "stop_token_ids": [usual.token_ids[1 + proposed + 1]]}


def _scheduling() -> list[Case]:
    turn = {"max_tokens": 10}
    told = Request(2000, 340, {"max_tokens": 13})
    return [
        # Of 353 tokens the last is not computed, and the others fill eleven blocks, the last of
        # them within the tokens that the last step accepts.
        Case(
            "prefix caching",
            "A cached prompt is answered as a cold one, with as many accepted tokens; a "
            "conversation's next turn finds as many cached tokens as without speculation.",
            (
                (told,),
                (told,),
                (Request(2000, 290, turn), Request(3000, 48, turn, turn_after=told)),
            ),
            ("stock", "prefix"),
            **_small("draft_model"),
        ),
        Case(
            "joining and leaving",
            "Requests that come and end at different steps answer as stock vLLM does.",
            (
                tuple(
                    Request(600 * i, n, {"max_tokens": 6 + 4 * i})
                    for i, n in enumerate((210, 420, 60, 300))
                ),
            ),
            every=3,
            **_small("draft_model"),
        ),
        Case(
            "session",
            "A session with input in pieces continues as in stock vLLM after a turn that ended "
            "inside a run of accepted tokens.",
            (
                # A piece that is hardly longer than what was thrown away.
                (Request(0, 700, _turn), Request(2000, 10, {"max_tokens": 14})),
            ),
            ("stock", "cut"),
            is_session=True,
            **_small("draft_model", retrieval_budget=1024),
            skip={"device": "rounds end its proposals elsewhere; tests/unit/test_scheduling.py"},
        ),
        # Three requests start with 8 blocks of 32 tokens and soon want 9, of 26 that there are
        # (one is vLLM's null block), whoever proposes how much.
        Case(
            "preemption",
            "Preempted requests answer as stock vLLM does, and leave no state.",
            (requests(250, 250, 250, 250, step=100, max_tokens=44), requests(220, max_tokens=12)),
            ("stock", "preempted", "nothing kept"),
            **CRAMPED,
        ),
        Case(
            "full budget",
            "Where its budget covers the context, level 2 is the target: all its tokens are "
            "accepted.",
            (requests(400, max_tokens=14),),
            ("stock", "always right"),
            **CRAMPED,
            at_least={"num_level2_drafted": 10},
        ),
    ]


# One place more than there are adapters: where all are taken, vLLM's CPU layers give the last one's
# to requests without any.
ADAPTERS = dict(enable_lora=True, max_loras=3, max_lora_rank=8)


def _adapters() -> list[Case]:
    asked = {}, {"logprobs": 2, "repetition_penalty": 1.2}, {"logprobs": 1}, {}

    def turn(*adapters: int) -> Round:
        return tuple(
            Request(100 * (i // 2), n, {"max_tokens": 10, **own}, adapter)
            for i, (n, adapter, own) in enumerate(zip((260, 260, 220, 240), adapters, asked))
        )

    return [
        Case(
            "adapters",
            "Each request of a batch has its own LoRA adapter or none, also where its prompt is "
            "cached under another adapter; log-probabilities too, with penalties and masks.",
            (turn(1, 2, 0, 1), turn(2, 0, 1, 0)),
            **_small(
                "prompt_lookup", engine=SMALL | ADAPTERS | {"logprobs_mode": "processed_logprobs"}
            ),
        ),
        Case(
            "adapters-full-budget",
            "Where its budget covers the context, level 2 is the target with each request's "
            "adapter, which may be of the last layer too: all its tokens are accepted, greedy "
            "output is stock vLLM's, and sampled tokens have the adapted target's distribution.",
            tuple(
                tuple(replace(request, adapter=a) for request, a in zip(batch, (1, 2, 0, 1)))
                for batch in _eight((dict(temperature=1.0), {}, NARROW, dict(temperature=1.0)), 34)
            ),
            ("stock", "calibrated", "always right"),
            source="prompt_lookup",
            **_of_eight(engine=WHOLE | ADAPTERS, retrieval_budget=1024),
            at_least={"num_level2_drafted": 50},
        ),
    ]


def _ends() -> list[Case]:
    """A budget that covers the context: whole proposals are accepted. Text of the usual answer to
    the same prompt, so that what ends a request lies inside."""

    # Tokens 1 to 7 of the usual answer are one run, 8 to 14 the next.
    def end(**more) -> Callable:
        return lambda u: {"max_tokens": 20, "stop": [u.text[14:19]], **more}

    detection = RepetitionDetectionParams(max_pattern_size=9, min_pattern_size=1, min_count=2)
    ends = (
        lambda u: {"max_tokens": 20, "stop": [u.text[19:22], u.text[14:19]]},
        lambda u: {"max_tokens": 20, "stop": [u.text[19:22]], "stop_token_ids": [u.token_ids[6]]},
        end(max_tokens=7, include_stop_str_in_output=True),
        end(min_tokens=5, logprobs=2),
        end(**ONE_ANSWER),
        # As several ends of text are, in a model's generation_config.json.
        lambda u: {"max_tokens": 20, "stop_token_ids": list(u.token_ids[4:7]), "min_tokens": 3},
        {"max_tokens": 20, "repetition_detection": detection},
        {"max_tokens": 14, "ignore_eos": False, "logit_bias": {EOS: 14}},
    )
    return [
        Case(
            "several ends in one run",
            "A request ends inside a run of accepted tokens as in stock vLLM: by stop strings, "
            "stop tokens, the end of text, max_tokens, min_tokens.",
            (tuple(Request(0, 700, params) for params in ends),),
            ("stock", "always right", "ended inside a run"),
            **CRAMPED,
            at_least={"num_level2_drafted": 20},
        )
    ]


CRAMPED = dict(
    keys={"retrieval_budget": 1024},
    engine=SMALL
    | {"num_gpu_blocks_override": 27, "max_model_len": 800, "disable_log_stats": False},
)


def _windows() -> list[Case]:
    """tests/engine/test_architectures.py has them on the host, with larger batches too."""
    batch = ((Request(0, 300, {"max_tokens": 16}), Request(300, 120, {"max_tokens": 16})),)
    families = {
        "gemma3": "Layers with a sliding window, in a KV cache group of their own",
        "gemma4": "Layers that differ in the length of their heads, so that vLLM doubles KV blocks "
        "of some, and layers that read another layer's KV cache",
        "mimo-v2": "Layers with a window that have attention sinks and twice the KV heads",
        "granite-windows": "Attention sinks in every layer, of which every other has a window",
    }
    covering = dict(checks=("stock", "always right"), at_least={"num_level2_drafted": 11})
    dice = dict(dice=1, at_least={"num_level2_accepted": 1, "num_level3_rejections": 1})
    return [
        Case(
            f"windows-{model}-{name}",
            f"{layers}: {promise}.",
            batch,
            model=model,
            source="prompt_lookup",
            keys={"retrieval_budget": budget, "min_context": 50},
            engine=SMALL,
            skip={"host": "tests/engine/test_architectures.py has it, and larger batches"},
            **how,
        )
        for model, layers in families.items()
        for name, promise, budget, how in (
            ("covering", "level 2 is the target where its budget covers it", 1024, covering),
            ("dice", "output is stock's for any plan, some of it rejected", 192, dice),
        )
    ]


# Level 2 reads 160 tokens of up to 460: it must be wrong at times.
EIGHT = dict(retrieval_budget=160, num_speculative_tokens=4, gamma=2, num_recent_tokens=60)
NO_LEVEL2 = dict(num_speculative_tokens=4)
EIGHT_LENGTHS = (400, 300, 350, 390)
# Prompts in one chunk: vLLM's CPU runner cannot discard a seeded sample (patches/README.md).
WHOLE = SMALL | {"max_num_batched_tokens": 2048}


def _of_eight(*, engine: Mapping = WHOLE, **keys) -> dict:
    return dict(model="eight", keys=EIGHT | keys, engine=engine)


# Far from what these models would accept; each draft is tested, as gamma is 1.
SYNTHETIC = dict(
    rejection_sample_method="synthetic",
    synthetic_acceptance_rates=[0.9, 0.6],
    synthetic_level1_acceptance=0.7,
    gamma=1,
)
NARROW = dict(temperature=0.6, top_p=0.9)
MIXED = (dict(temperature=1.0), NARROW, dict(temperature=0), dict(temperature=1.3))
VARIOUS = (
    dict(temperature=1.3, top_k=5),
    dict(temperature=0, seed=5),
    NARROW,
    dict(temperature=1.0, seed=11),
)
PENALTIES = dict(repetition_penalty=1.5, presence_penalty=0.7, frequency_penalty=0.3)
BIASED = (
    dict(temperature=1.0, logit_bias={3: 1.5, 5: -2.0}, **PENALTIES),
    dict(temperature=0, logit_bias={2: 3.0}, presence_penalty=-0.4),
    dict(temperature=1.0),
    dict(temperature=0.8, logit_bias={1: -100}, frequency_penalty=0.2),
)
SHAPED = (
    dict(temperature=0, logit_bias={3: 100}),
    dict(temperature=0, _bad_words_token_ids=[[2], [1, 1], [3, 4, 3]]),
    dict(temperature=1.0, allowed_token_ids=[1, 2, 6], _bad_words_token_ids=[[1, 2], [6, 6]]),
    dict(temperature=1.0, **PENALTIES),
    dict(temperature=0, logit_bias={1: 2.0, 4: -9.0}, **PENALTIES),
    dict(temperature=0, allowed_token_ids=[0, 3, 5]),
    dict(temperature=1.0, logit_bias={2: 4.0}, min_tokens=15, stop_token_ids=[2]),
    dict(temperature=1.0),
)


def _eight(params: tuple[Mapping, ...], max_tokens: int) -> tuple[Round, ...]:
    return (
        tuple(
            Request(500 * i, length, {**own, "max_tokens": max_tokens})
            for i, (length, own) in enumerate(zip(itertools.cycle(EIGHT_LENGTHS), params))
        ),
    )


def _without_level2() -> list[Case]:
    """Targets whose attention leaves level 2 nothing to retrieve from."""
    promise = "Where level 2 takes no part, because {}, output is exact all the same."
    direct = {"num_direct_proposals": 8, "num_level2_accepted": 8}
    return [
        Case(
            "no level 2-windows",
            promise.format("each layer has a window"),
            _eight((dict(temperature=1.0), NARROW, {}, dict(temperature=1.0, seed=3)), 34),
            ("stock", "calibrated"),
            drafts_by_target=True,
            model="windows",
            keys=NO_LEVEL2 | {"num_recent_tokens": 60},
            engine=WHOLE,
            at_least=direct,
        ),
        Case(
            "no level 2-alibi",
            promise.format("each layer has ALiBi"),
            (requests(520, 90, 400, max_tokens=24),),
            model="bloom",
            source="prompt_lookup",
            keys=NO_LEVEL2,
            engine=SMALL,
            at_least={"num_direct_proposals": 2},
        ),
    ]


def _heads() -> list[Case]:
    """Random heads: what they draft has next to nothing to do with the target."""
    kinds = (
        ("head", "eight", "a head that drafts half of the vocabulary"),
        ("mtp", "mimo", "the target's own MTP layer"),
    )
    return [
        *(
            Case(
                f"{kind}-{name}",
                f"Of {drafts}, {way}, sampled tokens have exactly the target's distribution.",
                _eight((dict(temperature=1.0), NARROW, {}, dict(temperature=1.0, seed=3)), 34),
                ("stock", "calibrated"),
                source="head",
                **_of_eight(**keys) | {"model": model},
                at_least=at_least,
            )
            for kind, model, drafts in kinds
            for name, way, keys, at_least in (
                ("sampled", "through level 2", {}, {"num_level1_accepted": 1}),
                (
                    "sampled directly",
                    "straight to the full pass",
                    {"levels": "1,3"},
                    {"num_direct_proposals": 8, "num_level2_accepted": 1},
                ),
            )
        ),
        Case(
            "head-none allowed",
            "Where a request allows no token of the head's vocabulary, its tokens still have "
            "exactly the target's distribution, and it is speculated on.",
            _eight((dict(temperature=1.0, allowed_token_ids=[0, 2, 6]),) * 4, 34),
            ("calibrated",),
            source="head",
            **_of_eight(levels="1,3"),
            at_least={"num_direct_proposals": 40},
        ),
        Case(
            "head-few slots",
            "Requests that only keep states for the head give way to those that are planned for.",
            (requests(90, 520, 400, 300, max_tokens=16),),
            **_small("head", max_speculating_seqs=2),
        ),
        Case(
            "head-copy",
            "A head may read the states of level 2's copy of the target.",
            (requests(520, 90, 400, max_tokens=10),),
            level2_model="bfloat16",
            **_small("head"),
        ),
        Case(
            "head-prefix caching",
            "Where a prompt's start comes from the prefix cache, its states are unknown, and the "
            "window begins behind it.",
            tuple(requests(n, max_tokens=24) for n in (500, 520, 500)),
            **_small("head", engine=SMALL | {"enable_prefix_caching": True}),
            at_least={"num_level1_drafted": 3},
        ),
        Case(
            "head-preemption",
            "Preempted requests and their states are restored.",
            (requests(250, 250, 250, 250, step=100, max_tokens=44),),
            ("stock", "preempted", "nothing kept"),
            source="head",
            **CRAMPED,
        ),
        Case(
            "head-adapters",
            "A head drafts for requests with LoRA adapters by the adapters' states.",
            (requests(300, 320, 340, adapters=(1, 0, 2), max_tokens=10),),
            **_small("head", engine=SMALL | ADAPTERS),
        ),
    ]


# Positions of Qwen3-VL are M-RoPE's, and an image adds fewer than it has tokens.
IMAGES = SMALL | {"limit_mm_per_prompt": {"image": 3, "video": 1}, "enable_prefix_caching": True}


def _images() -> list[Case]:
    def batch(max_tokens: int, *images: tuple[int, ...]) -> Round:
        return tuple(
            Request(100 * i, 240 + 60 * i, {"max_tokens": max_tokens}, images=seeds)
            for i, seeds in enumerate(images)
        )

    model = dict(model="qwen3-vl", engine=IMAGES)
    lookup = dict(source="prompt_lookup", **model)
    return [
        Case(
            "images-covering",
            "Level 2 is the target where its budget covers a context with images and video, with "
            "M-RoPE; images of requests before are in the prefix cache.",
            (batch(10, (1,), (2, -3), ()), batch(10, (1,), (-3, 2))),
            ("stock", "always right"),
            keys={"retrieval_budget": 1024},
            at_least={"num_level2_drafted": 30},
            **lookup,
        ),
        Case(
            "images-draft model",
            "A draft model drafts for requests without images beside others, whose proposals are "
            "of level 2 alone.",
            (batch(10, (1,), (), (2, 3)), batch(10, (4,))),
            ("stock", "level 1 for text alone"),
            keys=DRAFT,
            at_least={"num_level1_drafted": 1, "num_level2_accepted": 1},
            **model,
        ),
        Case(
            "images-straight to the full pass",
            "Tokens of prompt lookup go straight to the full pass of prompts with images.",
            (batch(24, (1,), (2, 3), ()),),
            keys={"retrieval_budget": 128, "levels": "1,3"},
            at_least={"num_direct_proposals": 3},
            **lookup,
        ),
        Case(
            "images-head",
            "A head reads the target's states of images, at positions of its own window.",
            (batch(10, (1,), (), (2, 3)),),
            source="head",
            keys=DRAFT | {"num_recent_tokens": 200},
            at_least={"num_level1_drafted": 9, "num_level2_accepted": 1},
            **model,
        ),
        Case(
            "images-copy",
            "A copy of a target that takes images is level 2.",
            (batch(10, (1,), ()),),
            level2_model="bfloat16",
            keys=LOOKUP,
            **lookup,
        ),
    ]


def _unequal_contexts() -> Case:
    """Default budgets, which are a share of each request's context."""
    seeded = dict(temperature=1.0, max_tokens=16)
    alone = Request(0, 6500, seeded | {"seed": 0}), Request(6500, 2500, seeded | {"seed": 1})
    return Case(
        "unequal contexts",
        "A seeded request samples the same tokens, and the same number is accepted, alone and "
        "beside requests with longer or shorter contexts, in any order.",
        (*((request,) for request in alone), alone, alone[::-1]),
        ("as alone",),
        engine=SMALL
        | dict(max_model_len=7168, max_num_batched_tokens=9216, kv_cache_memory_bytes=256 << 20),
        at_least={"num_level2_accepted": 30, "num_level3_rejections": 1},
    )


def _calibrated() -> list[Case]:
    """Of a vocabulary of eight tokens. Power: where level 3 accepts whatever it gets, 180 tokens
    at T=1 have p < 1e-18."""
    distribution = "Sampled tokens have exactly the target's distribution: {}."
    wrong_at_times = ("calibrated", "both accepted and rejected")
    shaped = (*_eight(SHAPED[:4], 22), *_eight(SHAPED[4:], 22))
    return [
        Case(
            "sampled-block",
            distribution.format("T=1, with a draft, each proposal tested as a block"),
            _eight((dict(temperature=1.0),) * 4, 30),
            wrong_at_times,
            **_of_eight(rejection_sample_method="block"),
            skip={"host": "Runner V1 refuses it (config/checks.py)"},
        ),
        *(
            Case(
                f"synthetic{name}",
                "At `rejection_sample_method: synthetic`, for benchmarks, both levels accept at "
                "the given rates.",
                _eight((dict(temperature=0.0, seed=1), dict(temperature=1.0, seed=2)) * 2, 60),
                ("at synthetic rates",),
                **_of_eight(**SYNTHETIC, levels=levels),
                at_least={"num_level2_drafted": 100},
            )
            for name, levels in (("", "1,2,3"), ("-direct", "1,3"))
        ),
        _unequal_contexts(),
        Case(
            "sampled-various",
            distribution.format("different parameters, and greedy requests, in one batch"),
            _eight(VARIOUS, 34),
            ("stock", *wrong_at_times),
            **_of_eight() | {"source": "prompt_lookup"},
        ),
        # Level 2 reads what level 3 reads, so a single rejection would mean that the distribution
        # lost something on its way up.
        Case(
            "sampled-full-budget",
            distribution.format("and level 2's own is read back as it was handed up"),
            _eight(VARIOUS, 34),
            ("stock", "calibrated", "always right"),
            source="prompt_lookup",
            **_of_eight(retrieval_budget=1024),
        ),
        Case(
            "sampled-biased",
            distribution.format("with biases and penalties, beside a request without and a greedy"),
            _eight(BIASED, 45),
            ("calibrated",),
            **_of_eight(),
            at_least={"num_level2_accepted": 1, "num_level3_rejections": 1},
        ),
        Case(
            "shaped-full-window",
            "Level 1 applies each request's changes of logits: where it is the target and its "
            "window holds the context, level 2 accepts all of its tokens.",
            shaped,
            ("level 1 always right",),
            drafts_by_target=True,
            **_of_eight(retrieval_budget=1024, num_recent_tokens=600),
        ),
        Case(
            "shaped-full-budget",
            "Level 2 applies each request's changes of logits as level 3 does: biases, allowed "
            "tokens, penalties, no end before min_tokens.",
            shaped,
            ("stock", "always right"),
            **_of_eight(retrieval_budget=1024),
        ),
    ]


# Request parameters. Each takes stock's usual completion of the first prompt, to be forbidden,
# biased and stopped at.
EOS = 2
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["a", "self"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}


ANSWER = r"( [a-z_]{1,8}){1,2}( = [0-9]{1,4})?\n"


def structured(**keys) -> dict:
    return {"structured_outputs": keys}


PARAMETERS: dict[str, Callable] = {
    "plain": lambda u: {},
    "ignore_eos": lambda u: dict(ignore_eos=True, logit_bias={EOS: 50}),
    "repetition penalty": lambda u: dict(repetition_penalty=1.2),
    "frequency penalty": lambda u: dict(frequency_penalty=0.6),
    "presence penalty": lambda u: dict(presence_penalty=0.9),
    "logit bias": lambda u: dict(logit_bias={u.token_ids[3]: -100, u.token_ids[5]: 3}),
    "bias and penalty": lambda u: dict(logit_bias={u.token_ids[3]: -9}, repetition_penalty=1.3),
    "bad words": lambda u: dict(bad_words=[u.text[8:14], u.text[20:22]]),
    "allowed tokens": lambda u: dict(allowed_token_ids=list(range(200, 700))),
    "stop token": lambda u: dict(stop_token_ids=[u.token_ids[7]]),
    "stop string": lambda u: dict(stop=[u.text[21:27]]),
    "stop string kept": lambda u: dict(stop=[u.text[21:27]], include_stop_str_in_output=True),
    "eos": lambda u: dict(logit_bias={EOS: 14}),
    "min_tokens": lambda u: dict(min_tokens=9, stop_token_ids=[u.token_ids[5]]),
    "logprobs": lambda u: dict(logprobs=5),
    "prompt_logprobs": lambda u: dict(prompt_logprobs=2, logprobs=0),
    "named logprobs": lambda u: dict(logprob_token_ids=list(u.token_ids[:4])),
    "json": lambda u: structured(json=SCHEMA),
    "json and min_tokens": lambda u: structured(json=SCHEMA) | dict(min_tokens=12, logprobs=2),
    "regex": lambda u: structured(regex=r"(self\._[a-z]{1,8} = [0-9]{1,3}\n){2,3}"),
    "choice": lambda u: structured(choice=["return self", "return None"]),
    "max_tokens": lambda u: dict(max_tokens=3),
}
# Or none that are speculated on: what is accepted is not looked at.
FEW_TOKENS = ["allowed tokens", "choice", "eos", "ignore_eos", "max_tokens", "named logprobs"]
# "named logprobs" beside other log-probabilities: stock vLLM itself gives the others these.
TOGETHER = {
    name: make
    for name, make in PARAMETERS.items()
    if "logprobs" not in name and name != "json and min_tokens"
}
BIG = dict(source="draft_model", keys={"retrieval_budget": 256})


def _with(make: Callable, **more) -> Callable:
    return lambda usual: {"max_tokens": 40, "ignore_eos": False, **more, **make(usual)}


def _parameters() -> list[Case]:
    alike = "A request with {} is answered as stock vLLM answers it: tokens, text, reasons, usage."
    alone = [
        Case(
            f"parameter-{name}",
            alike.format(name),
            ((Request(0, 700, _with(make)), Request(2000, 300, _with(make))),),
            ("stock", "stopped") if "stop" in name else ("stock",),
            **BIG,
            at_least={} if name in FEW_TOKENS else {"num_level2_accepted": 1},
            ties=1.0,
            skip=slow("parameters together"),
        )
        for name, make in PARAMETERS.items()
    ]
    some_sampled = [
        dict(temperature=t, max_tokens=m, min_p=p, n=n)
        for t, m, p, n in [(1.0, 9, 0.1, 2), (0.7, 14, 0, 1), (1.5, 10, 0.3, 3)]
    ]
    constrained = [
        dict(temperature=1.0, allowed_token_ids=list(range(200, 700)), max_tokens=10),
        dict(temperature=1.0, max_tokens=10, **structured(regex="[ a-m]{6,}")),
    ]
    company = [*TOGETHER.values(), *(lambda u, p=p: p for p in some_sampled + constrained)]
    # In an order in which no two of a kind are neighbours.
    company = [company[7 * i % len(company)] for i in range(len(company))]
    return [
        *alone,
        Case(
            "parameters together",
            "Greedy and sampled requests with all parameters are answered correctly in one batch.",
            (
                tuple(
                    Request((0, 2000)[i % 2], (250, 210)[i % 2], _with(make, max_tokens=10))
                    for i, make in enumerate(company)
                ),
            ),
            ("stock", "obeyed"),
            **_small("draft_model"),
        ),
        # A request that names the tokens whose log-probabilities it wants gets these, though
        # others in its batch are speculated on. (Beside it stock vLLM gives nobody else's rightly,
        # and speculation's rejection sampler drops them as soon as anybody has drafts.)
        Case(
            "named logprobs beside speculation",
            "Named log-probabilities are stock vLLM's beside requests that are speculated on.",
            (three({}, {"logprob_token_ids": [5, 9, 11]}, {}, max_tokens=24),),
            ("stock", "named"),
            **_small("draft_model"),
        ),
        Case(
            "limits by request",
            "A request may turn speculation off for itself, or limit its proposals, beside others.",
            (
                three(
                    {},
                    {"extra_args": {"triforce": False}},
                    {"extra_args": {"triforce_num_speculative_tokens": 2}},
                    max_tokens=24,
                ),
            ),
            ("stock", "limited"),
            **_small("draft_model"),
        ),
        Case(
            "log-probabilities",
            "Log-probabilities of every token, speculated or not, are stock vLLM's, with ranks and "
            "decoded tokens; those of prompts too, which are read beside drafts.",
            (
                (
                    Request(0, 300, dict(max_tokens=12, logprobs=3)),
                    Request(400, 250, dict(max_tokens=12, logprobs=1, prompt_logprobs=2)),
                    Request(400, 250, dict(max_tokens=12, logprobs=0, **ONE_ANSWER)),
                ),
            ),
            **_small("draft_model"),
        ),
        # EOS is the best token everywhere. vLLM's own speculation masks it in the bonus token for
        # too long.
        Case(
            "min_tokens inside a proposal",
            "The end of text ends a request right after min_tokens, wherever in a proposal it is.",
            (
                tuple(
                    Request(
                        2000,
                        300,
                        dict(max_tokens=20, ignore_eos=False, logit_bias={EOS: 60}, min_tokens=n),
                    )
                    for n in (1, 3, 4, 6, 9)
                ),
            ),
            ("stock", "ended after min_tokens"),
            **_small("draft_model"),
            at_least={},  # all end within the first proposals, at the latest after ten tokens
        ),
    ]


# On the host alone, by their size.


NUM_PROMPTS = 40
# From 50 to 8,000 tokens, evenly on a logarithmic scale.
LENGTHS = [round(50 * 160 ** (i / (NUM_PROMPTS - 1))) for i in range(NUM_PROMPTS)]


def _long(length: int, max_tokens: int = 24) -> Request:
    """Somewhere in the text, the same for every case: stock vLLM is asked once."""
    return Request(7919 * length % (16000 - length), length, {"max_tokens": max_tokens})


def in_batches(lengths: list[int]) -> tuple[Round, ...]:
    """Batches of 1 to 8 prompts of unequal length."""
    batch = [_long(n) for n in lengths]
    random.Random(1).shuffle(batch)
    rounds, sizes = [], itertools.cycle((1, 8, 3, 6, 2))
    while batch:
        size = next(sizes)
        rounds.append(tuple(batch[:size]))
        batch = batch[size:]
    return tuple(rounds)


# Model, source, gamma, num_speculative_tokens, retrieval budget in tokens, prompts' lengths.
SWEEPS = (
    ("pair", "draft_model", 2, 6, 1024, LENGTHS[1::5]),
    ("pair", "draft_model", 1, 1, 128, LENGTHS[0::5]),
    ("pair", "draft_model", 4, 8, 256, LENGTHS[1::5]),
    ("pair", "prompt_lookup", 3, 5, 512, LENGTHS[2::5]),
    ("pair", "prompt_lookup", 1, 3, 128, LENGTHS[3::5]),
    ("pair", "prompt_lookup", 2, 6, 4096, LENGTHS[4::5]),
    ("gqa", "draft_model", 1, 1, 128, LENGTHS[0::5]),
    ("gqa", "draft_model", 4, 8, 256, LENGTHS[1::5]),
    ("gqa", "prompt_lookup", 1, 3, 128, LENGTHS[3::5]),
    ("gqa", "prompt_lookup", 2, 6, 4096, LENGTHS[1::4]),
)


def _sweeps() -> list[Case]:
    """Ties within numerical noise are proved one by one; they must stay rare."""
    return [
        Case(
            f"greedy-{model}-{source}-{gamma}-{num_tokens}-{budget}",
            "Greedy output is stock vLLM's in batches of 1 to 8 requests, 50 to 8,000 tokens long.",
            in_batches(lengths),
            model=model,
            source=source,
            keys=dict(gamma=gamma, num_speculative_tokens=num_tokens, retrieval_budget=budget)
            | ({"num_recent_tokens": 120} if (model, source) == ("gqa", "draft_model") else {}),
            ties=0.1,
            skip=slow(f"greedy-{source}"),
        )
        for model, source, gamma, num_tokens, budget, lengths in SWEEPS
    ]


# The exact joint distribution of two speculated tokens, over a vocabulary of twelve.
TWELVE = dict(
    num_speculative_tokens=3,
    retrieval_budget=96,
    retrieval_recent_tokens=32,
    num_sink_tokens=4,
    num_recent_tokens=28,
)
# Penalties depend on what the request itself has sampled: the oracle is told.
ASKED = (
    dict(temperature=1.0),
    NARROW,
    dict(temperature=1.0, min_p=0.2),
    dict(temperature=0.8, min_p=0.05, top_k=6),
    dict(temperature=1.0, logit_bias={3: 2.0, 5: -3.0}),
    dict(temperature=0.9, allowed_token_ids=[1, 3, 4, 6, 8, 10]),
    dict(temperature=1.0, repetition_penalty=1.5, presence_penalty=0.7, frequency_penalty=0.9),
    dict(temperature=1.0, repetition_penalty=2.0, logit_bias={4: 3.0, 7: -4.0}),
)


def _joint() -> list[Case]:
    def completions(count: int, asked: tuple[Mapping, ...], n: int = 1) -> tuple[Round, ...]:
        batch = tuple(Request(0, 300, {**own, "max_tokens": 4, "n": n}) for own in asked)
        return (batch * (count // n),)

    shape = dict(model="twelve", keys=TWELVE, engine=dict(max_model_len=512, max_num_seqs=64))
    return [
        Case(
            "joint",
            "2,000 completions of each request of a batch follow the exact joint distribution of "
            "two speculated tokens, also with min_p and logit_bias, which vLLM rejects with any "
            "other speculation.",
            completions(2000, ASKED, n=10),
            ("joint", "rejected at both levels"),
            **shape,
            skip=slow("sampled-various"),
        ),
        Case(
            "joint, the reference's mistake",
            "The tests of distributions fail where the recovered token is drawn as in the "
            "published code.",
            completions(3000, ASKED[:1]),
            ("not joint", "not calibrated"),
            **shape,
            disturbance=("recovered from the whole",),
            skip={"device": "a kernel draws; tests/kernels compares it with its oracle"},
        ),
    ]


# Of four layers all lie there, or all but one; or some, with less of it or fewer blocks.
MOST_GIB, SOME_GIB = 1.0, 0.06
_MOST, _SOME = dict(kv_offload_gib=MOST_GIB), dict(kv_offload_gib=SOME_GIB)
OFFLOADED = {
    "greedy-draft_model": _MOST,
    "prefix caching": _MOST,
    "preemption": _SOME,
    "joining and leaving": _SOME,
    "nan-sampled-2": _SOME,
    "full budget": _SOME,
    "dice-sampled": _SOME,
}


_HOST_REFUSES = {"host": "Runner V1 refuses kv_offload_gib (config/checks.py)"}


def _offloaded(cases: list[Case]) -> list[Case]:
    """The same promises where the KV cache lies in host memory; stock vLLM has it all on the
    device."""
    by_name = {case.name: case for case in cases}
    return [
        replace(
            by_name[name],
            name=f"{name}, in host memory",
            keys={**by_name[name].keys, **keys},
            skip=_HOST_REFUSES,
        )
        for name, keys in OFFLOADED.items()
    ] + [
        Case(
            "plain decoding, in host memory",
            "Plain decoding over host memory; requests of one step may share blocks.",
            (
                tuple(Request(2000, n, {"max_tokens": 6}) for n in (330, 330, 401)),
                requests(520, 90, max_tokens=6),
            ),
            ("stock", "nothing proposed", "read together"),
            source="prompt_lookup",
            keys=_MOST | {"levels": "3"},
            engine=SMALL | {"max_num_batched_tokens": 1200},
            at_least={"num_staged_bytes": 1},
            skip=_HOST_REFUSES,
        )
    ]


def _all() -> list[Case]:
    """Engines that are the same stand together: to start one costs seconds."""
    kinds = [_scheduling, _nan, _parameters, _policies, _ends, _windows, _adapters, _reasoning]
    kinds += [_dice, _in_pass, _copies, _without_level2, _heads, _images, _calibrated]
    cases = [case for source in SOURCES for case in _by_source(source)]
    cases += [case for kind in [*kinds, _sweeps, _joint] for case in kind()]
    cases += _offloaded(cases)
    return sorted(
        cases, key=lambda its: repr((its.model, its.engine, its.source, its.level2_model, its.keys))
    )


# Left for ``make test-all``, by runner: what another case, or the other runner, holds in less time.
THOROUGH = {
    "device": {
        *(
            f"{name}-{source}"
            for name in ("chosen while running", "crossing the gate", "ends")
            for source in ("draft_model", "head")
        ),
        *(f"{name}, in host memory" for name in OFFLOADED if name != "full budget"),
        *(f"copy-{name}" for name in ("adapters", "sampled-bfloat16", "sampled-random")),
        *(f"head-{name}" for name in ("adapters", "dice", "preemption")),
        *(f"images-{name}" for name in ("copy", "head", "straight to the full pass")),
        *("sampled-block", "sampled-full-budget", "shaped-full-window", "adapters-full-budget"),
        *("sampled-biased", "in pass-greedy", "mtp-sampled directly", "nan-sampled-1"),
        *("windows-gemma4-dice", "windows-mimo-v2-dice"),
    },
    "host": {case.name for case in _sweeps()[:-1]},
}
_NAMED: dict[str, Case] = {case.name: case for case in _all()}
assert len(_NAMED) == len(_all()), "two cases have one name"
assert all(names <= _NAMED.keys() for names in THOROUGH.values()), "no case has that name"
CASES = {name: case for name, case in _NAMED.items() if case.source in SOURCES}


def has_own_settings(case: Case) -> bool:
    """True if a case has another model or other engine settings than most."""
    return case.model != "pair" or case.engine != SMALL or "kv_offload_gib" in case.keys


def cases_of(runner: str, is_chosen: Callable[[Case], bool] = lambda case: True) -> list:
    """Parameters of a test: the names of a runner's cases, with their marks."""
    return [
        pytest.param(name, marks=[pytest.mark.thorough] * (name in THOROUGH[runner]))
        for name, case in CASES.items()
        if runner not in case.skip and is_chosen(case)
    ]
