"""TriForce as it would be with the registry: no wrapper, no worker of its own."""

from vllm_triforce.config import TriForceConfig
from vllm_triforce.runner_v1.runner import RunnerAdapterV1


class RegisteredProposer(RunnerAdapterV1):
    def __init__(self, vllm_config, device, runner) -> None:
        keys = vllm_config.speculative_config.method_config
        config = TriForceConfig(**keys).with_defaults(can_adapt=False)
        config = config.resolve(vllm_config.cache_config.block_size)
        super().__init__(vllm_config, device, runner, config, draft_model=None)

    def on_kv_cache_initialized(self, kv_cache_config) -> None:
        self.allocate(kv_cache_config)


def register() -> None:
    from vllm.v1.spec_decode.registry import SpeculativeMethodInfo, register_speculative_method

    register_speculative_method(
        SpeculativeMethodInfo(
            name="triforce",
            proposer_cls=f"{__name__}.RegisteredProposer",
            config_cls="vllm_triforce.config.TriForceConfig",
            needs_draft_model=False,
            default_num_speculative_tokens=6,
            probabilistic_drafts=True,
            draft_limits_context=False,
        )
    )
