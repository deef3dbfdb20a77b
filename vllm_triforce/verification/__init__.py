"""Inner verification. The outer one, at level 3, is vLLM's own rejection sampler."""
