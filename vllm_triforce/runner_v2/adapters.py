"""LoRA on Model Runner V2: level 2's passes use each request's adapter, as the full passes do."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, cycle, islice, repeat

from vllm.lora.layers import LoRAMappingType
from vllm.lora.request import LoRARequest
from vllm.v1.worker.gpu.lora_utils import NO_LORA_ID, LoraState

from vllm_triforce.vllm_patches import swaps


class CountedLoraState(LoraState):
    """vLLM's, which gives the layer behind ``lm_head`` one row of logits a request. A request with
    drafts has one more for each: without this their logits would be computed with the adapters of
    other requests, or of none."""

    drafts: Mapping[str, Sequence[int]]
    """Tokens that the step's full pass verifies, by request; who has none may be missing."""

    def make_lora_inputs(self, req_ids, idx_mapping, num_scheduled_tokens):
        by_request, by_token, active = super().make_lora_inputs(
            req_ids, idx_mapping, num_scheduled_tokens
        )
        num_logits = [1 + len(self.drafts.get(name, ())) for name in req_ids]
        if len(by_request) == len(num_logits):  # or vLLM counts them itself
            by_request = tuple(chain.from_iterable(map(repeat, by_request, num_logits)))
        return by_request, by_token, active


class LevelAdapters:
    """Tells vLLM's LoRA layers which adapter each token of level 2's passes has.

    vLLM does so once a step, for the tokens of the full pass. Nothing of the target is computed
    between a proposal and the next step, so theirs need not be put back. The draft of level 1 has
    no adapters: it may guess worse, nothing else.
    """

    def __init__(self, runner) -> None:
        self._runner = runner
        max_loras = runner.lora_config.max_loras
        # As vLLM names those that it registers before it captures, or runs without requests.
        self._dummies = [
            LoRARequest(f"warmup_{number}", number, "/not/a/real/path")
            for number in range(1, max_loras + 1)
        ]
        self._is_trial = False
        self._state = CountedLoraState.__new__(CountedLoraState)
        self._state.__dict__ = swaps.LORA_STATE.set(runner, self._state).__dict__
        self._state.drafts = {}

    @property
    def capture_cases(self) -> list[int]:
        """Numbers of active adapters, as vLLM's descriptors of graphs have them: none, and the most
        that there can be (no adapter counts as one), of which any number can be replayed."""
        return [0, len(self._dummies) + 1]

    def begin_step(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """A full pass comes, which verifies these."""
        self._state.drafts = drafts

    def has_any(self, request_ids: Sequence[str]) -> bool:
        """Whether one of these requests has an adapter."""
        return any(adapter is not None for adapter in self._of(request_ids))

    def begin_proposal(self, request_ids: Sequence[str], num_rows: int, query_len: int) -> None:
        """The passes to come are of these requests, a row each. Where vLLM has to be told, it waits
        for the device, as it does before a full pass.

        Args:
            num_rows: rows of a pass, of which the last are padding.
            query_len: tokens of a row; there are logits of each, but of padding.
        """
        adapters = self._of(request_ids)
        if any(adapter is not None for adapter in adapters) or not self._are_off:
            padding = repeat(None, num_rows - len(adapters))
            self._activate(adapters, [*adapters, *padding], query_len)

    def begin_capture(self, num_active: int, num_rows: int, query_len: int) -> None:
        """What is captured next has no adapter, or all: one token after the other, for there may be
        fewer rows, and kernels are captured for as many as there are."""
        kinds = [*self._dummies, None] if num_active else [None]
        tokens = list(islice(cycle(kinds), num_rows * query_len))
        self._activate(tokens, tokens)

    @contextmanager
    def with_dummy_adapters(self) -> Iterator[None]:
        """While passes are tried and timed: every row has an adapter, at level 2 as in vLLM's dummy
        runs. vLLM makes and loads new ones for each of those; here they are there before."""
        runner = self._runner

        with runner.maybe_setup_dummy_loras(runner.lora_config):
            original = swaps.DUMMY_RUN_LORAS.set(runner, self._select_dummies)
            self._is_trial = True
            try:
                yield
            finally:
                self._is_trial = False
                swaps.DUMMY_RUN_LORAS.set(runner, original)

    def _select_dummies(
        self,
        lora_config,
        num_scheduled_tokens,
        num_sampled_tokens,
        remove_lora=True,
        num_active_loras=0,
        mapping_type=LoRAMappingType.LANGUAGE,
    ):
        """Take the place of vLLM's, which makes the adapters as well."""
        return self._runner.maybe_select_dummy_loras(
            lora_config,
            num_scheduled_tokens,
            mapping_type=mapping_type,
            num_sampled_tokens=num_sampled_tokens,
            num_active_loras=num_active_loras,
        )

    @property
    def _are_off(self) -> bool:
        """Whether vLLM's layers launch nothing as it is, whatever the number of tokens: the full
        pass had no adapters. On the CPU they count the rows of logits all the same."""
        if self._runner.device.type == "cpu":
            return False
        last = self._runner.lora_manager._adapter_manager._last_mapping
        return last is not None and not any(last.prompt_mapping)

    def _of(self, request_ids: Sequence[str]) -> list[LoRARequest | None]:
        if self._is_trial:
            return list(islice(cycle(self._dummies), len(request_ids)))
        return [self._state.lora_requests.get(request_id) for request_id in request_ids]

    def _activate(
        self,
        with_logits: list[LoRARequest | None],
        in_pass: list[LoRARequest | None],
        num_tokens: int = 1,
    ) -> None:
        """
        Args:
            num_tokens: of each of these.
        """
        by_logits, by_token = (
            tuple(
                NO_LORA_ID if adapter is None else adapter.lora_int_id
                for adapter in adapters
                for _ in range(num_tokens)
            )
            for adapters in (with_logits, in_pass)
        )
        # Those of a step are active; what is to be loaded anew has been, for the full pass.
        active = {a for a in in_pass if a is not None and not a.load_inplace}
        self._runner._set_active_loras(by_logits, by_token, active)
