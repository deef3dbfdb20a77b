"""The configuration of an engine, made as ``vllm serve`` makes it; weights are not read."""

import logging
from importlib.util import find_spec
from typing import Any

from vllm_triforce.config.keys import METHOD


class BadOptions(Exception):
    """vLLM's parser does not understand the options; says which."""


def engine(model: str, options: list[str]) -> tuple[dict[str, Any], Any]:
    """
    Args:
        options: of ``vllm serve``, for the engine.

    Returns:
        What it would run as, and vLLM's configuration; where it is refused the reason, and None.

    Raises:
        BadOptions: vLLM's parser does not understand the options.
    """
    heard = _Heard()
    logger = logging.getLogger("vllm.triforce")
    logger.addHandler(heard)
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    try:
        vllm_config = _configure(model, options, METHOD)
    except BadOptions:
        raise
    except Exception as error:  # whatever it is, it is what `vllm serve` would end with
        refusal = _said(error) + _hint(error)
        return {"model": model, "refusal": refusal, **_stock(model, options)}, None
    finally:
        logger.removeHandler(heard)
    return {**_facts(vllm_config), "warnings": heard.messages}, vllm_config


class _Heard(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _configure(model: str, options: list[str], method: str | None):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message):
            raise BadOptions(message)  # without the usage, which is of 250 lines

    parser = EngineArgs.add_cli_args(Parser())
    args = parser.parse_args(["--model", model, *options])
    if method is None:
        args.speculative_config = args.speculative_model = None
        args.spec_method = args.spec_model = args.spec_tokens = None
    else:
        args.speculative_model = method
    return EngineArgs.from_cli_args(args).create_engine_config()


def _stock(model: str, options: list[str]) -> dict[str, Any]:
    """Whether vLLM refuses the other options, without TriForce."""
    try:
        _configure(model, options, None)
    except Exception as error:
        return {"refused_by": "vLLM", "refusal_without_triforce": _said(error)}
    return {"refused_by": "vllm-triforce"}


def _hint(error: Exception) -> str:
    """vLLM looks at a model's code in a process of its own, and says only that it failed."""
    if "failed to be inspected" in str(error) and find_spec("torchvision") is None:
        return (
            " [models that take images need torchvision to be looked at, which is not installed "
            "here; TriForce takes text alone, with --language-model-only]"
        )
    return ""


def _said(error: Exception) -> str:
    """Pydantic has the messages of validators in a list, with much around them."""
    errors = getattr(error, "errors", None)
    if callable(errors):
        return "; ".join(str(each.get("msg", each)) for each in errors())
    return str(error) or type(error).__name__


def _facts(vllm_config) -> dict[str, Any]:
    settings = dict(vllm_config.additional_config[METHOD])
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    return {
        "model": vllm_config.model_config.model,
        "refusal": None,
        "runner": "V2" if vllm_config.use_v2_model_runner else "V1",
        "worker": parallel.worker_cls,
        "scheduler": _name(scheduler.scheduler_cls),
        "asynchronous": bool(scheduler.async_scheduling),
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "max_model_len": vllm_config.model_config.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "dtype": str(vllm_config.model_config.dtype).removeprefix("torch."),
        "draft": settings.pop("draft_model"),
        "is_plain": settings["levels"] == "3",
        "settings": settings,
        "chosen_while_running": settings["adaptive_keys"],
    }


def _name(scheduler_cls) -> str:
    is_name = isinstance(scheduler_cls, str)
    return scheduler_cls if is_name else f"{scheduler_cls.__module__}.{scheduler_cls.__qualname__}"
