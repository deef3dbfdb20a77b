"""Emulation of a GPU for vLLM's CUDA build on a CPU, for tests (docs/gpu-emulation.md).

    python -m emu script.py args...        python -m emu -m module args...

Each file replaces one part of the real thing:
  device.py      devices, streams and events of CUDA; tensors lie on the CPU
  graphs.py      CUDA graphs: launches in a capture are recorded, and a replay launches them again
  triton_jit.py  launches of Triton: compiled for sm_90, then interpreted
  bfloat16.py    bfloat16 in Triton's interpreter
  cuda_ops.py    vLLM's CUDA operations and FlashAttention 3, in PyTorch
"""

import ctypes
import os
import sys

_started = False


def start() -> None:
    """Start the emulation in this process, before torch or vLLM is imported."""
    global _started
    if _started:
        return
    _started = True
    os.environ["GPU_EMULATION"] = "1"  # child processes start it by the .pth of setup.sh
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    for name, value in {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRITON_CACHE_DIR": os.path.join(sys.prefix, "..", "triton-cache"),
    }.items():
        os.environ.setdefault(name, value)

    from . import cuda_ops, device, graphs, triton_jit

    _load_stub_libraries()
    device.install()
    graphs.install()
    triton_jit.install()
    _prepare_vllm()
    cuda_ops.install()


def _load_stub_libraries() -> None:
    """Load the stubs of NVIDIA's driver by path, so that later loads of the soname find them."""
    folder = os.path.join(sys.prefix, "..", "stubs")
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        path = os.path.join(folder, name)
        if not os.path.exists(path):
            raise FileNotFoundError(
                f"{path} is missing: run setup.sh, and use the Python of its venv"
            )
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)


def _prepare_vllm() -> None:
    """Adapt vLLM to CUDA tensors that lie on the CPU."""
    from vllm.platforms import cuda

    cuda.CudaPlatformBase.dispatch_key = "CPU"  # for vLLM's operations in Python
    cuda.CudaPlatformBase.dist_backend = "gloo"

    from vllm.utils import torch_utils

    torch_utils.get_accelerator_view_from_cpu_tensor = lambda cpu_tensor: cpu_tensor
    _let_recurrent_states_be_aligned()


def _let_recurrent_states_be_aligned() -> None:
    """Pass an assertion of vLLM that lengths lie on a GPU, which a tensor here never does."""
    import torch
    from vllm.v1.worker.mamba_utils import MambaSpecDecodeGPUContext

    class OnDevice(torch.Tensor):
        is_cuda = True

    def compute(context, seq_lens, num_reqs):
        return original(context, seq_lens.as_subclass(OnDevice), num_reqs)

    original = MambaSpecDecodeGPUContext.compute_aligned_state_indices
    MambaSpecDecodeGPUContext.compute_aligned_state_indices = compute
