"""transformers: causal language models that replay packed rows.

    model -> replayable(model): its layers are looked at, its attention becomes maskpack's -> response_log_probs

The attention takes bounds from `cu_seq_lens_q`, which travels through the model as a keyword argument; without it, it
raises. So does everything that it would have to guess: a mask, a cache, dropout, a feature that it does not know.
"""

from __future__ import annotations

import inspect
import os
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import AttentionInterface, PreTrainedModel

from maskpack.adapters.transformers import passes
from maskpack.adapters.transformers.limits import (
    PADDED,
    check_kind,
    check_layers,
    check_output,
    check_rows,
    plain_weight,
)
from maskpack.adapters.transformers.passes import NAME
from maskpack.adapters.transformers.shards import check_root, device_of, groups_of, most_of
from maskpack.core.arguments import said
from maskpack.errors import ReplayError
from maskpack.ops import packed_log_probs
from maskpack.ops.attention import packed_attention
from maskpack.replay.inputs import PackedInputs

_KNOWN = ("cu_seq_lens_q", "cu_seq_lens_k", "position_ids", "cache_position")
"""Tensors that an attention may be given; others change what it should compute (sinks, biases, sparse indices)."""
_TRUST = {torch.float32: 1e-4, torch.float64: 1e-8, torch.bfloat16: 0.25, torch.float16: 0.05}
"""How far the log-prob of a token may be off its dense forward, by dtype: more is another model, not other rounding.
Hidden states, in units of their root mean square, are as exact."""
_COMPARED = 512
"""Tokens at either end of a row whose log-probs are compared. The logits of all tokens of a long row may fill a GPU."""


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of a layer: query [1, H, T, D], key and value [1, KV, T, D] -> [1, T, H, D]."""
    bounds, longest = kwargs.get("cu_seq_lens_q"), kwargs.get("max_length_q")
    who = type(module).__name__
    running = passes.current()
    if running is not None and not running.own and (not isinstance(bounds, Tensor) or longest is None):
        raise ReplayError(f"{who}: the model does not pass the bounds of rows on to its attention. {PADDED}")
    if not isinstance(bounds, Tensor) or longest is None:
        raise ReplayError(
            f"{who}: the attention did not receive cu_seq_lens_q and max_length_q; expected the bounds of packed rows. "
            "Call response_log_probs or response_values, or give the model its own attention back before it runs on "
            "padded rows or generates: replayable(model).release()."
        )
    causal = getattr(module, "is_causal", True) if kwargs.get("is_causal") is None else kwargs["is_causal"]
    odd = sorted(name for name, given in kwargs.items() if isinstance(given, Tensor) and name not in _KNOWN)
    odd += ["a mask"] if attention_mask is not None else []
    odd += [f"dropout {dropout}"] if dropout else []
    odd += ["attention that is not causal"] if not causal else []
    odd += [f"{query.shape[0]} batch rows"] if query.shape[0] != 1 else []
    if odd:
        raise ReplayError(
            f"{who}: packed attention with {', '.join(odd)}; expected causal attention of one batch row of packed rows "
            "and nothing else. Pass no mask, set attention_dropout to 0, or replay padded: MASKPACK_PACKED_REPLAY=0."
        )
    hidden_window = _window(module) if sliding_window is None else None
    if hidden_window is not None and longest > hidden_window:
        raise ReplayError(
            f"{who}: the layer has a window of {hidden_window} tokens that it does not tell its attention, and a row "
            f"has {longest}; expected sliding_window. {PADDED}"
        )
    if value.shape[-1] != query.shape[-1]:
        raise ReplayError(
            f"{who}: values have heads of {value.shape[-1]}, queries of {query.shape[-1]}; expected one size. {PADDED}"
        )
    if key.shape[2] != query.shape[2]:
        raise ReplayError(
            f"{who}: {key.shape[2]} keys for {query.shape[2]} queries; expected as many: a cache was in use. Pass "
            "use_cache=False."
        )
    if running is not None:
        running.attended += 1
    dtype = value.dtype  # rotary tables widen queries and keys under autocast
    out = packed_attention(
        query[0].transpose(0, 1).to(dtype),
        key[0].transpose(0, 1).to(dtype),
        value[0].transpose(0, 1),
        bounds,
        int(longest),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
    )
    return out[None].contiguous(), None  # some models take a view of it


AttentionInterface.register(NAME, attention)


def _only_bounds(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before a model with this attention runs: a 2-D mask would be dropped on the way to the layers, without a word."""
    config: Any = module.config
    if config.get_text_config()._attn_implementation != NAME:
        return
    given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    given = {**given, **given.get("kwargs", {})}
    if given.get("attention_mask") is not None:
        raise ReplayError(
            f"{type(module).__name__}: an attention_mask came with packed attention; expected bounds alone. Pass none, "
            "or give the model its own attention back for padded rows: replayable(model).release()."
        )


