"""Draft model over a window of sink tokens and recent tokens (paper, section 4.1)."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_triforce.cache.streaming import StreamingWindow
from vllm_triforce.controller.draft_lengths import StopRule
from vllm_triforce.core.model_pass import PassInput, run_model
from vllm_triforce.core.models import private_cache, states_read
from vllm_triforce.runner_v1.sampling import (
    NAN_TOKEN,
    greedy_tokens,
    has_nan,
    softmax,
    token_distribution,
)
from vllm_triforce.runner_v1.sources.source import Draft, DraftSource, Match, SourceParts

# Number of extra tokens that a pass of the draft reads without taking notably longer.
_MAX_FREE_TOKENS = 16

ALWAYS = Match()


@dataclass
class Feed:
    """Inputs of one row of a pass."""

    token_ids: list[int]
    position: int
    """Of the first token, in the window."""
    hidden: torch.Tensor | None = None
    """[num_tokens, hidden_size], a head's input beside the tokens."""


class DraftModel(DraftSource):
    """Drafts with a small model that keeps a window of tokens per request."""

    name = "draft_model"
    prior_acceptance = (0.5,)  # docs/results.md
    needs_model = True
    stops_early = True

    def __init__(self, parts: SourceParts) -> None:
        self._config, self._vllm_config = parts.config, parts.vllm_config
        self.model, self._layers = parts.draft, parts.draft_layers
        num_slots = min(
            self._vllm_config.scheduler_config.max_num_seqs, self._config.max_speculating_seqs
        )
        self.cache, self._builder = private_cache(
            self._layers, self._vllm_config, self._config, num_slots, torch.device("cpu")
        )
        self._windows: dict[str, StreamingWindow] = defaultdict(self._new_window)

    @classmethod
    def build(cls, parts) -> "DraftModel":
        return cls(parts)

    def find_matches(self, batch, proposal, rows) -> list[Match | None]:
        # It has the images of no request.
        return [None if batch.has_placeholders(row) else ALWAYS for row in rows]

    def draft(
        self, batch, proposal, rows, max_tokens, matches, sampling, noise, stop=None
    ) -> Draft:
        """Draft as ``DraftSource.draft()`` says; ``stop`` ends drafts before ``max_tokens``."""
        draft = Draft([[] for _ in rows], None if sampling.all_greedy else [[] for _ in rows])
        active = [i for i, count in enumerate(max_tokens) if count and matches[i] is not None]
        ids = [batch.request_ids[row] for row in rows]
        for i in active:
            # Requests outside the batch keep their slots, so all may be taken.
            self.cache.slot(ids[i], evict=lambda: self._evict(batch))
        feed = [self._advance(batch, proposal, rows[i], max_tokens[i]) for i in active]
        draft.reads_window = any(len(row.token_ids) > _MAX_FREE_TOKENS for row in feed)
        # One pass per token. Rows drop out when they have their tokens.
        while active:
            logits, outputs = self._forward(feed, [self.cache.slot(ids[i]) for i in active])
            hidden = dict(zip(active, outputs))
            places = ((rows[i], draft.token_ids[i]) for i in active)
            logits = self._processed(batch.process_logits(logits, proposal, places), batch)
            draft.num_passes += 1
            active = self._sample(logits, active, sampling, noise, draft, stop)
            active = [
                i
                for i in active
                if len(draft.token_ids[i]) < max_tokens[i] and (stop is None or stop.goes_on(i))
            ]
            newest = [draft.token_ids[i][-1] for i in active]
            feed = [
                Feed([token], self._windows[ids[i]].append(token), hidden[i])
                for i, token in zip(active, newest)
            ]
        return draft

    def _advance(self, batch, proposal, row: int, num_drafts: int) -> Feed:
        """Move a row's window to the end of its context; return the missing tokens."""
        window = self._windows[batch.request_ids[row]]
        position, tokens = window.advance(batch.context(proposal, row), num_drafts)
        return Feed(tokens.tolist(), position)

    def _processed(self, logits: torch.Tensor, batch) -> torch.Tensor:
        """Return the logits of a pass, [num_rows, vocab_size], to which processors were applied."""
        return logits

    def _new_window(self) -> StreamingWindow:
        config = self._config
        return StreamingWindow(
            config.num_sink_tokens, config.num_recent_tokens, config.window_tokens
        )

    @property
    def num_requests(self) -> int:
        return max(len(self._windows), len(self.cache))

    def _evict(self, batch) -> str:
        """Drop the window of a request outside the batch and return its id."""
        present = set(batch.request_ids)
        absent = next(owner for owner in self.cache.owners() if owner not in present)
        self._windows.pop(absent, None)
        return absent

    def clean(self, request_id: str) -> None:
        """Zero a request's blocks.

        Kernels multiply masked values by 0, and 0 times NaN is NaN: a NaN would reach the slot's
        next owner.
        """
        blocks = self.cache.block_table[self.cache.slot(request_id)].long()
        for layer in self._layers.values():
            layer.kv_cache[blocks] = 0

    def release(self, request_id: str) -> None:
        self._windows.pop(request_id, None)
        self.cache.release(request_id)

    def _forward(
        self, feed: list[Feed], slots: Sequence[int]
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor | None]]:
        """Run a pass.

        Returns:
            The logits after each row's last token, [num_rows, vocab_size], and the hidden states
            for the next token of each row, [1, hidden_size], None without a head.
        """
        inputs = PassInput.from_rows(
            [row.token_ids for row in feed], [row.position for row in feed]
        )
        table = self.cache.block_table[slots]
        blocks = list(self.cache.host_table[slots])
        mapping = inputs.slot_mapping(blocks, self.cache.block_size)
        metadata = self._builder.build(0, inputs.common_metadata(table, mapping))
        states = [row.hidden for row in feed if row.hidden is not None]
        hidden, further = run_model(
            self.model,
            self._vllm_config,
            inputs,
            dict.fromkeys(self._layers, metadata),
            dict.fromkeys(self._layers, mapping),
            **({"hidden_states": torch.cat(states)} if states else {}),
        )
        last = inputs.query_start_loc[1:] - 1
        outputs = states_read(hidden, further)[0][last].split(1) if states else [None] * len(feed)
        return self.model.compute_logits(hidden[last]), outputs

    def _sample(
        self, logits, active: list[int], sampling, noise, draft: Draft, stop: StopRule | None
    ) -> list[int]:
        """Append a token to active rows of ``draft``, and return the rows that have one.

        Rows without are those with a NaN, which are marked, and those that ``stop`` ends. They keep
        their earlier tokens: whether one is dropped must not depend on those after it.
        """
        params, kept = sampling.take(active), []
        probs = None if draft.probs is None else token_distribution(logits, params)
        top_probs = [] if stop is None else _top_probs(logits, probs, params)
        tokens = greedy_tokens(logits).tolist() if probs is None else []
        nan = [token == NAN_TOKEN for token in tokens] if probs is None else has_nan(probs)
        for place, i in enumerate(active):
            if nan[place]:
                draft.nan_rows.append(i)
                continue
            # Before the token is drawn: the end of a draft must not depend on the draw.
            if stop is not None and not stop.keeps(i, top_probs[place]):
                continue
            kept.append(i)
            if probs is None:
                draft.token_ids[i].append(tokens[place])
                continue
            draft.token_ids[i].append(noise.sample(i, probs[place]))
            if draft.probs is not None and (row_probs := draft.probs[i]) is not None:
                row_probs.append(probs[place])
        return kept


def _top_probs(
    logits: torch.Tensor,  # [num_rows, vocab_size]
    probs: torch.Tensor | None,  # as logits; one-hot for greedy rows, None if all are
    sampling,
) -> list[float]:
    """Return the largest probability of each row's distribution, of greedy rows before argmax."""
    if probs is None:
        return softmax(logits).amax(-1).tolist()
    top_probs = probs.amax(-1)
    if (is_greedy := sampling.is_greedy).any():
        top_probs = torch.where(is_greedy, softmax(logits).amax(-1), top_probs)
    return top_probs.tolist()
