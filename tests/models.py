"""Small models for the tests: the embedded pair, and random ones of any geometry."""

import os
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
PAIR = Path(os.environ.get("TRIFORCE_TEST_MODELS", ROOT / "examples" / "models"))
PROMPTS = ROOT / "examples" / "prompts"


def make_llama(
    folder: Path,
    *,
    vocab_size: int = 4096,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 1,
    head_dim: int = 32,
    std: float = 0.02,
    query_scale: float = 1.0,
    seed: int = 0,
    max_position_embeddings: int = 16384,
) -> str:
    """Saves a randomly initialised Llama in float32; returns its folder.

    Args:
        std: of the initial weights; larger is more peaked.
        query_scale: multiplies the query projections, so that attention picks and chooses.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        initializer_range=std,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config).float()
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data.mul_(query_scale)
    model.save_pretrained(folder)
    return str(folder)


def held_out_tokens(tokenizer, num_tokens: int) -> list[int]:
    """Token ids of real text that the embedded pair has not seen."""
    text = (PROMPTS / "held_out.txt").read_text()
    ids = tokenizer(text[: 8 * num_tokens])["input_ids"]
    assert len(ids) >= num_tokens, "the held-out text is too short"
    return ids[:num_tokens]
