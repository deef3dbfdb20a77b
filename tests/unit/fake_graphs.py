"""vLLM's manager of CUDA graphs without a GPU: a capture calls what is captured."""

from types import SimpleNamespace

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

from benchmarks import memory_table


def manager_of(max_num_seqs: int, num_drafts: int):
    """Return vLLM's manager of a target's passes, whose graphs count as captured."""
    manager, _ = memory_table.captured(max_num_seqs, num_drafts)
    manager._graphs_captured = True
    return manager


def full_graphs(manager) -> list:
    """Return the descriptors of full graphs, in the order of their capture."""
    return manager._capture_descs[CUDAGraphMode.FULL]


def full_graph_by_size(manager) -> dict:
    """Return the full graph, or None, that serves each number of tokens without adapters."""
    full = full_graphs(manager)
    sizes = {num_tokens: d for (num_tokens, cases), d in manager._candidates.items() if not cases}
    return {n: next((d for d in found if d in full), None) for n, found in sizes.items()}


def without_gpu(monkeypatch) -> list:
    """Patch vLLM's manager; return a list to which a replay adds its descriptor."""

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
