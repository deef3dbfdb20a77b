"""Replay the controller's decisions over recorded answers of a model, on Runner V1's costs.

    python tools/replay.py record build/smollm2/mha answers.json --texts FILE FILE --context 2048
    python tools/replay.py decide answers.json --more-context 5000
    python tools/replay.py lookup answers.json

``record`` starts an engine, which measures its passes and samples answers to documents and to
questions about them; then the lab computes the probability that level 2's tokens are accepted, for
each token of each answer. ``decide`` decodes these answers again on a simulated clock, one request
at a time, with a new controller for each. Prompt lookup drafts as in an engine; a token of its is
accepted if the answer has it, one of level 2 by its probability. Every rule meets the same texts,
draws and mean costs; in an engine, sampled answers differ from run to run by more than a rule
gains. What a machine does beside its passes is a few constants here. It needs the extra ``bench``.
Preload vLLM's OpenMP as the Makefile does for ``make demo``.
"""

import argparse
import dataclasses
import json
import os
import random
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from vllm_triforce.config import TriForceConfig
from vllm_triforce.config.keys import FIXED_GAMMA
from vllm_triforce.controller import PLAIN, Candidate, Choice, Controller, CostModel, StepTime
from vllm_triforce.controller.measurements import Measurements
from vllm_triforce.controller.routes import HIERARCHICAL
from vllm_triforce.runner_v1.sources.prompt_lookup import PromptLookup

TEMPERATURES = (0.0, 0.7, 1.0)
QUESTIONS = (
    "Summarize the text above in a few paragraphs.",
    "What are the three most important points of this text, and why?",
    "Explain the text above to a beginner.",
    "Write a short blog post about the topic of this text.",
)
# Fixed rules: tokens by levels 1 and 2, and tokens of prompt lookup.
FIXED = [("levels", 2), ("levels", 4), ("levels", 8), ("lookup", 2), ("lookup", 4)]
# Seconds of a step beside its passes, of verifying any drafts, and of a decision: about those of an
# engine with SmolLM2 on two cores.
STEP_S, VERIFY_S, DECISION_S = 0.004, 0.002, 0.0015
# Seconds of a pass vary by this share, and each start-up's measurement of a kind of pass.
_NOISE, _START_UP_NOISE = 0.05, 0.1


# Record.


def record(args) -> None:
    """Write costs, answers and probabilities of acceptance."""
    from vllm import LLM, SamplingParams

    from tests.inside import controller_of

    llm = LLM(
        args.model,
        speculative_config={"method": "triforce"},
        dtype="float32",
        max_model_len=args.max_model_len,
        max_num_seqs=16,
        max_num_batched_tokens=2048,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=args.kv_gib << 30,
        distributed_executor_backend="uni",
    )
    answers = []
    for temperature in TEMPERATURES:
        params = SamplingParams(temperature=temperature, max_tokens=args.tokens)
        for text in args.texts:
            for kind, prompts in _prompts(llm.get_tokenizer(), text, args).items():
                asked = [{"prompt_token_ids": prompt} for prompt in prompts]
                params.ignore_eos = kind == "document"
                for output in llm.generate(asked, params, use_tqdm=False):
                    answers.append(
                        dict(
                            temperature=temperature,
                            kind=f"{text.stem}, {kind}",
                            prompt=output.prompt_token_ids,
                            tokens=list(output.outputs[0].token_ids),
                        )
                    )
    costs = controller_of(llm).model.measured.to_dict()
    del llm
    _add_acceptance(args.model, answers)
    args.output.write_text(json.dumps(dict(costs=costs, answers=answers)))


def _prompts(tokenizer, text: Path, args) -> dict[str, list[list[int]]]:
    """Cut a text into documents to continue, and documents with a question."""
    ids = tokenizer(text.read_text())["input_ids"]
    prompts: dict[str, list[list[int]]] = {"document": [], "question": []}
    for i in range(args.answers):
        start = (2 * i + 1) * (len(ids) - args.context) // (2 * args.answers)
        document = ids[start : start + args.context]
        prompts["document"].append(document)
        # As long as the documents: the chat template and the question have about 100 tokens.
        content = f"{tokenizer.decode(document[100:])}\n\n{QUESTIONS[i % len(QUESTIONS)]}"
        message = [{"role": "user", "content": content}]
        prompts["question"].append(
            tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        )
    return prompts


