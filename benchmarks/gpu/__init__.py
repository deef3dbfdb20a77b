"""Checks and times on a machine with a GPU (docs/gpu-suite.md)."""
