"""The target, run by Hugging Face transformers with the attention of the lab's two passes.

The full pass records, the sparse one replays.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from vllm_triforce.cache.allocation import checked_allocation
from vllm_triforce_bench.lab.copies import NO_COPY, check_copies, make_copy
from vllm_triforce_bench.lab.policies import LabPolicy
from vllm_triforce_bench.lab.settings import LabSettings
from vllm_triforce_bench.lab.trace import (
    AttentionOptions,
    LayerTrace,
    Trace,
    attention_scores,
    attention_weights,
    causal_mask,
    kept_mass,
    self_scores,
)

ATTENTION = "vllm_triforce_lab"
_PREFILL_TOKENS = 2048
_CHECKED_TOKENS = 24
_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Scores of a head group held at a time; on a CPU they should stay in its cache.
_MAX_SCORES_CPU, _MAX_SCORES = 1 << 20, 1 << 25


class Recording:
    """Attention of a full pass over ``num_tokens``: ``start`` of the prompt, then replayed ones."""

    def __init__(self, num_layers: int, num_tokens: int, start: int) -> None:
        self.start = start
        self.position = 0
        self._num_layers, self._num_tokens = num_layers, num_tokens
        self._layers: dict[int, LayerTrace] = {}

    def __call__(
        self,
        layer_index: int,
        query: torch.Tensor,  # [num_heads, n, head_dim], positions ``self.position`` and on
        keys: torch.Tensor,  # [num_kv_heads, n, head_dim]
        values: torch.Tensor,  # [num_kv_heads, n, value_dim]
        options: AttentionOptions,
    ) -> torch.Tensor:  # [num_heads, n, value_dim]
        if layer_index not in self._layers:
            self._layers[layer_index] = LayerTrace(
                keys.new_empty(len(keys), self._num_tokens, keys.shape[-1]),
                values.new_empty(len(keys), self._num_tokens, values.shape[-1]),
                len(query) // len(keys),
                self.start,
                options,
            )
        layer, first = self._layers[layer_index], self.position
        end = first + query.shape[1]
        layer.keys[:, first:end] = keys
        layer.values[:, first:end] = values
        output = values.new_empty(*query.shape[:2], values.shape[-1])
        max_scores = _MAX_SCORES_CPU if query.device.type == "cpu" else _MAX_SCORES
        rows = max(1, max_scores // (layer.group * end))
        for begin in range(first, end, rows):
            positions = torch.arange(begin, min(begin + rows, end), device=query.device)
            reach = int(positions[-1]) + 1
            # Without a window, the tokens hidden from these queries lie among themselves.
            low = begin if options.window is None else 0
            hidden = ~causal_mask(positions, reach, options.window)[:, low:]
            here = slice(begin - first, begin - first + len(positions))
            for head in range(keys.shape[0]):
                heads = layer.heads(head)
                scores = attention_scores(query[heads, here], layer.keys[head, :reach], options)
                scores[..., low:].masked_fill_(hidden, float("-inf"))
                weights = attention_weights(scores, layer.sinks(head))
                output[heads, here] = weights.to(values.dtype) @ layer.values[head, :reach]
        return output

    def layer_traces(self) -> list[LayerTrace]:
        """Return the recorded layers, prompt and replayed tokens.

        Raises:
            RuntimeError: a layer called no attention.
        """
        if missing := [i for i in range(self._num_layers) if i not in self._layers]:
            raise RuntimeError(
                f"layers {missing} of the model called no attention that the lab can stand in "
                "for; it needs a transformer whose layers all have attention of their own"
            )
        return [self._layers[index] for index in sorted(self._layers)]


class Replay:
    """Attention of a sparse pass: every replayed token reads the tokens that a policy keeps.

    All replayed tokens go through the model at once, hidden from each other. Keys and values of
    earlier tokens are the full pass's (level 3 has overwritten level 2's); a token's come from its
    sparse hidden state. A copy of another dtype attends in the target's dtype, as in the engine.
    Without a policy all tokens are kept, the reference.
    """

    def __init__(self, layers: list[LayerTrace], policy: LabPolicy | None) -> None:
        self._layers = layers
        self._policy = policy
        self._masses: list[torch.Tensor] = []
        self._reads: list[torch.Tensor] = []

    def __call__(
        self,
        layer_index: int,
        query: torch.Tensor,  # [num_heads, num_replayed, head_dim]
        keys: torch.Tensor,  # [num_kv_heads, num_replayed, head_dim], of the replayed tokens
        values: torch.Tensor,  # [num_kv_heads, num_replayed, value_dim], of the replayed tokens
        options: AttentionOptions,
    ) -> torch.Tensor:  # [num_heads, num_replayed, value_dim]
        layer = self._layers[layer_index]
        visible = causal_mask(layer.positions(), layer.num_tokens, options.window)
        dtype, stored = query.dtype, layer.keys.dtype
        query, keys, values = query.to(stored), keys.to(stored), values.to(stored)
        output = values.new_empty(*query.shape[:2], values.shape[-1])
        for head in range(keys.shape[0]):
            heads = layer.heads(head)
            scores = attention_scores(query[heads], layer.keys[head], options)
            new_scores = self_scores(query[heads], keys[head], options)
            scores.diagonal(layer.start, 1, 2).copy_(new_scores)
            mask = visible[None]
            if self._policy is not None and options.window is None:
                mask = mask & self._policy.mask(layer, head, query[heads], scores, visible)
                self._masses.append(kept_mass(scores, visible, mask).mean())
                self._reads.append(mask.sum(-1, dtype=torch.float32).mean())
            weights = attention_weights(
                scores.masked_fill_(~mask, float("-inf")), layer.sinks(head)
            )
            new_weights = weights.diagonal(layer.start, 1, 2).clone()
            weights.diagonal(layer.start, 1, 2).zero_()
            attended = weights.to(values.dtype) @ layer.values[head]
            output[heads] = attended + new_weights[..., None].to(values.dtype) * values[head]
        return output.to(dtype)

    @property
    def kept_mass(self) -> float:
        """Mean share of full attention on the kept tokens; 1 without a sparse layer."""
        return float(torch.stack(self._masses).mean()) if self._masses else 1.0

    @property
    def tokens_read(self) -> float:
        """Mean tokens that a query head of a sparse layer reads, the newest included."""
        return float(torch.stack(self._reads).mean()) if self._reads else 0.0


_current: ContextVar[Recording | Replay] = ContextVar("current pass of the lab")


def lab_attention(
    module: Any,  # transformers' attention layer
    query: torch.Tensor,  # [1, num_heads, n, head_dim]
    key: torch.Tensor,  # [1, num_kv_heads, n, head_dim], of the fed tokens
    value: torch.Tensor,  # [1, num_kv_heads, n, value_dim]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:  # [1, n, num_heads, value_dim]
    """Let the current pass compute the attention, for transformers' ``AttentionInterface``."""
    options = AttentionOptions(
        query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux, sliding_window
    )
    output = _current.get()(module.layer_idx, query[0], key[0], value[0], options)
    return output.transpose(0, 1)[None], None


