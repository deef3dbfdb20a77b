"""Prompts: stretches of one long text, each request and repetition another."""

from pathlib import Path

from vllm_triforce_bench.bench.errors import BadInput
from vllm_triforce_bench.bench.settings import Settings


def text_of(path: Path) -> str:
    """A file's text, or a folder's.

    A folder's is all its files in the order of their paths, each after a line with its path, with
    an empty line between two. Files and folders whose names begin with a dot are skipped, and so
    are files that are not UTF-8.

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


def token_stream(settings: Settings, tokenizer) -> list[int]:
    """All tokens that prompts are cut from.

    Raises:
        BadInput: there are too few for the grid.
    """
    if settings.prompts is not None:
        source = settings.prompts
        tokens = tokenizer(text_of(Path(source)))["input_ids"]
    else:
        from vllm_triforce_bench.bench.dataset import texts_of

        source = f"dataset {settings.dataset_name}"
        tokens = tokenizer("\n\n".join(texts_of(settings, tokenizer)))["input_ids"]
    prompts = num_prompts(settings)
    needed = max(settings.contexts) + prompts - 1
    if len(tokens) < needed:
        raise BadInput(
            f"{source} has {len(tokens)} tokens; {prompts} different prompts of "
            f"{max(settings.contexts)} need {needed}: use a longer text or lower --contexts"
        )
    return tokens


def num_prompts(settings: Settings) -> int:
    return settings.repetitions * max(settings.batch_sizes)


def cut(
    tokens: list[int],
    context: int,
    batch_size: int,
    repetition: int,
    settings: Settings,
    bos_token_id: int | None,
) -> list[list[int]]:
    """The prompts of a batch: stretches that begin evenly spread over the text.

    Where the tokenizer put a beginning-of-sequence token first, each prompt begins with it.

    Returns:
        ``batch_size`` prompts of ``context`` tokens. A smaller batch has the first prompts of a
        larger one of the same repetition; other repetitions have other prompts.
    """
    stride = (len(tokens) - context) // max(1, num_prompts(settings) - 1)
    first = repetition * max(settings.batch_sizes)
    prompts = [tokens[(first + i) * stride :][:context] for i in range(batch_size)]
    if tokens[0] == bos_token_id:
        prompts = [[tokens[0], *prompt[1:]] for prompt in prompts]
    return prompts
