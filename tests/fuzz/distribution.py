"""Do sampled tokens follow the target's distribution? Pooled over all streams.

Given what came before it, each token has a distribution p that transformers' model and the
request's parameters say. The tests of ``calibration`` are made of all tokens, and of those of each
place within a step: whether a step has a j-th token is known before that token is drawn, so each
place is a fair pool of its own, while "the last of a step" would not be one.
"""

import math

import torch

from tests.asked import only, sampled_from, shaped, target_logits
from tests.calibration import p_values
from tests.fuzz.drive import Answer
from tests.fuzz.models import DRAFTS, VOCAB_SIZE, target_of, token_of_character, tokens_of
from tests.fuzz.streams import END

# How far rounding may move a probability that a parameter cuts at.
EDGE = 1e-3
LEAST_TOKENS = 200
# Of prompts that transformers' model reads again; it has none of MiMo-V2.
LONGEST_PROMPT = {**dict.fromkeys(DRAFTS, 3000), "smollm2": 600, "mimo-v2": 0}
TESTS = ("frequency", "spread", "surprise")
"""Of ``calibration.p_values()``, in its order."""


def asked_for(
    logits: torch.Tensor,  # [num_tokens, vocab_size], float64
    prompt: list[int],
    new: list[int],
    params: dict,
    end: int,
    slack: float = 0.0,
) -> torch.Tensor:  # [num_tokens, vocab_size]
    """The distributions that a request asks for, in the order of vLLM's sampler.

    Args:
        end: the end token.
        slack: lets in what a cut leaves out by less than this.
    """
    logits = logits.clone()
    if classes := params.get("structured", {}).get("classes"):
        for place in range(len(new)):
            allowed = [token_of_character(c) for c in classes[place % len(classes)]]
            if place and not place % len(classes):
                allowed.append(end)
            logits[place] = only(logits[place], allowed)
    logits = shaped(logits, prompt, new, params)
    stops = [*params.get("stop_token_ids", ()), end]
    logits[: params.get("min_tokens", 0), stops] = -math.inf
    for *prefix, last in params.get("bad_words_token_ids", ()):
        for place in range(len(prefix), len(new)):
            if new[place - len(prefix) : place] == prefix:
                logits[place, last] = -math.inf
    return sampled_from(logits, params, slack)


def _is_near_a_cut(params: dict) -> bool:
    """True if rounding may let in a token, which changes the probabilities of all others."""
    return any(name in params for name in ("top_p", "min_p"))


class Pool:
    """Tokens drawn so far, of large vocabularies by their rank, and the distributions asked for."""

    def __init__(self) -> None:
        self._drawn: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def add(self, probs: torch.Tensor, tokens: torch.Tensor, places: torch.Tensor) -> None:
        """
        Args:
            probs: [num_tokens, vocab_size], float64.
            tokens, places: [num_tokens]; places within the tokens' steps.
        """
        own = probs.gather(1, tokens[:, None])[:, 0]
        # Others cannot tell anything, or rounding may have let them in.
        told = (probs.amax(1) < 1 - 1e-6) & (own > 0)
        probs, tokens = probs[told], tokens[told]
        if probs.shape[1] > VOCAB_SIZE:  # all ranks from the last one on are one
            probs, order = probs.sort(1, descending=True)
            last = VOCAB_SIZE - 1
            tokens = (order == tokens[:, None]).int().argmax(1).clamp(max=last)
            probs = torch.cat((probs[:, :last], probs[:, last:].sum(1, keepdim=True)), 1)
        self._drawn.append((probs, tokens, places[told]))

    @property
    def num_tokens(self) -> int:
        return sum(len(tokens) for _, tokens, _ in self._drawn)

    def p_values(self) -> dict[str, float]:
        if self.num_tokens < LEAST_TOKENS:
            return {}
        probs, tokens, places = map(torch.cat, zip(*self._drawn))
        found = {}
        for name, chosen in {
            "": places >= 0,
            ", first of a step": places == 0,
            ", second of a step": places == 1,
            ", later in a step": places > 1,
        }.items():
            if int(chosen.sum()) >= LEAST_TOKENS:
                values = p_values(probs[chosen], tokens[chosen])
                found |= {f"{test}{name}": value for test, value in zip(TESTS, values)}
        return found

    def p_value(self) -> float:
        """The least of all, times their number."""
        values = self.p_values().values()
        return min(1.0, min(values, default=1.0) * max(1, len(values)))


class Distribution:
    """Pools what streams drew, requests with a seed apart; finds what could not be drawn."""

    def __init__(self) -> None:
        self.pools = {"without seed": Pool(), "with seed": Pool()}
        self._seeds: set[int] = set()

    def add(
        self, model: str, stream: list[dict], answers: list[Answer], mode: str = "raw_logprobs"
    ) -> list[str]:
        """Adds a stream's sampled tokens; a line for each token that its request excludes.

        Args:
            mode: the engine's ``logprobs_mode``.
        """
        found = []
        for i, (request, answer) in enumerate(zip(stream, answers)):
            params = request["params"]
            structured = params.get("structured", {"classes": []})
            if not params["temperature"] or request.get("lora") or "classes" not in structured:
                continue
            if "thinking_token_budget" in params:  # which forces tokens
                continue
            if request["prompt"]["length"] > LONGEST_PROMPT[model]:
                continue
            seed = params.get("seed")
            pool = self.pools["without seed" if seed is None else "with seed"]
            # Two requests of one seed have the same noise: only the first is independent.
            is_new = seed is None or seed not in self._seeds
            self._seeds |= {seed} - {None}
            for choice in answer.choices.values():
                if choice.token_ids:
                    found += self._add(model, request, choice, pool if is_new else Pool(), i, mode)
        return found

    def _add(
        self, model: str, request: dict, choice, pool: Pool, number: int, mode: str
    ) -> list[str]:
        params, new = request["params"], choice.token_ids
        prompt = tokens_of(model, request["prompt"])
        logits = target_logits(target_of(model), prompt, new)
        probs = asked_for(logits, prompt, new, params, END[model])
        tokens = torch.tensor(new)
        found = []
        own = probs.gather(1, tokens[:, None])[:, 0]
        if (own <= 0).any():
            wider = asked_for(logits, prompt, new, params, END[model], EDGE)
            excluded = wider.gather(1, tokens[:, None])[:, 0] <= 0
            for place in excluded.nonzero()[:1, 0].tolist():
                found.append(f"excluded: request {number}: token {new[place]} at {place}")
        pool.add(probs, tokens, torch.tensor(choice.places))
        # A grammar's mask is in stock vLLM's log-probabilities too; penalties and biases are not,
        # but where they are asked for. Processed logits are not compared: a shift changes nothing.
        if choice.logprobs and "structured" not in params and not found:
            asked = {
                "raw_logprobs": lambda: logits.log_softmax(-1),
                "raw_logits": lambda: logits,
                "processed_logprobs": lambda: probs.log(),
            }.get(mode)
            scores = asked().gather(1, tokens[:, None])[:, 0].tolist() if asked else []
            for place, (table, wanted) in enumerate(zip(choice.logprobs, scores)):
                if mode == "processed_logprobs" and _is_near_a_cut(params):
                    break
                if abs(table[new[place]].logprob - wanted) > 2e-3:
                    found.append(
                        f"logprobs: request {number}: {table[new[place]].logprob} at {place}, "
                        f"which is {wanted}"
                    )
                    break
        return found