class Target:
    """A causal language model of transformers with the lab's attention in every layer.

    Raises:
        RuntimeError: the lab's attention changes the model's logits.
    """

    def __init__(self, model) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION, lab_attention)
        self.model = model.eval()
        self._last_copy: tuple[str, Any] = NO_COPY, None
        self._token_bytes = 0  # of the full cache; read off the check
        self.config = model.config.get_text_config()
        self.device = model.device
        self._last_only = (
            {"logits_to_keep": 1}
            if "logits_to_keep" in inspect.signature(model.forward).parameters
            else {}
        )
        self._check()

    @torch.inference_mode()
    def record(
        self,
        prompt: Sequence[int],
        replayed: Sequence[int] | int,
        draw: Callable[[torch.Tensor], int] = lambda logits: int(logits.argmax()),
    ) -> Trace:
        """Run a full pass over the prompt and the replayed tokens.

        Args:
            replayed: tokens that follow the prompt, or their number: then ``draw`` chooses each
                from logits [vocab_size].

        Raises:
            MemoryError: the context's keys and values do not fit.
        """
        count = replayed if isinstance(replayed, int) else len(replayed)
        num_tokens = len(prompt) + count
        recording = Recording(self.config.num_hidden_layers, num_tokens, len(prompt))
        remedy = "lower --context or --contexts, or use --dtype bfloat16"
        with (
            checked_allocation(
                "the full cache", num_tokens * self._token_bytes, self.device, remedy
            ),
            _standing_in(recording),
        ):
            for begin in range(0, len(prompt), _PREFILL_TOKENS):
                logits = self._feed(recording, prompt[begin : begin + _PREFILL_TOKENS])
            if isinstance(replayed, int):
                tokens: list[int] = []
                while len(tokens) < count:
                    tokens.append(draw(logits[-1]))
                    logits = self._feed(recording, tokens[-1:])
            else:
                tokens = list(replayed)
                self._feed(recording, tokens)
        return Trace(recording.layer_traces(), tokens, len(prompt))

    @torch.inference_mode()
    def replay(
        self, trace: Trace, policy: LabPolicy | None, copy: str = NO_COPY
    ) -> tuple[torch.Tensor, Replay]:  # [num_replayed, vocab_size]
        """Return the logits after each replayed token, which reads the tokens that a policy keeps.

        Without a policy it reads all: the reference, by the same operations.

        Args:
            copy: weights of the pass, by name in ``SCHEMES``; the context is the target's.
        """
        sparse = Replay(trace.layers, policy)
        with _standing_in(sparse):
            return self._logits(trace.replayed, trace.start, self._copy(copy)), sparse

    def _copy(self, name: str):
        """Return the model by a scheme; the last copy is kept."""
        if name == NO_COPY:
            return self.model
        if name != self._last_copy[0]:
            self._last_copy = NO_COPY, None  # frees its memory
            self._last_copy = name, make_copy(self.model, name)
        return self._last_copy[1]

    def _feed(self, recording: Recording, tokens: Sequence[int]) -> torch.Tensor:
        logits = self._logits(tokens, recording.position, self.model, **self._last_only)
        recording.position += len(tokens)
        return logits

    def _logits(self, tokens: Sequence[int], position: int, model, **kwargs) -> torch.Tensor:
        ids = torch.tensor([tokens], device=self.device)
        positions = torch.arange(position, position + len(tokens), device=self.device)[None]
        output = model(input_ids=ids, position_ids=positions, use_cache=False, **kwargs)
        return output.logits[0]

    @torch.inference_mode()
    def _check(self) -> None:
        """Compare logits: a model may need attention that the lab lacks (biases, chunks)."""
        generator = torch.Generator().manual_seed(0)
        vocab_size = self.config.vocab_size
        probe = torch.randint(vocab_size, (_CHECKED_TOKENS,), generator=generator).tolist()
        self.model.set_attn_implementation("eager")  # others may leave out soft caps
        expected = self._logits(probe, 0, self.model).float()
        self.model.set_attn_implementation(ATTENTION)
        trace = self.record(probe[:-2], probe[-2:])
        logits, _ = self.replay(trace, None)
        num_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in trace.layers)
        self._token_bytes = num_bytes // len(probe)
        error = float((logits.float() - expected[-2:]).abs().max() / expected.std())
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


