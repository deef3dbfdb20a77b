"""Promise: with layers staged ahead, attention reads what host memory has, in whatever order the
device does what the waits allow (``offload/staging.py``)."""

import random
from functools import partial

import pytest
import torch

from vllm_triforce.kernels.stage_blocks import Part
from vllm_triforce.offload import staging as module
from vllm_triforce.offload.side_stream import NoSideStream
from vllm_triforce.offload.staging import HostLayer, Staging

BLOCK, SIZE, NUM_BLOCKS, NUM_LAYERS = 4, 2, 24, 5
NAN = float("nan")


class Streams:
    """A model of two streams. The main one's work is done at once; each piece of the side stream's
    at some moment before the main stream waits for it, in any order: whatever is launched together
    has none, and all that is launched is waited for before more is."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.is_on_side = False
        self.pending: list = []
        self.most_pending = 0

    def run(self, launch) -> None:
        assert not self.pending, "no more than one layer is copied ahead"
        self.is_on_side = True
        launch()
        self.is_on_side = False
        self.dice.shuffle(self.pending)
        self.most_pending = max(self.most_pending, len(self.pending))

    def join(self) -> None:
        while self.pending:
            self.pending.pop()()

    def main(self, *pieces) -> None:
        """The main stream's; between any two, some of the side stream's may be done."""
        for piece in pieces:
            while self.pending and self.dice.random() < 0.3:
                self.pending.pop()()
            piece()

    def launch(self, pieces: list) -> None:
        """On whichever stream it is."""
        if self.is_on_side:
            self.pending += pieces
        else:
            self.main(*self.dice.sample(pieces, len(pieces)))


class StreamsThatDoNotWait(Streams):
    def join(self) -> None:
        pass

    def run(self, launch) -> None:
        left, self.pending = self.pending, []
        super().run(launch)
        self.pending += left


def stage(streams: Streams):
    """In the place of the kernel: each half of each block is copied for itself."""

    def stage_blocks(host, buffer, tables, seq_lens, starts, block_size, counters, part):
        pieces = []
        for row, seq_len in enumerate(seq_lens.tolist()):
            num_full = (seq_len - int(starts[row + 1] - starts[row])) // block_size
            first = num_full if part == Part.NEW else 0
            last = num_full if part == Part.COMPUTED else -(-seq_len // block_size)
            for block in tables[row, first:last].tolist():
                for half in (slice(0, block_size // 2), slice(block_size // 2, None)):
                    pieces.append(partial(buffer[block, 0, half].copy_, host[block, 0, half]))
        streams.launch(pieces)

    return stage_blocks


class Request:
    """
    Args:
        blocks: its block table.
        num_computed: tokens, some maybe by another of the same batch in the same pass.
    """

    def __init__(self, blocks: list[int], num_computed: int, num_new: int) -> None:
        self.blocks, self.num_computed, self.num_new = blocks, num_computed, num_new

    @property
    def length(self) -> int:
        return self.num_computed + self.num_new


def some_batch(dice: random.Random) -> list[Request]:
    """Three that have nothing in common, and maybe one that reads as computed what the first fills
    in this pass, and one that is padding."""
    free = dice.sample(range(1, NUM_BLOCKS), NUM_BLOCKS - 1)
    batch = []
    for _ in range(3):
        blocks = [free.pop() for _ in range(5)]
        num_computed = dice.randrange(0, 4 * BLOCK)
        batch.append(Request(blocks, num_computed, dice.randrange(1, 5 * BLOCK - num_computed + 1)))
    if dice.random() < 0.6 and (shared := batch[0].length // BLOCK):
        blocks = [*batch[0].blocks[:shared], free.pop()]
        batch.insert(dice.randrange(4), Request(blocks, shared * BLOCK, dice.randrange(1, BLOCK)))
    if dice.random() < 0.3:
        batch.append(Request([0], 0, 0))
    return batch


class World:
    def __init__(self, streams: Streams, num_buffers: int = 2) -> None:
        self.streams = streams
        shape = (NUM_BLOCKS, 1, BLOCK, SIZE)
        self.hosts = [torch.zeros(shape) for _ in range(NUM_LAYERS)]
        buffers = [torch.full(shape, NAN) for _ in range(num_buffers)]
        staging = Staging(self.hosts, buffers, torch.zeros(0), streams)
        pool = torch.zeros(0)
        self.layers = [HostLayer(staging, number, pool) for number in range(NUM_LAYERS)]
        self.num_passes = 0

    def run(self, batch: list[Request]) -> bool:
        """A pass, layer by layer as vLLM has it: keys and values are written, then attention reads.

        Returns:
            whether it read what host memory had.
        """
        self.num_passes += 1
        width = max(len(request.blocks) for request in batch)
        tables = torch.tensor([r.blocks + [0] * (width - len(r.blocks)) for r in batch])
        seq_lens = torch.tensor([request.length for request in batch])
        starts = torch.tensor([0, *[request.num_new for request in batch]]).cumsum(0)
        is_right = True
        for number, (host, layer) in enumerate(zip(self.hosts, self.layers)):
            self.streams.main(*self._writes(number, host, batch))
            buffer = layer.staged(tables, seq_lens, starts)
            is_right &= self._attends(batch, buffer, host)
        return is_right

    def _attends(self, batch: list[Request], buffer: torch.Tensor, host: torch.Tensor) -> bool:
        found = []

        def read(block: int, end: int) -> None:
            found.append(torch.equal(buffer[block, 0, :end], host[block, 0, :end]))

        self.streams.main(
            *(
                partial(read, block, min(BLOCK, request.length - index * BLOCK))
                for request in batch
                for index, block in enumerate(request.blocks[: -(-request.length // BLOCK)])
            )
        )
        return all(found)

    def _writes(self, number: int, host: torch.Tensor, batch: list[Request]) -> list:
        value = 1000.0 * self.num_passes + 100 * number
        return [
            partial(host[request.blocks[at // BLOCK], 0, at % BLOCK].fill_, value + 10 * row + at)
            for row, request in enumerate(batch)
            for at in range(request.num_computed, request.length)
        ]


def passes_that_are_right(monkeypatch, streams: Streams, num_buffers: int = 2) -> float:
    monkeypatch.setattr(module, "stage_blocks", stage(streams))
    world = World(streams, num_buffers)
    outcomes = [world.run(some_batch(streams.dice)) for _ in range(12)]
    return sum(outcomes) / len(outcomes)


@pytest.mark.parametrize("seed", range(40))
def test_attention_reads_what_host_memory_has(monkeypatch, seed):
    streams = Streams(random.Random(seed))
    assert passes_that_are_right(monkeypatch, streams) == 1
    assert streams.most_pending > 10 and not streams.pending


def test_so_it_does_without_a_second_buffer_or_stream(monkeypatch):
    streams = Streams(random.Random(1))
    assert passes_that_are_right(monkeypatch, streams, num_buffers=1) == 1
    assert streams.most_pending == 0

    class Alone(Streams, NoSideStream):
        run, join = NoSideStream.run, NoSideStream.join

    assert passes_that_are_right(monkeypatch, Alone(random.Random(2))) == 1


def test_a_pass_that_was_left_half_way_leaves_nothing_to_the_next(monkeypatch):
    streams = Streams(random.Random(3))
    monkeypatch.setattr(module, "stage_blocks", stage(streams))
    world = World(streams)
    layers = world.layers
    for left_at in (1, 2, 3, 4):
        world.layers = layers[:left_at]
        world.run(some_batch(streams.dice))
        assert streams.most_pending
        world.layers = layers
        assert world.run(some_batch(streams.dice))


# The model of streams sees what it is there to see.


def test_the_model_sees_a_wait_that_is_missing(monkeypatch):
    assert passes_that_are_right(monkeypatch, StreamsThatDoNotWait(random.Random(4))) < 1


def test_the_model_sees_blocks_of_this_pass_that_are_copied_ahead_alone(monkeypatch):
    """As computed by one request, filled by another."""
    streams = Streams(random.Random(5))
    monkeypatch.setattr(module, "stage_blocks", stage(streams))
    world = World(streams)
    once = stage(streams)

    def too_early(host, buffer, tables, seq_lens, starts, block_size, counters, part):
        if part == Part.NEW:
            # Only what no other request reads as computed.
            full = [int(n - (b - a)) // block_size for n, a, b in zip(seq_lens, starts, starts[1:])]
            ahead = {i for row, num in zip(tables.tolist(), full) for i in row[:num]}
            kept = buffer.clone()
            once(host, buffer, tables, seq_lens, starts, block_size, counters, part)
            for block in ahead:
                buffer[block] = kept[block]
        else:
            once(host, buffer, tables, seq_lens, starts, block_size, counters, part)

    monkeypatch.setattr(module, "stage_blocks", too_early)
    assert not all(world.run(some_batch(streams.dice)) for _ in range(30))


def test_the_model_sees_one_buffer_for_two_layers(monkeypatch):
    streams = Streams(random.Random(6))
    monkeypatch.setattr(module, "stage_blocks", stage(streams))
    world = World(streams)
    staging = world.layers[0].staged.func.__self__
    staging.buffers[1] = staging.buffers[0]
    assert not all(world.run(some_batch(streams.dice)) for _ in range(12))
