"""Promise: what tokens are drawn by is as fine as their probabilities, and serves one proposal."""

import torch
from vllm.triton_utils import tl, triton

from tests.kernels.device import DEVICE
from tests.kernels.noise_probe import probe
from tests.kernels.tensors import integers
from vllm_triforce.kernels.draw import delay_of, open_unit

EDGES = [0, 1, 2, 5, 255, 256, 65535, 65536, 2**24 - 1, 2**24]
EDGES += [2**30 - 1, 2**30, 2**31, 2**32 - 2**26]


@triton.jit
def _map_kernel(numbers_ptr, units_ptr, delays_ptr, size, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    mask = places < size
    unit = open_unit(tl.load(numbers_ptr + places, mask=mask, other=0).to(tl.uint32))
    tl.store(units_ptr + places, unit, mask=mask)
    tl.store(delays_ptr + places, delay_of(unit), mask=mask)


def mapped(numbers: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Map random 32 bits to numbers of the open unit interval and to delays."""
    units, delays = torch.zeros(2, len(numbers), device=DEVICE)
    _map_kernel[(1,)](
        integers(numbers, torch.int64),
        units,
        delays,
        len(numbers),
        BLOCK=triton.next_power_of_2(len(numbers)),
    )
    return units.double().cpu(), delays.double().cpu()


def test_small_delays_have_all_bits():
    """A token of probability p wins by a delay of about p: were delays multiples of 2**-24, as by
    -log of a float32 close to 1, tokens below a millionth would be drawn too rarely."""
    draw = torch.Generator().manual_seed(0)
    some = torch.randint(2**32, (500,), generator=draw).tolist()
    small = torch.randint(2**12, (200,), generator=draw).tolist()
    numbers = EDGES + some + small
    _, delays = mapped(numbers)
    exact = -torch.log1p(-(torch.tensor(numbers, dtype=torch.float64) + 0.5) / 2**32)
    torch.testing.assert_close(delays, exact, rtol=2e-5, atol=0)


def test_the_ends_are_open():
    """A chance of 1 would reject a token that is as likely as it was drafted; a delay without end
    would let the only token there is lose."""
    units, delays = mapped([0, 2**32 - 1])
    assert 0 < units[0] < 2**-32 and 1 - 2**-23 < units[1] < 1
    assert 0 < delays[0] < 2**-32 and 16 < delays[1] < 17


def test_drawn_delays_are_exponential_to_the_smallest():
    size, num_seeds = 4096, 128
    seeds = torch.arange(num_seeds, dtype=torch.int64, device=DEVICE)
    places = torch.zeros(num_seeds, dtype=torch.int32, device=DEVICE)
    _, delays, _ = probe(seeds, places, places, size)
    delays = delays.double().flatten().cpu()
    for threshold in (1e-4, 1e-3, 0.1, 1.0, 5.0):
        expected = -torch.expm1(torch.tensor(-threshold, dtype=torch.float64)) * len(delays)
        found = int((delays < threshold).sum())
        assert abs(found - expected) < 4 * expected.sqrt(), threshold
    smallest = delays[delays < 1e-4] * 2**24
    assert (smallest != smallest.round()).any(), "they have more than 24 bits behind the point"


def test_no_two_proposals_draw_by_the_same_numbers():
    """What came of a proposal's discarded tokens is learnt from: were the next one to draw the same
    positions by the same numbers, whether it is made at all would depend on what they bring."""
    seeds, positions = integers([7] * 4, torch.int64), integers([120, 120, 120, 121])
    found = probe(seeds, integers([100, 100, 104, 100]), positions, 19)
    for first, again, later, beside in found:
        assert torch.equal(first, again)
        assert not torch.equal(first, later) and not torch.equal(first, beside)
