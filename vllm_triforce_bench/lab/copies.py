"""Copies of the target with fewer bits a weight, for level 2's passes (the key ``level2_model``).

Linear layers round their weights, and by some schemes their inputs, to the numbers that a kernel of
few bits would multiply, with scales in float32; the products are computed in the target's dtype.
The output layer and the embeddings stay as they are, as in checkpoints of vLLM's formats.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

NO_COPY = "none"
_INT4_GROUP = 128


def round_to_integers(
    values: torch.Tensor,  # [..., n]
    largest: int,
) -> torch.Tensor:  # as values
    """Round each row to multiples of a scale, at most ``largest`` of them."""
    scale = _scale(values, largest)
    return ((values / scale).round() * scale).to(values.dtype)


def round_to_int4(
    weight: torch.Tensor,  # [num_outputs, num_inputs]
) -> torch.Tensor:  # as weight
    """Round to integers of -7 to 7, with a scale for each group of inputs.

    Groups have 128 inputs, or the largest power of two that divides the layer's.
    """
    group = math.gcd(weight.shape[1], _INT4_GROUP)
    return round_to_integers(weight.unflatten(1, (-1, group)), 7).flatten(1)


def round_to_fp8(
    values: torch.Tensor,  # [..., n]
) -> torch.Tensor:  # as values
    """Round to ``float8_e4m3fn``, with a scale for each row."""
    dtype = torch.float8_e4m3fn
    scale = _scale(values, torch.finfo(dtype).max)
    return ((values / scale).to(dtype).float() * scale).to(values.dtype)


def _scale(values: torch.Tensor, largest: float) -> torch.Tensor:
    """Return each row's scale in float32, by which its largest value becomes ``largest``."""
    return values.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / largest


@dataclass(frozen=True)
class Scheme:
    """A scheme of few bits.

    Args:
        weights: rounds weights [num_outputs, num_inputs]; None leaves them.
        inputs: rounds inputs [..., num_inputs] token by token; None leaves them.
        dtype: of the whole copy; None is the target's.
    """

    weights: Callable[[torch.Tensor], torch.Tensor] | None = None
    inputs: Callable[[torch.Tensor], torch.Tensor] | None = None
    dtype: torch.dtype | None = None


_round_to_int8 = partial(round_to_integers, largest=127)
SCHEMES = {
    NO_COPY: Scheme(),
    "bfloat16": Scheme(dtype=torch.bfloat16),
    "fp8": Scheme(round_to_fp8, round_to_fp8),
    "int8": Scheme(_round_to_int8, _round_to_int8),
    "int8-weights": Scheme(_round_to_int8),
    "int4": Scheme(round_to_int4),
}
"""By name of ``--copies``. ``fp8`` is vLLM's ``fp8_per_channel``, ``int8`` its W8A8 with dynamic
scales of tokens; ``int4`` rounds to the nearest, without the calibration of AWQ or GPTQ."""


@torch.inference_mode()
def make_copy(model: Any, name: str) -> Any:
    scheme = SCHEMES[name]
    copied = copy.deepcopy(model)
    if scheme.dtype is not None:
        # Parameters alone: RoPE's frequencies are a buffer, and stay exact.
        for parameter in copied.parameters():
            parameter.data = parameter.data.to(scheme.dtype)
        return copied
    output, round_inputs = copied.get_output_embeddings(), scheme.inputs
    for layer in copied.modules():
        if not isinstance(layer, nn.Linear) or layer is output:
            continue
        if scheme.weights is not None:
            layer.weight.copy_(scheme.weights(layer.weight))
        if round_inputs is not None:
            layer.register_forward_pre_hook(lambda _, args: (round_inputs(args[0]), *args[1:]))
    return copied


def check_copies(config, names: Sequence[str], trust_remote_code: bool = False) -> None:
    """Raise ValueError if a scheme cannot round all matrices of transformers' model."""
    from transformers import AutoModelForCausalLM

    if not any(SCHEMES[name].weights for name in names):
        return
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear | nn.Embedding)]
    weights = {id(layer.weight) for layer in layers}
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and id(weight) not in weights:
            raise ValueError(
                f"copies: {name} of {type(model).__name__} is not a torch.nn.Linear, whose weights "
                "alone the lab rounds; use bfloat16 or none"
            )
