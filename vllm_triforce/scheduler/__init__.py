"""Subclasses of vLLM's schedulers: plans, lent KV blocks, and speculation metrics."""
