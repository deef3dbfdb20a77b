"""Export of checkpoints for vLLM and transformers."""

import os

import torch

from .model import SIZES, load_model
from .text import BOS, EOS, VOCAB


def export(work, out):
    """Write both models as LlamaForCausalLM folders, each replaced in one step per file."""
    from tokenizers import Tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(work / "tokenizer.json")),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    for name in SIZES["small"]:
        if not (work / f"{name}.pt").exists():
            continue
        model = load_model(work, name)
        s = model.shape
        weights = {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.norm}
        for i, layer in enumerate(model.layers):
            named = {
                "self_attn.o_proj": layer.out[0],
                "mlp.down_proj": layer.down[0],
                "input_layernorm": layer.norm1,
                "post_attention_layernorm": layer.norm2,
            }
            named.update(
                zip(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), layer.qkv)
            )
            named.update(zip(("mlp.gate_proj", "mlp.up_proj"), layer.gate_up))
            weights.update({f"model.layers.{i}.{k}.weight": v for k, v in named.items()})
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=s.hidden,
            intermediate_size=s.inner,
            num_hidden_layers=s.layers,
            num_attention_heads=s.heads,
            num_key_value_heads=s.heads,
            head_dim=s.head_dim,
            rms_norm_eps=1e-6,
            max_position_embeddings=s.positions,
            bos_token_id=BOS,
            eos_token_id=EOS,
            rope_parameters={"rope_type": "default", "rope_theta": s.theta},
            tie_word_embeddings=True,
        )
        hf = LlamaForCausalLM(config).eval()
        missing, unknown = hf.load_state_dict(weights, strict=False)
        assert missing in ([], ["lm_head.weight"]) and not unknown, (missing, unknown)
        hf.tie_weights()
        ids = torch.randint(3, VOCAB, (1, 300))
        with torch.no_grad():
            error = (hf(ids).logits - model(ids, torch.arange(300)[None])).abs().max()
        assert error < 1e-3, f"{name}: transformers computes other logits ({error})"
        folder, fresh = out / name, out / f".{name}.{os.getpid()}"
        hf.to(torch.bfloat16).save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        folder.mkdir(parents=True, exist_ok=True)
        for file in fresh.iterdir():
            file.chmod(0o644)
            os.replace(file, folder / file.name)
        fresh.rmdir()
        print(
            f"{folder}: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, "
            f"logits as in transformers to {error:.1e}"
        )
