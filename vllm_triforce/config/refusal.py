"""Refusals: configuration errors raised by TriForce's checks, printed as one sentence."""

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_MARK = "is_triforce_refusal"


@contextmanager
def refusing() -> Iterator[None]:
    """Mark a ``ValueError`` raised inside as a refusal and raise it again."""
    try:
        yield
    except ValueError as error:
        setattr(error, _MARK, True)
        raise


def is_refusal(error: BaseException) -> bool:
    """True if the error was raised by one of TriForce's checks."""
    return getattr(error, _MARK, False)


@functools.cache
def print_refusals_alone() -> None:
    """Print a refusal that ends the process without its traceback; leave other errors alone.

    It goes to stderr in argparse's form, as vLLM's own errors of arguments do: a log may be off.
    """
    previous_hook = sys.excepthook

    def print_error(kind, error, traceback) -> None:
        if is_refusal(error):
            print(f"vllm-triforce: error: {error}", file=sys.stderr)
        else:
            previous_hook(kind, error, traceback)

    sys.excepthook = print_error