def _add_acceptance(model: str, answers: list[dict]) -> None:
    """Add the probability of each token that level 2's pass in its place is accepted."""
    from transformers import AutoModelForCausalLM

    from vllm_triforce_bench.lab.measure import acceptance, next_token_probs
    from vllm_triforce_bench.lab.policies import POLICIES, Sizes
    from vllm_triforce_bench.lab.target import Target

    target = Target(AutoModelForCausalLM.from_pretrained(model, dtype="float32"))
    for number, answer in enumerate(answers):
        trace = target.record(answer["prompt"], answer["tokens"])
        config = TriForceConfig().with_defaults(can_adapt=True, model=None).resolve(32)
        sizes = Sizes(config.budget_of(len(answer["prompt"])), 32, 128, refresh_interval=0)
        policy = POLICIES["retrieval"](sizes)
        full, sparse = (
            next_token_probs(target.replay(trace, its)[0], answer["temperature"], top_p=1.0)
            for its in (None, policy)
        )
        answer["acceptance"] = acceptance(full, sparse).tolist()
        mean = np.mean(answer["acceptance"])
        print(f"{number + 1} of {len(answers)}: acceptance {mean:.3f}", file=sys.stderr, flush=True)


# Decide.


class Decoder:
    """Decodes recorded answers on a simulated clock.

    Args:
        costs: true seconds of all passes.
        more_context: tokens added to each context when passes are priced; text, acceptance and
            budget stay the same.
    """

    def __init__(self, costs: Measurements, max_tokens: int, more_context: int) -> None:
        self._costs = costs
        self._max_tokens = max_tokens
        self._more_context = more_context
        self._lookup = PromptLookup(max_ngram=8)
        self._traits = PromptLookup.traits()

    def new_controller(self, seed: int) -> Controller:
        """Start a controller, with start-up measurements that are off by some percent."""
        draw = random.Random(seed)

        def off(points: list, factor: float) -> list:
            if isinstance(points[0][1], list):
                return [(count, off(inner, factor)) for count, inner in points]
            return [(point[0], *(factor * seconds for seconds in point[1:])) for point in points]

        full, level2 = (max(0.7, draw.gauss(1, _START_UP_NOISE)) for _ in range(2))
        costs = dataclasses.replace(
            self._costs,
            full_by_rows=off(self._costs.full_by_rows, full),
            full_by_tokens=off(self._costs.full_by_tokens, full),
            level2_by_tokens=off(self._costs.level2_by_tokens, level2),
            level2_by_batch=off(self._costs.level2_by_batch, level2),
        )
        config = TriForceConfig().with_defaults(can_adapt=True, model=None).resolve(32)
        controller = Controller(config, [self._traits])
        controller.start(CostModel(costs))
        return controller

    def decode(
        self, answer: dict, seed: int, rule: Controller | tuple[str, int]
    ) -> tuple[float, float]:
        """Return the seconds of an answer by a rule, and of plain decoding."""
        self._truth, self._answer, self._rule = CostModel(self._costs), answer, rule
        self._ids = np.array(answer["prompt"] + answer["tokens"])
        self._start = len(answer["prompt"])
        draw, self._noise = random.Random(seed), random.Random(seed + 1)
        self._luck = [draw.random() for _ in answer["tokens"]]
        self._is_greedy = answer["temperature"] == 0
        position = self._start + 1
        end = min(len(self._ids), position + self._max_tokens)
        controller = rule if isinstance(rule, Controller) else None
        if controller is not None:
            controller.requests_joined()
        seconds = plain_s = 0.0
        self._has_selection = False
        self._timed: StepTime | None = None
        while position < end:
            step_s, accepted = self._step(controller, position, end)
            seconds += step_s
            for place in range(position, min(position + accepted + 1, end)):
                plain_s += self._truth.full_pass([1], [place + self._more_context]) + STEP_S
            position += accepted + 1
        if controller is not None:
            controller.release("answer")
        return seconds, plain_s

    def _step(self, controller: Controller | None, position: int, end: int) -> tuple[float, int]:
        """Return the seconds of a proposal and its full pass, and the accepted tokens."""
        context, is_new = position + self._more_context, position == self._start + 1
        proposing_s = 0.0
        match = self._lookup.find(self._ids[:position])
        choice = PLAIN
        if controller is None:
            route, length = self._rule
            length = min(length, end - position - 1)
            if length > 0 and (route == "levels" or match):
                name = HIERARCHICAL if route == "levels" else self._traits.name
                choice = Choice(name, length, match.match_class if match else None)
            is_settled = is_reevaluation = False
        else:
            backoff = controller.backoff
            backoff.begin_step()
            is_settled, is_reevaluation = backoff.is_settled, backoff.is_reevaluation
            # A step's time is known when the next one begins, as in runner_v1/plain_steps.py.
            if self._timed is not None and backoff.wants_times:
                controller.observe_step(self._timed, None)
            self._timed = None
            if not (backoff.is_resting or is_new):
                proposing_s += DECISION_S
                (choice,) = controller.choose([self._candidate(controller, position, end, match)])
        drafted, accepted, probs, is_typical = 0, 0, None, True
        if choice.route == HIERARCHICAL:
            is_typical = self._has_selection
            if not self._has_selection:
                proposing_s += self._truth.first_selection(context)
                self._has_selection = True
            proposing_s += self._rounds(controller, position, choice.num_tokens, is_typical)
            # The lab's probability is that of the token after each one.
            first = position - self._start - 1
            probs = self._answer["acceptance"][first : first + choice.num_tokens]
            drafted = len(probs)
            hits = [luck < p for luck, p in zip(self._luck[first:], probs)]
            accepted = (*hits, False).index(False)
            if self._is_greedy:
                probs = [float(hit) for hit in hits]
        elif choice is not PLAIN:
            drafted = choice.num_tokens
            accepted = self._num_equal(position, match, drafted)
        full_s = self._varied(self._truth.full_pass([1 + drafted], [context])) + STEP_S
        full_s += drafted * self._truth.draft_seconds(self._is_greedy) + VERIFY_S * (drafted > 0)
        if controller is not None:
            planned = controller.take_plan()
            if drafted:
                step = StepTime(
                    self._is_greedy,
                    [1 + drafted],
                    [context],
                    full_s,
                    drafted,
                    proposing_s,
                    accepted,
                )
                controller.observe_step(step, planned if is_typical else None)
                controller.observe_full_pass("answer", drafted, accepted, choice, probs)
            elif backoff.wants_times and (is_settled or is_reevaluation):
                seconds = full_s + proposing_s
                self._timed = StepTime(
                    self._is_greedy, [1], [context], seconds, is_reevaluation=is_reevaluation
                )
        return full_s + proposing_s, accepted

    def _candidate(self, controller: Controller, position: int, end: int, match) -> Candidate:
        context = position + self._more_context
        return Candidate(
            "answer",
            context,
            max(0, min(controller.config.num_speculative_tokens, end - position - 1)),
            {} if match is None else {self._traits.name: match.match_class},
            is_greedy=self._is_greedy,
            tokens_unselected=0 if self._has_selection else context,
            num_left=end - position,
        )

    def _rounds(
        self, controller: Controller | None, position: int, num_tokens: int, is_typical: bool
    ) -> float:
        """Return the seconds of the rounds of levels 1 and 2 for a proposal."""
        seconds, made = 0.0, 0
        while made < num_tokens:
            match = self._lookup.find(self._ids[: position + made])
            classes = {} if match is None else {self._traits.name: match.match_class}
            count = min(FIXED_GAMMA, num_tokens - made - 1) if match else 0
            if controller is not None:
                room = num_tokens - made - 1
                source, count = controller.choose_draft("answer", False, classes, 1, room)
                count = count if source else 0
            kept = self._num_equal(position + made, match, count)
            level2_s = self._varied(self._truth.level2(1, count + 1))
            test_s = self._truth.test_seconds(count + 1, self._is_greedy)
            seconds += level2_s + test_s
            if controller is not None:
                drafted = (self._traits.name, match.match_class) if count else (None, None)
                controller.acceptance.observe_round("answer", *drafted, count, kept)
                if is_typical:
                    controller.measured.observe_round(
                        1, count, [], count + 1, self._is_greedy, 0.0, level2_s, test_s
                    )
            made += kept + 1
        return seconds

    def _num_equal(self, position: int, match, count: int) -> int:
        """Count the tokens of a match that are the answer's."""
        if not count:
            return 0
        drafted = self._lookup.continue_from(self._ids[:position], match, count)
        actual = self._ids[position : position + count].tolist()
        return next((i for i, (a, b) in enumerate(zip(drafted, actual)) if a != b), len(actual))

    def _varied(self, seconds: float) -> float:
        return seconds * max(0.5, self._noise.gauss(1, _NOISE))


