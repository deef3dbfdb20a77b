"""Input and output of Runner V1's speculator: rows of vLLM's batch, and their proposals."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.core.limits import (
    decodes_plainly,
    is_greedy,
    proposal_limit,
    room_for_proposal,
    sampling_seed,
)
from vllm_triforce.runner_v1.sampling import LogitsProcessing, SamplingRows
from vllm_triforce.vllm_patches import swaps

# In the place of the ids that stand for an image, audio or video in a prompt.
PLACEHOLDER = -1


@dataclass
class DraftBatch:
    """Requests to speculate on after a full pass. Lists have one entry per request."""

    request_ids: list[str]
    token_ids: list[np.ndarray]
    """[num_computed_tokens + 1], int32: prompt, output and the token just sampled; ``PLACEHOLDER``
    where the target reads something else than a token."""
    num_computed_tokens: list[int]
    """Tokens whose KV the full pass has written and accepted."""
    max_num_tokens: list[int]
    """Longest proposal that fits the lookahead slots; at least 1."""
    block_tables: list[list[np.ndarray]]
    """Allocated block ids per KV cache group and request."""
    sampling: SamplingRows
    logits_processors: list[LogitsProcessing | None] = field(default_factory=list)
    """None for requests that change no logits; empty if none does."""
    tenants: list[str | None] = field(default_factory=list)
    """Requests of a tenant may see each other's answers, requests of None nobody's."""
    # For the controller, which chooses before a batch is divided.
    num_plain_reqs: int = 0
    """Number of requests in the engine's step that cannot be speculated on."""
    is_greedy: list[bool] = field(default_factory=list)
    """True where level 3 verifies by argmax. Requests with a grammar are drafted greedily although
    level 3 samples."""

    def __len__(self) -> int:
        return len(self.request_ids)

    def context(self, proposal: "Proposal", row: int) -> np.ndarray:
        """Return a request's tokens and proposed tokens, [num_tokens], int32."""
        proposed_ids = proposal.token_ids[row]
        if not proposed_ids:
            return self.token_ids[row]
        return np.concatenate([self.token_ids[row], np.asarray(proposed_ids, dtype=np.int32)])

    def has_placeholders(self, row: int) -> bool:
        """True if a request's prompt has an image, audio or video."""
        return self.token_ids[row].min() == PLACEHOLDER

    def has_seed(self, row: int) -> bool:
        return bool(self.sampling.seeds) and self.sampling.seeds[row] is not None

    def process_logits(
        self,
        logits: torch.Tensor,  # [num_places, vocab_size]
        proposal: "Proposal",
        places: Iterable[tuple[int, list[int]]],
    ) -> torch.Tensor:  # [num_places, vocab_size], float32 if any request changes its logits
        """Process the logits of every place, maybe in place.

        Args:
            places: the row and the tokens drafted after its proposal.
        """
        if not any(self.logits_processors):
            return logits
        logits = logits.float()
        for place_logits, (row, draft) in zip(logits, places):
            if (processor := self.logits_processors[row]) is not None:
                processor(place_logits, [*proposal.token_ids[row], *draft])
        return logits

    def take(self, rows: list[int], max_num_tokens: list[int]) -> "DraftBatch":
        """Return the requests of ``rows`` with other maximum lengths."""

        def pick(values):
            return [values[row] for row in rows]

        return DraftBatch(
            pick(self.request_ids),
            pick(self.token_ids),
            pick(self.num_computed_tokens),
            max_num_tokens,
            [pick(tables) for tables in self.block_tables],
            self.sampling.take(rows),
            pick(self.logits_processors) if self.logits_processors else [],
            pick(self.tenants) if self.tenants else [],
        )


@dataclass
class Proposal:
    """Proposed tokens and the distribution that each was drawn from."""

    token_ids: list[list[int]]
    probs: list[list[torch.Tensor | None]]
    """[vocab_size], float32, per request and token, None for a one-hot distribution; of no use for
    greedy requests, and maybe empty."""
    num_planned: list[int]
    """Number of tokens per request, each decided on before it is drawn."""
    routes: list[str] = field(default_factory=list)
    """Way of each request's tokens (``controller/routes.py``)."""

    @classmethod
    def empty(cls, num_reqs: int) -> "Proposal":
        return cls([[] for _ in range(num_reqs)], [[] for _ in range(num_reqs)], [0] * num_reqs)

    def __len__(self) -> int:
        return len(self.token_ids)

    def extend(self, row: int, token_ids: list[int], probs: Sequence[torch.Tensor | None]) -> None:
        """Append tokens and copies of their distributions to a request's proposal."""
        self.token_ids[row] += token_ids
        # They may be rows of a pass, which would stay in memory as a whole.
        self.probs[row] += [None if row_probs is None else row_probs.clone() for row_probs in probs]


