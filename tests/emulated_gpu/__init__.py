"""TriForce in vLLM's CUDA build on an emulated GPU (docs/gpu-emulation.md)."""
