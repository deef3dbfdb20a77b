"""Unpack a wheel without the files that dense models do not need.

unpack.py vllm WHEEL SITE MOE FA2
unpack.py other WHEEL SITE
"""

import sys
import zipfile

LIBRARIES = {
    "vllm/_C_stable_libtorch.abi3.so",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
    "vllm/cumem_allocator.abi3.so",
    "vllm/spinloop.abi3.so",
    "vllm/fs_io_C.abi3.so",
}
MOE = "vllm/_moe_C_stable_libtorch.abi3.so"
FLASH_ATTENTION_2 = "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so"
LEFT_OUT = (
    "vllm/third_party/deep_gemm/",
    "vllm/third_party/fmha_sm100/",
    "vllm/entrypoints/serve/instrumentator/static/",
    "vllm/vllm-rs",
)


def is_wanted_of_vllm(name: str, libraries: set[str]) -> bool:
    if name.startswith(LEFT_OUT) or ".data/" in name:
        return False
    if name.endswith(".so"):
        return name in libraries
    return ".dist-info/" not in name or name.endswith(("METADATA", "entry_points.txt", "WHEEL"))


def is_wanted_of_others(name: str) -> bool:
    return not (
        ".data/" in name
        or name.endswith((".dist-info/RECORD", ".pyi"))
        or "/tests/" in name
        or name.startswith("tests/")
    )


def main() -> None:
    libraries = LIBRARIES
    match sys.argv[1:]:
        case ["vllm", wheel, site, moe, fa2]:
            optional = {MOE: moe, FLASH_ATTENTION_2: fa2}
            libraries = LIBRARIES | {name for name, flag in optional.items() if flag == "1"}
        case ["other", wheel, site]:
            pass
        case _:
            sys.exit(__doc__)
    is_vllm = sys.argv[1] == "vllm"
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        for name in names:
            if is_wanted_of_vllm(name, libraries) if is_vllm else is_wanted_of_others(name):
                archive.extract(name, site)
    if is_vllm and (missing := libraries - set(names)):
        print("not in this wheel:", *sorted(missing))


if __name__ == "__main__":
    main()
