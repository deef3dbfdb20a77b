"""Config under which the models of levels 1 and 2 register their layers apart from the target's.

vLLM takes every layer of its own config (``static_forward_context``) for one of the target's: KV
connectors load them all, and the KV cache has a place for each. A pass and its metadata builder
look layers up by name, in the config that they are given.
"""

import copy

from vllm.config import VllmConfig


def with_own_layers(vllm_config: VllmConfig) -> VllmConfig:
    """Return a copy of a config that has no layers yet."""
    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    return config
