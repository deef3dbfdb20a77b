"""A draft that cannot be loaded: the error names it."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading_draft(draft_model: str) -> Iterator[None]:
    """Around vLLM's loader, whose own errors do not say which of the two models they are about.

    Raises:
        RuntimeError: loading failed.
    """
    try:
        yield
    except Exception as error:
        raise RuntimeError(
            f"draft model {draft_model!r} could not be loaded ({type(error).__name__}: {error}); "
            "check its files, or leave 'model' out of speculative_config for prompt lookup"
        ) from error
