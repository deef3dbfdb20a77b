"""What a user may ask for, checked before any model is loaded."""

from vllm_triforce.config.keys import TriForceConfig
from vllm_triforce.config.resolved import ResolvedConfig

__all__ = ["ResolvedConfig", "TriForceConfig"]
