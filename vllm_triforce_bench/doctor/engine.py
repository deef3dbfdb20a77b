"""Configuration of an engine, made as ``vllm serve`` makes it, without reading weights."""

import logging
from importlib.util import find_spec
from logging.handlers import MemoryHandler
from typing import Any

from vllm_triforce.config.keys import METHOD
from vllm_triforce.config.level2 import why_no_level2
from vllm_triforce_bench.options import BadInput


def engine(model: str, options: list[str]) -> tuple[dict[str, Any], Any]:
    """Configure an engine with TriForce.

    Returns:
        The engine's settings and vLLM's configuration, or the refusal and None.

    Raises:
        BadInput: vLLM's parser rejects the options.
    """
    handler = MemoryHandler(capacity=0)  # without a target it keeps all
    logger = logging.getLogger("vllm.triforce")
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    try:
        vllm_config = _configure(model, options, METHOD)
    except BadInput:
        raise
    except Exception as error:  # any error that would end `vllm serve` is the refusal
        refusal = _message_of(error)
        if "failed to be inspected" in refusal and find_spec("torchvision") is None:
            # The model's own error stays in another process.
            refusal += (
                " [models that take images need torchvision to be looked at, which is not "
                "installed here; TriForce takes text alone, with --language-model-only]"
            )
        results = {"model": model, "refusal": refusal, "refused_by": "vllm-triforce"}
        try:
            _configure(model, options, None)
        except Exception as stock_error:
            reason = _message_of(stock_error)
            results |= {"refused_by": "vLLM", "refusal_without_triforce": reason}
        return results, None
    finally:
        logger.removeHandler(handler)
    warnings = [record.getMessage() for record in handler.buffer]
    return {**_settings_of(vllm_config), "warnings": warnings}, vllm_config


def _configure(model: str, options: list[str], method: str | None):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message):
            # Without the usage of 250 lines.
            raise BadInput(f"{message}; 'vllm serve --help=all' has the options of the engine")

    parser = EngineArgs.add_cli_args(Parser())
    args = parser.parse_args(["--model", model, *options])
    if method is None:
        args.speculative_config = args.speculative_model = None
        args.spec_method = args.spec_model = args.spec_tokens = None
    else:
        args.speculative_model = method
    return EngineArgs.from_cli_args(args).create_engine_config()


def _message_of(error: Exception) -> str:
    """Extract the message; pydantic keeps those of validators in a list."""
    errors = getattr(error, "errors", None)
    if callable(errors):
        return "; ".join(str(each.get("msg", each)) for each in errors())
    return str(error) or type(error).__name__


def _settings_of(vllm_config) -> dict[str, Any]:
    settings = dict(vllm_config.additional_config[METHOD])
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    scheduler_cls = scheduler.scheduler_cls
    if not isinstance(scheduler_cls, str):
        scheduler_cls = f"{scheduler_cls.__module__}.{scheduler_cls.__qualname__}"
    return {
        "model": vllm_config.model_config.model,
        "architecture": vllm_config.model_config.architecture,
        "refusal": None,
        "runner": "V2" if vllm_config.use_v2_model_runner else "V1",
        "worker": parallel.worker_cls,
        "scheduler": scheduler_cls,
        "asynchronous": bool(scheduler.async_scheduling),
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "max_model_len": vllm_config.model_config.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "dtype": str(vllm_config.model_config.dtype).removeprefix("torch."),
        "draft": settings.pop("draft_model"),
        "is_plain": settings["levels"] == "3",
        "no_level2": why_no_level2(vllm_config.model_config),
        "settings": settings,
        "chosen_while_running": settings["adaptive_keys"],
    }
