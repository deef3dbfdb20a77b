"""What level 1 hands up."""

from dataclasses import dataclass, field

import torch


@dataclass
class Drafted:
    """Tokens drafted by level 1, a list per row, maybe empty."""

    token_ids: list[list[int]]
    probs: list[list[torch.Tensor] | None] | None = None
    """Per row and token [vocab_size], what each was drawn from; None, as a whole or for a row,
    where each token was certain (prompt lookup, greedy requests)."""
    nan_rows: list[int] = field(default_factory=list)
    """Rows for which the draft's logits had a NaN; nothing is drafted for them."""
    is_first: bool = False
    """Whether the draft read a whole window of tokens, of a request that it knew nothing of."""
    num_read: int = 0
    """Tokens of windows that it knew but was far behind of, which it read besides."""
