"""The registries of other trainers, by the names that their batches have.

    areal, nemo_rl, prime_rl     rows of S tokens, and a loss mask with holes
    areal_advantages             the same, the mask moved one token to the left
    trl                          prompts and completions side by side, a mask for each
    skyrl                        one block, padded on the left; the response is its last R columns
    openrlhf                     [B, S], and [B, S - 1] for what is predicted
    slime                        jagged columns, or rows padded on the right with their lengths
    verl                         RL_FIELDS and more fields

The mask of a field is where its values are. These may be more tokens than those of the loss: engines return the
log-probs of every token, and estimators fill whole rows.
"""

from __future__ import annotations

from dataclasses import replace

from maskpack.core.keys import Key
from maskpack.core.pads import PAD_TOKEN_ID, PER_ROW, ZERO, PadValue
from maskpack.fields.registry import MaskAxis, MaskNestingRegistry, MaskNestingSpec
from maskpack.fields.rl_fields import RL_FIELDS, WHITENED

_MASK = ("rle",)
_ROWS: dict[Key, MaskNestingSpec] = {
    **{name: RL_FIELDS[name] for name in ("attention_mask", "position_ids", "routed_experts")},
    "input_ids": MaskNestingSpec("sequence", PAD_TOKEN_ID),
}
"""The fields of rows of S tokens, under the names that most trainers have for them."""

_SCORED = MaskNestingSpec("response", hints=_MASK)
"""A loss mask [B, S]: on the axis that it gives, so that a packed batch has this axis for replay."""


def _each(names: str, mask: Key | list[Key], pad: PadValue | list[PadValue], *hints: str) -> dict[Key, MaskNestingSpec]:
    return dict.fromkeys(names.split(), MaskNestingSpec(mask, pad, hints=hints))


_ON_RESPONSE: list[Key] = ["response", "sequence"]
verl = RL_FIELDS | {
    **_each("log_probs entropy distillation_losses student_mass teacher_mass", _ON_RESPONSE, ZERO),
    **_each("prompt_embeds prompt_embeds_mask", "prompt_embeds_mask", 0),
    **_each("negative_prompt_embeds negative_prompt_embeds_mask", "negative_prompt_embeds_mask", 0),
}
"""`RL_FIELDS`, and further fields of batches and results of verl's trainers and engines."""

trl = MaskNestingRegistry(
    axes={
        "prompt": (MaskAxis("prompt_mask", padded="left"),),
        "sequence": (MaskAxis("attention_mask"),),
        "response": (MaskAxis("completion_mask"),),
    },
    fields={
        **_ROWS,
        "prompt_ids": MaskNestingSpec("prompt", PAD_TOKEN_ID, hints=("dictionary",)),
        "prompt_mask": MaskNestingSpec("prompt", hints=_MASK),
        "completion_ids": MaskNestingSpec("response", PAD_TOKEN_ID),
        "completion_mask": MaskNestingSpec("response", hints=_MASK),
        "tool_mask": MaskNestingSpec("response", [1, PER_ROW], hints=_MASK),
        "old_per_token_logps": MaskNestingSpec("response", ZERO),
        **_each("ref_per_token_logps sampling_per_token_logps", "response", ZERO, "near:old_per_token_logps"),
        # [B, 1] for whole sequences: its own mask, so that a row with 0.0 has no token
        "importance_sampling_ratio": MaskNestingSpec(["response", "importance_sampling_ratio"], PER_ROW),
        "old_log_probs": MaskNestingSpec("sequence", ZERO),
    },
)
"""The batches of TRL's GRPOTrainer and RLOOTrainer, and samples of its AsyncGRPOTrainer that are padded with an
`attention_mask`."""

nemo_rl = MaskNestingRegistry(
    axes={
        "sequence": (MaskAxis("input_lengths", form="lengths", head=("input_ids", "token_mask")),),
        "response": (MaskAxis("token_mask"),),
    },
    fields={
        **_ROWS,
        "token_mask": _SCORED,
        **_each("invalid_tool_call_mask malformed_thinking_mask", "sequence", 0, *_MASK),
        **_each("prev_logprobs teacher_reference_logprobs", "sequence", ZERO),
        **_each("reference_policy_logprobs generation_logprobs", "sequence", ZERO, "near:prev_logprobs"),
        **_each("advantages returns values", "sequence", WHITENED, "rle"),
        **_each("teacher_topk_logits teacher_topk_indices", "sequence", ZERO),
        **_each("generation_topk_ids generation_topk_logprobs", "sequence", ZERO),
        **_each("teacher_full_hidden_states teacher_full_logits", "sequence", ZERO),
        "prompt_ids_for_adv": MaskNestingSpec(None),
    },
)
"""The batches of NeMo-RL. Rows are as long as `input_lengths` says."""

