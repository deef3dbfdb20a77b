"""KV cache in host memory: placement of layers, staging for full passes, level 2's pool."""
