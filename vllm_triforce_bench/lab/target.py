"""The target, run by Hugging Face transformers with the lab's attention in place of its own."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from vllm_triforce.cache.allocation import allocating
from vllm_triforce_bench.lab.policies.base import LabPolicy
from vllm_triforce_bench.lab.recording import Recording
from vllm_triforce_bench.lab.replay import Replay
from vllm_triforce_bench.lab.trace import AttentionOptions, Trace

ATTENTION = "vllm_triforce_lab"
_PREFILL_TOKENS = 2048
_CHECKED_TOKENS = 24

_current: ContextVar[Recording | Replay] = ContextVar("current pass of the lab")


def lab_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_heads, n, head_dim]
    key: torch.Tensor,  # [1, num_kv_heads, n, head_dim], the fed tokens' own
    value: torch.Tensor,  # [1, num_kv_heads, n, value_dim]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:  # [1, n, num_heads, value_dim]
    """A function of transformers' ``AttentionInterface``; the current pass does the work."""
    options = AttentionOptions(
        query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux, sliding_window
    )
    output = _current.get()(module.layer_idx, query[0], key[0], value[0], options)
    return output.transpose(0, 1)[None], None


class Target:
    """A causal language model whose every attention layer the lab stands in for.

    Args:
        model: of transformers, on its device, whose attention can be exchanged.

    Raises:
        RuntimeError: the model's logits with the lab's attention are not those with its own.
    """

    def __init__(self, model) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION, lab_attention)
        self.model = model.eval()
        self.config = model.config.get_text_config()
        self.device = model.device
        self._last_only = (
            {"logits_to_keep": 1}
            if "logits_to_keep" in inspect.signature(model.forward).parameters
            else {}
        )
        model.set_attn_implementation("eager")  # others may leave out soft caps
        wanted = self._own_logits()
        model.set_attn_implementation(ATTENTION)
        self._check(wanted)

    @torch.inference_mode()
    def record(
        self,
        prompt: Sequence[int],
        replayed: Sequence[int] | int,
        with_mass: bool = False,
        advance: Callable[[int], None] = lambda tokens: None,
    ) -> Trace:
        """A full pass over the prompt and what is to be replayed.

        Args:
            replayed: the tokens that follow the prompt, or how many greedy ones to generate.
            advance: told the number of tokens done, for a progress bar.

        Raises:
            MemoryError: the context's keys and values do not fit.
        """
        count = replayed if isinstance(replayed, int) else len(replayed)
        capacity = len(prompt) + count
        recording = Recording(self.config.num_hidden_layers, capacity, len(prompt), with_mass)
        remedy = "lower --context or --contexts, or use --dtype bfloat16"
        with (
            allocating("the full cache", self._cache_bytes(capacity), self.device, remedy),
            _standing_in(recording),
        ):
            for begin in range(0, len(prompt), _PREFILL_TOKENS):
                piece = prompt[begin : begin + _PREFILL_TOKENS]
                logits = self._feed(recording, piece)
                advance(len(piece))
            if isinstance(replayed, int):
                tokens = []
                while len(tokens) < count:
                    tokens.append(int(logits[-1].argmax()))
                    logits = self._feed(recording, tokens[-1:])
            else:
                tokens = list(replayed)
                self._feed(recording, tokens)
        return Trace(recording.layer_traces(), tokens, len(prompt))

    @torch.inference_mode()
    def replay(
        self, trace: Trace, policy: LabPolicy | None
    ) -> tuple[torch.Tensor, Replay]:  # [num_replayed, vocab_size]
        """The next-token logits after each replayed token when it reads what the policy keeps.

        With no policy it reads everything: the reference, by the same operations.
        """
        sparse = Replay(trace.layers, policy)
        with _standing_in(sparse):
            return self._logits(trace.replayed, trace.start), sparse

    def _feed(self, recording: Recording, tokens: Sequence[int]) -> torch.Tensor:
        logits = self._logits(tokens, recording.position, **self._last_only)
        recording.position += len(tokens)
        return logits

    def _logits(self, tokens: Sequence[int], position: int, **kwargs) -> torch.Tensor:
        ids = torch.tensor([tokens], device=self.device)
        positions = torch.arange(position, position + len(tokens), device=self.device)[None]
        output = self.model(input_ids=ids, position_ids=positions, use_cache=False, **kwargs)
        return output.logits[0]

    def _cache_bytes(self, num_tokens: int) -> int:
        config = self.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        size = torch.finfo(self.model.dtype).bits // 8
        return 2 * config.num_hidden_layers * heads * head_dim * num_tokens * size

    def _probe(self) -> list[int]:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(
            self.config.vocab_size, (_CHECKED_TOKENS,), generator=generator
        ).tolist()

    @torch.inference_mode()
    def _own_logits(self) -> torch.Tensor:
        return self._logits(self._probe(), 0).float()

    @torch.inference_mode()
    def _check(self, wanted: torch.Tensor) -> None:
        """Models ask for things that the lab does not know (biases, chunked attention): see it."""
        tokens = self._probe()
        trace = self.record(tokens[:-2], tokens[-2:])
        found = self.replay(trace, None)[0].float()
        error = float((found - wanted[-2:]).abs().max() / wanted.std())
        limit = 1e-3 if self.model.dtype == torch.float32 else 0.25
        if not error <= limit:
            raise RuntimeError(
                f"{type(self.model).__name__} says something else with the lab's attention than "
                f"with its own (logits differ by {error:.2g} standard deviations): it asks for "
                "something of attention that the lab does not do; use another model"
            )


@contextmanager
def _standing_in(current: Recording | Replay):
    token = _current.set(current)
    try:
        yield
    finally:
        _current.reset(token)
