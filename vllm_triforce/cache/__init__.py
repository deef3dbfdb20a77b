"""Level 1's private KV cache, and level 2's selection among the blocks of vLLM's."""
