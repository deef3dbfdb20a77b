"""Texts that prompts are cut from: files, folders, and the datasets of ``vllm bench``."""

import argparse
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_triforce_bench.bench import BadInput


def load_tokenizer(target: str, engine_keys: Mapping[str, Any]):
    """Load the target's tokenizer at the revision that its engine will load."""
    from vllm.tokenizers import get_tokenizer

    return get_tokenizer(
        target,
        trust_remote_code=bool(engine_keys.get("trust_remote_code", False)),
        revision=engine_keys.get("tokenizer_revision") or engine_keys.get("revision"),
    )


def read_text(path: Path) -> str:
    """Read a file, or all files of a folder.

    Files come in the order of their paths, each after a line with its path, an empty line between
    two. Hidden files and folders are skipped, and files that are not UTF-8.

    Raises:
        BadInput: there is no text.
    """
    if path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise BadInput(f"{path} is not UTF-8 text ({error})") from error
    else:
        text = "\n\n".join(_folder_parts(path))
    if not text.strip():
        raise BadInput(f"{path} holds no text; name a text file or a folder of sources")
    return text


def _folder_parts(folder: Path) -> list[str]:
    parts = []
    for file in sorted(folder.rglob("*")):
        relative = file.relative_to(folder)
        if not file.is_file() or any(part.startswith(".") for part in relative.parts):
            continue
        try:
            parts.append(f"{relative}\n{file.read_text(encoding='utf-8')}")
        except UnicodeDecodeError:
            continue
    return parts


def dataset_texts(options: list[str], name: str, tokenizer) -> list[str]:
    """Return the prompts of one of vLLM's datasets.

    Args:
        options: options of ``vllm bench``, ``--dataset-name`` among them.

    Raises:
        BadInput: vLLM refuses the options, or the dataset has no text.
    """
    from vllm.benchmarks.datasets import add_dataset_parser, get_samples
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="--dataset-args", add_help=False, exit_on_error=False)
    add_dataset_parser(parser)
    try:
        args, unknown = parser.parse_known_args(options)
        if unknown:
            raise BadInput(f"--dataset-args: vLLM has no option {' '.join(unknown)}")
        # `vllm bench serve` sets it beside the dataset's options.
        args.backend = "openai"
        samples = get_samples(args, tokenizer)
    except BadInput:
        raise
    except (argparse.ArgumentError, SystemExit, Exception) as error:
        raise BadInput(f"vLLM's dataset {name!r} failed: {error}") from error
    texts = [sample.prompt for sample in samples if isinstance(sample.prompt, str)]
    if not texts:
        raise BadInput(f"vLLM's dataset {name!r} gave no text prompts")
    return texts


def token_stream(settings, tokenizer) -> list[int]:
    """Return all tokens that the prompts of a ``BatchSettings`` are cut from.

    ``random`` makes a prompt of the longest context for each prompt of the grid.

    Raises:
        BadInput: there are too few tokens for the grid.
    """
    longest, num_prompts = max(settings.contexts), settings.num_prompts
    if settings.prompts is not None:
        source = settings.prompts
        text = read_text(Path(source))
    else:
        name = settings.dataset_name
        source = f"dataset {name}"
        options = ["--dataset-name", name, "--seed", str(settings.seed), "--skip-chat-template"]
        if settings.dataset_path:
            options += ["--dataset-path", settings.dataset_path]
        if name == "random":
            options += ["--num-prompts", str(num_prompts + 1), "--random-input-len", str(longest)]
        options += shlex.split(settings.dataset_args)
        text = "\n\n".join(dataset_texts(options, name, tokenizer))
    tokens = tokenizer(text)["input_ids"]
    needed = longest + num_prompts - 1
    if len(tokens) < needed:
        raise BadInput(
            f"{source} has {len(tokens)} tokens; {num_prompts} different prompts of {longest} need "
            f"{needed}: use a longer text or lower --contexts"
        )
    return tokens


def cut(
    tokens: list[int],
    context: int,
    batch_size: int,
    repetition: int,
    settings,
    bos_token_id: int | None,
) -> list[list[int]]:
    """Cut the prompts of a batch: stretches that begin evenly spread over the text.

    A smaller batch has the first prompts of a larger one of the same repetition. If the tokenizer
    put a beginning-of-sequence token first, each prompt begins with it.

    Returns:
        ``batch_size`` prompts of ``context`` tokens.
    """
    stride = (len(tokens) - context) // max(1, settings.num_prompts - 1)
    first = repetition * max(settings.batch_sizes)
    prompts = [tokens[(first + i) * stride :][:context] for i in range(batch_size)]
    if tokens[0] == bos_token_id:
        prompts = [[tokens[0], *prompt[1:]] for prompt in prompts]
    return prompts
