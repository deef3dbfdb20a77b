"""LoRA on Model Runner V2: activate each request's adapter in level 2's passes."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, cycle, islice, repeat

from vllm.lora.request import LoRARequest
from vllm.v1.worker.gpu.lora_utils import NO_LORA_ID, LoraState

from vllm_triforce.vllm_patches import swaps


class CountedLoraState(LoraState):
    """vLLM's state, with a row of logits for each draft.

    vLLM gives the LoRA layer of ``lm_head`` one row of logits a request. A request with drafts has
    one more for each, which would be computed with other requests' adapters, or without.
    """

    drafts: Mapping[str, Sequence[int]]
    """Of the step, by request; requests without drafts may be missing."""

    def make_lora_inputs(self, req_ids, idx_mapping, num_scheduled_tokens):
        by_request, by_token, active = super().make_lora_inputs(
            req_ids, idx_mapping, num_scheduled_tokens
        )
        num_logits = [1 + len(self.drafts.get(request_id, ())) for request_id in req_ids]
        if len(by_request) == len(num_logits):  # unless vLLM counts them itself
            by_request = tuple(chain.from_iterable(map(repeat, by_request, num_logits)))
        return by_request, by_token, active


class LevelAdapters:
    """Activates adapters of vLLM's LoRA layers for level 2's passes.

    vLLM activates those of the full pass once a step. No pass of the target runs between a proposal
    and the next step, so they are not restored. Level 1's draft uses no adapters, which can only
    lower acceptance.
    """

    def __init__(self, runner) -> None:
        self._runner = runner
        max_loras = runner.lora_config.max_loras
        # Named as the dummy adapters that vLLM registers for capture and dummy runs.
        self._dummy_adapters = [
            LoRARequest(f"warmup_{number}", number, "/not/a/real/path")
            for number in range(1, max_loras + 1)
        ]
        self._uses_dummies = False
        self._state = CountedLoraState.__new__(CountedLoraState)
        self._state.__dict__ = swaps.LORA_STATE.set(runner, self._state).__dict__
        self._state.drafts = {}

    @property
    def capture_cases(self) -> list[int]:
        """Numbers of active adapters that graphs are captured for, as in vLLM's descriptors.

        They are 0 and the maximum, whose graphs serve any number. No adapter counts as one.
        """
        return [0, len(self._dummy_adapters) + 1]

    def begin_step(self, drafts: Mapping[str, Sequence[int]]) -> None:
        self._state.drafts = drafts

    def has_any(self, request_ids: Sequence[str]) -> bool:
        return any(adapter is not None for adapter in self._adapters_of(request_ids))

    def begin_proposal(self, request_ids: Sequence[str], num_rows: int, query_len: int) -> None:
        """Activate the adapters of these requests for passes of ``num_rows`` rows with padding.

        Activation waits for the device, as it does in vLLM before a full pass. Batches without
        adapters skip it. All tokens have logits, except those of padding.
        """
        adapters = self._adapters_of(request_ids)
        if any(adapter is not None for adapter in adapters) or not self._is_inactive:
            padding = repeat(None, num_rows - len(adapters))
            self._activate(adapters, [*adapters, *padding], query_len)

    def begin_capture(self, num_active: int, num_rows: int, query_len: int) -> None:
        """Activate no adapter, or all dummy adapters, for the capture of a pass.

        Adapters alternate by token: a pass may have fewer rows than there are adapters, and kernels
        are captured for the adapters that tokens have.
        """
        adapters = [*self._dummy_adapters, None] if num_active else [None]
        tokens = list(islice(cycle(adapters), num_rows * query_len))
        self._activate(tokens, tokens)

    @contextmanager
    def with_dummy_adapters(self) -> Iterator[None]:
        """Give every row a dummy adapter while passes are warmed up and measured.

        vLLM creates and loads adapters for each dummy run, which would be measured too.
        Here they are loaded once.
        """
        runner = self._runner
        with (
            runner.maybe_setup_dummy_loras(runner.lora_config),
            swaps.DUMMY_RUN_LORAS.during(runner, self._select_dummies),
        ):
            self._uses_dummies = True
            try:
                yield
            finally:
                self._uses_dummies = False

    def _select_dummies(self, lora_config, num_scheduled_tokens, *, remove_lora=True, **more):
        """Replace ``maybe_dummy_run_with_lora``, which also loads the adapters."""
        return self._runner.maybe_select_dummy_loras(lora_config, num_scheduled_tokens, **more)

    @property
    def _is_inactive(self) -> bool:
        """True if vLLM's LoRA layers launch nothing, as the full pass had no adapters.

        On the CPU they check the number of rows of logits all the same.
        """
        if self._runner.device.type == "cpu":
            return False
        mapping = self._runner.lora_manager._adapter_manager._last_mapping
        return mapping is not None and not any(mapping.prompt_mapping)

    def _adapters_of(self, request_ids: Sequence[str]) -> list[LoRARequest | None]:
        if self._uses_dummies:
            return list(islice(cycle(self._dummy_adapters), len(request_ids)))
        return [self._state.lora_requests.get(request_id) for request_id in request_ids]

    def _activate(
        self,
        with_logits: list[LoRARequest | None],
        in_pass: list[LoRARequest | None],
        num_tokens: int = 1,
    ) -> None:
        """Activate the adapters of rows of logits and of tokens, each ``num_tokens`` times."""
        by_logits, by_token = (
            tuple(
                NO_LORA_ID if adapter is None else adapter.lora_int_id
                for adapter in adapters
                for _ in range(num_tokens)
            )
            for adapters in (with_logits, in_pass)
        )
        # Adapters with load_inplace were loaded for the full pass, and would be loaded again.
        active = {a for a in in_pass if a is not None and not a.load_inplace}
        self._runner._set_active_loras(by_logits, by_token, active)
