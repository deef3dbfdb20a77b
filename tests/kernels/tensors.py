"""Small tensors that tests hand to kernels."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from tests.kernels.device import DEVICE
from vllm_triforce.config.budget import RetrievalBudget
from vllm_triforce.kernels.draw import Distributions, ExponentialSampler, LevelLogits
from vllm_triforce.kernels.row_table import Owner, RowColumn, StateColumn, stack_columns
from vllm_triforce.kernels.rows import Rows, SamplingParameters
from vllm_triforce.kernels.verification import verify_drafts
from vllm_triforce.metrics.counters import DeviceCounter

VOCAB_SIZE = 100


def integers(values, dtype=torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def config_of(gamma: int, num_speculative_tokens: int = 6, **more) -> Any:
    """Make what ``Rows`` reads of a ``ResolvedConfig``; without ``more`` nothing limits rows."""
    lengths = dict(gamma=gamma, num_speculative_tokens=num_speculative_tokens)
    limits = dict(min_context=0, block_size=16, table_width=0, has_head=False)
    return SimpleNamespace(**lengths, **{"budget": RetrievalBudget(0, 0, 0), **limits, **more})


def new_counters() -> torch.Tensor:
    return integers([0] * len(DeviceCounter), torch.int64)


def counted(counters: torch.Tensor) -> dict[DeviceCounter, int]:
    """Return the counters that are not 0."""
    return {counter: n for counter, n in zip(DeviceCounter, counters.tolist()) if n}


def some_rows(num_rows: int, gamma: int, num_speculative_tokens: int = 6, **fields) -> Rows:
    """Make rows in slots of their own, with one to spare behind them.

    Args:
        fields: by name, tensors of ``Rows`` or columns of its table, or numbers for each row.
    """
    config = config_of(gamma, num_speculative_tokens)
    rows = Rows(config, num_rows + 1, VOCAB_SIZE, DEVICE)
    rows.num_rows = num_rows
    rows.row_metadata[:num_rows, RowColumn.SLOT] = torch.arange(num_rows, device=DEVICE)
    rows.table[:, StateColumn.ROUNDS_LEFT] = 100
    for name, values in fields.items():
        field = getattr(rows, name, None)
        if field is None:
            field = rows.table[:, StateColumn[name.upper()]]
        field[:num_rows] = torch.as_tensor(values).to(DEVICE)
    return rows


def distributions(logits: torch.Tensor, temperature: torch.Tensor) -> Distributions:
    """Make the distributions of logits [num_rows, ..., vocab_size]."""
    safe = temperature.where(temperature > 0, torch.ones(()))
    safe = safe.view(-1, *[1] * (logits.dim() - 1))
    return Distributions(logits.to(DEVICE), (logits / safe).logsumexp(-1).to(DEVICE))


def greedy_parameters(count: int) -> SamplingParameters:
    zeros = torch.zeros(count, device=DEVICE)
    top_k = integers([VOCAB_SIZE] * count)
    return SamplingParameters(zeros, integers([0] * count, torch.int64), top_k, zeros + 1, zeros)


def init_rows(rows: Rows, computed: Sequence[int], **columns: Sequence[int]) -> None:
    """Begin a proposal of greedy requests behind their computed tokens.

    Args:
        columns: of ``RowColumn``; else each row is its own state and slot, new there, with room.
    """
    count = len(computed)
    table = {column: [0] * count for column in RowColumn}
    for column in (RowColumn.BATCH_ROW, RowColumn.STATE, RowColumn.SLOT):
        table[column] = list(range(count))
    table[RowColumn.OWNER] = [Owner.NEW_OWNER] * count
    table[RowColumn.RESERVED] = [n + 64 for n in computed]
    table[RowColumn.LIMIT] = [100_000] * count
    table[RowColumn.MAX_TOKENS] = table[RowColumn.MAX_ROUNDS] = [6] * count
    table |= {RowColumn[name]: values for name, values in columns.items()}
    rows.init(
        torch.from_numpy(stack_columns(table)).to(DEVICE),
        integers(list(computed)),
        integers([1] * count),
        integers([[0]] * count, torch.int64),
        greedy_parameters(count),
    )


def level_logits(logits: torch.Tensor, temperature: torch.Tensor | None) -> LevelLogits:
    """Make a level's logits, without distributions where there is no temperature."""
    return LevelLogits(
        logits.argmax(-1).to(DEVICE),
        logits.amax(-1).to(DEVICE),
        None if temperature is None else distributions(logits, temperature),
    )


def verify(
    rows: Rows,
    target: torch.Tensor,  # [num_rows, gamma + 1, vocab_size], logits
    temperature: torch.Tensor | None,  # [num_rows]; None if all rows are greedy
    draft: torch.Tensor | None = None,  # [num_rows, gamma, vocab_size], logits; None: certain
    synthetic_rate: float | None = None,
) -> torch.Tensor:
    """Verify the rows' drafts; return the counters."""
    counters = new_counters()
    verify_drafts(
        rows,
        level_logits(target, temperature),
        None if draft is None or temperature is None else distributions(draft, temperature),
        ExponentialSampler(len(target), target.shape[-1], DEVICE),
        counters,
        synthetic_rate,
    )
    return counters
