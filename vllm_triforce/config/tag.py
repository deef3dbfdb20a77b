"""How every process tells TriForce's ``SpeculativeConfig`` from another's."""

# It is pickled with the configuration, so it reaches the front-end, the engine and the workers.
_MARK = "_is_triforce"


def mark(speculative_config) -> None:
    object.__setattr__(speculative_config, _MARK, True)


def is_triforce(speculative_config) -> bool:
    """Whether it was marked."""
    return getattr(speculative_config, _MARK, False)
