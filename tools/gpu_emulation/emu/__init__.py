"""vLLM's CUDA build in Python on a CPU, for tests (docs/gpu-emulation.md):

    python -m emu script.py args...        python -m emu -m module args...

A file for each thing that is put in the place of the real one:
  native.py      the driver, of which every call fails, and NVML, with one H200
  device.py      devices, streams and events of CUDA: its tensors lie on the CPU
  graphs.py      CUDA graphs: what is launched in a capture is kept, and launched again
  triton_jit.py  launches of Triton: compiled for sm_90, then interpreted
  bfloat16.py    what the interpreter gets wrong of bfloat16
  cuda_ops.py    vLLM's CUDA operations and FlashAttention 3, in PyTorch
"""

import os
import sys

_started = False


def start() -> None:
    """In this process, before torch or vLLM is imported."""
    global _started
    if _started:
        return
    _started = True
    os.environ["GPU_EMULATION"] = "1"  # for processes that this one starts: see setup.sh's .pth
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
    """What vLLM itself has to know of CUDA tensors that lie on the CPU."""
    from vllm.platforms import cuda

    cuda.CudaPlatformBase.dispatch_key = "CPU"  # of the operations that vLLM writes in Python
    cuda.CudaPlatformBase.dist_backend = "gloo"

    from vllm.utils import torch_utils

    torch_utils.get_accelerator_view_from_cpu_tensor = lambda cpu_tensor: cpu_tensor
