"""Refusals: what replay of a transformers model does not run, why, and what to do instead. One row each.

    raise Refusal.WINDOW("Qwen2MoeAttention", window=5, longest=15)
    Qwen2MoeAttention: the layer has a window of 5 tokens that ..., and a row has 15; expected sliding_window. Replay it

docs/models.md has them as a table, which `table` makes.
"""

from __future__ import annotations

import re
import sys
from enum import Enum
from typing import Any

import torch

from maskpack.core.tensors import out_of_memory
from maskpack.errors import ReplayError

PADDED = "padded: MASKPACK_PACKED_REPLAY=0"
_PADDED = f"Replay it {PADDED}"
_OWN = "Take its log-probs from its own forward"
_FORWARD = "the base model, then the output layer, then a scale or cap"
_NO_ROUTES = "Leave routed_experts out"
_LEAK = "Such layers carry tokens of one row into the next"


class Refusal(Enum):
    """What is refused, what is expected and thereby why, and what to do instead. Names in braces are given by the
    caller; `model`, `layer` and `part` are names of classes."""

    def __init__(self, refused: str, expected: str, instead: str) -> None:
        self.refused, self.expected, self.instead = refused, expected, instead

    def __call__(self, call: str = "replayable", /, **given: Any) -> ReplayError:
        """The error to raise."""
        text = f"{self.refused}; expected {self.expected}. {self.instead}."
        return ReplayError(f"{call}: {text.format_map(given)}")

    # ---------------------------------------------------------------- the kind of the model

    NO_MODEL = (
        "got {seen}",
        "a model of transformers",
        "Pass the model itself; of a policy with a value head, the model within, and the head as heads= of "
        "response_outputs. For PEFT with adapters in its layers, pass get_base_model(). Shard with fully_shard, "
        "which does not wrap the model. Instead of a DistributedDataParallel, pass the model that it wraps, and "
        "average the gradients yourself, because it averages only in its own forward and backward pass",
    )
    ENCODER = "{model} has an encoder and a decoder", "a causal model", "Use another"
    NO_BASE = "{model} has no model of hidden states within", 'one in "{prefix}"', _OWN
    NO_POSITIONS = "{model} takes no position_ids", "them, row by row", _PADDED
    META = "the weights of {model} are on the meta device", "weights", "Load the model first"
    DROPOUT = (
        "{model} has dropout ({names}) and is in train mode",
        "none: rows that share a token would share its random numbers, and each packing would draw others",
        "Set it to 0, or call eval()",
    )
    ROPE = (
        "{model} has rotary positions of kind {kind}, which change for all rows where one is longer than {limit} "
        "tokens; a row, or the tail of multiple_of, has {longest}",
        "shorter rows",
        "Keep all within {limit}",
    )

    # ---------------------------------------------------------------- what layers receive

    NOT_PASSED = "the model does not pass {what} on to its {parts}", "{keyword}", "Replay it {without}"
    NOT_RECEIVED = (
        "the {part} did not receive {keywords}",
        "the bounds of packed rows",
        "Call response_outputs, or give the model its own forward back before it runs on padded "
        "rows or generates: replayable(model).release()",
    )
    ATTENTION = (
        "packed attention with {what}",
        "causal attention of one batch row of packed rows and nothing else",
        f"Pass no mask, set attention_dropout to 0, or replay {PADDED}",
    )
    WINDOW = (
        "the layer has a window of {window} tokens that it does not pass to its attention, and a row has {longest}",
        "sliding_window",
        _PADDED,
    )
    KEYS = "{keys} keys for {queries} queries", "as many: a cache was in use", "Pass use_cache=False"
    MASK = (
        "packed attention received an attention_mask",
        "bounds only",
        "Pass none, or give the model its own attention back for padded rows: replayable(model).release()",
    )
    RELEASED = (
        "packed rows reached the model's own {part}",
        "that of maskpack",
        "Run the backward pass before release(), and before MASKPACK_PACKED_REPLAY=0",
    )

    # ---------------------------------------------------------------- layers that carry state

    LAYERS = "{model} has layers of kind {kinds}", "full or sliding attention", f"{_LEAK}. {_PADDED}"
    NO_MIXER = (
        "{model} has layers of kind {kind}, but layer {number} has no mixer",
        "a part within it that takes hidden states and one of {names}, and does not attend",
        f"{_LEAK}. {_PADDED}",
    )
    TWO_MIXERS = (
        "{part} of {model} takes a cache, and so does a part within it",
        "only the innermost part to carry state, because that part runs on rows",
        _PADDED,
    )
    SHARDED_PART = (
        "a part within {part} is sharded by itself ({kind})",
        "its layer to be: ranks call such parts as often as their rows have groups, and would wait for each other",
        "Shard whole layers",
    )
    ATTENDED = (
        "{model} attended {seen} times in {layers} layers",
        "every layer to attend through transformers' attention interface",
        _PADDED,
    )
    MIXED = "{model} ran {seen} of {count} parts that carry state", "all to run", _PADDED
    MIXER_INPUT = "{name} is {seen}", "hidden states [1, {tokens}, H] of packed rows", _PADDED
    MIXER_GIVEN = (
        "a layer that carries state got {names}",
        "packed rows alone, without a mask or a cache",
        f"Pass use_cache=False and no mask. {_PADDED}",
    )
    MIXER_ENTRY = (
        "{name} is {seen}",
        "entries of {tokens} tokens, [1, T, ...] or [n, 1, T, ...], which can be cut into rows",
        _PADDED,
    )
    MIXER_OUTPUT = "made {seen} of hidden states {groups}", "outputs of as many rows and tokens", _PADDED
    REPLACED = (
        "{part} has a replaced forward, or is already compiled",
        "the forward of its class",
        "{remedy}, or remove what replaced it, such as hooks of accelerate",
    )

    # ---------------------------------------------------------------- the output layer

    NO_HEAD = (
        "{model} has no output layer that scores tokens",
        "one for log-probs",
        "Use response_values, or load it as a causal language model",
    )
    HEAD = (
        "the output layer of {model} is a {kind}, or has hooks",
        "torch.nn.Linear, whose weight and bias say all, the same product in float32, or LoRA of PEFT around it",
        "Merge other adapters of the output layer, or leave it without one",
    )
    LORA = (
        "the output layer of {model} has LoRA with {seen}",
        "lora_B(lora_A(x)) * scaling beside torch.nn.Linear",
        "{remedy}",
    )
    SHARDED_HEAD = (
        "the output layer of {model} is sharded",
        "its whole weight after a forward pass",
        "Shard the model too, as the root: fully_shard of its parts, then of the model",
    )
    FORWARD = "the forward of {model} {does}", _FORWARD, _OWN
    CURVE = (
        "the forward of {model} makes {seen} of the logits {given}",
        "a positive scale, and softcap * tanh(x / softcap) after it",
        _OWN,
    )

    # ---------------------------------------------------------------- images and videos

    PLACEHOLDERS = (
        "input_ids contain placeholders of images, video or audio of {model} (ids {ids})",
        "{expected}",
        "Give them in multi_modal_inputs. Of audio, take the log-probs from its own forward",
    )
    TEXT_ALONE = (
        "the batch has images or videos ({names}), and {model} takes text alone",
        "a model that takes them",
        "Drop these fields, or replay another model",
    )
    MEDIA = (
        "the batch has {names} of images or videos, which {model} does not take by name",
        "{known}",
        "Drop what the model does not need",
    )
    IN_CONTEXT = "{what} came with context_group", "text alone and layers that attend alone", "Leave context_group out"
    OWN_MASKS = (
        "{model} makes its own masks, in which tokens of an image may attend to later tokens",
        "causal attention in rows with images",
        f"Replay its rows of text alone. {_OWN}",
    )
    M_ROPE = (
        "{model} has position ids of several sections (M-RoPE), and rows with images or videos have one number a token",
        "position_ids [B, 3, S] or [B, 4, S] in the batch, as get_rope_index of the model makes them",
        "Keep them in the batch",
    )
    PATCHES = "row {row} has {seen} patches in {pixels}, and {grid} says {said}", "as many", "Fix the producer"
    PLACES = (
        "row {row} has {seen} {kind} tokens in its ids, and media of {entries} entries ({pixels})",
        "{wanted} tokens for {model}",
        "Media have to stay with their rows, and ids have to keep all places: fix the producer",
    )
    SOME_PLACES = (
        "row {row} shares some places of its images or videos with another row, but not all, for {model}",
        "all or none of rows with equal media",
        "Leave share_prefixes out",
    )

    # ---------------------------------------------------------------- experts of the batch

    ROUTERS = (
        "routed_experts with {model}, in whose layers {seen} choose experts by torch.topk",
        "one router in a layer",
        _NO_ROUTES,
    )
    ROUTES = (
        'field "routed_experts" has {seen} layers',
        "those of {model}: {layers}, or the {routers} that have a router",
        "Fix the producer",
    )
    ROUTED = (
        "{seen} routers of {model} took the experts of the batch",
        "{count}",
        f"The model does not pass them on to its layers. {_NO_ROUTES}",
    )
    TOPK = (
        "{taken} calls of topk chose experts, of {seen}",
        "one, of k = {experts} experts for {tokens} tokens",
        _NO_ROUTES,
    )
    EXPERT = (
        'field "routed_experts" has the expert {highest}',
        "ids below {experts}, its experts",
        "Check that the field is of this model",
    )
    MASKED_SCORES = (
        "the router masked scores of experts that the batch has chosen",
        "a mask that replay can see, by masked_fill",
        _NO_ROUTES,
    )

    # ---------------------------------------------------------------- parts by own kernels

    NO_PARTS = (
        "fused=True, but {model} has no norm, MLP or rotation that has a known name, and code of the package of the "
        "model",
        "classes that end in Norm or MLP, or attention that calls apply_rotary_pos_emb",
        "Leave fused out",
    )

    # ---------------------------------------------------------------- the same bits in every packing

    VARIANT = (
        "invariant=True, but bits of {part} of {model} depend on the packing: {seen} of {count} {numbers} of a row "
        "differ from those of this row alone",
        "the same bits in every packing",
        "{remedy}, or leave invariant out",
    )
    INVARIANT_SIZE = (
        "invariant=True, but bits of {part} of {model} differ between {tokens} tokens and {fewer} of them",
        "the same product of the same token",
        "Give micro-batches of other sizes (multiple_of), or leave invariant out",
    )
    INVARIANT_CONTEXT = (
        "invariant=True with context_group",
        "all tokens of a row on one rank",
        "Leave one of them out",
    )
    INVARIANT_ROWS = (
        "invariant=True, but it runs by groups of padded rows ({way}), whose bits depend on their lengths",
        "a layer whose kernels keep rows apart",
        "Install its kernels, or leave invariant out",
    )
    INVARIANT_PADDED = "invariant=True with MASKPACK_PACKED_REPLAY=0", "packed rows", "Unset it, or leave invariant out"

    # ---------------------------------------------------------------- ranks

    NOT_THE_ROOT = (
        "{model} lies inside a module that FSDP shards",
        "the root of the sharding, which gathers the weights",
        "Shard with fully_shard, the layers and then the model, and pass the model",
    )
    UNKNOWN_HEAD = (
        "{model} is sharded, with a head that replay does not know",
        "its base model as the root of the sharding",
        "Shard and replay the base model, and apply its head separately",
    )
    SOME_MEDIA = (
        "{model} is sharded, and some ranks have rows with images or videos, others text alone{this}",
        "the same on all ranks, which run the vision tower together",
        "Give each micro-batch such a row",
    )
    OTHER_RANK = (
        "another rank of the context group cannot run these rows",
        "all ranks to",
        "Look for the error there",
    )

    # ---------------------------------------------------------------- the self-check

    OFF = (
        "{what} of {model} are off by {off} from its own forward of the same row",
        "at most {most}",
        "Replay of this model is incorrect, or dropout is on. {remedy}",
    )
    GRADIENTS_OFF = (
        "gradients of packed attention in {model} are off by {off} of their norm from those of the same row alone",
        "at most {most}",
        f"Its attention kernel is incorrect for these tensors: use another one. {_PADDED}",
    )
    CAP = (
        "{model} has a soft cap of {cap:g} in its attention. Packed rows apply it; padded rows do not, because "
        'attn_implementation="{own}" ignores it',
        "the same of both",
        "Packed rows are right: the cap is a part of the model. Load the model with "
        'attn_implementation="eager"; if it never runs padded, pass self_check=False',
    )


def table() -> str:
    """All refusals in Markdown."""
    lines = ["| refused | expected | instead |", "|---|---|---|"]
    for one in Refusal:
        cells = (re.sub(r"{(\w+)[^}]*}", r"*\1*", text) for text in (one.refused, one.expected, one.instead))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def may_refuse(error: Exception, *more: type[Exception]) -> bool:
    """Whether code of a model or a kernel may raise this for what it does not support; `more` are further kinds. Memory
    that ran out and a device that failed decide nothing."""
    triton = sys.modules.get("triton.errors")
    kinds = ImportError, AssertionError, RuntimeError, TypeError, ValueError, ReplayError, *more
    known = isinstance(error, kinds) or (triton is not None and isinstance(error, triton.TritonError))
    return known and not isinstance(error, torch.AcceleratorError) and out_of_memory(error) is None
