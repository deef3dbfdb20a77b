"""Draws of levels 1 and 2: logits processing, sampling parameters and random numbers."""

import hashlib
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from vllm_triforce.core.limits import GREEDY_EPSILON

# Stands for a token where the logits have a NaN: no token can be chosen from them.
NAN_TOKEN = -1
# Repetition, frequency and presence penalty.
_NO_PENALTIES = (1.0, 0.0, 0.0)


@dataclass
class SamplingRows:
    """Sampling parameters, one row per request."""

    temperature: torch.Tensor  # [num_reqs], float32; 0 is greedy
    top_k: torch.Tensor | None = None  # [num_reqs], int
    top_p: torch.Tensor | None = None  # [num_reqs], float32
    min_p: torch.Tensor | None = None  # [num_reqs], float32
    seeds: list[int | None] = field(default_factory=list)
    """[num_reqs], seed of each request or None; may be empty if no request has one."""

    @cached_property
    def all_greedy(self) -> bool:
        return bool(self.is_greedy.all())

    @property
    def is_greedy(self) -> torch.Tensor:  # [num_reqs], bool
        return self.temperature < GREEDY_EPSILON

    def take(self, rows: list[int]) -> "SamplingRows":
        """Return the parameters of ``rows``, which may repeat."""
        if rows == list(range(len(self.temperature))):
            return self
        index = torch.tensor(rows)

        def pick(values):
            return None if values is None else values.index_select(0, index)

        return SamplingRows(
            pick(self.temperature),
            pick(self.top_k),
            pick(self.top_p),
            pick(self.min_p),
            [self.seeds[row] for row in rows] if self.seeds else [],
        )


def softmax(
    logits: torch.Tensor,  # [num_tokens, vocab_size]
) -> torch.Tensor:  # [num_tokens, vocab_size], float32
    """Compute probabilities that are equal bit by bit on all ranks of a tensor-parallel group.

    All decisions about tokens are made from these, as each rank makes them by itself, and ranks
    that decided differently would wait for each other's passes. Torch computes a row of softmax on
    one thread. Other sums over a row, as of ``logsumexp()``, depend on the number of threads.
    """
    return logits.softmax(-1, dtype=torch.float32)


def greedy_tokens(
    logits: torch.Tensor,  # [num_tokens, vocab_size]
) -> torch.Tensor:  # [num_tokens], int64
    """Return the argmax of each row, ``NAN_TOKEN`` for rows with a NaN.

    Torch's maximum of a row with a NaN is NaN, so no second pass over the logits is needed.
    """
    best, tokens = logits.max(-1)
    return tokens.masked_fill(best.isnan(), NAN_TOKEN)


def has_nan(
    probs: torch.Tensor,  # [num_tokens, vocab_size], by token_distribution()
) -> list[bool]:  # [num_tokens]
    """True for each row from logits with a NaN: softmax spreads a NaN over the whole row."""
    return probs[:, 0].isnan().tolist()


def below_min_p(
    logits: torch.Tensor,  # [num_tokens, vocab_size], divided by the temperature
    min_p: torch.Tensor,  # [num_tokens], float32
) -> torch.Tensor:  # [num_tokens, vocab_size], bool
    """True for each token less likely than ``min_p`` times the likeliest one."""
    probs = softmax(logits)
    return probs < probs.amax(-1, keepdim=True) * min_p[:, None]


def token_distribution(
    logits: torch.Tensor,  # [num_tokens, vocab_size]
    sampling: SamplingRows,  # [num_tokens]
) -> torch.Tensor:  # [num_tokens, vocab_size], float32
    """Compute the distribution that each row is sampled from; one-hot for greedy rows.

    Rows with a NaN are NaN throughout. Temperature, min-p, top-k and top-p are applied in vLLM's
    order (vllm/v1/sample/sampler.py), so that level 2's tokens are among those level 3 keeps.
    """
    greedy = sampling.is_greedy
    scaled = logits.float() / torch.where(greedy, 1.0, sampling.temperature)[:, None]
    if sampling.min_p is not None:
        scaled = scaled.masked_fill(below_min_p(scaled, sampling.min_p), float("-inf"))
    probs = softmax(apply_top_k_top_p(scaled, sampling.top_k, sampling.top_p))
    if greedy.any():
        best = torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).to(probs.dtype)
        best.masked_fill_(probs[:, :1].isnan(), float("nan"))
        probs = torch.where(greedy[:, None], best, probs)
    return probs


