"""Faults of vLLM mended at run time; patches/README.md is the ledger."""