skyrl = MaskNestingRegistry(
    axes={
        "sequence": (MaskAxis("attention_mask", padded="left"),),
        "response": (MaskAxis("response_mask", padded="left"),),
        "columns": (MaskAxis("attention_mask", part="tail", tail=("response_mask", "loss_mask")),),
    },
    fields={
        "sequences": MaskNestingSpec("sequence", PAD_TOKEN_ID),
        "attention_mask": RL_FIELDS["attention_mask"],
        "rollout_expert_indices": RL_FIELDS["routed_experts"],
        **_each("response_mask loss_mask", "response", 0, *_MASK),
        **_each("rewards rollout_logprobs", "response", ZERO),
        # of a short response, the R columns begin with tokens of the prompt, which models score, too
        **_each("action_log_probs values", "columns", ZERO),
        **_each("base_action_log_probs", "columns", ZERO, "near:action_log_probs"),
        **_each("advantages returns kl", "columns", WHITENED, "rle"),
    },
)
"""The TrainingInputBatch of SkyRL."""

openrlhf = MaskNestingRegistry(
    axes={
        "sequence": (MaskAxis("attention_mask"),),
        "response": (MaskAxis("action_mask"),),
        "predicted": (MaskAxis("attention_mask", part="tail", tail=("action_mask",)),),
    },
    fields={
        "sequences": MaskNestingSpec("sequence", [PAD_TOKEN_ID, 0]),
        "attention_mask": RL_FIELDS["attention_mask"],
        "action_mask": MaskNestingSpec("response", hints=_MASK),
        **_each("action_log_probs values kl", "response", ZERO),
        **_each("base_action_log_probs rollout_log_probs", "response", ZERO, "near:action_log_probs"),
        # returns sum up rewards from the end of a row to its beginning
        **_each("advantages returns", "predicted", WHITENED, "rle"),
    },
)
"""The step fields of OpenRLHF's Experience: column t of [B, S - 1] is for token t + 1."""

areal = MaskNestingRegistry(
    axes={"sequence": (MaskAxis("attention_mask"),), "response": (MaskAxis("loss_mask"),)},
    fields={
        **_ROWS,
        "input_ids": MaskNestingSpec("sequence", 0),
        "loss_mask": _SCORED,
        "versions": MaskNestingSpec("sequence", hints=("rle",)),
        **_each("logprobs prox_logp teacher_logp values", "sequence", ZERO),
        **_each("ref_logp", "sequence", ZERO, "near:logprobs"),
        **_each("advantages returns kl_rewards tot_rewards", "sequence", WHITENED, "rle"),
    },
)
"""The trajectories of AReaL before `compute_advantages`."""

areal_advantages = areal | MaskNestingRegistry({}, {"response": (MaskAxis("loss_mask", shift=-1),)})
"""The trajectories of AReaL after `compute_advantages`, which moves `loss_mask` and `logprobs` one token to the left:
replay scores the tokens that the mask was for before. Its log-probs have the columns of the moved fields."""

prime_rl = MaskNestingRegistry(
    axes={
        "sequence": (MaskAxis("attention_mask"), MaskAxis("cu_seqlens", form="cu_seqlens")),
        "response": (MaskAxis("loss_mask"), MaskAxis("mask")),
        "rows": (MaskAxis("cu_seqlens", form="cu_seqlens"),),
    },
    fields={
        **_ROWS,
        "token_ids": MaskNestingSpec("sequence", PAD_TOKEN_ID),
        **_each("loss_mask mask", ["rows", "response"], 0, *_MASK),
        "mm_token_type_ids": MaskNestingSpec("sequence", hints=_MASK),
        **_each("logprobs inference_logprobs ref_logprobs teacher_logprobs", "sequence", ZERO),
        **_each("advantages rewards rl_weights ce_weights ref_kl_weights", "sequence", WHITENED, "rle"),
        "temperatures": MaskNestingSpec("sequence", [ZERO, 1], hints=("rle",)),
        "sampling_mask": MaskNestingSpec("sequence", -1),
    },
)
"""The samples of prime-rl, padded with an `attention_mask`, and its micro-batches as [T] with `cu_seqlens`."""

slime = MaskNestingRegistry(
    axes={
        "sequence": (MaskAxis("total_lengths", form="lengths", head=("tokens",)), MaskAxis("tokens", form="jagged")),
        "response": (
            MaskAxis("response_lengths", form="lengths", head=("loss_masks", "rollout_log_probs")),
            MaskAxis("loss_masks", form="jagged"),
        ),
        "experts": (MaskAxis("rollout_routed_experts", form="jagged"),),  # of all tokens but the last
    },
    fields={
        "tokens": MaskNestingSpec("sequence", PAD_TOKEN_ID),
        "loss_masks": MaskNestingSpec("response", hints=_MASK),
        **_each("log_probs values entropy", "response", ZERO),
        **_each("ref_log_probs rollout_log_probs teacher_log_probs", "response", ZERO, "near:log_probs"),
        **_each("advantages returns kl", "response", WHITENED, "rle"),
        "rollout_routed_experts": replace(RL_FIELDS["routed_experts"], mask=["sequence", "experts"]),
    },
)
"""The rollout data of slime."""

PRESETS: dict[str, MaskNestingRegistry] = {
    "verl": verl,
    "trl": trl,
    "nemo_rl": nemo_rl,
    "skyrl": skyrl,
    "openrlhf": openrlhf,
    "areal": areal,
    "areal_advantages": areal_advantages,
    "slime": slime,
    "prime_rl": prime_rl,
}
"""The presets by their names in `maskpack.fields`."""
