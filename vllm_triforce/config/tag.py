"""Tag that tells TriForce's ``SpeculativeConfig`` from those of other methods."""

# The tag is pickled with the config, so the front end, the engine and the workers see it.
_MARK = "_is_triforce"


def mark(speculative_config) -> None:
    """Tag a ``SpeculativeConfig`` as TriForce's."""
    object.__setattr__(speculative_config, _MARK, True)


def is_triforce(speculative_config) -> bool:
    """True if the config is tagged as TriForce's."""
    return getattr(speculative_config, _MARK, False)
