"""What is run, one engine a case, and with what each is compared."""

import fnmatch
from dataclasses import dataclass, replace
from itertools import product

from vllm_triforce.config.draft_sources import HEAD_SOURCE, MODEL_SOURCE, SOURCES_V2
from vllm_triforce.selection import POLICIES

# Each backend in the type in which it can be compared: FlashAttention has no float32.
BACKENDS = {"FLASH_ATTN": "bfloat16", "TRITON_ATTN": "float32"}
# Of a target with multi-head latent attention, for which level 2 takes no part.
MLA = "TRITON_MLA"
# Targets with state space beside full attention, for which level 2 takes no part either.
STATE_SPACE = ("granite-hybrid", "nemotron-h")
# Any two of a source, a policy and a plan come together; on TRITON_ATTN, with which a case takes
# minutes, each of them comes once.
WAYS = {
    "FLASH_ATTN": {
        ("draft_model", "retrieval", "fixed"),
        ("draft_model", "quest", "dice"),
        ("prompt_lookup", "retrieval", "dice"),
        ("prompt_lookup", "quest", "fixed"),
        ("head", "retrieval", "dice"),
        ("head", "quest", "fixed"),
    },
    "TRITON_ATTN": {("draft_model", "retrieval", "fixed"), ("prompt_lookup", "quest", "dice")},
}


@dataclass(frozen=True)
class Case:
    """
    Args:
        source: of level 1's tokens; empty is stock vLLM.
        plan: ``fixed`` lengths, ``dice`` in the place of the controller, or ``plain``, to propose
            nothing.
        graphs: whether decode passes are (stand-ins for) CUDA graphs.
        offload: whether the KV cache lies in host memory, of stock vLLM's on the device.
        is_single: True if one request at a time is speculated on (``max_speculating_seqs=1``).
        target: its kind (``requests.py``).
        copies: whether level 2 is a copy of the target, in bfloat16 of float32.
        cached: whether each prompt is in the prefix cache, with recurrent states at ends of blocks.
    """

    backend: str
    source: str = ""
    selection: str = ""
    plan: str = ""
    graphs: bool = False
    offload: bool = False
    is_single: bool = False
    target: str = "llama"
    copies: bool = False
    cached: bool = False

    @property
    def name(self) -> str:
        stock = "" if self.plan else "stock"
        parts = [self.backend, self.source or stock, self.selection, self.plan]
        parts += ["offload" * self.offload, "single" * self.is_single]
        parts += ["" if self.target == "llama" else self.target, "copies" * self.copies]
        parts += ["cached" * self.cached, "graphs" * self.graphs]
        return "-".join(part for part in parts if part)

    @property
    def dtype(self) -> str:
        return BACKENDS.get(self.backend, "bfloat16")

    @property
    def reference(self) -> "Case":
        """Whose greedy tokens are to be found."""
        return Case(self.backend, target=self.target)

    @property
    def eager(self) -> "Case":
        """Whose tokens of requests with a seed are to be found."""
        return replace(self, graphs=False)

    @property
    def num_tokens(self) -> int:
        """That a request asks for at most. Triton's kernels of attention take their time in the
        interpreter."""
        return 8 if self.backend == "TRITON_ATTN" else 14

    @property
    def reads_all(self) -> bool:
        """True if level 2 reads the whole context, so that its tokens are the full pass's."""
        return self.target == "qwen3.5" and self.source == "prompt_lookup"

    @property
    def has_draft(self) -> bool:
        """True if level 1 runs a model."""
        return self.source in (MODEL_SOURCE, HEAD_SOURCE)

    @property
    def counts_launches(self) -> bool:
        """True if kernel launches are counted and bounded (``verdict.py``)."""
        return self.name == "FLASH_ATTN-draft_model-retrieval-fixed-graphs"


def every_case() -> list[Case]:
    """References first, and eager before graphs, which are compared with it; with sources and
    policies that are not named above, all ways."""
    named = {name for way in WAYS["FLASH_ATTN"] for name in way}
    policies = sorted(set(POLICIES) - {"streaming"})
    ways = [
        way
        for way in product(BACKENDS, sorted(SOURCES_V2), policies, ("fixed", "dice"))
        if way[1:] in WAYS[way[0]] or not set(way[1:]) <= named
    ]
    offloaded = Case("FLASH_ATTN", "draft_model", "retrieval", "fixed", offload=True)
    cases = [
        *(Case(backend) for backend in BACKENDS),
        *(Case("FLASH_ATTN", target=its) for its in ("granite-windows", "qwen3.5", *STATE_SPACE)),
        Case(MLA, target="deepseek-v2"),
        *(Case(*way) for way in ways),
        Case(MLA, "prompt_lookup", plan="fixed", target="deepseek-v2"),
        *(Case("FLASH_ATTN", "prompt_lookup", plan="fixed", target=its) for its in STATE_SPACE),
        Case("TRITON_ATTN", "draft_model", "retrieval", "fixed", copies=True),
        # What is staged or fills the pool, and what dense layers read, is so whoever drafts.
        Case("FLASH_ATTN", plan="plain", offload=True),
        offloaded,
        replace(offloaded, is_single=True),
        Case("FLASH_ATTN", "prompt_lookup", "quest", "fixed", target="granite-windows"),
        Case("FLASH_ATTN", "prompt_lookup", "retrieval", "fixed", target="qwen3.5"),
        Case("FLASH_ATTN", "prompt_lookup", "retrieval", "fixed", target="qwen3.5", cached=True),
        Case("FLASH_ATTN", "head", "retrieval", "dice", target="qwen3.5", cached=True),
    ]
    return [replace(case, graphs=graphs) for case in cases for graphs in (False, True)]


def chosen(pattern: str) -> list[Case]:
    """Those of all cases whose names fit a pattern of the shell, with what they are compared with.

    Raises:
        ValueError: none does.
    """
    cases = every_case()
    fitting = {case for case in cases if fnmatch.fnmatch(case.name, pattern)}
    if not fitting:
        names = "\n  ".join(case.name for case in cases)
        raise ValueError(f"--only {pattern!r} fits no case; there are\n  {names}")
    needed = {other for case in fitting for other in (case, case.reference, case.eager)}
    return [case for case in cases if case in needed]