def decide(args) -> None:
    """Print the controller's speed over plain decoding's for first answers, beside fixed rules."""
    recorded = json.loads(args.recording.read_text())
    costs = recorded["costs"]
    decoder = Decoder(_measurements(costs), args.tokens, args.more_context)
    print(" " * 22, "controller (share of answers below 0.98)", *(f"{r} {n}" for r, n in FIXED))
    for temperature in TEMPERATURES:
        answers = [a for a in recorded["answers"] if a["temperature"] == temperature]
        kinds = sorted({a["kind"] for a in answers})
        for kind in [*kinds, "all"]:
            chosen = [a for a in answers if kind in ("all", a["kind"])]
            rows = []
            for rule in (None, *FIXED):
                times = [
                    decoder.decode(answer, seed, rule or decoder.new_controller(seed))
                    for answer in chosen
                    for seed in range(args.seeds)
                ]
                rows.append((sum(p for _, p in times) / sum(s for s, _ in times), times))
            slow = np.mean([p / s < 0.98 for s, p in rows[0][1]])
            fixed = " ".join(f"{speed:8.3f}" for speed, _ in rows[1:])
            print(f"T={temperature} {kind:18} {rows[0][0]:.3f} ({slow:.2f}) {fixed}", flush=True)


def lookup(args) -> None:
    """Print how often prompt lookup's tokens are the answers', by length of the matched n-gram."""
    answers = json.loads(args.recording.read_text())["answers"]
    source, num_drafted = PromptLookup(max_ngram=8), 6
    for temperature in TEMPERATURES:
        first: list[list[int]] = [[] for _ in source.prior_acceptance]
        rounds: list[int] = []
        for answer in (a for a in answers if a["temperature"] == temperature):
            ids, start = np.array(answer["prompt"] + answer["tokens"]), len(answer["prompt"])
            for position in range(start + 1, len(ids) - num_drafted):
                match, kept = source.find(ids[:position]), 0
                if match is not None:
                    drafted = source.continue_from(ids[:position], match, num_drafted)
                    is_same = [a == b for a, b in zip(drafted, ids[position:])]
                    kept = (*is_same, False).index(False)
                    first[match.match_class].append(kept > 0)
                rounds.append(kept + 1)
        shares = " ".join(f"{np.mean(its):.2f} ({len(its)})" for its in first if its)
        print(
            f"T={temperature} round of {num_drafted}: {np.mean(rounds):.2f}; first token: {shares}"
        )


