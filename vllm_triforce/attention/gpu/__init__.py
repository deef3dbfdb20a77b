"""Attention on vLLM's GPU backends: FLASH_ATTN, FLASHINFER and TRITON_ATTN.

At level 3 the backend's own code runs unchanged; only the queries are kept. At level 2, and in
level 1's draft, one of vLLM's paged kernels is called directly (``paged_kernels.py``):
FlashAttention where the backend is FLASH_ATTN, the Triton kernel where it is TRITON_ATTN or
FLASHINFER, whose own kernels want a plan made on the host before every pass.

Passes have fixed shapes only: GPUs run Runner V2 (``config/checks.py`` refuses V1 on them).
"""
