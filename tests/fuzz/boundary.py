"""What is handed to vLLM's rejection sampler on Model Runner V1, looked at from outside.

An oracle of its own: it knows nothing of how the package makes, or checks, a proposal.
"""

from collections.abc import Callable

import torch

GREEDY = 1e-5
TOLERANCE = 1e-4


class BoundaryWatch:
    """Wraps a runner's rejection sampler; ``faults`` has a line for each thing that is wrong."""

    def __init__(self, runner) -> None:
        self.faults: list[str] = []
        self._forward: Callable = runner.rejection_sampler.forward
        runner.rejection_sampler.forward = self.forward

    def take(self) -> list[str]:
        faults, self.faults = self.faults, []
        return faults

    def forward(self, metadata, draft_probs, logits, sampling_metadata):
        self.faults += self._look(metadata, draft_probs, logits, sampling_metadata)
        return self._forward(metadata, draft_probs, logits, sampling_metadata)

    def _look(self, metadata, draft_probs, logits, sampling) -> list[str]:
        counts, drafted = list(metadata.num_draft_tokens), metadata.draft_token_ids
        found = []
        if len(drafted) != sum(counts):
            found.append(f"tokens: {len(drafted)} drafted, {counts} announced")
        if len(drafted) and not -1 <= int(drafted.min()) <= int(drafted.max()) < logits.shape[1]:
            found.append(f"tokens: {drafted.tolist()} are not all in the vocabulary")
        if len(logits) != sum(counts) + len(counts):
            found.append(f"logits: {len(logits)} rows for {counts} drafted")
        if draft_probs is not None and len(draft_probs) != sum(counts):
            return [*found, f"rows: {len(draft_probs)} distributions for {counts} drafted"]
        temperature = sampling.temperature
        if temperature is None or found:
            return found
        owners = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        is_sampled = temperature[owners] >= GREEDY
        if (is_sampled & (drafted < 0)).any():
            # vLLM's scheduler pads requests that come or come back with one token left; Triton's
            # kernel rejects -1, the CPU's looks up its probability, which lies in the row before.
            return [f"placeholder: -1 drafted for a sampled request, {counts} drafted"]
        if draft_probs is None:
            return found
        for place in range(len(owners)):
            if not is_sampled[place]:
                continue
            row, token = draft_probs[place], int(drafted[place])
            if not abs(float(row.sum()) - 1) < TOLERANCE or float(row.min()) < 0:
                found.append(f"sum: a distribution sums to {float(row.sum())}, {counts} drafted")
            elif not float(row[token]) > 0:
                found.append(f"drawn: a token has q = {float(row[token])}, {counts} drafted")
        return found