class LogitsProcessing:
    """Logits processing of one request after one full pass, so that level 3 accepts its drafts.

    Applied in the order of vLLM's sampler (vllm/v1/sample/sampler.py): ``allowed_token_ids``,
    ``bad_words``, ``min_tokens``, ``logit_bias``, penalties.

    Args:
        params: vLLM's ``SamplingParams``.
        token_ids: [num_tokens], int: prompt, output and the token just sampled.
    """

    def __init__(
        self,
        params,
        token_ids: np.ndarray,
        num_prompt_tokens: int,
        vocab_size: int,
    ) -> None:
        def ids(tokens) -> torch.Tensor:
            return torch.tensor(list(tokens), dtype=torch.int64)

        output = token_ids[num_prompt_tokens:]
        self._vocab_size = vocab_size
        allowed = params.allowed_token_ids
        self._allowed = ids(allowed) if allowed else None
        self._words = params.bad_words_token_ids or []
        # Newest tokens that may be the prefix of a bad word.
        max_prefix = max(map(len, self._words), default=1) - 1
        self._newest = output[len(output) - min(max_prefix, len(output)) :].tolist()
        self._num_output, self._min_tokens = len(output), params.min_tokens
        self._stops = [token for token in params.all_stop_token_ids if token < vocab_size]
        self._bias = None
        if bias := params.logit_bias:
            values = torch.tensor(list(bias.values()), dtype=torch.float32)
            self._bias = ids(bias), values
        self._penalties = _penalties(params)
        if self._penalties != _NO_PENALTIES:
            # A tokenizer may have more tokens than the model.
            seen = np.flatnonzero(np.bincount(token_ids)[:vocab_size])
            counts = np.bincount(output, minlength=vocab_size)[seen].astype(np.float32)
            self._seen = torch.from_numpy(seen)
            self._counts = torch.from_numpy(counts)

    @classmethod
    def for_request(
        cls, params, token_ids: np.ndarray, num_prompt_tokens: int, *others
    ) -> "LogitsProcessing | None":
        """Create the processing of a request, None if it changes no logits any more."""
        has_any = (
            params.allowed_token_ids
            or params.bad_words_token_ids
            or len(token_ids) - num_prompt_tokens < params.min_tokens
            or params.logit_bias
            or _penalties(params) != _NO_PENALTIES
        )
        return cls(params, token_ids, num_prompt_tokens, *others) if has_any else None

    def __call__(
        self,
        logits: torch.Tensor,  # [vocab_size], float32, changed in place
        new: list[int],  # tokens after ``token_ids``
    ) -> None:
        """Process the logits of the token after ``new``."""
        forbidden = self._forbidden(new)
        if self._allowed is not None:
            bad = torch.tensor(forbidden, dtype=torch.int64)
            allowed = self._allowed[~torch.isin(self._allowed, bad)]
            if not len(allowed):
                return  # no token is left: level 3 decides
            allowed_logits = logits[allowed]
            logits.fill_(float("-inf"))[allowed] = allowed_logits
        elif forbidden:
            logits[forbidden] = float("-inf")
        if self._bias is not None:
            tokens, values = self._bias
            logits[tokens] += values
        if self._penalties != _NO_PENALTIES:
            self._penalize(logits, new)

    def _forbidden(self, new: list[int]) -> list[int]:
        """Return last tokens of bad words that have begun, and stop tokens before min_tokens."""
        tokens, forbidden = self._newest + new, []
        for *prefix, last in self._words:
            has_begun = tokens[max(0, len(tokens) - len(prefix)) :] == prefix
            if has_begun and last < self._vocab_size:
                forbidden.append(last)
        if self._num_output + len(new) < self._min_tokens:
            forbidden += self._stops
        return forbidden

    def _penalize(self, logits: torch.Tensor, new: list[int]) -> None:
        """Apply the penalties to tokens that occurred, which are few in a vocabulary."""
        repetition, frequency, presence = self._penalties
        seen, counts = self._seen, self._counts
        if new:
            more = torch.tensor(new)
            counts = counts + (seen[:, None] == more).sum(1)
            unseen = more[~torch.isin(more, seen)]
            counts = torch.cat([counts, (unseen[:, None] == unseen).sum(1)])
            seen = torch.cat([seen, unseen])
        values = logits[seen]
        values *= torch.where(values > 0, 1.0 / repetition, repetition)
        values -= frequency * counts
        logits[seen] = values - presence * (counts > 0)


def _penalties(params) -> tuple[float, float, float]:
    return params.repetition_penalty, params.frequency_penalty, params.presence_penalty


class InnerNoise:
    """Uniform random numbers for the rows of one round.

    Level 3 draws from vLLM's generators. If its numbers were used here too, acceptance would
    depend on how a token was drafted. Unseeded requests share a private generator. A seeded request
    gets a generator per round, derived from its seed and its place in the sequence, so that its
    numbers do not depend on the other requests of the batch.

    Args:
        engine_seed: seed of vLLM's configuration, the same for all ranks and replicas.
        replica: index of the engine in a data-parallel deployment. Replicas draw different
            numbers; the ranks of one engine draw the same.
    """

    def __init__(self, engine_seed: int | None, replica: int = 0) -> None:
        self._shared = _generator("engine", engine_seed, replica)
        self._rows: list[torch.Generator] = []

    def begin(self, seeds: list[int | None], places: list[tuple[int, int]]) -> None:
        """Start a round.

        Args:
            seeds: seed of each row; may be empty if no request has one.
            places: number of computed tokens and length of the proposal, per row. Two rounds of a
                request share a place only if the first round's tokens were discarded. The lengths
                of a seeded request do not depend on anything learned from those tokens.
        """
        self._rows = [self._shared] * len(places)
        for row, seed in enumerate(seeds):
            if seed is not None:
                self._rows[row] = _generator("request", seed, *places[row])

    def uniform(self, row: int) -> float:
        generator = self._rows[row]
        return torch.rand((), generator=generator, dtype=torch.float64).item()

    def sample(
        self,
        row: int,
        probs: torch.Tensor,  # [vocab_size], need not be normalised
    ) -> int:
        """Draw a token by the inverse of the cumulative distribution."""
        sums = probs.cumsum(0, dtype=torch.float64)
        token = int(torch.searchsorted(sums, self.uniform(row) * float(sums[-1]), right=True))
        if token == len(sums):  # the product was rounded up to the sum itself
            token = int(probs.nonzero()[-1])
        return token


def _generator(*parts) -> torch.Generator:
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8, person=b"triforce").digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
