"""Inner passes are not seen by vLLM's KV connectors.

A connector (prefill elsewhere, offloading, shared caches) loads a layer before the full pass's
attention and saves it afterwards (``maybe_transfer_kv_layer`` in
vllm/model_executor/layers/attention/kv_transfer_utils.py), by the metadata of the step, which is
still bound while drafts are made. The passes of levels 1 and 2 go through the same layers; what
they write into the cache is provisional and must not be saved under a request's name.

Remove when vLLM lets a pass say that it is none of the connector's business.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from vllm_triforce.vllm_patches import swaps


@contextmanager
def hidden_kv_connector() -> Iterator[None]:
    """While it is entered, attention layers see no connector; others do."""
    from vllm.model_executor.layers.attention import kv_transfer_utils

    original = kv_transfer_utils.has_kv_transfer_group
    if not original():
        yield
        return
    swaps.HAS_KV_TRANSFER_GROUP.set(kv_transfer_utils, _sees_none)
    try:
        yield
    finally:
        swaps.HAS_KV_TRANSFER_GROUP.set(kv_transfer_utils, original)


def _sees_none() -> bool:
    return False
