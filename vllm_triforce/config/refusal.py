"""Tell what TriForce refuses from vLLM's own errors, and print it as one sentence."""

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_MARK = "is_triforce_refusal"


@contextmanager
def refusing() -> Iterator[None]:
    """Mark a ``ValueError`` of our checks as a refusal; it stays one for whoever calls us."""
    try:
        yield
    except ValueError as error:
        setattr(error, _MARK, True)
        raise


def is_refusal(error: BaseException) -> bool:
    return getattr(error, _MARK, False)


@functools.cache
def print_refusals_alone() -> None:
    """Print a refusal that ends this process as its sentence; leave other errors as they are."""
    earlier = sys.excepthook

    def print_error(kind, error, traceback) -> None:
        if is_refusal(error):
            print(f"vllm-triforce: error: {error}", file=sys.stderr)
        else:
            earlier(kind, error, traceback)

    sys.excepthook = print_error
