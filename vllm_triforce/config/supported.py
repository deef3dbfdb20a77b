"""Which versions of vLLM the plugin knows: those that ``tests/contract`` covers."""

SUPPORTED_VLLM = (">=0.32.0", "<0.34")


def is_supported(version: str) -> bool:
    """
    Args:
        version: vLLM's; a build without one of its own, such as ``dev``, is not known.
    """
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        return SpecifierSet(",".join(SUPPORTED_VLLM)).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False
