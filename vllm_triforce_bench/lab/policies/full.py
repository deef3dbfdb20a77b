"""No selection: with it the loss is the copy's alone."""

from vllm_triforce_bench.lab.policies.base import LabPolicy


class Full(LabPolicy):
    """No selection.

    Mechanism: every query head reads all tokens. Without a copy (``--copies``) it is the reference
    itself.
    Parameters: none.
    """

    name = "full"

    def keep(self, layer, kv_head, query, scores, visible):
        return visible[None]
