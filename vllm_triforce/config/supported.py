"""Supported vLLM versions: those that ``tests/contract`` covers."""

SUPPORTED_VLLM = (">=0.32.0", "<0.34")


def is_supported(version: str) -> bool:
    """True if TriForce supports this vLLM version.

    Args:
        version: vLLM's version; one that does not parse, such as ``dev``, is not supported.
    """
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        return SpecifierSet(",".join(SUPPORTED_VLLM)).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False