def _own_without_bounds(module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before an attention layer runs: the model's own would not know what bounds are. Layers that run again in a
    backward pass, after the model was given its own attention back, come here."""
    config: Any = getattr(module, "config", None)
    if "cu_seq_lens_q" in kwargs and getattr(config, "_attn_implementation", NAME) != NAME:
        raise ReplayError(
            f"{type(module).__name__}: packed rows came to the model's own attention; expected maskpack's. Run the "
            "backward pass before release(), and before MASKPACK_PACKED_REPLAY=0."
        )


def _window(module: nn.Module) -> int | None:
    """The sliding window of an attention layer as its configuration says it: some models only put it into masks."""
    config: Any = getattr(module, "config", None)
    kinds = list(getattr(config, "layer_types", None) or ["sliding_attention"])
    index = getattr(module, "layer_idx", None)
    if "sliding_attention" not in (kinds if index is None or len(kinds) == 1 else kinds[index : index + 1]):
        return None
    return getattr(config, "sliding_window", None) or None


def replayable(model: PreTrainedModel) -> Replayable:
    """What `response_log_probs` and `response_values` take. The model's own attention becomes maskpack's, also in
    backward passes that run its layers again (gradient checkpointing), until `release()`; the next replay takes it
    again.

    Raises:
        ReplayError: a model that replay would get wrong, by name; see `transformers_limits`.

    A model without an output layer (AutoModel, AutoModelForTokenClassification) is one for `response_values`.
    """
    return Replayable(model)


class Replayable:
    """What `response_log_probs` and `response_values` take: a model of transformers, which stays as it is in `model`.

    Attributes:
        model: for its parameters, its modes, and after `release()` for padded rows and generation.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        model = getattr(model, "_orig_mod", model)  # of torch.compile
        if not isinstance(model, PreTrainedModel):
            raise ReplayError(
                f"replayable: got {said(model)}; expected a model of transformers. Pass the model itself; "
                "of PEFT with adapters in its layers, get_base_model(); shard with fully_shard, which wraps nothing."
            )
        self.model = model
        self._base: Any = getattr(model, model.base_model_prefix, None) or model.get_decoder()
        self._output: Any = cast("Any", model).get_output_embeddings()
        self._config: Any = model.config.get_text_config()
        self._trusted: set[tuple[torch.dtype, bool, bool]] = set()
        check_kind(model, self._base, self._output)
        if self._output is not None:
            check_output(model, self._config, self._output)
        if os.environ.get("MASKPACK_PACKED_REPLAY") != "0":
            check_layers(model, self._base, self._config)
        check_root(model)
        self._groups = groups_of(model)
        self._watch()
        passes.take(self.model, self._config)

    def _watch(self) -> None:
        """Two checks that stay with the model."""
        if _only_bounds not in self._base._forward_pre_hooks.values():
            self._base.register_forward_pre_hook(_only_bounds, with_kwargs=True)
        for layer in self._base.modules():
            watched = _own_without_bounds in layer._forward_pre_hooks.values()
            if "Attention" in type(layer).__name__ and not watched:
                layer.register_forward_pre_hook(_own_without_bounds, with_kwargs=True)

    def release(self) -> PreTrainedModel:
        """Gives the model its own attention back, for padded rows and generation; the next replay takes it again. Not
        between a forward pass and its backward pass, which may run layers again (gradient checkpointing), and not while
        another thread replays the model."""
        passes.release(self.model, self._config)
        return self.model

    # ---------------------------------------------------------------- what replay asks for

    @property
    def device(self) -> torch.device:
        """Where its first layer, which takes the ids, runs."""
        weight = next(self.model.get_input_embeddings().parameters())
        if weight.is_meta:
            raise ReplayError(
                f"replayable: the weights of {type(self.model).__name__} are on the meta device; expected weights. "
                "Load the model first."
            )
        return device_of(weight)

    @property
    def head(self) -> Tensor:
        """[V, H]: the weight of the output layer."""
        if self._output is None:
            raise ReplayError(
                f"replayable: {type(self.model).__name__} has no output layer that scores tokens; expected one for "
                "log-probs. Ask it for response_values, or load it as a causal language model."
            )
        return plain_weight(self.model, self._output)

    def hidden(self, inputs: PackedInputs) -> Tensor:
        """[T, H]: the last hidden states of packed rows."""
        check_layers(self.model, self._base, self._config)
        check_rows(self.model, self._config, inputs.input_ids, inputs.max_seqlen)
        self._find_ranks()
        passes.take(self.model, self._config)
        with passes.Pass().running() as packed:
            states = self._states(
                input_ids=inputs.input_ids,
                position_ids=inputs.position_ids,
                cu_seq_lens_q=inputs.cu_seqlens,
                cu_seq_lens_k=inputs.cu_seqlens,
                max_length_q=inputs.max_seqlen,
                max_length_k=inputs.max_seqlen,
            )
        if packed.attended < self._config.num_hidden_layers:
            raise ReplayError(
                f"replayable: {type(self.model).__name__} attended {packed.attended} times in "
                f"{self._config.num_hidden_layers} layers; expected every layer to attend through transformers' "
                f"attention interface. {PADDED}"
            )
        return states[0]

    def dense_hidden(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        """[B, S, H]: those of padded rows, by the model's own attention."""
        check_rows(self.model, self._config, input_ids, input_ids.shape[1])
        self._find_ranks()
        self.release()
        return self._states(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids)

    def _find_ranks(self) -> None:
        """Those of a model that was sharded after it was made replayable."""
        if not self._groups and (not self._trusted or isinstance(self.model, FSDPModule)):
            self._groups = groups_of(self.model)

    def _states(self, **given: Any) -> Tensor:
        """The last hidden states. A model that FSDP shards runs whole, without its output layer: only the forward pass
        of the root gathers what is in no layer of its own."""
        if not isinstance(self.model, FSDPModule) or self._base is self.model:
            return self._base(**given, use_cache=False).last_hidden_state
        if self._output is None:
            raise ReplayError(
                f"replayable: {type(self.model).__name__} is sharded, with a head that replay does not know; expected "
                "its base model as the root of the sharding. Shard and replay that, and its head apart."
            )
        self._output.forward = _as_it_is
        try:
            return cast("Any", self.model)(**given, use_cache=False).logits
        finally:
            del self._output.forward

    def trust(self, inputs: PackedInputs, hidden: Tensor, again: bool = False) -> None:
        """Compares the log-probs of one row with those of the whole model run on this row alone, by its own attention;
        of a model that scores no tokens, its hidden states, in units of their root mean square. Once for each
        Replayable, dtype, and packed or padded, or `again`. A first row alone shows little: the next batch with two is
        compared too. The ranks of a sharded model compare in the same call, because all of them must run the model; one
        without a row to compare runs a token. Where a rank is wrong all of them raise."""
        dtype, packed = _precision(hidden), self._config._attn_implementation == NAME
        if (dtype, packed, True) in self._trusted and not again:
            return
        begin, end = _row_to_compare(inputs)
        most = most_of(self._groups, 0 if end - begin < 2 else 1 if begin == 0 else 2, hidden.device)
        kind = dtype, packed, most == 2
        if most == 0 or (kind in self._trusted and not again):
            return
        off = self._distance(inputs, hidden, begin, end)
        worst = most_of(self._groups, off, hidden.device)
        if not worst <= _TRUST[dtype]:
            what = "hidden states" if self._output is None else "log-probs"
            seen = f"{worst:.3g} on another rank" if off <= _TRUST[dtype] else f"{off:.3g}"
            raise ReplayError(
                f"replayable: {'packed' if packed else 'padded'} {what} of {type(self.model).__name__} are off by "
                f"{seen} from its own forward of the same row; expected at most {_TRUST[dtype]}. Replay of "
                f"this model is not right, or dropout is on. {PADDED if packed else 'Use its own forward.'}"
            )
        self._trusted.add(kind)

    def _distance(self, inputs: PackedInputs, hidden: Tensor, begin: int, end: int) -> float:
        """How far the row from `begin` to `end` is off the model's own forward; 0 of a row that scores no token."""
        tokens = slice(begin, max(end, begin + 1))
        ids = inputs.input_ids[:, tokens]
        places = torch.arange(ids.shape[1] - 1, device=ids.device)
        more: dict[str, Any] = {}
        if self._output is not None and places.numel() > 2 * _COMPARED:
            places = torch.cat([places[:_COMPARED], places[-_COMPARED:]])
            if "logits_to_keep" in inspect.signature(self.model.forward).parameters:
                more["logits_to_keep"] = places
        passes.follow_passes(self.model)
        alone = self._base if self._output is None else self.model
        with torch.no_grad():
            with passes.Pass(own=True).running():
                out: Any = alone(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),  # without it, positions that jump would begin a row
                    position_ids=inputs.position_ids[..., tokens],
                    use_cache=False,
                    **more,
                )
            if end - begin < 2:
                return 0.0
            states = hidden[begin:end].detach()
            if self._output is None:
                truth = out.last_hidden_state[0]
                off = (states - truth).float().abs().max() / truth.float().square().mean().sqrt()
            else:
                scored = ids[0, places + 1]
                seen = packed_log_probs(states[places], self.head, scored)
                logits = out.logits[0] if more else out.logits[0, places]
                truth = logits.to(seen.dtype).log_softmax(-1).gather(-1, scored[:, None])[:, 0]
                off = (seen - truth).abs().max()
        return float(off)


def _as_it_is(hidden: Tensor) -> Tensor:
    return hidden


def _precision(hidden: Tensor) -> torch.dtype:
    """In which the model computed."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _row_to_compare(inputs: PackedInputs) -> tuple[int, int]:
    """The bounds of the longest row but the first, whose tokens a wrong bound would show others; of the first if no
    other has two tokens."""
    if not inputs.num_tokens:
        return 0, 0
    lengths = inputs.bounds[1:] - inputs.bounds[:-1]
    row = 1 + int(lengths[1:].argmax()) if lengths.size > 1 and lengths[1:].max() > 1 else 0
    begin, end = inputs.bounds[row : row + 2].tolist()
    return begin, end
