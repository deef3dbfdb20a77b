"""Triton kernels of Runner V2 and of offload; ``tests/kernels`` has readable oracles."""
