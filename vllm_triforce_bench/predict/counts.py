"""How often a step launches something that no CUDA graph holds, and speaks with the device."""

from dataclasses import dataclass
from pathlib import Path

from vllm_triforce_bench.predict.machine import from_json


@dataclass(frozen=True)
class Counts:
    """Kernels, uploads and waits of a greedy step, by what makes them. The defaults were
    counted with a draft on Model Runner V2 (docs/results.md), those within passes
    are read off its code; a file with others may take their place.

    Args:
        graphs_per_pass: CUDA graphs of each pass of a model; level 1's of a round share one.
        step_kernels: of any step, stock vLLM's too: preparing inputs, sampling.
        verified_kernels: of a step that verifies drafts, beyond these.
        proposal_kernels: of a proposal: its rows, level 1's window, handing up.
        drafting_kernels: of each token of a draft, beside its pass and in the graph of its round.
        level2_kernels: in the graph of level 2's pass, for what its logits say.
        round_kernels: of a round of levels 1 and 2, beside its graphs.
        direct_round_kernels: of each ``gamma`` tokens that go straight to the full pass.
        selection_kernels: of a selection of chunks.
        step_uploads, proposal_uploads: copies to the device.
        step_syncs: waits for the device in any step; with asynchronous scheduling there is one that
            the next step's launches hide in part.
        layer_kernels: within a pass's graph, of a layer.
        moe_layer_kernels: of a layer's experts, beyond these.
        pass_kernels: of a pass, beside its layers.
        staging_kernels: within a full pass's graph, of a layer whose KV lies in host memory.
        refill_kernels: of a proposal through level 2, where there are such layers.
        logits_reads: times that a vocabulary's row is read or written for a verified token.
    """

    graphs_per_pass: float = 1
    step_kernels: float = 20
    verified_kernels: float = 2
    proposal_kernels: float = 13
    drafting_kernels: float = 6
    level2_kernels: float = 3
    round_kernels: float = 2
    direct_round_kernels: float = 1
    selection_kernels: float = 17
    step_uploads: float = 2
    proposal_uploads: float = 4
    step_syncs: float = 1
    layer_kernels: float = 9
    moe_layer_kernels: float = 5
    pass_kernels: float = 4
    staging_kernels: float = 1
    refill_kernels: float = 4
    logits_reads: float = 3

    def __post_init__(self) -> None:
        if negative := [name for name, count in vars(self).items() if count < 0]:
            raise ValueError(f"counts {negative} are below 0; give what was counted")

    @classmethod
    def load(cls, path: Path) -> "Counts":
        """From a JSON object with some of these names.

        Raises:
            ValueError: it is no such object, or has another name.
        """
        return from_json(cls, path)
