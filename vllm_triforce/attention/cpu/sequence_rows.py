"""The order of a query's rows when every KV head of a request is a sequence of its own."""

import numpy as np
import torch


def sequence_rows(
    query_lens: torch.Tensor,  # [num_reqs]
    num_kv_heads: int,
) -> torch.Tensor | None:  # [num_tokens * num_kv_heads]
    """Rows of ``query.view(num_tokens * num_kv_heads, ...)`` in the order of one-head sequences.

    None where every request has one token: the order is then unchanged.
    """
    lens = query_lens.tolist()
    if all(n == 1 for n in lens):
        return None
    heads = np.arange(num_kv_heads)
    rows, start = [], 0
    for n in lens:
        tokens = np.arange(start, start + n)
        rows.append((tokens[None, :] * num_kv_heads + heads[:, None]).ravel())
        start += n
    return torch.from_numpy(np.concatenate(rows))