class RunnerBatch:
    """Reads a runner's batch by row; ids in ``disabled`` are no longer speculated on."""

    def __init__(
        self,
        runner,
        config: ResolvedConfig,
        disabled: Container[str],
    ) -> None:
        self._runner = runner
        self._config = config
        self._disabled = disabled
        self.tenants: dict[str, str] = {}
        """``cache_salt`` by request, "" without one; none where the scheduler is the user's."""

    def is_never_speculated_on(self, row: int) -> bool:
        """True if a request is excluded from speculation for good."""
        request_id = self._runner.input_batch.req_ids[row]
        return decodes_plainly(self._params(row)) or request_id in self._disabled

    def max_proposal_len(self, row: int, num_computed: int, max_tokens: int) -> int:
        """Return how many tokens may be proposed for a request; none if it is not positive."""
        request, input_batch = self._request(row), self._runner.input_batch
        if self.is_never_speculated_on(row):
            return 0
        tables, params = input_batch.block_table.block_tables, request.sampling_params
        max_tokens = room_for_proposal(
            num_computed,
            proposal_limit(params, max_tokens),
            min(int(table.num_blocks_per_row[row]) * table.block_size for table in tables),
            min(self._runner.max_model_len, request.num_prompt_tokens + params.max_tokens),
            self._config.min_context,
        )
        num_emitted = num_computed + 1 - request.num_prompt_tokens
        if num_emitted < params.min_tokens:
            # vLLM masks stop tokens of the bonus token by the number of tokens before the step, so
            # a proposal must not reach past min_tokens.
            max_tokens = min(max_tokens, params.min_tokens - num_emitted - 1)
        return max_tokens

    def limit_rows(self, rows: list[int], speculating: Container[str], max_rows: int) -> list[int]:
        """Choose at most ``max_rows`` rows, requests that are ``speculating`` first.

        Each proposed token of a sampled request keeps a distribution over the vocabulary until it
        is verified.
        """
        if len(rows) <= max_rows:
            return rows
        request_ids = self._runner.input_batch.req_ids
        by_age = sorted(rows, key=lambda row: request_ids[row] not in speculating)
        return sorted(by_age[:max_rows])

    def rows_with_states(self, held: Container[str], max_rows: int) -> list[int]:
        """Choose at most ``max_rows`` rows whose hidden states a head may read.

        Contexts that may be speculated on now go first, and requests in ``held`` before others.
        """
        num_reqs = len(self._runner.input_batch.req_ids)
        rows = [row for row in range(num_reqs) if not self.is_never_speculated_on(row)]
        if len(rows) <= max_rows:
            return rows
        is_long = {row: self._request(row).num_tokens >= self._config.min_context for row in rows}
        chosen = self.limit_rows([row for row in rows if is_long[row]], held, max_rows)
        short = [row for row in rows if not is_long[row]]
        return chosen + self.limit_rows(short, held, max_rows - len(chosen))

    def has_seed(self, row: int) -> bool:
        return sampling_seed(self._params(row)) is not None

    def position_deltas(self, request_ids: list[str]) -> list[int]:
        """Return M-RoPE positions of generated tokens minus their positions in the request.

        Requests outside the runner, which calibration uses, have 0.
        """
        requests = self._runner.requests
        return [requests[i].mrope_position_delta if i in requests else 0 for i in request_ids]

    def draft_batch(self, rows, computed, max_lens, sampled, counts, metadata) -> DraftBatch:
        """Build the speculator's input for ``rows``.

        Args:
            computed, max_lens: tokens, for every row of the batch; as the next two.
            sampled, counts: token ids of the step, and the number of valid ones.
            metadata: vLLM's ``SamplingMetadata``.
        """
        input_batch, ids = self._runner.input_batch, self._runner.input_batch.req_ids
        requests, params = list(map(self._request, rows)), list(map(self._params, rows))
        token_ids, logits_processors = [], []
        for row, request in zip(rows, requests):
            earlier_ids = input_batch.token_ids_cpu[row, : computed[row] + 1 - counts[row]]
            new_ids = np.asarray(sampled[row][: counts[row]], dtype=np.int32)
            row_ids = np.concatenate([earlier_ids, new_ids])
            token_ids.append(row_ids)
            logits_processors.append(
                LogitsProcessing.for_request(
                    request.sampling_params,
                    row_ids,
                    request.num_prompt_tokens,
                    input_batch.vocab_size,
                )
            )
            # Penalties and the newest token are of the true ids; only the drafts see no images.
            for feature in request.mm_features:
                place = feature.mm_position
                row_ids[place.offset : place.offset + place.length] = PLACEHOLDER
        return DraftBatch(
            request_ids=[ids[row] for row in rows],
            token_ids=token_ids,
            num_computed_tokens=[computed[row] for row in rows],
            max_num_tokens=[max_lens[row] for row in rows],
            block_tables=[
                [table.block_table.np[row, : table.num_blocks_per_row[row]] for row in rows]
                for table in input_batch.block_table.block_tables
            ],
            sampling=self.sampling(rows, params, metadata),
            # A seeded request's samples must not depend on answers to others.
            tenants=[None if self.has_seed(r) else self.tenants.get(ids[r]) for r in rows],
            num_plain_reqs=sum(map(bool, counts)) - len(rows),
            is_greedy=list(map(is_greedy, params)),
            logits_processors=logits_processors,
        )

    def sampling(self, rows: list[int], params: list, metadata) -> SamplingRows:
        """Build sampling parameters from ``SamplingMetadata`` and the rows' ``SamplingParams``."""
        seeds = [sampling_seed(p) for p in params]
        if metadata.temperature is None:
            return SamplingRows(torch.zeros(len(rows)), seeds=seeds)
        min_p = [p.min_p for p in params]
        temperature = metadata.temperature[rows]
        if structured := [i for i, p in enumerate(params) if p.structured_outputs is not None]:
            # The scheduler cuts these proposals at the first token that the grammar forbids. If
            # that token had been drawn, its replacement would have to come from a residual. A
            # greedy proposal has one-hot distributions and may be cut anywhere.
            temperature[structured] = 0.0
        return SamplingRows(
            temperature=temperature,
            top_k=None if metadata.top_k is None else metadata.top_k[rows],
            top_p=None if metadata.top_p is None else metadata.top_p[rows],
            min_p=torch.tensor(min_p) if any(min_p) else None,
            seeds=seeds,
        )

    def _request(self, row: int):
        return self._runner.requests[self._runner.input_batch.req_ids[row]]

    def _params(self, row: int):
        return self._request(row).sampling_params


