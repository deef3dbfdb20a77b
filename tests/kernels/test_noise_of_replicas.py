"""Requests without a seed: data-parallel engines draw apart, ranks of one engine alike."""

import pytest
import torch

from tests.kernels.device import DEVICE, needs_triton

if needs_triton.mark.args[0]:
    pytest.skip(needs_triton.mark.kwargs["reason"], allow_module_level=True)

from vllm import SamplingParams
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.gpu.sample import states as vllm_states

from tests.kernels.noise_probe import probe


class OnTheHost:
    """In the place of vLLM's tensors that the host and the device share."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.np = torch.zeros(size, dtype=dtype).numpy()

    def copy_to_uva(self) -> None:
        pass


def noise_of(data_parallel_index: int) -> tuple[torch.Tensor, ...]:
    """Of the first two requests of an engine that has just started with seed 0."""
    set_random_seed(0, data_parallel_index)  # as vLLM's worker does
    states = vllm_states.SamplingStates(2, 100)
    for row in range(2):
        states.add_request(row, SamplingParams(temperature=1.0))
    places = torch.tensor([7, 7], dtype=torch.int32, device=DEVICE)
    return probe(torch.from_numpy(states.seeds.np).to(DEVICE), places, places, 19)


def test_replicas_draw_apart_and_ranks_alike(monkeypatch):
    monkeypatch.setattr(vllm_states, "UvaBackedTensor", OnTheHost)
    first, rank, replica = noise_of(0), noise_of(0), noise_of(1)
    for own, same, other in zip(first, rank, replica):
        assert torch.equal(own, same)
        assert not torch.equal(own, other) and not torch.equal(own[0], own[1])
