"""Hide vLLM's KV connector from the passes of levels 1 and 2.

A connector (remote prefill, offloading, shared caches) loads a layer's KV before the full pass's
attention and saves it afterwards, by the step's metadata (``maybe_transfer_kv_layer`` in
vllm/model_executor/layers/attention/kv_transfer_utils.py). That metadata is still bound while
drafts are made. The passes of levels 1 and 2 run through the same layers and write provisional KV,
which must not be saved under a request's name.

Remove when a vLLM pass can opt out of the connector.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from vllm_triforce.vllm_patches import swaps


@contextmanager
def hidden_kv_connector() -> Iterator[None]:
    """Hide the connector from attention layers while entered."""
    from vllm.model_executor.layers.attention import kv_transfer_utils

    original = kv_transfer_utils.has_kv_transfer_group
    if not original():
        yield
        return
    swaps.HAS_KV_TRANSFER_GROUP.set(kv_transfer_utils, _has_no_connector)
    try:
        yield
    finally:
        swaps.HAS_KV_TRANSFER_GROUP.set(kv_transfer_utils, original)


def _has_no_connector() -> bool:
    return False
