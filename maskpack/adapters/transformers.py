"""transformers: causal language models that replay packed rows.

    model -> replayable(model): its layers are looked at, its attention becomes maskpack's -> response_log_probs

The attention takes bounds from `cu_seq_lens_q`, which travels through the model as a keyword argument; without it, it
raises. So does everything that it would have to guess: a mask, a cache, dropout, a feature that it does not know.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import AttentionInterface, PreTrainedModel

from maskpack.adapters.transformers_limits import (
    PADDED,
    check_kind,
    check_layers,
    check_output,
    check_rows,
    plain_weight,
)
from maskpack.arguments import said
from maskpack.attention import packed_attention
from maskpack.errors import ReplayError
from maskpack.ops import packed_log_probs
from maskpack.replay import PackedInputs
from maskpack.rows import IntArray

NAME = "maskpack"
"""Of the attention, in `config._attn_implementation`."""

_KNOWN = ("cu_seq_lens_q", "cu_seq_lens_k", "position_ids", "cache_position")
"""Tensors that an attention may be given; others change what it should compute (sinks, biases, sparse indices)."""
_TRUST = {torch.float32: 1e-4, torch.float64: 1e-8, torch.bfloat16: 0.25, torch.float16: 0.05}
"""How far the log-prob of a token may be off its dense forward, by dtype: more is another model, not other rounding.
Hidden states, in units of their root mean square, are as exact."""
_switching = threading.Lock()
"""Held while the attention of a model is changed; no forward pass runs under it."""


@dataclass
class _Pass:
    """A forward pass that replay runs. It stays in one thread, which is in one pass at a time. Layers that a backward
    pass runs again belong to no pass, in whatever thread they are.

    Attributes:
        own: whether the model attends by its own attention.
        attended: calls of `attention` so far.
    """

    own: bool = False
    attended: int = 0

    @contextmanager
    def running(self) -> Generator[_Pass]:
        token = _pass.set(self)
        try:
            yield self
        finally:
            _pass.reset(token)


_pass: ContextVar[_Pass | None] = ContextVar("_pass", default=None)


class _Taken(str):
    """NAME, which knows the attention that it stands in for. It lies in the configuration, so that copies of a model
    know it, and models that share a configuration agree."""

    own: str | None = None


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
    running = _pass.get()
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


def _own_of(name: str) -> str:
    """The attention that NAME stands in for."""
    return name.own if isinstance(name, _Taken) and name.own else "sdpa"


def _follow_passes(config: Any) -> None:
    """Lets `_attn_implementation` of a configuration, which layers read in every forward pass, say the model's own
    attention in a pass that has it. The configuration itself stays as it is, because other threads read it too."""
    kind = next(kind for kind in type(config).__mro__ if "_attn_implementation" in vars(kind))
    known: property = vars(kind)["_attn_implementation"]
    getter: Any = known.fget
    if hasattr(getter, "follows_passes"):
        return

    @functools.wraps(getter)
    def of_this_pass(config: Any) -> Any:
        name = getter(config)
        running = _pass.get() if name == NAME else None
        return name if running is None or not running.own else _own_of(name)

    cast("Any", of_this_pass).follows_passes = True
    cast("Any", kind)._attn_implementation = property(of_this_pass, known.fset, known.fdel, known.__doc__)


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
                "of PEFT with adapters in its layers, get_base_model()."
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
        self._watch()
        self._take()

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
        with _switching:
            if self._config._attn_implementation == NAME:
                for config in _parts(self.model.config):
                    name = config._attn_implementation
                    if name == NAME:
                        config._attn_implementation_internal = _own_of(name)
        return self.model

    def _take(self) -> None:
        with _switching:
            if self._config._attn_implementation != NAME:
                own = [(config, config._attn_implementation) for config in _parts(self.model.config)]
                self.model.set_attn_implementation(NAME)
                for config, name in own:
                    if config._attn_implementation == NAME:
                        taken = _Taken(NAME)
                        taken.own = getattr(name, "own", None) or name
                        config._attn_implementation_internal = taken

    # ---------------------------------------------------------------- what replay asks for

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
        self._take()
        with _Pass().running() as packed:
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
        self.release()
        return self._states(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids)

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
        Replayable, dtype, and packed or padded, or `again`; of a sharded model only `again`, on all ranks at once. A
        first row alone shows little: the next batch with two is compared too."""
        if isinstance(self.model, FSDPModule) and not again:
            return  # every rank would have to compare in the same call
        dtype = _precision(hidden)
        row = _row_to_compare(inputs.bounds)
        packed = self._config._attn_implementation == NAME
        kind = dtype, packed, row > 0
        if (kind in self._trusted or (dtype, packed, True) in self._trusted) and not again:
            return
        begin, end = inputs.bounds[row : row + 2].tolist() if inputs.num_tokens else (0, 0)
        if end - begin < 2:
            return
        alone = self._base if self._output is None else self.model
        ids = inputs.input_ids[:, begin:end]
        for config in _parts(self.model.config):
            _follow_passes(config)
        with torch.no_grad():
            with _Pass(own=True).running():
                out: Any = alone(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),  # without it, positions that jump would begin a row
                    position_ids=inputs.position_ids[..., begin:end],
                    use_cache=False,
                )
            states = hidden[begin:end].detach()
            if self._output is None:
                truth = out.last_hidden_state[0]
                what, off = "hidden states", (states - truth).float().abs().max() / truth.float().square().mean().sqrt()
            else:
                seen = packed_log_probs(states[:-1], self.head, ids[0, 1:])
                truth = out.logits[0, :-1].to(seen.dtype).log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
                what, off = "log-probs", (seen - truth).abs().max()
        if not float(off) <= _TRUST[dtype]:
            raise ReplayError(
                f"replayable: {'packed' if packed else 'padded'} {what} of {type(self.model).__name__} are off by "
                f"{float(off):.3g} from its own forward of the same row; expected at most {_TRUST[dtype]}. Replay of "
                f"this model is not right, or dropout is on. {PADDED if packed else 'Use its own forward.'}"
            )
        self._trusted.add(kind)


def _parts(config: Any) -> Iterator[Any]:
    """A configuration and those within it."""
    yield config
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            yield from _parts(getattr(config, name))


def _as_it_is(hidden: Tensor) -> Tensor:
    return hidden


def _precision(hidden: Tensor) -> torch.dtype:
    """In which the model computed."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _row_to_compare(bounds: IntArray) -> int:
    """The longest row but the first, whose tokens a wrong bound would show others; the first if there is no other."""
    lengths = bounds[1:] - bounds[:-1]
    return 1 + int(lengths[1:].argmax()) if lengths.size > 1 and lengths[1:].max() > 1 else 0
