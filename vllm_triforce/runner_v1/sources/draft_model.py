"""A small draft model that sees sink tokens and recent tokens (paper, section 4.1)."""

import torch
from vllm.model_executor.layers.attention import Attention

from vllm_triforce.cache.streaming import StreamingCache, StreamingWindow
from vllm_triforce.core.draft_cache import private_cache
from vllm_triforce.core.model_pass import PassInput, run_model
from vllm_triforce.runner_v1.logits_processing import process_logits
from vllm_triforce.runner_v1.sampling import (
    NAN_TOKEN,
    greedy_tokens,
    has_nan,
    token_distribution,
)
from vllm_triforce.runner_v1.sources.source import Drafted, DraftSource, Offer

# Tokens that a pass of the draft reads beside others without taking notably longer.
_FAR_BEHIND = 16

_ALWAYS = Offer()


class DraftModel(DraftSource):
    """Drafts with a model of its own and a window of its own per request.

    Args:
        model: the draft, loaded by vLLM.
        layers: its attention layers by name.
        builder: vLLM's metadata builder of the draft's layers.
        cache: the private cache, bound to these layers.
    """

    name = "draft_model"
    prior_acceptance = (0.5,)  # docs/results/2026-11-21-cpu.md
    needs_model = True

    def __init__(
        self,
        model: torch.nn.Module,
        vllm_config,
        layers: dict[str, Attention],
        builder,
        cache: StreamingCache,
        num_sink_tokens: int,
        num_recent_tokens: int,
        window_tokens: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._vllm_config = vllm_config
        self._layers = layers
        self._builder = builder
        self.cache = cache
        self._window_sizes = (num_sink_tokens, num_recent_tokens, window_tokens)
        self._device = device
        self._windows: dict[str, StreamingWindow] = {}

    @classmethod
    def build(cls, parts) -> "DraftModel":
        config, vllm_config = parts.config, parts.vllm_config
        cache, builder = private_cache(
            parts.draft_layers,
            vllm_config,
            config,
            vllm_config.scheduler_config.max_num_seqs,
            parts.device,
        )
        return cls(
            parts.draft,
            vllm_config,
            parts.draft_layers,
            builder,
            cache,
            config.num_sink_tokens,
            config.num_recent_tokens,
            config.window_tokens,
            parts.device,
        )

    def offers(self, batch, proposal, rows) -> list[Offer]:
        return [_ALWAYS] * len(rows)

    def draft(self, batch, proposal, rows, wanted, offers, sampling, noise) -> Drafted:
        greedy = sampling.all_greedy
        drafted = Drafted([[] for _ in rows], None if greedy else [[] for _ in rows])
        active = [i for i, count in enumerate(wanted) if count]
        self._take_slots(batch, [batch.request_ids[rows[i]] for i in active])
        drafted.is_first = any(batch.request_ids[rows[i]] not in self._windows for i in active)
        drafted.num_read = self._num_far_behind(batch, [rows[i] for i in active])
        feed, first_positions = [], []
        for i in active:
            row = rows[i]
            token_ids = batch.context(proposal, row)
            position, tokens = self._window(batch.request_ids[row]).advance(token_ids, wanted[i])
            feed.append(tokens.tolist())
            first_positions.append(position)
        while active:
            slots = [self.cache.slot(batch.request_ids[rows[i]]) for i in active]
            logits = self._forward(feed, first_positions, slots)
            places = ((rows[i], drafted.token_ids[i]) for i in active)
            logits = process_logits(logits, batch, proposal, places)
            self._sample(logits, active, sampling, noise, drafted)
            active = [
                i
                for i in active
                if len(drafted.token_ids[i]) < wanted[i] and i not in drafted.nan_rows
            ]
            feed = [[drafted.token_ids[i][-1]] for i in active]
            first_positions = [
                self._windows[batch.request_ids[rows[i]]].append(tokens[0])
                for i, tokens in zip(active, feed)
            ]
        return drafted

    def num_uncached_tokens(self, request_id: str, num_tokens: int) -> int:
        """Tokens that the draft has to read before it can go on after ``num_tokens``."""
        window = self._windows.get(request_id) or StreamingWindow(*self._window_sizes)
        return window.behind(num_tokens)

    def _num_far_behind(self, batch, rows: list[int]) -> int:
        """Tokens to read of windows for which that takes notably longer than drafting itself."""
        behind = [
            self.num_uncached_tokens(batch.request_ids[row], len(batch.token_ids[row]))
            for row in rows
        ]
        return sum(count for count in behind if count > _FAR_BEHIND)

    @property
    def num_requests(self) -> int:
        """Requests that something is kept for."""
        return max(len(self._windows), len(self.cache))

    def _take_slots(self, batch, request_ids: list[str]) -> None:
        """A slot for each of these requests. More may have had one than run at a time, since a
        preempted request keeps its own: whoever is not in the batch gives way."""
        for request_id in request_ids:
            self.cache.slot(request_id, evict=lambda: self._evicted(batch))

    def _evicted(self, batch) -> str:
        present = set(batch.request_ids)
        absent = next(owner for owner in self.cache.owners() if owner not in present)
        self._windows.pop(absent, None)
        return absent

    def clean(self, request_id: str) -> None:
        """Kernels multiply what is masked by 0: a NaN left behind would reach the next owner."""
        blocks = self.cache.block_table[self.cache.slot(request_id)].long()
        for layer in self._layers.values():
            layer.kv_cache[blocks] = 0

    def release(self, request_id: str) -> None:
        self._windows.pop(request_id, None)
        self.cache.release(request_id)

    def _window(self, request_id: str) -> StreamingWindow:
        if request_id not in self._windows:
            self._windows[request_id] = StreamingWindow(*self._window_sizes)
        return self._windows[request_id]

    def _forward(self, feed, first_positions, slots) -> torch.Tensor:
        """Logits after each row's last token, [num_rows, vocab_size]."""
        inputs = PassInput.from_rows(feed, first_positions, self._device)
        table = self.cache.block_table[slots]
        mapping = inputs.slot_mapping(self.cache.host_table[slots], self.cache.block_size)
        metadata = self._builder.build(0, inputs.common_metadata(table, mapping))
        hidden = run_model(
            self._model,
            self._vllm_config,
            inputs,
            dict.fromkeys(self._layers, metadata),
            dict.fromkeys(self._layers, mapping),
        )
        return self._model.compute_logits(hidden[inputs.query_start_loc[1:] - 1])

    def _sample(self, logits, active, sampling, noise, drafted: Drafted) -> None:
        if drafted.probs is None:
            for i, token in zip(active, greedy_tokens(logits).tolist()):
                if token == NAN_TOKEN:
                    self._draft_nothing(i, drafted)
                else:
                    drafted.token_ids[i].append(token)
            return
        distributions = token_distribution(logits, sampling.take(active))
        for i, probs, nan in zip(active, distributions, has_nan(distributions)):
            if nan:
                self._draft_nothing(i, drafted)
                continue
            drafted.token_ids[i].append(noise.sample(i, probs))
            drafted.probs[i].append(probs)

    @staticmethod
    def _draft_nothing(row: int, drafted: Drafted) -> None:
        drafted.nan_rows.append(row)
        drafted.token_ids[row] = []
        if drafted.probs is not None:
            drafted.probs[row] = []
