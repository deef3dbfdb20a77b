"""Proposals of level 1 alone, for requests that level 2 is not worth its time for."""

from vllm_triforce.device.batch import DeviceBatch
from vllm_triforce.device.begin import LevelParts, begin_rows, take_slots
from vllm_triforce.device.sources.source import DeviceSource
from vllm_triforce.kernels.direct import extend_proposals
from vllm_triforce.kernels.export_proposal import export_distributions
from vllm_triforce.kernels.row_metadata import Refresh


def propose_directly(parts: LevelParts, source: DeviceSource, batch: DeviceBatch) -> None:
    """Fills ``rows.proposal`` with a source's tokens, ``gamma`` at a time; rows that have no more
    are left as they are."""
    slots, rows = take_slots(parts, batch), parts.rows
    source.begin(batch, slots)
    begin_rows(parts, batch, slots, [Refresh.UNUSED] * len(batch))
    for number in range(int(batch.max_num_rounds.max())):
        source.draft(batch, rows, is_first=number == 0)
        distributions = source.distributions
        extend_proposals(rows, distributions, parts.counters)
        if not batch.sampling.all_greedy:
            logits = None if distributions is None else distributions.logits
            export_distributions(parts.handed_up, rows, logits)
    source.clean(batch, rows)
