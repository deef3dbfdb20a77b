"""Which requests propose how much in a step, so that tokens per second are most."""

from dataclasses import dataclass

import numpy as np

from vllm_triforce.controller.options import Options


@dataclass
class Plan:
    """What is best for a batch.

    Args:
        options: [num_reqs], of each request the column of its option, -1 for decoding plainly.
        rate: expected tokens per second.
    """

    options: np.ndarray
    rate: float

    @property
    def is_plain(self) -> bool:
        return bool((self.options < 0).all())


def plan(
    options: Options, plain_seconds: float, speculating_seconds: float = 0.0, margin: float = 0.0
) -> Plan:
    """Maximises expected tokens per second of the whole step.

    A step emits a token for each request and takes ``plain_seconds``. Options add tokens ``E`` and
    seconds ``C``, and the first one adds ``speculating_seconds``; the best ratio of sums
    ``(n + sum E) / (plain + speculating + sum C)`` is found by Dinkelbach's method: at the present
    rate ``r`` each request takes the option with the largest ``E - r * C``, which gives a better
    rate, until it no longer rises. So a request with nothing to gain decodes plainly whatever the
    others do. It begins at the rate of decoding plainly: if nothing is better than that, then
    nobody speculates.

    Args:
        margin: relative gain over plain decoding below which nothing is proposed; and, of
            proposals whose gains differ by less, the shortest is taken: it risks less, and tokens
            come more evenly.
    """
    num_reqs = len(options.tokens)
    plain_rate = num_reqs / plain_seconds
    best = Plan(np.full(num_reqs, -1), plain_rate)
    rate = plain_rate * (1 + margin)
    rows = np.arange(num_reqs)
    for _ in range(8):
        columns = _best_columns(options, rate, margin)
        taken, columns = rows[columns >= 0], columns[columns >= 0]
        if not len(taken):
            break
        tokens = num_reqs + options.tokens[taken, columns].sum()
        seconds = options.seconds[taken, columns].sum()
        found = tokens / (plain_seconds + speculating_seconds + seconds)
        if found <= rate * (1 + 1e-6):
            break
        rate = float(found)
        best = Plan(np.full(num_reqs, -1), rate)
        best.options[taken] = columns
    return best


def _best_columns(options: Options, rate: float, margin: float) -> np.ndarray:
    """Of each request the option with the largest ``tokens - rate * seconds``, or a shorter one
    that is nearly as good; -1 where nothing is gained."""
    gains = np.where(options.is_possible, options.tokens - rate * options.seconds, -np.inf)
    most = gains.max(axis=1, keepdims=True)
    is_good = (gains >= (1 - margin) * most) & (most > 0)
    lengths = np.where(is_good, options.lengths, np.inf)
    # Of equally long ones, by other routes, the one that gains most.
    is_shortest = is_good & (lengths == lengths.min(axis=1, keepdims=True))
    columns = np.where(is_shortest, gains, -np.inf).argmax(axis=1)
    return np.where(most[:, 0] > 0, columns, -1)


def best_alone(options: Options, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Of each request by itself, if a plain step takes ``share`` seconds of it.

    Returns:
        Columns, [num_reqs], and tokens per second, [num_reqs]; -infinity where none is possible.
    """
    rates = (1 + options.tokens) / (share + options.seconds)
    rates = np.where(options.is_possible, rates, -np.inf)
    return rates.argmax(axis=1), rates.max(axis=1)
