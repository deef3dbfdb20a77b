"""Texts that prompts are cut from: files, folders, and the datasets of ``vllm bench``."""

import argparse
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vllm_triforce_bench.bench.settings import Settings
from vllm_triforce_bench.options import BadInput

MIN_PROMPT = 2
"""Tokens."""


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
        parts = []
        for file in sorted(path.rglob("*")):
            relative = file.relative_to(path)
            if file.is_file() and not any(part.startswith(".") for part in relative.parts):
                with suppress(UnicodeDecodeError):
                    parts.append(f"{relative}\n{file.read_text(encoding='utf-8')}")
        text = "\n\n".join(parts)
    if not text.strip():
        raise BadInput(f"{path} holds no text; name a text file or a folder of sources")
    return text


@dataclass(frozen=True)
class Prompts:
    """Prompts as token ids.

    Args:
        texts: with the longest context, or each as long as it is.
        num_left_out: prompts of a dataset that do not fit the model, or are too short.
    """

    texts: list[list[int]]
    num_left_out: int = 0

    def take(self, context: int, first: int, count: int) -> list[list[int]]:
        """Return ``count`` prompts of ``context`` tokens, or ``EACH``, from number ``first`` on."""
        return [text[: context or None] for text in self.texts[first : first + count]]

    def longest_of(self, context: int) -> list[int]:
        return max(self.texts, key=len)[: context or None]


def source(settings: Settings, tokenizer, max_context: int) -> Prompts:
    """Read a dataset's own prompts, or cut prompts that begin evenly spread over one text.

    Shorter contexts begin at the same places.

    Args:
        max_context: positions of the model; a dataset's longer prompts are left out.

    Raises:
        BadInput: there are too few.
    """
    if settings.has_own_prompts:
        return _own_prompts(settings, tokenizer, max_context)
    longest, num_prompts = max(settings.contexts), settings.num_prompts
    if settings.prompts is not None:
        source = settings.prompts
        text = read_text(Path(source))
    else:
        name = settings.dataset_name
        source = f"dataset {name}"
        options = ["--skip-chat-template"]
        if name == "random":
            # One for each stretch; traffic's many stretches of it overlap.
            count = min(num_prompts, 64 + 2 * num_prompts // longest) + 1
            options += ["--num-prompts", str(count), "--random-input-len", str(longest)]
        text = "\n\n".join(_dataset_of(settings, options, tokenizer))
    tokens = tokenizer(text)["input_ids"]
    needed = longest + num_prompts - 1
    if len(tokens) < needed:
        raise BadInput(
            f"{source} has {len(tokens)} tokens; {num_prompts} different prompts of {longest} need "
            f"{needed}: use a longer text, or lower --contexts, --batch-sizes or --repetitions"
        )
    stride = (len(tokens) - longest) // max(1, num_prompts - 1)
    texts = [tokens[i * stride :][:longest] for i in range(num_prompts)]
    if tokens[0] == tokenizer.bos_token_id:
        texts = [[tokens[0], *text[1:]] for text in texts]
    return Prompts(texts)


def _own_prompts(settings: Settings, tokenizer, max_context: int) -> Prompts:
    """Read a dataset's text prompts as ``vllm bench serve`` sends them, as many as needed."""
    texts = _dataset_of(settings, ["--no-oversample"], tokenizer)
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    room = max_context - settings.max_model_len
    fitting = [prompt for prompt in prompts if MIN_PROMPT <= len(prompt) <= room]
    num_left_out = len(prompts) - len(fitting)
    if len(fitting) < settings.num_prompts:
        raise BadInput(
            f"dataset {settings.dataset_name} gave {len(fitting)} prompts that fit "
            f"{settings.target} ({num_left_out} are too long, or empty), and "
            f"{settings.num_prompts} are needed: lower --repetitions, --batch-sizes or --tokens, "
            "or raise vLLM's --num-prompts in --dataset-args"
        )
    return Prompts(fitting[: settings.num_prompts], num_left_out)


def _dataset_of(settings: Settings, options: list[str], tokenizer) -> list[str]:
    """Return the prompts of one of vLLM's datasets.

    Args:
        options: options of ``vllm bench`` beside the user's.

    Raises:
        BadInput: vLLM refuses the options, or the dataset has no text.
    """
    from vllm.benchmarks.datasets import add_dataset_parser, get_samples
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    name = settings.dataset_name
    options = ["--dataset-name", f"{name}", "--seed", str(settings.seed), *options]
    if settings.dataset_path:
        options += ["--dataset-path", settings.dataset_path]
    parser = FlexibleArgumentParser(prog="--dataset-args", add_help=False, exit_on_error=False)
    add_dataset_parser(parser)
    try:
        args, unknown = parser.parse_known_args(options + shlex.split(settings.dataset_args))
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
