"""Where level 1's tokens come from: what may be asked for, and what is used."""

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

# Used where nothing is asked for, the preferred one first.
_WITH_MODEL, _WITHOUT_MODEL = ("draft_model", "prompt_lookup"), ("prompt_lookup",)


def parse_sources(asked: str) -> tuple[str, ...]:
    """Names separated by commas.

    Raises:
        ValueError: there is none, one is unknown, or one stands twice.
    """
    names = tuple(name.strip() for name in asked.split(","))
    if unknown := [name for name in names if name not in SOURCES.names]:
        raise ValueError(
            f"draft_sources={asked!r}: {unknown[0]!r} is not a source of drafts; "
            f"use {' or '.join(map(repr, SOURCES.names))}, or several separated by commas"
        )
    if len(set(names)) < len(names):
        raise ValueError(f"draft_sources={asked!r} names a source twice; name each once")
    return names


def choose_sources(asked: str | None, model: str | None, can_choose: bool) -> tuple[str, ...]:
    """The sources that are used, the preferred one first.

    Args:
        asked: the key ``draft_sources``.
        model: the key ``model``, a draft model.
        can_choose: whether the controller chooses between sources; if not, one is used.

    Raises:
        ValueError: what was asked for needs a model that is not given, or does not use the one that
            is; or would need a choice that nobody makes; or there is none.
    """
    if asked is None:
        usual = [n for n in (_WITH_MODEL if model else _WITHOUT_MODEL) if n in SOURCES]
        if not usual or (model and _WITH_MODEL[0] not in usual):
            raise ValueError(
                f"there is nothing to draft from {'with' if model else 'without'} a draft model; "
                f"{'leave out' if model else 'name one with'} 'model', or name one of "
                f"{SOURCES.names} with 'draft_sources'"
            )
        return tuple(usual) if can_choose else (usual[0],)
    names = parse_sources(asked)
    # Loads them, which takes seconds where one brings a model's layers.
    with_model = [name for name in names if SOURCES[name].needs_model]
    if with_model and not model:
        raise ValueError(
            f"draft_sources={asked!r}: {with_model[0]!r} needs a draft model; name one with "
            "'model', or leave it out of draft_sources"
        )
    if model and not with_model:
        raise ValueError(
            f"draft_sources={asked!r} does not use the draft model {model!r}; add a source that "
            f"does, as {_WITH_MODEL[0]!r}, or leave 'model' out"
        )
    if len(names) > 1 and not can_choose:
        raise ValueError(
            f"draft_sources={asked!r}: nothing chooses between sources here (gamma or levels are "
            f"given, or adaptive is false); name one, as {names[0]!r}"
        )
    return names
