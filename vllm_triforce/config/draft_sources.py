"""Sources of level 1's drafts: their registries, and the choice of sources for an engine."""

from vllm_triforce.registry import Registry

SOURCES = Registry(
    "vllm_triforce.runner_v1.sources",
    base=("source", "DraftSource"),
    group="vllm_triforce.draft_sources",
)
SOURCES_V2 = Registry(
    "vllm_triforce.runner_v2.sources",
    base=("source", "DraftSourceV2"),
    group="vllm_triforce.draft_sources_v2",
)

# Sources that run the draft model, if it is a head and if not.
HEAD_SOURCE, MODEL_SOURCE = "head", "draft_model"
# Used beside them, and without a draft model.
_LOOKUP = "prompt_lookup"


def parse_sources(draft_sources: str) -> tuple[str, ...]:
    """Parse the comma-separated names of the key ``draft_sources``.

    Raises:
        ValueError: no name is given, or one is unknown or given twice.
    """
    names = tuple(name.strip() for name in draft_sources.split(","))
    if unknown := [name for name in names if name not in SOURCES.names]:
        raise ValueError(
            f"draft_sources={draft_sources!r}: {unknown[0]!r} is not a source of drafts. "
            f"Use {' or '.join(map(repr, SOURCES.names))}, or several separated by commas."
        )
    if len(set(names)) < len(names):
        raise ValueError(f"draft_sources={draft_sources!r} names a source twice. Name each once.")
    return names


def choose_sources(
    draft_sources: str | None, model: str | None, can_choose: bool, is_head: bool = False
) -> tuple[str, ...]:
    """Choose the sources that the engine uses by two of its keys, the preferred one first.

    Args:
        can_choose: True if the controller chooses between sources; else one source is used.

    Raises:
        ValueError: the sources and the draft model do not fit each other, or nothing can choose.
    """
    fitting, unfit = (HEAD_SOURCE, MODEL_SOURCE) if is_head else (MODEL_SOURCE, HEAD_SOURCE)
    if draft_sources is None:
        defaults = (fitting, _LOOKUP) if model else (_LOOKUP,)
        return defaults if can_choose else defaults[:1]
    names = parse_sources(draft_sources)
    setting = f"draft_sources={draft_sources!r}"
    try:
        # This loads the sources; one that imports model layers takes seconds.
        with_model = [name for name in names if SOURCES[name].needs_model]
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0].replace("_", "-")
        raise ValueError(
            f"{setting} is not supported here: a source needs the package {package!r}, which is "
            f"not installed. Run pip install {package}, or leave the source out."
        ) from error
    if with_model and not model:
        raise ValueError(
            f"{setting}: {with_model[0]!r} needs a draft model. Name one with 'model', or leave it "
            "out of draft_sources."
        )
    if model and not with_model:
        raise ValueError(
            f"{setting} does not use the draft model {model!r}. Add a source that does, such as "
            f"{fitting!r}, or leave 'model' out."
        )
    if unfit in with_model:
        kind = "a head" if is_head else "no head"
        raise ValueError(f"{setting}: {model!r} is {kind}. Use {fitting!r} instead of {unfit!r}.")
    if len(names) > 1 and not can_choose:
        raise ValueError(
            f"{setting}: nothing chooses between sources here (gamma, or every length, is given; "
            f"adaptive is false; or the scheduler is your own). Name one, such as {names[0]!r}."
        )
    return names
