"""Requests that do not exist: proposals for them compile kernels at start, and are timed."""

import numpy as np
import torch

from vllm_triforce.device.batch import DeviceBatch, DeviceSampling
from vllm_triforce.kernels.distributions import SamplingParameters


class TrialBatches:
    """Makes them, over KV blocks that hold nothing yet.

    Args:
        build: the loop and its parts (``worker/v2/build.py``).
        runner: vLLM's, whose block tables say how blocks are laid out.
    """

    def __init__(self, build, runner, num_blocks: int, device: torch.device) -> None:
        self._build = build
        self._runner = runner
        self._num_blocks = num_blocks
        self._device = device
        self._num_made = 0
        self._vocab_size = runner.sampler.sampling_states.vocab_size

    @property
    def max_rows(self) -> int:
        """Requests that can be in one."""
        return self._build.rows.max_rows

    def make(
        self, num_rows: int, context: int, num_tokens: int, num_rounds: int, is_greedy: bool
    ) -> DeviceBatch:
        """New requests of so much context, that propose as much.

        Args:
            is_greedy: whether nothing else is asked of their tokens, or everything that can be.
        """
        states, size = np.arange(num_rows), max(self._runner.block_tables.block_sizes)
        self._num_made += 1
        return DeviceBatch(
            request_ids=[f"trial {self._num_made}, {row}" for row in range(num_rows)],
            batch_rows=states,
            states=states,
            max_computed_tokens=np.full(num_rows, context),
            reserved=np.full(num_rows, -(-(context + num_tokens + 1) // size) * size),
            limits=np.full(num_rows, context + 2 * num_tokens + 4),
            max_num_tokens=np.full(num_rows, num_tokens),
            max_num_rounds=np.full(num_rows, num_rounds),
            is_certain=np.zeros(num_rows, dtype=bool),
            sampling=DeviceSampling(is_greedy, has_masks=not is_greedy, is_shaped=not is_greedy),
            tables=self._tables(num_rows, context + 2 * num_tokens),
            num_computed=self._of_states(context, torch.int32),
            num_sampled=self._filled(num_rows, 1, torch.int32),
            last_sampled=self._of_states(0, torch.int64)[:, None],
            parameters=SamplingParameters(
                self._of_states(0.0 if is_greedy else 1.0, torch.float32),
                self._of_states(1, torch.int64),
                self._of_states(self._vocab_size, torch.int32),
                self._of_states(0.9, torch.float32),
                self._of_states(0.0, torch.float32),
            ),
            all_token_ids=self._runner.req_states.all_token_ids.gpu,
        )

    def forget(self, batch: DeviceBatch) -> None:
        """Nothing is kept of its requests."""
        for request_id in batch.request_ids:
            self._build.slots.release(request_id)

    def _tables(self, num_rows: int, num_tokens: int) -> list[torch.Tensor]:
        """Of each KV cache group; block 0 is vLLM's null block."""
        tables = []
        for size, own in zip(self._runner.block_tables.block_sizes, self._build.tables):
            width = own.shape[1]
            ids = torch.arange(num_rows * width, dtype=torch.int32, device=self._device)
            ids = 1 + ids.view(num_rows, width) % (self._num_blocks - 1)
            ids[:, -(-num_tokens // size) + 1 :] = 0
            tables.append(own[:num_rows].copy_(ids))
        return tables

    def _of_states(self, value, dtype: torch.dtype) -> torch.Tensor:
        return self._filled(self._runner.max_num_reqs, value, dtype)

    def _filled(self, count: int, value, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((count,), value, dtype=dtype, device=self._device)
