"""``vllm-triforce predict``: what a step takes, by arithmetic (docs/prediction.md)."""
