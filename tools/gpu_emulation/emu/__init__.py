"""Runs the Python of vLLM's CUDA build on a machine without a GPU. For tests only; nothing here is fast.

    python -m emu script.py args...        python -m emu -m pytest tests/...

What is faked, one file each:
  native.py      the driver library (every call fails) and NVML (one H200)
  device.py      `cuda` devices, streams and events: tensors on "cuda" are CPU tensors
  triton_jit.py  Triton launches: compiled for sm_90 for real, then run by Triton's interpreter
  bfloat16.py    mends that interpreter's bfloat16
  cuda_ops.py    vLLM's CUDA ops and FlashAttention 3: plain PyTorch with the same signatures
"""

import os
import sys

_started = False


def start() -> None:
    """Starts the emulation in this process; must come before the first import of torch or vLLM."""
    global _started
    if _started:
        return
    _started = True
    os.environ["GPU_EMULATION"] = (
        "1"  # Python processes started from here emulate too (see setup.sh's .pth file)
    )
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    for name, value in {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRITON_CACHE_DIR": os.path.join(sys.prefix, "..", "triton-cache"),
    }.items():
        os.environ.setdefault(name, value)

    from . import cuda_ops, device, graphs, native, triton_jit

    native.load_stub_libraries()
    device.install()
    graphs.install()
    triton_jit.install()
    _prepare_vllm()
    cuda_ops.install()


def _prepare_vllm() -> None:
    """The three places where vLLM itself must know that its CUDA tensors lie on the CPU."""
    from vllm.platforms import cuda

    cuda.CudaPlatformBase.dispatch_key = "CPU"  # where vLLM registers its own Python ops
    cuda.CudaPlatformBase.dist_backend = "gloo"

    from vllm.utils import torch_utils

    torch_utils.get_accelerator_view_from_cpu_tensor = lambda cpu_tensor: cpu_tensor
