"""The kernels once more, for reading: plain loops over NumPy and PyTorch, one row at a time."""

import torch

from vllm_triforce.cache.one_head_blocks import ChunkIds


def attention(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim], the newest tokens of each request
    query_lens: list[int],
    seq_lens: list[int],
    num_kv_heads: int,
    gather,  # (request, KV head) -> keys and values, [seq_len, head_dim]
    sinks: torch.Tensor | None = None,  # [num_heads]
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
    """Compute causal attention in float32, each head's sink a key without a value."""
    output, (_, num_heads, head_dim), start = torch.zeros_like(query), query.shape, 0
    for request, (count, length) in enumerate(zip(query_lens, seq_lens)):
        own = slice(start, start := start + count)
        ends = length - count + torch.arange(count, device=query.device)
        later = torch.arange(length, device=query.device) > ends[:, None]
        for head in range(num_heads):
            key, value = gather(request, head // (num_heads // num_kv_heads))
            scores = query[own, head].float() @ key.float().T * head_dim**-0.5
            scores = scores.masked_fill(later, -torch.inf)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head].float().expand(count, 1)], 1)
            probs = scores.softmax(-1)[:, :length]
            output[own, head] = (probs @ value.float()).to(output.dtype)
    return output


def chunk_summary(keys: torch.Tensor, scale: float, kind: str) -> torch.Tensor:
    """Summarize one head's keys in one block, [block_size, head_dim]."""
    keys = keys.float()
    if kind == "mean":
        return keys.sum(0) / len(keys) * scale
    return (keys.sort(0).values[0 if kind == "min" else -1]) * scale


def sparse_table(
    selected: list[int],
    table: list[int],
    tail_start: int,
    num_blocks: int,
    width: int,
    head: int,
    ids: ChunkIds,
) -> list[int]:
    """List the blocks of one head: the selected ones, the tail, then the null block."""
    blocks = [*selected, *table[tail_start:num_blocks]]
    blocks = [*blocks, *[0] * width][:width]
    return [
        block // ids.split * ids.per_block + block % ids.split * ids.per_part + head * ids.per_head
        for block in blocks
    ]


def probabilities(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return (logits.double() / temperature).softmax(-1)


def draw(weights: torch.Tensor, delays: torch.Tensor) -> int:
    """Return the token with the largest weight for its delay, as in the exponential race."""
    return int((weights / delays.double()).argmax())


def verify_row(
    drafted: list[int],
    target: torch.Tensor,  # [len(drafted) + 1, vocab_size], logits
    draft: torch.Tensor | None,  # [len(drafted), vocab_size], logits; None: certain tokens
    temperature: float,
    chances: list[float],  # a uniform number for each drafted token
    delays: list[torch.Tensor],  # exponential noise for each place, [vocab_size]
) -> list[int]:
    """Return the accepted prefix and one more token (arXiv 2211.17192, algorithm 1)."""
    if temperature == 0:
        best = target.argmax(-1).tolist()
        accepted = 0
        while accepted < len(drafted) and drafted[accepted] == best[accepted]:
            accepted += 1
        return [*drafted[:accepted], best[accepted]]
    p2 = probabilities(target, temperature)
    for place, token in enumerate(drafted):
        if draft is None:
            p1 = torch.zeros_like(p2[place])
            p1[token] = 1
        else:
            p1 = probabilities(draft[place], temperature)
        if chances[place] >= p2[place, token] / p1[token]:
            rest = (p2[place] - p1).clamp(min=0)
            return [*drafted[:place], draw(rest, delays[place])]
    return [*drafted, draw(p2[len(drafted)], delays[len(drafted)])]


def window_feed(
    tokens: list[int],  # all tokens of a request, proposed ones included
    query_len: int,
    num_sinks: int,
    window_start: int,
    capacity: int,
) -> list[tuple[int, int] | None]:
    """Return (token, position) of a window's newest tokens, None for those outside it."""
    window = [*range(num_sinks), *range(window_start, len(tokens))]
    feed: list[tuple[int, int] | None] = []
    for index in range(len(tokens) - query_len, len(tokens)):
        position = window.index(index) if index in window else capacity
        feed.append((tokens[index], position) if position < capacity else None)
    return feed