def _measurements(costs: dict) -> Measurements:
    """Read ``Measurements`` from JSON, which has lists for tuples."""
    pairs = {
        name: [tuple(point) for point in costs[name]]
        for name in ("full_by_rows", "level2_by_tokens", "full_by_num_reqs")
    }
    grids = {
        name: [(count, [tuple(point) for point in points]) for count, points in costs[name]]
        for name in ("full_by_tokens", "level2_by_batch")
    }
    return Measurements(**{**costs, **pairs, **grids})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(required=True)
    recorder = commands.add_parser("record", help="sample answers and measure costs")
    recorder.set_defaults(run=record)
    recorder.add_argument("model")
    recorder.add_argument("output", type=Path)
    recorder.add_argument("--texts", type=Path, nargs="+", required=True)
    recorder.add_argument("--context", type=int, default=2048, help="tokens of a document")
    recorder.add_argument("--answers", type=int, default=4, help="for each kind and text")
    recorder.add_argument("--tokens", type=int, default=128, help="tokens of an answer, at most")
    recorder.add_argument("--max-model-len", type=int, default=8192)
    recorder.add_argument("--kv-gib", type=int, default=3)
    counter = commands.add_parser("lookup", help="count prompt lookup's hits")
    counter.set_defaults(run=lookup)
    counter.add_argument("recording", type=Path)
    decider = commands.add_parser("decide", help="decode them again")
    decider.set_defaults(run=decide)
    decider.add_argument("recording", type=Path)
    decider.add_argument("--more-context", type=int, default=0, help="tokens that only cost")
    decider.add_argument("--tokens", type=int, default=96, help="tokens of an answer, at most")
    decider.add_argument("--seeds", type=int, default=2, help="draws of luck and noise")
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
