"""The KV cache in host memory: where layers lie, and what passes read of those."""