def forget_blocks(runner, num_kept: Mapping[str, tuple[int, ...]]) -> None:
    """Remove all but ``num_kept`` blocks of requests, by KV cache group: others were taken back."""
    batch = runner.input_batch
    for request_id, counts in num_kept.items():
        if request_id not in runner.requests:
            continue
        for ids, count in zip(runner.requests[request_id].block_ids, counts):
            del ids[count:]
        if (row := batch.req_id_to_index.get(request_id)) is not None:
            for table, count in zip(batch.block_table.block_tables, counts):
                table.num_blocks_per_row[row] = count


class AdapterSwitch:
    """Sets the LoRA adapter of each token for level 2's passes.

    vLLM sets them once per step, for the tokens of the full pass; level 2's passes have other
    tokens. The draft of level 1 runs without adapters, which only lowers acceptance. A pass fits
    vLLM's buffers: ``max_num_batched_tokens`` has room for every request's proposal.
    """

    def __init__(self, runner) -> None:
        self._runner = runner
        self._full_pass: tuple[tuple, dict] | None = None
        self._set_active = swaps.ACTIVE_LORAS.set(runner, self._remember)

    def _remember(self, *mapping, **kwargs) -> None:
        self._full_pass = mapping, kwargs
        self._set_active(*mapping, **kwargs)

    def before_pass(self, request_ids: list[str], num_tokens: list[int]) -> None:
        """Set the adapters of a pass with ``num_tokens[i]`` tokens of ``request_ids[i]``.

        Requests outside the batch, which calibration uses, have no adapter.
        """
        input_batch = self._runner.input_batch
        rows = map(input_batch.req_id_to_index.get, request_ids)
        lora_ids = [0 if row is None else input_batch.request_lora_mapping[row] for row in rows]
        mapping = tuple(np.repeat(lora_ids, num_tokens).tolist())
        active = set(input_batch.lora_id_to_lora_request.values())
        # Logits are computed for every token, so vLLM's prompt and token mappings are the same.
        self._set_active(mapping, mapping, active)

    def restore(self) -> None:
        """Set the full pass's adapters: vLLM computes prompt log-probabilities after a proposal."""
        if self._full_pass is not None:
            mapping, kwargs = self._full_pass
            self._set_active(*mapping, **kwargs)
