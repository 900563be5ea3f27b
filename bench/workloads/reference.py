"""The synthetic workload: log-normal lengths, 8.4 % of S real; P = 2048, R = 14336: 1 097 728 bytes a row; GRPO, 16
rows share a prompt; and variants of it.
"""

from __future__ import annotations

import numpy as np
from tensordict import TensorDict

from bench.workloads.rows import Array, Lengths, Rows, as_batch, critic, log_normal, log_probs, padded, rewards, tokens

PROMPT_WIDTH, RESPONSE_WIDTH = 2048, 14_336

VARIANTS = (
    "reference",  # GRPO, one turn
    "multi-turn",  # response_mask is 0 at tool output, attention_mask is 1 there
    "negative-zeros",  # advantages multiplied by the mask: the pad of a negative advantage is -0.0
    "m-rope",  # position_ids (B, 4, S): text and vision rows, all padded with 1
    "m-rope-edge",  # position_ids (B, 3, S): vision rows, padded with the nearest real value
    "routed-experts",  # int16 (B, S, 4, 8); models have about 48 layers, 4 keep the batch in memory
    "ppo",  # with values; advantages and returns differ from token to token
)

_GROUP = 16
_FILL = 0.084  # real share of S
_PROMPT_FILL = 0.074  # real share of P: together with _FILL this gives the 72 kB a row that jagged values take
_LAYERS, _TOP_K, _EXPERTS = 4, 8, 128


def make_batch(
    variant: str = "reference",
    rows: int = 256,
    *,
    prompt_width: int = PROMPT_WIDTH,
    response_width: int = RESPONSE_WIDTH,
    group: int = _GROUP,
    seed: int = 0,
) -> TensorDict:
    """One padded batch [rows], `group` of which share a prompt; the same arguments give the same bits.

    Raises ValueError for a variant that is not in VARIANTS.
    """
    if variant not in VARIANTS:
        raise ValueError(f"make_batch: variant is {variant!r}; expected one of {', '.join(VARIANTS)}.")
    rng = np.random.default_rng(seed)
    shape = Rows.of(rng, lengths_of(rng, rows, prompt_width, response_width, group), group)
    fields = tokens(shape)
    if variant == "multi-turn":
        fields["response_mask"] *= ~_tool_spans(shape)
    fields |= log_probs(shape, fields["response_mask"])
    fields |= rewards(shape, fields["response_mask"])
    if variant == "negative-zeros":
        for name in ("advantages", "returns"):
            fields[name] = np.where(shape.on_response, fields[name], np.copysign(np.float32(0), fields[name][:, :1]))
    if variant == "ppo":
        fields |= critic(shape)
    if variant.startswith("m-rope"):
        fields["position_ids"] = _m_rope(shape, edge=variant == "m-rope-edge")
    if variant == "routed-experts":
        choices = shape.rng.integers(0, _EXPERTS, (int(shape.mask.sum()), _LAYERS, _TOP_K), dtype=np.int16)
        fields["routed_experts"] = padded(choices, shape.mask, 0)
    return as_batch(fields)


def widths(scale: float) -> tuple[int, int]:
    return max(1, round(scale * PROMPT_WIDTH)), max(1, round(scale * RESPONSE_WIDTH))


def lengths_of(
    rng: np.random.Generator, rows: int, prompt_width: int, response_width: int, group: int = _GROUP
) -> Lengths:
    groups = -(-rows // group)
    prompt = np.repeat(log_normal(rng, groups, 0.5, _PROMPT_FILL * prompt_width, prompt_width), group)[:rows]
    mean = _FILL * (prompt_width + response_width) - (prompt.mean() if rows else 0)
    return Lengths(prompt, log_normal(rng, rows, 1.0, mean, response_width), prompt_width, response_width)


def _tool_spans(shape: Rows) -> Array:
    """bool [B, R]: up to four spans of tool output a row; the first and the last token are the model's own."""
    rng, length = shape.rng, shape.response
    rows, width = shape.on_response.shape
    steps = np.zeros((rows, width + 1), np.int8)
    for _ in range(4):
        span = np.minimum(rng.geometric(min(1.0, 8 / width), rows), length // 6)
        start = 1 + (rng.random(rows) * (length - 1 - span)).astype(np.int64)
        used = (span > 0) & (rng.random(rows) < 0.6)
        row = np.flatnonzero(used)
        steps[row, start[row]] += 1
        steps[row, (start + span)[row]] -= 1
    return np.cumsum(steps, axis=1, dtype=np.int8)[:, :width] > 0


def _m_rope(shape: Rows, *, edge: bool) -> Array:
    """Multimodal positions. An image takes the second and third quarter of the prompt: one time step, a grid of rows
    and columns; the text after it goes on behind the larger side of the grid. Processors fill pads with 1; with `edge`
    the pads repeat the nearest real value, and the text row is left out."""
    text = np.clip(np.cumsum(shape.mask, axis=1, dtype=np.int64) - 1, 0, None)
    begin, count = (shape.prompt // 4)[:, None], (shape.prompt // 2)[:, None]
    side = np.maximum(np.sqrt(count).astype(np.int64), 1)
    inside = np.clip(text - begin, 0, count - 1)
    after = text - count + np.maximum(side, -(-count // side))
    image = (text >= begin) & (text < begin + count)
    behind = np.where(text < begin, text, after)
    vision = [np.where(image, begin + part, behind) for part in (np.zeros_like(inside), inside // side, inside % side)]
    if edge:
        return np.stack(vision, axis=1)
    return np.where(shape.mask[:, None], np.stack([text, *vision], axis=1), 1)
