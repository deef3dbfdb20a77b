"""Configurations of engines that are made but not started, and what refuses them."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


def engine_config(model: str, speculative_config=None, **kwargs):
    from vllm.engine.arg_utils import EngineArgs

    arguments = dict(dtype="float32", skip_tokenizer_init=True, max_model_len=4096)
    args = EngineArgs(model=model, speculative_config=speculative_config, **{**arguments, **kwargs})
    return args.create_engine_config()


@contextmanager
def refused(*named: str) -> Iterator[pytest.ExceptionInfo]:
    """Expect a ValueError whose message has all parts of ``named``."""
    with pytest.raises(ValueError) as error:
        yield error
    for part in named:
        assert part in str(error.value)
