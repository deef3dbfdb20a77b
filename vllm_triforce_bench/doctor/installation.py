"""Versions, support of the installed vLLM, and its wrapped functions."""

import platform
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any

import vllm_triforce
from vllm_triforce.config.keys import SUPPORTED_VLLM, is_supported

_GROUP, _NAME = "vllm.general_plugins", "triforce"
LIBRARIES = ("torch", "triton", "transformers", "flash-attn", "xformers")


def installation() -> dict[str, Any]:
    """Examine the installation; ``refusal`` is None if vLLM offers the method ``triforce``."""
    try:
        import vllm
    except ImportError as error:
        return {**_versions(None), "refusal": f"vLLM cannot be imported: {error}; install it"}
    results = _versions(vllm.__version__)
    results["is_supported"] = is_supported(vllm.__version__)
    if (refusal := _plugin_refusal()) is not None:
        return {**results, "refusal": refusal}
    from vllm_triforce.plugin import DOES_NOT_LOAD, register, unsupported_reason

    if (reason := unsupported_reason()) is not None:
        remedy = f"install vLLM {', '.join(SUPPORTED_VLLM)}, or uninstall vllm-triforce"
        if reason.startswith(DOES_NOT_LOAD):
            remedy = "mend its environment, with which TriForce has nothing to do"
            if "torchvision" in reason:  # which breaks a CPU build
                remedy += (
                    ": on a CPU, PyPI's torchvision, torchaudio and torchcodec want another torch "
                    "than is here; pip uninstall all three"
                )
        return {**results, "refusal": f"this vLLM is left alone: {reason}; {remedy}"}
    register()
    from vllm.platforms import current_platform

    from vllm_triforce import vllm_patches

    results["platform"] = current_platform.device_type
    if not current_platform.is_cpu():
        results["device"] = current_platform.get_device_name()
    patches = vllm_patches.PATCHES
    misfits = [misfit for patch in patches if (misfit := patch.signature_mismatch())]
    results["wraps"] = [{"what": p.name, "why": p.why, "until": p.until} for p in patches]
    return {**results, "refusal": f"vllm-triforce wraps {misfits[0]}" if misfits else None}


def _versions(vllm_version: str | None) -> dict[str, Any]:
    versions = {
        "vllm_triforce": vllm_triforce.__version__,
        "vllm": vllm_version,
        "supported_vllm": ",".join(SUPPORTED_VLLM),
        "python": platform.python_version(),
    }
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _plugin_refusal() -> str | None:
    from vllm import envs

    if _NAME not in entry_points(group=_GROUP).names:
        return (
            "vLLM does not find the plugin: this package was not installed, only imported; "
            "pip install it in vLLM's environment"
        )
    if envs.VLLM_PLUGINS is not None and _NAME not in envs.VLLM_PLUGINS:
        return (
            f"VLLM_PLUGINS={','.join(envs.VLLM_PLUGINS)} leaves the plugin out; add {_NAME!r} to "
            "it, or unset it"
        )
    return None
