"""How often trials came to what proposals have to: whether it is promising to try."""

from collections import defaultdict

from vllm_triforce.controller.acceptance import Rate

# Promise that everything begins with is worth so many trials, and after so many one counts 1/e.
_WEIGHT, _MEMORY = 4.0, 32.0
# However often it was in vain, this share of what may be spent on finding out is spent: traffic
# changes, and it is by trying that one sees it.
_LEAST = 1 / 8

Kind = tuple[bool, int]
"""Whether a request is greedy, and which power of 4 its context reaches: what is accepted depends
on the one, what has to be accepted on the other."""


def kind_of(is_greedy: bool, context: int) -> Kind:
    return is_greedy, (context.bit_length() - 1) // 2


class Promise:
    """By kind of request, the share of the latest trials that paid."""

    def __init__(self) -> None:
        self._paid: dict[Kind, Rate] = defaultdict(lambda: Rate(1.0, _WEIGHT, _MEMORY))

    def of(self, kind: Kind) -> float:
        """Between 1/8 and 1."""
        return max(_LEAST, self._paid[kind].value)

    def add(self, kind: Kind, has_paid: bool) -> None:
        """What came of a trial."""
        self._paid[kind].add(1, int(has_paid))
