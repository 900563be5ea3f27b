"""Models of transformers that replay would get wrong, refused by name before anything is run.

its kind        encoder and decoder, no model of hidden states                  never
its output      logits that are scaled or capped, a layer that is not one plain weight    no log-probs
its layers      state from token to token, positions that are not taken         not packed
its rows        longer than where rotary frequencies change, places of images   not these rows
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from maskpack.errors import ReplayError

_LAYERS = {"full_attention", "sliding_attention"}
_SCALES = ("final_logit_softcapping", "logits_soft_cap", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""What models do to logits, if it is not 1."""
_PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id", "image_token_index")
"""Ids of tokens in whose places a model puts something else."""
_CHANGING = ("dynamic", "longrope")
"""Kinds of rotary positions whose frequencies depend on the longest row."""
PADDED = "Replay it padded: MASKPACK_PACKED_REPLAY=0."


def check_kind(model: Any, base: Any, output: Any) -> None:
    """Of any model, packed or padded."""
    who = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ReplayError(f"replayable: {who} has an encoder and a decoder; expected a causal model. Use another.")
    if output is not None and base is model:
        raise ReplayError(
            f"replayable: {who} has no model of hidden states within; expected one in "
            f'"{model.base_model_prefix}". Its log-probs have to come from its own forward.'
        )


def check_output(model: Any, config: Any, output: Any) -> None:
    """Of a model that scores tokens: its output layer is a product with one weight, and nothing else."""
    who = type(model).__name__
    scales = [name for name in _SCALES if getattr(config, name, None) not in (None, 1)]
    if scales:
        raise ReplayError(
            f"replayable: {who} scales or caps its logits ({', '.join(scales)}); expected plain logits. Its "
            "log-probs have to come from its own forward."
        )
    if getattr(output, "bias", None) is not None:
        raise ReplayError(
            f"replayable: {who} has an output layer with a bias; expected one weight [V, H]. Its log-probs have to "
            "come from its own forward."
        )


def plain_weight(model: Any, output: Any) -> Tensor:
    """[V, H]: the weight of an output layer that does nothing else. Looked at in every call: adapters come and go."""
    who, layer = type(model).__name__, cast("Any", type(output))
    if isinstance(getattr(output, "weight", None), DTensor):
        raise ReplayError(
            f"replayable: the output layer of {who} is sharded; expected its whole weight after a forward "
            "pass. Leave it to the root of the sharding: fully_shard of the layers, then of the model."
        )
    hooked = [name for name in ("_forward_hooks", "_forward_pre_hooks") if getattr(output, name, None)]
    plain = isinstance(output, nn.Linear) and layer.forward is nn.Linear.forward and "forward" not in vars(output)
    if not plain or hooked:
        raise ReplayError(
            f"replayable: the output layer of {who} is a {layer.__module__}.{layer.__name__}, or has hooks; expected "
            "torch.nn.Linear, whose weight says all. Merge adapters of the output layer, or leave it without one."
        )
    return output.weight


def check_layers(model: Any, base: Any, config: Any) -> None:
    """Of a model that is run packed."""
    who = type(model).__name__
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYERS)
    if kinds:
        raise ReplayError(
            f"replayable: {who} has layers of kind {', '.join(kinds)}; expected full or sliding attention. Such layers "
            f"carry tokens of one row into the next. {PADDED}"
        )
    if "position_ids" not in inspect.signature(base.forward).parameters:
        raise ReplayError(
            f"replayable: {type(base).__name__} takes no position_ids; expected them, row by row. {PADDED}"
        )


def check_rows(model: Any, config: Any, ids: Tensor, longest: int) -> None:
    """Of the rows of a call. Waits for a GPU only where the model has places for images."""
    who = type(model).__name__
    for kind, limit in _changes(config):
        if longest > limit:
            raise ReplayError(
                f"replayable: {who} has rotary positions of kind {kind}, which change for all rows where one is longer "
                f"than {limit} tokens; a row, or the tail of multiple_of, has {longest}. Keep all within {limit}."
            )
    places: set[Any] = {getattr(part, name, None) for part in (model.config, config) for name in _PLACEHOLDERS} - {None}
    if places and bool(torch.isin(ids, torch.tensor(sorted(places), device=ids.device)).any()):
        raise ReplayError(
            f"replayable: input_ids hold places of images, video or audio of {who} (ids {sorted(places)}); expected "
            "text alone: replay passes nothing else to the model. Its log-probs have to come from its own forward."
        )


def _changes(config: Any) -> Iterator[tuple[str, int]]:
    """Kinds of rotary positions that depend on the longest row, and the tokens up to which they do not."""
    given = cast("dict[str, Any]", getattr(config, "rope_parameters", None) or {})
    within = [cast("dict[str, Any]", part) for part in given.values() if isinstance(part, dict)]
    for part in (given, *within):
        if part.get("rope_type") in _CHANGING:
            first = "original_max_position_embeddings"
            limit = part.get(first) or getattr(config, first, None) or config.max_position_embeddings
            yield part["rope_type"], int(limit)
