"""The GPU suite: what is checked and measured on a machine with a GPU (docs/gpu-suite.md)."""
