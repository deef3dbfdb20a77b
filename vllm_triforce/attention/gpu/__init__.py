"""Attention on vLLM's GPU backends: FLASH_ATTN, FLASHINFER and TRITON_ATTN.

At level 3 the backend's own code runs unchanged, and the queries are kept. Level 2 and level 1's
draft call one of vLLM's paged kernels directly (``paged_kernels.py``): FlashAttention wherever it
takes the stored dtype and head size, the Triton kernel elsewhere. FlashInfer's own kernels need a
plan made on the host before every pass.

Passes have fixed shapes only: GPUs run Runner V2 (``config/checks.py`` refuses V1 on them).
"""
