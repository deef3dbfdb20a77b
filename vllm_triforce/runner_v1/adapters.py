"""LoRA on Model Runner V1: level 2's passes use each request's adapter."""

from vllm_triforce.vllm_patches import swaps


class AdapterSwitch:
    """Tells vLLM's LoRA layers which adapter each token of a pass belongs to.

    vLLM does so once per step, for the tokens of the full pass; level 2's passes have others.
    The draft of level 1 has no adapters: it may guess worse, nothing else. A pass fits vLLM's
    buffers: ``max_num_batched_tokens`` has room for every request's proposal.
    """

    def __init__(self, runner) -> None:
        self._runner = runner
        self._full_pass: tuple[tuple, dict] | None = None
        self._set_active = swaps.ACTIVE_LORAS.set(runner, self._remember)

    def _remember(self, *mapping, **more) -> None:
        self._full_pass = mapping, more
        self._set_active(*mapping, **more)

    def before_pass(self, request_ids: list[str], num_tokens: list[int]) -> None:
        """Logits are computed for every token, so both of vLLM's mappings are the same. Requests
        that are not in the batch, by which passes are measured, have no adapter."""
        input_batch = self._runner.input_batch
        rows = map(input_batch.req_id_to_index.get, request_ids)
        numbers = (0 if row is None else input_batch.request_lora_mapping[row] for row in rows)
        adapters = tuple(
            int(number) for number, count in zip(numbers, num_tokens) for _ in range(count)
        )
        active = set(input_batch.lora_id_to_lora_request.values())
        self._set_active(adapters, adapters, active)

    def restore(self) -> None:
        """The full pass's mapping again: prompt log-probabilities are computed after a proposal."""
        if self._full_pass is not None:
            mapping, more = self._full_pass
            self._set_active(*mapping, **more)
