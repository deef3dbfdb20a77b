"""Batches: windows of a stream of tokens, and their positions."""

import torch

from .tokenizer import BOS


class Windows:
    """Windows of the stream, without replacement: cut at a random offset, shuffled, again.

    They are cut on the CPU and handed over on `device`."""

    def __init__(self, stream, seed, device="cpu"):
        self.stream, self.rng, self.starts = stream, torch.Generator().manual_seed(seed), {}
        self.device = device

    def rand(self, low, high):
        return int(torch.randint(low, high, (1,), generator=self.rng))

    def batch(self, rows, length, repeat=0.0):
        """[rows, length + 1] tokens; every row begins with BOS, the sink. In a share `repeat`
        of them a span reappears further on, which teaches copying from far back early."""
        out = []
        for _ in range(rows):
            if not self.starts.get(length):
                n = (len(self.stream) - length - 1) // length
                starts = torch.randperm(n, generator=self.rng) * length + self.rand(0, length)
                self.starts[length] = starts.tolist()
            i = self.starts[length].pop()
            row = self.stream[i : i + length + 1].clone()
            if self.rand(0, 1000) < 1000 * repeat:
                n = self.rand(16, length // 4)
                a = self.rand(1, length - 2 * n)
                b = self.rand(a + n, length - n + 1)
                row[b : b + n] = row[a : a + n].clone()
            row[0] = BOS
            out.append(row)
        return torch.stack(out).to(self.device)

    def positions(self, rows, length, limit, skip=0.0):
        """Positions 0, 1, 2 ...; in a share `skip` of the rows with two jumps somewhere, so that
        distances up to `limit` are met without sequences that long (as PoSE does)."""
        pos = torch.arange(length).repeat(rows, 1)
        for row in pos:
            if self.rand(0, 1000) < 1000 * skip:
                room = self.rand(0, limit - length)
                first = self.rand(0, room + 1)
                row[self.rand(1, length) :] += first
                row[self.rand(1, length) :] += room - first
        return pos.to(self.device)
