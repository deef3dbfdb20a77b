"""Texts out of the datasets of vLLM's own benchmarks (``vllm bench``)."""

import argparse
import shlex

from vllm_triforce_bench.bench.errors import BadInput
from vllm_triforce_bench.bench.prompts import num_prompts
from vllm_triforce_bench.bench.settings import Settings


def texts_of(settings: Settings, tokenizer) -> list[str]:
    """The prompts of a dataset, each a text.

    vLLM's own options of the dataset can be given in ``--dataset-args``. Without them, ``random``
    has as many prompts as the grid needs, each as long as its longest context.

    Raises:
        BadInput: vLLM refuses the arguments, or finds no text.
    """
    from vllm.benchmarks.datasets import add_dataset_parser, get_samples
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="--dataset-args", add_help=False, exit_on_error=False)
    add_dataset_parser(parser)
    given = ["--dataset-name", settings.dataset_name or "", "--seed", str(settings.seed)]
    given += ["--skip-chat-template"]
    if settings.dataset_path:
        given += ["--dataset-path", settings.dataset_path]
    if settings.dataset_name == "random":
        given += ["--num-prompts", str(num_prompts(settings) + 1)]
        given += ["--random-input-len", str(max(settings.contexts))]
    given += shlex.split(settings.dataset_args)
    try:
        options, unknown = parser.parse_known_args(given)
        if unknown:
            raise BadInput(f"--dataset-args: vLLM has no option {' '.join(unknown)}")
        # What `vllm bench serve` sets beside the options of the dataset.
        options.backend = "openai"
        samples = get_samples(options, tokenizer)
    except BadInput:
        raise
    except (argparse.ArgumentError, SystemExit, Exception) as error:
        raise BadInput(f"vLLM's dataset {settings.dataset_name!r} failed: {error}") from error
    texts = [sample.prompt for sample in samples if isinstance(sample.prompt, str)]
    if not texts:
        raise BadInput(f"vLLM's dataset {settings.dataset_name!r} gave no text prompts")
    return texts
