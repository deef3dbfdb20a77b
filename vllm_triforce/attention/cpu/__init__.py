"""Attention on vLLM's CPU backend (vllm/v1/attention/backends/cpu_attn.py)."""
