"""Engines of the fuzzer, stock and with TriForce, in this process."""

import gc
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from tests.fuzz.models import NUM_GROUPS, adapter_of, draft_of, scratch, target_of
from tests.fuzz.settings import PROMPT_TOKENS, SHORT, max_model_len_of
from tests.inside import scheduler_of
from tests.one_process import allow_many_engines
from tests.parity.cases import REASONING
from tests.parity.disturbing import replaced
from vllm_triforce.config import triforce_config

ARGUMENTS = dict(
    dtype="float32",
    distributed_executor_backend="uni",
    gpu_memory_utilization=0.1,
    enforce_eager=True,
    max_model_len=SHORT,
    disable_log_stats=True,
)
# A place more than there are adapters (patches/README.md, requests without adapters on the CPU).
LORA = dict(enable_lora=True, max_loras=3, max_lora_rank=8)
STOCK = dict(max_num_seqs=16, block_size=32)
# Their answers depend on them, so that a stock engine has them too.
OF_STOCK = ("max_model_len", "logprobs_mode", "kv_cache_dtype", "reasoning")


def start(settings: dict):
    """An engine with TriForce, or, where ``triforce`` is None, without: a control."""
    if settings["triforce"] is None:
        return _start(settings["model"], settings["lora"], None, **settings["engine"])
    keys = dict(settings["triforce"])
    if draft := keys.pop("draft"):
        keys["model"] = draft_of(settings["model"], draft)
    keys |= {"method": "triforce", "log_interval": 0}
    # Runner V2's kernels that select take a second a pass in Triton's interpreter: where the policy
    # is named.
    triforce_config._PASS_KERNELS = ("retrieval",) if "selection" in keys else ()
    with _placing(keys.pop("num_device_layers", None)):
        return _start(settings["model"], settings["lora"], keys, **settings["engine"])


@contextmanager
def _placing(num_device_layers: int | None) -> Iterator[None]:
    """With so many layers' KV cache on the device, of those that could all lie there."""
    if num_device_layers is None:
        yield
        return
    from vllm_triforce.offload import startup as offloading

    def place_layers(**how):
        return replace(original(**how), num_device_layers=num_device_layers)

    with replaced(offloading, "place_layers", place_layers) as original:
        yield


def start_stock(settings: dict):
    own = {name: settings["engine"][name] for name in OF_STOCK if name in settings["engine"]}
    # A stream fits, once more for what is asked again.
    num_blocks = 2 * PROMPT_TOKENS[max_model_len_of(settings)] // STOCK["block_size"]
    own["num_gpu_blocks_override"] = num_blocks * NUM_GROUPS[settings["model"]]
    return _start(settings["model"], settings["lora"], None, **{**STOCK, **own})


def _start(model: str, lora: bool, keys: dict | None, **arguments):
    from vllm import LLM
    from vllm.v1.sample import sampler
    from vllm.v1.sample.ops import topk_topp_sampler

    # vLLM compiles the ranks of log-probabilities, which takes 20 s and changes nothing.
    compiled = sampler.batched_count_greater_than
    sampler.batched_count_greater_than = getattr(compiled, "_torchdynamo_orig_callable", compiled)
    # Triton's interpreter cannot run the kernel for top-k and top-p; PyTorch's way is exact too.
    topk_topp_sampler.HAS_TRITON = False
    allow_many_engines()
    gc.collect()
    arguments = {**ARGUMENTS, **(LORA if lora else {}), **arguments}
    if arguments.pop("reasoning", False):
        arguments |= REASONING
    if arguments.pop("connector", False):
        folder = tempfile.mkdtemp(prefix="connector-", dir=scratch())
        arguments["kv_transfer_config"] = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": folder},
        }
    return LLM(target_of(model), speculative_config=keys, **arguments)


def adapters(model: str) -> dict:
    """``LoRARequest`` by number; 0 is none."""
    from vllm.lora.request import LoRARequest

    numbered = {i: LoRARequest(f"adapter {i}", i, adapter_of(model, i)) for i in (1, 2)}
    return {0: None, **numbered}


@contextmanager
def without_connector() -> Iterator[None]:
    """For a stock engine beside one with a KV connector, which is the process's."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    with replaced(kv_transfer_state, "_KV_CONNECTOR_AGENT", None):
        yield


@contextmanager
def grammars_by(llm, backend: str) -> Iterator[None]:
    """Compile grammars by another backend; vLLM has one for all requests of an engine."""
    config = llm.llm_engine.vllm_config.structured_outputs_config
    manager = scheduler_of(llm).structured_output_manager
    before = config.backend
    config.backend, manager.backend = backend, None
    try:
        yield
    finally:
        config.backend, manager.backend = before, None
