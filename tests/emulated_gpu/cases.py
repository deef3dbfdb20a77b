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
PLANS = ("fixed", "dice")
# Offloaded, one request at a time, with windows: not the first and the last, for one layer with
# full attention is staged for all.
KINDS = ((False, False, False), (True, False, False), (True, True, False), (False, False, True))


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
        windows: whether every other layer of the target has a sliding window, and all have sinks.
        copies: whether level 2 is a copy of the target, in bfloat16 of float32.
        recurrent: whether every other layer of the target is a gated delta net.
    """

    backend: str
    source: str = ""
    selection: str = ""
    plan: str = ""
    graphs: bool = False
    offload: bool = False
    is_single: bool = False
    windows: bool = False
    copies: bool = False
    recurrent: bool = False

    @property
    def name(self) -> str:
        stock = "" if self.plan else "stock"
        parts = [self.backend, self.source or stock, self.selection, self.plan]
        parts += ["offload" * self.offload, "single" * self.is_single]
        parts += ["windows" * self.windows, "copies" * self.copies]
        parts += ["recurrent" * self.recurrent, "graphs" * self.graphs]
        return "-".join(part for part in parts if part)

    @property
    def dtype(self) -> str:
        return BACKENDS.get(self.backend, "bfloat16")

    @property
    def target(self) -> str:
        """Kind of the target (``requests.py``)."""
        if self.backend == MLA:
            return "deepseek-v2"
        if self.recurrent:
            return "qwen3.5"
        return "granite-windows" if self.windows else "llama"

    @property
    def reference(self) -> "Case":
        """Whose greedy tokens are to be found."""
        return Case(self.backend, windows=self.windows, recurrent=self.recurrent)

    @property
    def eager(self) -> "Case":
        """Whose tokens of requests with a seed are to be found."""
        return replace(self, graphs=False)

    @property
    def num_tokens(self) -> int:
        """That a request asks for at most. Triton's kernels of attention and gated delta nets take
        their time in the interpreter."""
        return 8 if self.backend == "TRITON_ATTN" or self.recurrent else 14

    @property
    def reads_all(self) -> bool:
        """True if level 2 reads the whole context, so that its tokens are the full pass's."""
        return self.recurrent and self.source == "prompt_lookup"

    @property
    def has_draft(self) -> bool:
        """True if level 1 runs a model."""
        return self.source in (MODEL_SOURCE, HEAD_SOURCE)

    @property
    def counts_launches(self) -> bool:
        """True if kernel launches are counted and bounded (``verdict.py``)."""
        return self.name == "FLASH_ATTN-draft_model-retrieval-fixed-graphs"

    @property
    def limit_s(self) -> int:
        return 400 if self.backend == "FLASH_ATTN" and not self.recurrent else 900


def every_case() -> list[Case]:
    """References first; with each way of choosing drafts and chunks both kinds of plan."""
    stock = [Case(backend, windows=windows) for windows in (False, True) for backend in BACKENDS]
    others = [
        Case("FLASH_ATTN", plan="plain", offload=True),
        Case("TRITON_ATTN", "draft_model", "retrieval", "fixed", copies=True),
        Case("FLASH_ATTN", recurrent=True),
        Case("FLASH_ATTN", "prompt_lookup", "retrieval", "fixed", recurrent=True),
        Case("FLASH_ATTN", "head", "retrieval", "dice", recurrent=True),
        Case(MLA),
        Case(MLA, "prompt_lookup", plan="fixed"),
    ]
    policies = sorted(set(POLICIES) - {"streaming"})
    ways = product(BACKENDS, sorted(SOURCES_V2), policies, PLANS, KINDS)
    cases = [Case(*way, False, *kind) for *way, kind in ways]
    # A draft has layers of one kind, and the target with windows gives no states to a head.
    cases = [case for case in cases if not (case.windows and case.has_draft)]
    # Eager before graphs, which are compared with it.
    every = [*stock, *others, *cases]
    return [replace(case, graphs=graphs) for case in every for graphs in (False, True)]


# Any two of a source, a policy and a plan come together; on TRITON_ATTN, with which a case takes
# minutes, each of them comes once.
_PAIRS = {
    ("draft_model", "retrieval", "fixed"),
    ("draft_model", "quest", "dice"),
    ("prompt_lookup", "retrieval", "dice"),
    ("prompt_lookup", "quest", "fixed"),
    ("head", "retrieval", "dice"),
    ("head", "quest", "fixed"),
}
# What is staged, what fills the pool and what dense layers read is the same, whoever drafts.
_ONCE = {
    "offload": ("FLASH_ATTN-plain", "FLASH_ATTN-draft_model-retrieval-fixed"),
    "windows": ("FLASH_ATTN-stock", "FLASH_ATTN-prompt_lookup-quest-fixed"),
}
_FEW = {("draft_model", "retrieval", "fixed"), ("prompt_lookup", "quest", "dice")}


def default_cases() -> list[Case]:
    """What is worth the time; with sources and policies that are not named there, all of those."""
    named = {name for way in _PAIRS for name in way}
    return [
        case
        for case in every_case()
        if not case.offload or case.name.startswith(_ONCE["offload"])
        if not case.windows or case.name.startswith(_ONCE["windows"])
        if not case.source
        or case.backend == MLA
        or case.recurrent
        or (case.source, case.selection, case.plan)
        in (_PAIRS if case.backend == "FLASH_ATTN" else _FEW)
        or not {case.source, case.selection} <= named
    ]


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
