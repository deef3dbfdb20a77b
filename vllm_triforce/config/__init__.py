from vllm_triforce.config.triforce_config import TriForceConfig

__all__ = ["TriForceConfig"]
