"""vLLM's manager of CUDA graphs without a GPU: a capture calls what is captured."""

from types import SimpleNamespace


def without_gpu(monkeypatch) -> list:
    """Puts it in the place of vLLM's.

    Returns:
        Descriptors of what is replayed, which does nothing else.
    """
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    def init(self, vllm_config, device, mode, query_len, lora_capture_cases):
        self.compilation_config = SimpleNamespace(max_cudagraph_capture_size=64)
        self.cudagraph_mode, self.decode_query_len = mode, query_len
        self.lora_capture_cases = lora_capture_cases or [0]
        self._lora_dispatch_map, self._max_lora_case = self._build_lora_dispatch_map()
        self._candidates, self._capture_descs = {}, {}
        self._init_candidates()

    def capture(self, create_forward_fn, progress_bar_desc):
        for desc in self._capture_descs[CUDAGraphMode.FULL]:
            create_forward_fn(desc, warmup=False)(CUDAGraphMode.NONE)
        self._graphs_captured = True

    replayed: list = []
    monkeypatch.setattr(CudaGraphManager, "__init__", init)
    monkeypatch.setattr(CudaGraphManager, "capture", capture)
    monkeypatch.setattr(CudaGraphManager, "run_fullgraph", lambda self, desc: replayed.append(desc))
    return replayed
