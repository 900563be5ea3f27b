"""Vision-language models of transformers with two layers of 32 in either part, and rows with images and videos."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as tf
from tensordict import NonTensorStack, TensorDict
from tiny_models import MROPE, TINY, VOCABULARY
from torch import Tensor

IMAGE, VIDEO, BEFORE, AFTER = 90, 91, 80, 81
TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO}
PATCH = 24  # numbers of a patch: 3 colours, 2 frames, 2 x 2 pixels
SIDES = 12, 12  # of images that are padded
VISION = {
    "depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32, "patch_size": 2,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
TOWER = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 2,
    "image_size": 8,
}  # fmt: skip
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}


def qwen25_vl(**more: Any) -> Any:
    seen = VISION | {"window_size": 8, "fullatt_block_indexes": [1]}
    config = tf.Qwen2_5_VLConfig(text_config=TINY | MROPE | more, vision_config=seen, **TOKENS)
    return tf.Qwen2_5_VLForConditionalGeneration(config)


def qwen2_vl(**more: Any) -> Any:
    seen = {key: VISION[key] for key in ("depth", "hidden_size", "num_heads", "patch_size", "spatial_merge_size")}
    seen |= {"embed_dim": 32, "mlp_ratio": 2, "temporal_patch_size": 2}
    return tf.Qwen2VLForConditionalGeneration(
        tf.Qwen2VLConfig(text_config=TINY | MROPE | more, vision_config=seen, **TOKENS)
    )


def qwen3_vl(**more: Any) -> Any:
    """Features of both vision layers are added to the first layers of the text (deepstack)."""
    seen = VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
    text = TINY | SECTIONS | {"head_dim": 8} | more
    return tf.Qwen3VLForConditionalGeneration(tf.Qwen3VLConfig(text_config=text, vision_config=seen, **TOKENS))


def qwen35_vl(**more: Any) -> Any:
    """The first layer of its text carries state: a gated delta net."""
    seen = VISION | {"num_position_embeddings": 16}
    state = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "head_dim": 8}
    heads = {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    text = TINY | SECTIONS | state | heads | more
    model = tf.Qwen3_5ForConditionalGeneration(tf.Qwen3_5Config(text_config=text, vision_config=seen, **TOKENS))
    with torch.no_grad():  # as `_calmed`; a convolution stays as it is made
        state = model.model.language_model.layers[0].linear_attn
        for weight in state.parameters():
            weight.mul_({3: 0.1, 2: 0.5}.get(weight.dim(), 1))
        state.A_log.fill_(-1.0)  # the state lasts, and gradients of decays do not cancel
        for weight in model.model.visual.parameters():
            weight.mul_(0.3 if weight.dim() > 1 else 1)
    return model


def glm4v(**more: Any) -> Any:
    rope = {"rope_parameters": SECTIONS["rope_parameters"] | {"partial_rotary_factor": 1.0}}
    text = TINY | rope | {"head_dim": 8} | more
    config = tf.Glm4vConfig(text_config=text, vision_config=VISION | {"image_size": 8}, **TOKENS)
    return tf.Glm4vForConditionalGeneration(config)


def llava(*, tower: str = "clip", **more: Any) -> Any:
    kind = tf.CLIPVisionConfig if tower == "clip" else tf.SiglipVisionConfig
    config = tf.LlavaConfig(
        vision_config=kind(**TOWER),
        text_config=tf.LlamaConfig(**TINY | more),
        image_token_index=IMAGE,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default" if tower == "clip" else "full",  # without its class token
    )
    return _calmed(tf.LlavaForConditionalGeneration(config))


def _calmed(model: Any) -> Any:
    """A tower of several images at once rounds otherwise than one of each alone: with the large weights of `pair`, by
    9e-6 in log-probs (and 1e-15 in float64)."""
    with torch.no_grad():
        for weight in model.model.vision_tower.parameters():
            weight.mul_(0.3 if weight.dim() > 1 else 1)
    return model


def internvl(**more: Any) -> Any:
    text = tf.Qwen2Config(**TINY | more).to_dict()
    seen = TOWER | {"image_size": [8, 8], "patch_size": [2, 2]}
    config = tf.InternVLConfig(vision_config=seen, text_config=text, image_token_id=IMAGE)
    return tf.InternVLForConditionalGeneration(config)


def mistral3(**more: Any) -> Any:
    config = tf.Mistral3Config(
        vision_config=TOWER | {"model_type": "pixtral", "image_size": 12},
        text_config=TINY | {"model_type": "mistral", "head_dim": 8} | more,
        image_token_index=IMAGE,
        spatial_merge_size=2,
        vision_feature_layer=-1,
    )
    return tf.Mistral3ForConditionalGeneration(config)


def gemma3(**more: Any) -> Any:
    """Tokens of an image see each other in both directions."""
    config = tf.Gemma3Config(
        text_config=TINY | {"head_dim": 8} | more,
        vision_config=TOWER,
        image_token_index=IMAGE,
        mm_tokens_per_image=4,
    )
    return tf.Gemma3ForConditionalGeneration(config)


GRIDS = (qwen25_vl, qwen2_vl, qwen3_vl, qwen35_vl, glm4v)  # patches of images of any size, with M-RoPE


@dataclass(frozen=True)
class Row:
    """A row: its images and videos as (frames, height, width) in patches, and the numbers of its other tokens."""

    prompt: int
    response: int
    images: Sequence[tuple[int, int, int]] = ()
    videos: Sequence[tuple[int, int, int]] = ()


ROWS = (
    Row(3, 4, images=[(1, 4, 4)]),
    Row(5, 6),
    Row(2, 3, images=[(1, 2, 4), (1, 6, 4)]),
    Row(0, 0),
    Row(4, 5, images=[(1, 4, 2)]),
    Row(1, 1),
)
WITH_VIDEO = (*ROWS, Row(2, 5, videos=[(2, 4, 4)]), Row(3, 3, images=[(1, 4, 4)], videos=[(3, 2, 4)]))


@dataclass
class Sample:
    """The tokens of a row, and what a model is given with them."""

    ids: list[int]
    response: int
    media: dict[str, Tensor] = field(default_factory=dict)


def sample(make: Callable[..., Any], row: Row, source: torch.Generator) -> Sample:
    """A row at random; the places of its images are in the prompt."""

    def text(count: int) -> list[int]:
        return torch.randint(3, 70, (count,), generator=source).tolist()

    ids, pixels, videos = text(row.prompt), [], []
    for frames, height, width in row.images:
        places = height * width // 4 if make in GRIDS or make is mistral3 else 4 if make is internvl else 16
        ids += [BEFORE, *[IMAGE] * (frames * places), AFTER]
        size = (height * width, PATCH) if make in GRIDS else (1, 3, *(SIDES if make is mistral3 else (8, 8)))
        pixels.append(torch.randn(size, generator=source))
    for frames, height, width in row.videos:
        apart = frames if make is qwen3_vl else 1  # a time lies before each frame
        for _ in range(apart):
            ids += [BEFORE, *[VIDEO] * (frames // apart * height * width // 4), AFTER]
        videos.append(torch.randn((frames * height * width, PATCH), generator=source))
    ids += text(row.response)
    media: dict[str, Tensor] = {}
    if row.images:
        media["pixel_values"] = torch.cat(pixels)
    if row.images and make in GRIDS:
        media["image_grid_thw"] = torch.tensor(row.images)
    if row.images and make is mistral3:
        media["image_sizes"] = torch.tensor([(2 * height, 2 * width) for _, height, width in row.images])
    if row.videos:
        media |= {"pixel_values_videos": torch.cat(videos), "video_grid_thw": torch.tensor(row.videos)}
    return Sample(ids, row.response, media)


def samples(make: Callable[..., Any], rows: Sequence[Row] = ROWS, seed: int = 0) -> list[Sample]:
    source = torch.Generator().manual_seed(seed)
    return [sample(make, row, source) for row in rows]


def kinds_of(ids: Tensor) -> Tensor:
    """1 for images, 2 for videos, by which models know the places of their position ids."""
    return (ids == IMAGE).int() + 2 * (ids == VIDEO).int()


def positions(model: Any, one: Sample) -> Tensor:
    """[3, n] for models with M-RoPE, else [n]."""
    ids = torch.tensor([one.ids], dtype=torch.int64)
    if not hasattr(model.model, "get_rope_index"):
        return torch.arange(ids.shape[1])
    if not one.ids:
        return torch.zeros(3, 0, dtype=torch.int64)
    grids = {name: x for name, x in one.media.items() if name.endswith("thw")}
    return model.model.get_rope_index(ids, mm_token_type_ids=kinds_of(ids), **grids)[0][:, 0]


def batch_of(model: Any, given: Sequence[Sample], *, media: str = "objects") -> TensorDict:
    """Prompts padded on the left, responses on the right. `media`: "objects" (multi_modal_inputs), "jagged", "none"."""
    prompt = max(len(one.ids) - one.response for one in given) + 1
    width = prompt + max(one.response for one in given) + 2
    sections = positions(model, given[0]).shape[:-1]
    mask = torch.zeros(len(given), width, dtype=torch.int64)
    ids = torch.zeros_like(mask)
    where = torch.zeros(len(given), *sections, width, dtype=torch.int64)
    for b, one in enumerate(given):
        begin = prompt - len(one.ids) + one.response
        here = slice(begin, begin + len(one.ids))
        mask[b, here], ids[b, here] = 1, torch.tensor(one.ids, dtype=torch.int64)
        where[b, ..., here] = positions(model, one)
    fields = {"input_ids": ids, "attention_mask": mask, "responses": ids[:, prompt:], "position_ids": where}
    batch = TensorDict(fields, batch_size=[len(given)])
    if media == "objects":
        batch["multi_modal_inputs"] = NonTensorStack(*[one.media for one in given])
    elif media == "jagged":
        for name in dict.fromkeys(name for one in given for name in one.media):
            like = next(one.media[name] for one in given if name in one.media)
            parts = [one.media.get(name, like[:0]) for one in given]
            batch[name] = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    return batch


def truth(model: Any, given: Sequence[Sample]) -> Tensor:
    """Log-probs of all response tokens, from the model's own forward of each row alone, which finds the positions of
    its tokens by itself."""
    out = [torch.zeros(0)]
    for one in given:
        if len(one.ids) < 2:
            continue
        ids = torch.tensor([one.ids])
        more = dict(one.media)
        if hasattr(model.model, "get_rope_index") and one.media:
            more["mm_token_type_ids"] = kinds_of(ids)
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **more).logits[0].float()
        scores = logits.log_softmax(-1)[:-1].gather(-1, ids[0, 1:, None])[:, 0]
        out.append(scores[len(scores) - one.response :])
    return torch.cat(out)


assert VOCABULARY > VIDEO
