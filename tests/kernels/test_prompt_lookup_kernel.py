"""Promise: prompt lookup on the device drafts what it drafts on the host, up to a placeholder."""

from itertools import takewhile

import pytest
import torch

from tests.kernels.device import DEVICE
from tests.kernels.tensors import VOCAB_SIZE, config_of, integers
from tests.unit.test_sources import on_host
from vllm_triforce.kernels import prompt_lookup as on_device
from vllm_triforce.kernels.row_table import RowColumn
from vllm_triforce.kernels.rows import Rows


@pytest.mark.parametrize("max_ngram", [1, 3, 4])
@pytest.mark.parametrize("vocab_size", [2, 5, 40])
def test_prompt_lookup_is_the_hosts(vocab_size, max_ngram):
    draw = torch.Generator().manual_seed(vocab_size * 10 + max_ngram)
    rows = Rows(config_of(gamma=3), 6, VOCAB_SIZE, DEVICE)
    lengths, proposed = [1, 2, 9, 300, 1500, 2100], [0, 0, 2, 0, 5, 3]
    all_tokens = torch.randint(vocab_size, (8, 2200), generator=draw, dtype=torch.int32)
    # A place of an image is -1; the newest token is none.
    all_tokens[:, ::7][torch.arange(2200)[::7].expand(8, -1) % 10 > 5] = -1
    proposal = torch.randint(vocab_size, (6, 6), generator=draw)
    rows.proposal.copy_(proposal)
    rows.num_rows = 6
    rows.row_metadata[:, RowColumn.STATE] = integers([7, 2, 0, 1, 5, 3])
    rows.computed.copy_(integers([n - 1 for n in lengths]))
    rows.length.copy_(integers(proposed))
    tokens = on_device.gather_tokens(rows, all_tokens.to(DEVICE), 2100)
    on_device.look_up(rows, tokens, max_ngram, max_tokens=2206)
    for row, state in enumerate([7, 2, 0, 1, 5, 3]):
        tokens = torch.cat([all_tokens[state, : lengths[row]], proposal[row, : proposed[row]]])
        expected = list(takewhile(lambda t: t >= 0, on_host(tokens.numpy(), max_ngram, 3)))
        found = rows.drafted[row, : int(rows.num_drafted[row])].tolist()
        assert found == expected
