"""EAGLE-3 head over a window of recent tokens (arXiv 2503.01840)."""

from vllm_triforce.runner_v2.sources.draft_model import DraftModelV2


class Eagle3V2(DraftModelV2):
    """Drafts with a head that reads the target's hidden states beside the tokens.

    The first pass of a proposal feeds all tokens that the last full pass can have added, with its
    states; the first pass of a later round those that level 2 can have added, with level 2's.
    """

    name = "eagle3"
