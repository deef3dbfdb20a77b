"""Top-p on a CPU, for Model Runner V1's samplers, without sorting the vocabulary."""

from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.ops import topk_topp_sampler

from vllm_triforce.verification.top_p import TopPMasks
from vllm_triforce.vllm_patches import swaps

# Those that have the function by this name: the plain sampler's and the rejection sampler's.
_MODULES = (rejection_sampler, topk_topp_sampler)


class FastTopP:
    """While it is entered, vLLM's samplers mask by a function that keeps the same tokens."""

    def __init__(self) -> None:
        self.masks = TopPMasks()
        self._originals: list = []

    def __enter__(self) -> None:
        self._originals = [swaps.TOP_K_TOP_P.set(module, self.masks) for module in _MODULES]

    def __exit__(self, *exception) -> None:
        for module, original in zip(_MODULES, self._originals):
            swaps.TOP_K_TOP_P.set(module, original)
