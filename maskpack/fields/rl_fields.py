"""RL_FIELDS: the registry of PPO, GRPO and DAPO batches."""

from __future__ import annotations

from typing import Any

from maskpack.core.keys import Key
from maskpack.core.pads import EDGE, PAD_TOKEN_ID, PER_ROW, ZERO, PadValue
from maskpack.fields.registry import MaskAxis, MaskNestingRegistry, MaskNestingSpec

_SPLIT: dict[str, Any] = {
    "head": ("prompts", "max_prompt_length"),
    "tail": ("responses", "response_mask", "max_response_length"),
}
_RESPONSE_OR_SEQUENCE: list[Key] = ["response", "sequence"]
WHITENED: list[PadValue] = [ZERO, PER_ROW]
"""Also the pads of `masked_whiten(x, mask)`: one constant in each batch."""


def _field(mask: Key | list[Key], pad: PadValue | list[PadValue] = 0, **more: Any) -> MaskNestingSpec:
    return MaskNestingSpec(mask, pad, **more)


RL_FIELDS = MaskNestingRegistry(
    axes={
        "sequence": (MaskAxis("attention_mask"), MaskAxis("input_ids", form="jagged")),
        "prompt": (MaskAxis("attention_mask", part="head", **_SPLIT), MaskAxis("prompts", form="jagged")),
        "response": (
            MaskAxis("attention_mask", part="tail", **_SPLIT),
            MaskAxis("responses", form="jagged"),
            MaskAxis("response_mask", form="jagged"),
            MaskAxis("response_mask", part="prefix"),
        ),
    },
    fields={
        "prompts": _field("prompt", PAD_TOKEN_ID, hints=("dictionary",)),
        "responses": _field("response", PAD_TOKEN_ID),
        "input_ids": _field("sequence", PAD_TOKEN_ID, hints=("concat:prompts,responses",)),
        "attention_mask": _field("sequence", hints=("rle",)),
        "position_ids": _field("sequence", [EDGE, 0, 1], ragged_dim=-1, hints=("columns", "delta")),
        "response_mask": _field("response", hints=("rle",)),
        "loss_mask": _field(_RESPONSE_OR_SEQUENCE, hints=("rle",)),
        **{
            name: _field(_RESPONSE_OR_SEQUENCE, ZERO, hints=hints)
            for name, hints in {
                "rollout_log_probs": ("near:old_log_probs",),
                "old_log_probs": (),
                "ref_log_prob": ("near:old_log_probs",),
                "entropys": (),
                "sum_pi_squared": (),
                "token_level_scores": (),
                "rm_scores": (),
                "rollout_is_weights": (),
            }.items()
        },
        "advantages": _field(_RESPONSE_OR_SEQUENCE, WHITENED, hints=("rle",)),
        **{name: _field(_RESPONSE_OR_SEQUENCE, WHITENED) for name in ("values", "returns", "token_level_rewards")},
        "routed_experts": _field("sequence", [0, -1], hints=("columns",)),
        "teacher_ids": _field("sequence", PAD_TOKEN_ID),
        "teacher_logprobs": _field("sequence", ZERO),
        "reward_baselines": MaskNestingSpec(None),
        "dummy_tensor": MaskNestingSpec(None),
        "multi_modal_inputs": MaskNestingSpec(None),
        "global_token_num": MaskNestingSpec(None),
    },
)
"""The fields of PPO, GRPO and DAPO batches; docs/fields.md has the table."""