# Loading: cheap checks first, the weights last.


def load_config_and_tokenizer(settings: LabSettings) -> tuple:
    """Load the model's config and tokenizer.

    Raises:
        ValueError: there is no such model, or the lab cannot run it.
    """
    from transformers import AutoConfig, AutoTokenizer

    keys = dict(revision=settings.revision, trust_remote_code=settings.trust_remote_code)
    try:
        config = AutoConfig.from_pretrained(settings.model, **keys)
        check_config(config, settings)
        check_copies(config, settings.copies, settings.trust_remote_code)
        return config, AutoTokenizer.from_pretrained(settings.model, **keys)
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"model {settings.model!r} cannot be read ({reason}); give a folder with a "
            "transformers checkpoint and its tokenizer, or a name of the hub"
        ) from error


def check_config(config, settings: LabSettings) -> None:
    """Raise ValueError if the lab cannot run the model, or not at these lengths."""
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"model {settings.model!r} is an encoder-decoder; the lab replays causal language "
            "models only"
        )
    unknown = set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES
    if unknown:
        raise ValueError(
            f"model {settings.model!r} has layers of type {', '.join(sorted(unknown))}; the lab "
            "knows full and sliding-window attention only"
        )
    limit = getattr(text, "max_position_embeddings", None)
    if limit is not None and settings.num_tokens > limit:
        raise ValueError(
            f"the longest context of {settings.longest_context} and its replay need "
            f"{settings.num_tokens} positions, and model {settings.model!r} has {limit}; use "
            "shorter --context and --contexts"
        )


def check_device(device: str) -> None:
    """Raise ValueError if torch has no such device."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device={device!r} cannot be used ({reason}); use cpu or cuda") from error


def load_target(settings: LabSettings) -> Target:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(
        settings.model,
        dtype=getattr(torch, settings.dtype),
        revision=settings.revision,
        trust_remote_code=settings.trust_remote_code,
    )
    return Target(model.to(settings.device))
