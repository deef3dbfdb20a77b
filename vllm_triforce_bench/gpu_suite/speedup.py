"""From the times of single passes to the speed-up at any acceptance: ``predict/speedup.py``."""

from vllm_triforce_bench.predict.speedup import (
    Costs,
    curve,
    inner_loop,
    per_test,
    speedup,
    tokens_per_step,
)

__all__ = ["Costs", "curve", "inner_loop", "per_test", "speedup", "tokens_per_step"]
