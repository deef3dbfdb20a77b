"""Small random models that take images, and their images and videos.

torchvision is not needed: Qwen3-VL gets transformers' image processor of PIL, for video too.
"""

import importlib
import sys
from pathlib import Path

import numpy as np
import torch

from tests.models import PAIR
from tests.one_process import inspect_models_here

# Of both models: a grid of 24 x 32 pixels gives 12 tokens of Qwen3-VL.
_TEXT = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=16384,
    initializer_range=0.1,
    bos_token_id=0,
    eos_token_id=1,
)
_QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_PILS = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"


def install() -> None:
    """Make vLLM load Qwen3-VL without torchvision; call it in every process of an engine."""
    pil = importlib.import_module(_PILS)
    sys.modules.setdefault(_PILS.replace("_pil", ""), pil)
    from transformers.models.qwen3_vl import Qwen3VLProcessor
    from vllm.model_executor.models import qwen3_vl

    class Processor(Qwen3VLProcessor):
        def check_argument_for_proper_class(self, *args) -> None:
            """Do nothing: the class of video processors does not load."""

    class Videos(pil.Qwen2VLImageProcessorPil):
        """Reads frames as images, and makes a patch of two frames' patches at the same place."""

        def __call__(self, videos, video_metadata, **kwargs) -> dict:
            ((frames,),) = videos
            images = super().__call__(list(frames), return_tensors="pt")
            # [pairs, first or second frame, patches, channels, twice the same, pixels]
            patches = images["pixel_values"].view(len(frames) // 2, 2, -1, 3, 2, self.patch_size**2)
            patches = patches.diagonal(0, 1, 4).movedim(-1, 3)
            return dict(
                pixel_values_videos=patches.flatten(2).flatten(0, 1),
                video_grid_thw=images["image_grid_thw"][:1] * torch.tensor([len(patches), 1, 1]),
                video_metadata=video_metadata[0],
            )

    def get_hf_processor(self, **kwargs):
        model = self.ctx.model_config.model
        images = pil.Qwen2VLImageProcessorPil.from_pretrained(model)
        videos = Videos.from_pretrained(model)
        return Processor(images, self.get_tokenizer(), videos)

    info = qwen3_vl.Qwen3VLProcessingInfo
    info.get_hf_processor = get_hf_processor
    scopes = {"images_kwargs": set(), "videos_kwargs": set()}
    info.get_supported_mm_processor_kwargs = lambda self: scopes
    inspect_models_here()  # another process has none of the above


def _tokenizer(folder: Path, tokens: tuple[str, ...]) -> tuple[list[int], int]:
    """Save the pair's tokenizer with further tokens; return their ids and the vocabulary's size."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(PAIR / "target"))
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    tokenizer.save_pretrained(folder)
    return tokenizer.convert_tokens_to_ids(list(tokens)), -(-len(tokenizer) // 64) * 64


def make_qwen3_vl(folder: Path) -> tuple[str, dict[str, tuple[int, ...]], int]:
    """Save a random Qwen3-VL: M-RoPE, and features of the image in several layers.

    Returns:
        Its folder, the tokens of an image and of a video in a prompt, and the vocabulary's size.
    """
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    pil = importlib.import_module(_PILS)
    (start, end, image, video), vocab_size = _tokenizer(folder, _QWEN_TOKENS)
    rope = dict(rope_type="default", rope_theta=1e4, mrope_interleaved=True)
    vision = dict(
        depth=2,
        hidden_size=32,
        intermediate_size=64,
        out_hidden_size=64,
        num_heads=2,
        patch_size=4,
        num_position_embeddings=64,
        deepstack_visual_indexes=[0],
        initializer_range=0.3,
    )
    config = Qwen3VLConfig(
        text_config=_TEXT
        | dict(vocab_size=vocab_size, rope_parameters=rope | {"mrope_section": [6, 5, 5]}),
        vision_config=vision,
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(config).float()
    for layer in model.model.language_model.layers:
        layer.self_attn.q_proj.weight.data.mul_(4)
    model.save_pretrained(folder)
    pixels = {"shortest_edge": 64, "longest_edge": 64 * 64}
    pil.Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=pixels).save_pretrained(folder)
    tokens = {"image": (start, image, end), "video": (start, video, end)}
    return str(folder), tokens, vocab_size


def make_idefics3(folder: Path) -> tuple[str, dict[str, tuple[int, ...]], int]:
    """Save a random Idefics3, which reads an image as a whole and in pieces, with text between.

    The result is that of ``make_qwen3_vl()``.
    """
    from transformers import (
        AutoTokenizer,
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3Processor,
    )
    from transformers.models.idefics3 import image_processing_pil_idefics3 as pil

    pieces = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    tokens = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
    (image, *_), vocab_size = _tokenizer(folder, (*tokens, *pieces))
    config = Idefics3Config(
        text_config=_TEXT | dict(model_type="llama", vocab_size=vocab_size),
        vision_config=dict(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=32,
            patch_size=4,
            initializer_range=0.3,
        ),
        image_token_id=image,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = Idefics3ForConditionalGeneration(config).float()
    for layer in model.model.text_model.layers:
        layer.self_attn.q_proj.weight.data.mul_(4)
    model.save_pretrained(folder)
    images = pil.Idefics3ImageProcessorPil(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 32}
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    Idefics3Processor(images, tokenizer, image_seq_len=16).save_pretrained(folder)
    return str(folder), {"image": (image,)}, vocab_size


def make_image(seed: int):
    """Return an image of random pixels, whose shape is its seed's."""
    from PIL import Image

    draw = np.random.default_rng(seed)
    shape = 8 * draw.integers(3, 6), 8 * draw.integers(3, 6), 3
    return Image.fromarray(draw.integers(0, 256, shape, dtype=np.uint8))


def make_video(seed: int) -> tuple[np.ndarray, dict]:
    """Return frames that become darker, and what vLLM knows of them: two a second."""
    image, times = np.asarray(make_image(seed)), range(1, 7)
    facts = dict(fps=2.0, total_num_frames=len(times), frames_indices=[*range(len(times))])
    return np.stack([image // time for time in times]), facts


def as_prompt(token_ids: list[int], images: tuple[int, ...]) -> dict:
    """Return vLLM's prompt of tokens and images, by seeds; negative ones are of videos."""
    data: dict = {}
    for seed in images:
        name, make = ("image", make_image) if seed > 0 else ("video", make_video)
        data.setdefault(name, []).append(make(abs(seed)))
    return {"prompt_token_ids": token_ids} | ({"multi_modal_data": data} if data else {})
