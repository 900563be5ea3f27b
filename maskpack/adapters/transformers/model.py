"""replayable: causal language models of transformers with an attention that keeps packed rows apart.

    model -> replayable(model): checks the model, and replaces its attention -> response_log_probs, response_values

The attention reads the bounds of the rows from `cu_seq_lens_q`, a keyword argument that models pass on to their layers.
It raises without it, and for every input that it does not support: a mask, a cache, dropout, other tensors.

Models that replay would compute wrongly are refused by name before anything runs:

its kind        encoder and decoder, no model of hidden states              always
its output      logits or a layer that ops.Logits cannot say (output.py)     for log-probs
its layers      state without a mixer that runs on rows, no position_ids    for packed rows
its rows        longer than the limit of dynamic RoPE, other images         for these rows
its bits        parts whose bits depend on the packing (invariant.py)       with invariant, at the first call of a path

The ranks of a sharded model run together and agree on the self-check:

rank 0   longest row to compare: 2 tokens   ---+                compares this row
rank 1   no row to compare: 0               ---+--> most: 2     runs one token, so that weights can be gathered
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad
from transformers import AttentionInterface, PreTrainedModel

from maskpack.adapters.transformers import experts, gradients, mixers, passes, vision
from maskpack.adapters.transformers.experts import Routers
from maskpack.adapters.transformers.forwards import Forward
from maskpack.adapters.transformers.fused import FusedParts, restore_parts
from maskpack.adapters.transformers.invariant import HEAD, Difference, Probe, Products, Sizes, probe_rows
from maskpack.adapters.transformers.mixers import Mixers
from maskpack.adapters.transformers.output import Layer, check_layer, curve_of, states_of
from maskpack.adapters.transformers.passes import NAME
from maskpack.adapters.transformers.refusals import PADDED, Refusal, may_refuse
from maskpack.core.arguments import IntArray, flag, said
from maskpack.errors import ReplayError
from maskpack.ops import Logits, packed_log_probs
from maskpack.ops.attention import packed_attention, widened
from maskpack.replay.inputs import PackedInputs
from maskpack.replay.log_probs import in_dtype, padded_rows
from maskpack.replay.media import Media
from maskpack.replay.routes import RoutedExperts

_SLIDING = {"sliding_attention", "hybrid_sliding"}
"""Kinds of layers whose attention has a window."""
_CHANGING = ("dynamic", "longrope")
"""RoPE types whose frequencies depend on the longest row."""
_DROPOUT_LAYERS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_RANDOM = re.compile("^(?!classifier|summary).*(drop|jitter)")
"""Options of dropout and noise, which some models apply without a layer of it; those of other heads have no effect."""
_KNOWN = ("cu_seq_lens_q", "cu_seq_lens_k", "position_ids", "cache_position")
"""Tensors that an attention accepts. Others would change its result (sinks, biases, sparse indices)."""
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 0.25, torch.float16: 0.05}
"""The largest difference of a log-prob from the dense forward pass, by dtype. Rounding alone stays below. Float64 has
the bound of float32, in which many models compute softmax, norms or scans whatever their dtype; tokens of other rows
change log-probs by 1e-2 and more. The same bounds hold for hidden states in units of their root mean square."""
FIRST, LATER, SHARED = 1, 2, 3
"""What the comparison of a row proves, more and more: of the first row, of a later one, of one that shares a prefix."""
_COMPARED = 512
"""The number of tokens at either end of a row that are compared. All logits of a long row may not fit on a GPU."""


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
    who, running = type(module).__name__, passes.current()
    told = None if running is None or running.own else running
    if not isinstance(bounds, Tensor) or longest is None:
        keywords = "cu_seq_lens_q and max_length_q"
        if told is None:
            raise Refusal.NOT_RECEIVED(who, part="attention", keywords=keywords)
        raise Refusal.NOT_PASSED(who, what="the bounds of rows", parts="attention", keyword=keywords, without=PADDED)
    tree, group = kwargs.get("prefix_tree"), kwargs.get("context_group")
    for what, given, wanted, keyword, option in (
        ("the tree of shared prefixes", tree, told and told.tree, "prefix_tree", "share_prefixes"),
        ("the context-parallel group", group, told and told.group, "context_group", "context_group"),
        (
            "whether bits may depend on the packing",
            kwargs.get("invariant"),
            told and told.invariant,
            "invariant",
            "invariant",
        ),
    ):
        if told is not None and given is not wanted:
            raise Refusal.NOT_PASSED(who, what=what, parts="attention", keyword=keyword, without=f"without {option}")
    causal = getattr(module, "is_causal", True) if kwargs.get("is_causal") is None else kwargs["is_causal"]
    odd = sorted(name for name, given in kwargs.items() if isinstance(given, Tensor) and name not in _KNOWN)
    odd += ["a mask"] if attention_mask is not None else []
    odd += [f"dropout {dropout}"] if dropout else []
    odd += ["attention that is not causal"] if not causal else []
    odd += [f"{query.shape[0]} batch rows"] if query.shape[0] != 1 else []
    if odd:
        raise Refusal.ATTENTION(who, what=", ".join(odd))
    window = _window(module) if sliding_window is None else None
    if window is not None:
        longest_row = longest if tree is None else max(longest, int(tree.lengths.max()))
        if longest_row > window:
            raise Refusal.WINDOW(who, window=window, longest=longest_row)
    if key.shape[2] != query.shape[2]:
        raise Refusal.KEYS(who, keys=key.shape[2], queries=query.shape[2])
    if running is not None:
        running.attended += 1
        running.softcap = softcap if softcap is not None else running.softcap
    dtype = value.dtype  # rotary tables widen queries and keys under autocast
    # values of multi-head latent attention are narrower: zeros add nothing
    size = max(query.shape[-1], value.shape[-1])
    given = (
        # squeezed, because the gradient of x[0] is a copy
        widened(query.squeeze(0).transpose(0, 1).to(dtype), size),
        widened(key.squeeze(0).transpose(0, 1).to(dtype), size),
        widened(value.squeeze(0).transpose(0, 1), size),
    )
    options: dict[str, Any] = {
        "scale": query.shape[-1] ** -0.5 if scaling is None else scaling, "window": sliding_window,
        "softcap": softcap, "tree": tree, "group": group, "invariant": bool(kwargs.get("invariant")),
    }  # fmt: skip
    passes.note(gradients.AttentionCall(given, bounds, int(longest), options))
    out = packed_attention(*given, bounds, int(longest), **options)
    return out[None, ..., : value.shape[-1]].contiguous(), None  # some models take a view of it


AttentionInterface.register(NAME, attention)


def _only_bounds(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward pre-hook of the model: transformers would drop a 2-D mask silently on the way to the layers."""
    config: Any = module.config
    if config.get_text_config()._attn_implementation != NAME:
        return
    given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    given = {**given, **given.get("kwargs", {})}
    if given.get("attention_mask") is not None:
        raise Refusal.MASK(type(module).__name__)


def _own_without_bounds(module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward pre-hook of attention layers: the original attention would ignore the bounds. It fires if a backward
    pass runs layers again (gradient checkpointing) after `release`."""
    config: Any = getattr(module, "config", None)
    if "cu_seq_lens_q" in kwargs and getattr(config, "_attn_implementation", NAME) != NAME:
        raise Refusal.RELEASED(type(module).__name__, part="attention")


def _window(module: nn.Module) -> int | None:
    """The sliding window of an attention layer by its configuration. Some models apply it in masks only."""
    config: Any = getattr(module, "config", None)
    kinds = list(getattr(config, "layer_types", None) or ["sliding_attention"])
    index = getattr(module, "layer_idx", None)
    own = kinds if index is None or len(kinds) == 1 else kinds[index : index + 1]
    if not _SLIDING & set(own):
        return None
    return getattr(config, "sliding_window", None) or None


def replayable(model: PreTrainedModel, *, fused: bool = False, invariant: bool = False) -> Replayable:
    """Prepares a model of transformers to run packed rows, for `response_outputs`.

    The attention of the model is replaced by packed attention until `release()`, also in backward passes that run
    layers again (gradient checkpointing). The next replay replaces it again. A model without an output layer
    (AutoModel, AutoModelForTokenClassification) works with `response_values`.

    Args:
        model: a causal language model, or its base model.
        fused: whether RMS norms, gated MLPs and the rotation of queries and keys run by kernels of maskpack until
            `release()`. They are float32, bfloat16 or float16 on a GPU; parts that the kernels do not compute as their
            classes do stay as they are: `fused_parts` tells which, and a warning if none is left. The model keeps its
            modules and parameters. Results are the same within rounding, and the self-check compares them with the
            model as it is.
        invariant: whether the log-probs of a row have the same bits in every packing: alone, in any micro-batch, with
            `share_prefixes` and without, with gradients and without; and gradients of packed attention the same bits in
            every run. Passes are padded to some thousand tokens on a GPU. The first call of each path runs rows of
            random ids in several packings, and refuses by name a part whose bits differ.

    Raises:
        ReplayError: replay does not support the model; the message says why.
    """
    return Replayable(model, fused=fused, invariant=invariant)


class Replayable:
    """A model of transformers that replay can run on packed rows. Build one with `replayable`.

    Attributes:
        model: the same module, with its parameters and modes; after `release()`, for padded rows and generation.
        invariant: whether log-probs of a row have the same bits in every packing.
        shares_prefixes, context_parallel, replays_routes, takes_media: whether it supports `PackedInputs.tree`,
            `.context`, `.routed_experts` and `.media`: True.
    """

    shares_prefixes = context_parallel = replays_routes = takes_media = True

    def __init__(self, model: PreTrainedModel, *, fused: bool = False, invariant: bool = False) -> None:
        fuses = flag(fused, "fused", "replayable", ReplayError)
        self.invariant = flag(invariant, "invariant", "replayable", ReplayError)
        model = getattr(model, "_orig_mod", model)  # of torch.compile
        if not isinstance(model, PreTrainedModel):
            raise Refusal.NO_MODEL(seen=said(model))
        self.model = model
        self._output: Any = cast("Any", model).get_output_embeddings()
        self._wide: Any = None  # the forward of an output layer that multiplies in float32
        whole = self._output is None and vision.sees(model)  # its decoder takes text alone
        self._base: Any = getattr(model, model.base_model_prefix, None) or (model if whole else model.get_decoder())
        self._config: Any = model.config.get_text_config()
        self._checked: dict[tuple[Any, ...], int] = {}
        self._probed = set[tuple[Any, ...]]()
        self._routers: Routers | None = None
        self._attention_cap: float | None = None
        who = type(model).__name__
        if getattr(model.config, "is_encoder_decoder", False):
            raise Refusal.ENCODER(model=who)
        if self._output is not None and self._base is model:
            raise Refusal.NO_BASE(model=who, prefix=model.base_model_prefix)
        if getattr(model, "_is_fsdp_managed_module", False) and not isinstance(model, FSDPModule):
            raise Refusal.NOT_THE_ROOT(model=who)
        Forward.restore(cast("nn.Module", self._base))
        self._mixers = Mixers(model, self._base, self._config)
        if self._output is not None:
            self._scale, self._softcap = curve_of(model, self._base, self._output)
        if os.environ.get("MASKPACK_PACKED_REPLAY") != "0":
            _check_layers(model, self._base, self._mixers)
        self._groups = _groups_of(model)
        self._parts = FusedParts(model, self._base) if fuses else None
        # hooks that stay with the model
        if _only_bounds not in self._base._forward_pre_hooks.values():
            self._base.register_forward_pre_hook(_only_bounds, with_kwargs=True)
        layers: list[Any] = list(cast("Any", self._base).modules())
        for layer in layers:
            watched = _own_without_bounds in layer._forward_pre_hooks.values()
            if "Attention" in type(layer).__name__ and not watched:
                layer.register_forward_pre_hook(_own_without_bounds, with_kwargs=True)
        vision.keep_bounds_in_text(self._base)
        self._take()

    def _take(self) -> None:
        passes.take(self.model, self._config)
        if self._parts is None:
            restore_parts(self._base)
        else:
            self._parts.install()
        self._mixers.install()

    def release(self) -> PreTrainedModel:
        """Restores the model for padded rows and generation, and returns it. The next replay replaces its parts again.

        It restores attention, mixers of layers that carry state, and fused parts. Do not call it between a
        forward pass and its backward pass, which may run layers again (gradient checkpointing), nor while another
        thread replays the model."""
        passes.release(self.model, self._config)
        Forward.restore(self._base)
        return self.model

    @property
    def mixers(self) -> dict[str, str]:
        """How each part that carries state from token to token runs, by its name. Empty for a model without such parts.

        The values are "bounds" (kernels of the library), "rows" with the reason (groups of padded rows), or "not run
        yet"."""
        return self._mixers.ways()

    @property
    def fused_parts(self) -> dict[str, str]:
        """How each part that may run by a kernel of `fused=True` ran last, by its name. Empty without that option.

        The values are "kernel", "own forward" (the part computes something else, or its dtype or device has no kernel),
        or "not run yet"."""
        return {} if self._parts is None else self._parts.ways()

    # ---------------------------------------------------------------- ReplayModel

    @property
    def device(self) -> torch.device:
        """The device on which the embedding layer runs."""
        weight = next(self.model.get_input_embeddings().parameters())
        if weight.is_meta:
            raise Refusal.META(model=type(self.model).__name__)
        if not isinstance(weight, DTensor):
            return weight.device
        kind = weight.device_mesh.device_type  # its shards may be offloaded to the host
        return (
            torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())
        )

    @property
    def head(self) -> Tensor:
        """[V, H]: the weight of the output layer, in float32 if that multiplies in float32. Where FSDP2 has sharded it
        again after the forward pass, all ranks have to ask for it: it is gathered, until the backward pass, or without
        gradients as a copy."""
        return self._factor(self._whole(weight=True).weight)

    def _factor(self, weight: Tensor) -> Tensor:
        return weight if self._wide is None else weight.float()

    @property
    def head_logits(self) -> Logits:
        """What the output layer does beside `head`, and the scale and soft cap of the model. Its tensors are gathered
        as `head` is."""
        return self._whole(weight=False).logits(self._scale, self._softcap)

    def _whole(self, *, weight: bool) -> Layer:
        """The output layer with gathered tensors; without `weight`, that one may be a shard."""
        if self._output is None:
            raise Refusal.NO_HEAD(model=type(self.model).__name__)
        self._wide = check_layer(self.model, self._output, self._wide)
        gathered: list[Any] = []
        for part in (self._output, self.model):
            if Layer.of(self._output).is_sharded(weight=weight) and isinstance(part, FSDPModule):
                part.unshard()
                gathered.append(part)
        layer = Layer.of(self._output)
        if layer.is_sharded(weight=weight):
            raise Refusal.SHARDED_HEAD(model=type(self.model).__name__)
        if gathered and not torch.is_grad_enabled():  # no backward pass would shard it again
            layer = layer.copied(weight=weight)
            for part in gathered:
                part.reshard()
        return layer

    def hidden(self, inputs: PackedInputs) -> Tensor:
        """[T, H]: the last hidden states of packed rows; of a shard, those of its tokens."""
        group = None if inputs.context is None else inputs.context.group
        if group is not None and self.invariant:
            raise Refusal.INVARIANT_CONTEXT()
        more = self._check(inputs, group)
        self._find_ranks()
        self._need_media_on_all_ranks(inputs.media, inputs.input_ids.device)
        if not self.invariant:
            return self._run(inputs, group, more)
        self._probe(inputs)
        return self._run_invariant(inputs, more)

    def _run(self, inputs: PackedInputs, group: dist.ProcessGroup | None, more: dict[str, Any]) -> Tensor:
        """The last hidden states of inputs that were checked. `more` are arguments for images and videos."""
        tree, invariant = inputs.tree, True if self.invariant else None
        more = more | self._routed(inputs.routed_experts)
        rows = self._mixers.rows(inputs, self.invariant)
        told = {"prefix_tree": tree, "context_group": group, mixers.KEYWORD: rows, "invariant": invariant}
        more |= {name: x for name, x in told.items() if x is not None}
        self._take()
        with passes.Pass(tree=tree, group=group, rows=rows, invariant=invariant).running() as packed:
            states = self._states(
                input_ids=inputs.input_ids,
                position_ids=inputs.position_ids,
                cu_seq_lens_q=inputs.cu_seqlens,
                cu_seq_lens_k=inputs.cu_seqlens,
                max_length_q=inputs.max_seqlen,
                max_length_k=inputs.max_seqlen,
                **more,
            )
        self._attention_cap = packed.softcap
        self._mixers.check_run(packed)
        if self._parts is not None:
            self._parts.check_run(type(self.model).__name__, inputs.input_ids.device)
        self._check_routed(packed, inputs.routed_experts)
        return states.squeeze(0)

    # ---------------------------------------------------------------- the same bits in every packing

    def _run_invariant(self, inputs: PackedInputs, more: dict[str, Any], compare: bool = True) -> Tensor:
        """`_run` of enough tokens that bits do not depend on their number. With `compare`, products of a number of
        tokens that is new are compared with those of fewer tokens."""
        before = inputs.input_ids.shape[1]
        total = self._sizes.total(before)
        path = self._path(inputs)
        with self._products.compared(total, path, compare) as differing:
            states = self._run(inputs.with_tail(total), None, more)
        names = [name for name, count in differing if int(count)]  # seldom: where T is new
        if compare and most_of(self._groups, len(names), inputs.input_ids.device):
            part, fewer = names[0] if names else "a part on another rank", self._sizes.least
            raise Refusal.INVARIANT_SIZE(part=part, model=type(self.model).__name__, tokens=total, fewer=fewer)
        if compare:
            self._products.known.add((total, path))
        return states[:before]

    @functools.cached_property
    def _sizes(self) -> Sizes:
        return Sizes.of(self._base, self.device)

    @functools.cached_property
    def _products(self) -> Products:
        return Products(self.model, self._mixers.parts, self._sizes.least)

    def _path(self, inputs: PackedInputs) -> tuple[Any, ...]:
        """What decides which kernels run, beside the number of tokens."""
        weight: Any = next(self.model.get_input_embeddings().parameters())
        device = inputs.input_ids.device
        half = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
        return device, weight.dtype, half, torch.is_grad_enabled(), self.model.training

    def _probe(self, inputs: PackedInputs) -> None:
        """Raises ReplayError if bits of rows of random ids depend on their packing. Once for each path."""
        path = *self._path(inputs), inputs.share_prefixes
        if path in self._probed:
            return
        device = inputs.input_ids.device
        limits = [limit for _, limit in _changes(self._config)]
        longest = min([getattr(self._config, "max_position_embeddings", None) or 1 << 30, *limits])
        without = sorted(vision.all_places(self.model, self._config))
        rows = probe_rows(self._config.vocab_size, longest, without, inputs.share_prefixes)
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        devices = [] if device.type == "cpu" else [device]
        check = Probe(self.model, self._output, self._mixers.parts, self._probed_run, self._sizes)
        try:
            # calls of attention that the self-check notes are those of the batch
            with torch.random.fork_rng(devices, device_type=device.type), passes.noting():
                found = check.difference(rows, inputs.share_prefixes, device)
        finally:
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
        if most_of(self._groups, found is not None, device):
            raise self._variant(found or Difference("a part, on another rank,", None, 0, 0))
        self._probed.add(path)

    def _probed_run(self, inputs: PackedInputs) -> tuple[Tensor, Tensor | None]:
        """The hidden states of rows of the probe, and the log-probs of their scored tokens."""
        hidden = self._run_invariant(inputs, {}, compare=False)
        try:
            head, logits = self.head, self.head_logits
        except ReplayError:  # the call for log-probs raises it, that for values does not need a head
            return hidden.detach(), None
        rows, targets = in_dtype(padded_rows(hidden.index_select(0, inputs.predict)), head), inputs.targets
        ids = pad(targets, (0, rows.shape[0] - targets.shape[0]))
        return hidden.detach(), packed_log_probs(rows, head, ids, logits=logits)[: targets.shape[0]].detach()

    def _variant(self, found: Difference) -> ReplayError:
        part, numbers, remedy = found.part, "tokens", "Replace it"
        if found.kind is not None:
            part, carrying = f"{part} ({found.kind.__name__})", {type(mixer) for mixer in self._mixers.parts}
            if found.kind in carrying:
                remedy = "Install the kernels of its layers that carry state, of which replay.mixers tells"
            elif re.search("Expert|Moe|MoE|MOE", found.kind.__name__):
                remedy = 'Choose other products of experts, as by set_experts_implementation("batched_mm")'
        elif part == HEAD:
            numbers, remedy = "log-probs", "On a GPU, use half precision, without a bias and LoRA of that layer"
        return Refusal.VARIANT(
            part=part,
            model=type(self.model).__name__,
            seen=found.seen,
            count=found.numbers,
            numbers=numbers,
            remedy=remedy,
        )

    def _routed(self, routes: RoutedExperts | None) -> dict[str, Any]:
        """The keyword argument by which routers are told the experts of tokens."""
        if routes is None:
            return {}
        if self._routers is None:
            self._routers = Routers(self.model, self._base, self._config)
        self._routers.check(routes)
        self._routers.install()
        return {experts.NAME: routes}

    def _check_routed(self, done: passes.Pass, routes: RoutedExperts | None) -> None:
        if routes is not None and self._routers is not None and done.routed != self._routers.count:
            raise Refusal.ROUTED(model=type(self.model).__name__, seen=done.routed, count=self._routers.count)

    def _check(self, inputs: PackedInputs, group: dist.ProcessGroup | None) -> dict[str, Any]:
        """The images and videos that the model is given. Raises ReplayError for inputs that replay does not support, on
        all ranks of a context group if on one."""
        groups = [] if group is None else [group]
        try:
            _check_layers(self.model, self._base, self._mixers, inputs)
            _check_rows(self.model, self._config, inputs.position_ids, inputs.longest_row)
            if group is not None and inputs.media is not None:
                raise Refusal.IN_CONTEXT(what="rows with images or videos")
            media = vision.given_media(self.model, self._base, self._config, inputs)
            # with or without a tree: all ranks of a sharded model raise, or none
            if inputs.share_prefixes or self.invariant:
                check_dropout(self.model, self._base, self._config)
        except ReplayError:
            most_of(groups, 1, inputs.input_ids.device)  # tells the other ranks
            raise
        if most_of(groups, 0, inputs.input_ids.device):
            raise Refusal.OTHER_RANK()
        return media

    def dense_hidden(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        media: Media | None = None,
        routed_experts: RoutedExperts | None = None,
    ) -> Tensor:
        """[B, S, H]: the last hidden states of padded rows, by the original attention. `media` are of these rows, and
        `routed_experts` of all their B * S cells."""
        if self.invariant:
            raise Refusal.INVARIANT_PADDED()
        _check_rows(self.model, self._config, position_ids, input_ids.shape[1])
        if media is None:
            vision.need_text(self.model, self._config, input_ids)
            more: dict[str, Any] = {}
        else:
            more = vision.padded_media(self.model, self._base, self._config, input_ids, position_ids, media)
        self._find_ranks()
        self._need_media_on_all_ranks(media, input_ids.device)
        self.release()
        more |= self._routed(routed_experts)
        with passes.Pass(own=True).running() as padded:
            states = self._states(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **more)
        self._check_routed(padded, routed_experts)
        return states

    def _need_media_on_all_ranks(self, media: Media | None, device: torch.device) -> None:
        """Raises ReplayError on all ranks of a sharded model if some have images or videos and some have none: they
        would gather the weights of the vision tower alone."""
        if not self._groups or not vision.sees(self._base):
            return
        some, none = (bool(most_of(self._groups, one, device)) for one in (media is not None, media is None))
        if some and none:
            raise Refusal.SOME_MEDIA(model=type(self.model).__name__, this="" if media is not None else ", as this one")

    def _find_ranks(self) -> None:
        """Finds the process groups of a model that was sharded after `replayable`."""
        if not self._groups and (not self._checked or isinstance(self.model, FSDPModule)):
            self._groups = _groups_of(self.model)

    def _states(self, **given: Any) -> Tensor:
        """The last hidden states. A model sharded by FSDP runs from its root with an output layer that returns its
        input: only the forward pass of the root gathers the weights that are in no wrapped layer."""
        if not isinstance(self.model, FSDPModule) or self._base is self.model:
            return self._base(**given, use_cache=False).last_hidden_state
        if self._output is None:
            raise Refusal.UNKNOWN_HEAD(model=type(self.model).__name__)
        return states_of(self.model, self._output, given | {"use_cache": False})

    def self_check(self, inputs: PackedInputs, hidden: Tensor, again: bool = False) -> None:
        """Compares the log-probs of one row with those of the whole model on this row alone, by its original attention.
        For a model without an output layer it compares hidden states, in units of their root mean square. If packed
        rows need gradients, it also compares those of queries, keys and values of each kind of attention layer.
        Parameters get no gradients, and their hooks do not run.

        It runs once for each Replayable, dtype, and path: packed, with share_prefixes, with a context group, or padded,
        each with and without gradients and images; always with `again`. Of a batch with images it compares a row that
        has some. Some rows prove more than others: the first row of a batch little, because wrong bounds may not change
        it; the most with share_prefixes one that begins with the tokens of another. The next batch with a row that
        proves more is compared too. The ranks of a sharded model compare in the same call, because all of them must run
        the model; a rank without a row to compare runs one token. If one rank fails, all raise ReplayError."""
        dtype, packed = precision(hidden), self._config._attn_implementation == NAME
        path: tuple[Any, ...] = (
            *(dtype, packed, inputs.share_prefixes, inputs.context is not None),
            *(inputs.media is not None, inputs.routed_experts is not None, hidden.requires_grad),
        )
        before = self._checked.get(path, 0)
        if before == (SHARED if inputs.share_prefixes else LATER) and not again:
            return
        row, tokens, proof = _row_to_compare(inputs)
        groups = self._groups if inputs.context is None else (*self._groups, inputs.context.group)
        proof = int(most_of(groups, proof, hidden.device))
        if proof == 0 or (proof <= before and not again):
            return
        if packed:
            self.need_same_cap()
        model, most = type(self.model).__name__, TOLERANCE[dtype]
        off = too_far(self._distance(inputs, hidden, row, tokens), most, groups, hidden.device)
        if off is not None:
            what = f"{'packed' if packed else 'padded'} {'hidden states' if self._output is None else 'log-probs'}"
            remedy = f"Replay it {PADDED}" if packed else "Use its own forward"
            raise Refusal.OFF(what=what, model=model, off=off, most=most, remedy=remedy)
        if packed and hidden.requires_grad:
            with torch.no_grad(), passes.noting() as calls:
                self.hidden(inputs)
            most = gradients.TOLERANCE[dtype]
            off = too_far(gradients.error(calls.values(), inputs, tokens), most, groups, hidden.device)
            if off is not None:
                raise Refusal.GRADIENTS_OFF(model=model, off=off, most=most)
        self._checked[path] = max(before, proof)

    def need_same_cap(self) -> None:
        """Raises ReplayError if packed attention was told a soft cap that the model's own attention ignores."""
        own = passes.own_of(self._config._attn_implementation)
        if self._attention_cap is not None and own is not None and _ignores_caps(own):
            raise Refusal.CAP(model=type(self.model).__name__, cap=self._attention_cap, own=own)

    def _distance(self, inputs: PackedInputs, hidden: Tensor, number: int, row: IntArray) -> float:
        """The largest difference of a row, given by its number in the batch and its tokens among the inputs, from its
        own forward pass; 0 if it scores no token."""
        tokens = row if row.size else np.zeros(1, np.int64)
        ids = inputs.collected(inputs.input_ids[0], tokens)[None]
        positions = inputs.collected(inputs.position_ids.movedim(-1, 0), tokens).movedim(0, -1)
        compared = np.arange(tokens.size - (self._output is not None))
        more: dict[str, Any] = {} if inputs.media is None else inputs.media.joined([number])
        if self._output is not None and compared.size > 2 * _COMPARED:
            compared = np.append(compared[:_COMPARED], compared[-_COMPARED:])
        places = torch.from_numpy(compared).to(ids.device)
        if places.shape[0] < ids.shape[1] - 1 and "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            more["logits_to_keep"] = places
        routes = inputs.routed_experts
        if routes is not None:
            more |= self._routed(replace(routes, ids=inputs.collected(routes.ids.int(), tokens)))
        passes.follow_passes(self.model)
        alone = self._base if self._output is None else self.model
        with torch.no_grad():
            with passes.Pass(own=True).running():
                out: Any = alone(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),  # without it, positions that jump would begin a row
                    position_ids=positions,
                    use_cache=False,
                    **more,
                )
            head = None if self._output is None else (self.head, self.head_logits)  # all ranks gather it
            if row.size < 2:
                return 0.0
            states = inputs.collected(hidden, row[compared])
            if head is None:
                truth = out.last_hidden_state[0]
                off = (states - truth).float().abs().max() / truth.float().square().mean().sqrt()
            else:
                scored = ids[0, places + 1]
                seen = packed_log_probs(in_dtype(states, head[0]), head[0], scored, logits=head[1])
                logits = out.logits[0] if "logits_to_keep" in more else out.logits[0, places]
                truth = logits.to(seen.dtype).log_softmax(-1).gather(-1, scored[:, None])[:, 0]
                off = (seen - truth).abs().max()
        return float(off)


@functools.cache
def _ignores_caps(name: str) -> bool:
    """Whether an attention of transformers gives the same for any soft cap. "eager" is each model's own, and has it."""
    function = cast("Any", AttentionInterface().get(name))  # pyright: ignore[reportUnknownMemberType]
    if function is None or "softcap" in inspect.signature(function).parameters:
        return False
    layer: Any = SimpleNamespace(is_causal=True, training=False)
    qkv = torch.linspace(-1, 1, 3 * 2 * 16, device="cpu").view(3, 1, 1, 2, 16).unbind()
    try:
        seen: list[Tensor] = [function(layer, *qkv, None, scaling=1.0, softcap=cap)[0] for cap in (None, 0.5)]
    except Exception as error:
        if not may_refuse(error):
            raise
        return False  # it refuses caps, or runs on a GPU alone: the forward of the model says so
    return torch.equal(*seen)


def precision(hidden: Tensor) -> torch.dtype:
    """The dtype in which the model computed."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _row_to_compare(inputs: PackedInputs) -> tuple[int, IntArray, int]:
    """A row, its tokens among the inputs, and what it proves: of the longest row that shares a prefix with another, or
    that is after the first, which a wrong bound would change; of the first row if no other has two tokens. Of a batch
    with images or videos it has some: all ranks of a sharded model run the vision tower."""
    tree, media = inputs.tree, inputs.media
    if tree is not None:
        lengths = np.where(tree.shared > 0, tree.lengths[tree.order], 0)  # the first row of a prefix shares nothing
        if media is not None:
            lengths = np.where(media.of_row[tree.order] >= 0, 1 + lengths, 0)
        row = int(tree.order[lengths.argmax()])
        tokens = tree.of_row_token[tree.row_offsets[row] : tree.row_offsets[row + 1]]
        proof = SHARED if lengths.max() > 1 or media is None else LATER
    elif inputs.num_tokens:
        lengths = np.diff(inputs.bounds)
        if media is not None:
            lengths = np.where(media.of_row[media.rows] >= 0, lengths, 0)
        place = 1 + int(lengths[1:].argmax()) if lengths.size > 1 and lengths[1:].max() > 1 else 0
        if not lengths[place]:  # the only rows with images have one token
            place = int(lengths.argmax())
        row = place if media is None else int(media.rows[place])
        tokens = np.arange(int(inputs.bounds[place]), int(inputs.bounds[place + 1]))
        proof = LATER if place else FIRST
    else:
        return 0, np.zeros(0, np.int64), 0
    return row, tokens, proof if tokens.size > 1 else 0


# -------------------------------------------------------------------- unsupported models


def _check_layers(model: Any, base: Any, mixers: Mixers, inputs: PackedInputs | None = None) -> None:
    """Checks that the layers support packed rows, and these inputs."""
    mixers.check(inputs)
    if "position_ids" not in inspect.signature(base.forward).parameters and not mixers.pure:
        raise Refusal.NO_POSITIONS(model=type(base).__name__)


def _check_rows(model: Any, config: Any, positions: Tensor, longest: int) -> None:
    """Checks the rows of a call, or of the shard of a rank. One synchronisation on CUDA if the model has rotary
    positions that change."""
    for kind, limit in _changes(config):
        longest = max(longest, int(positions.max()) + 1 if positions.numel() else 0)  # positions may begin above 0
        if longest > limit:
            raise Refusal.ROPE(model=type(model).__name__, kind=kind, limit=limit, longest=longest)
        if longest == limit:
            _forget_longer_rows(model, positions, limit)


def _forget_longer_rows(model: nn.Module, positions: Tensor, limit: int) -> None:
    """Lets rotary embeddings take back the frequencies of an earlier, longer row. They do it themselves for rows below
    their limit, and keep them at the limit."""
    ending = "max_seq_len_cached"
    for part in model.modules():
        held = {name: value for name, value in vars(part).items() if name.endswith(ending)}
        for name in [name for name, value in held.items() if value > limit]:
            kind = name.removesuffix(ending).removesuffix("_")  # of the layers, if a model has several
            first = torch.zeros_like(positions[..., :1])
            part(torch.zeros(1, device=positions.device), first, *([kind] if kind else []))


def check_dropout(model: Any, base: Any, config: Any) -> None:
    """Checks that rows do not need random numbers of their own for the tokens that they share."""
    if not any(part.training for part in base.modules()):
        return
    layers = [
        name for name, part in base.named_modules()
        if isinstance(part, _DROPOUT_LAYERS) and part.p and part.training
    ]  # fmt: skip
    given: dict[str, Any] = {}
    for part in (*passes.configurations(model.config), config):  # also of a vision tower, whose images rows share
        seen = cast("dict[str, Any]", vars(part))
        given |= {name: value for name, value in seen.items() if name not in given or value}
    options = [name for name in given if _RANDOM.match(name) and isinstance(given[name], int | float) and given[name]]
    if layers or options:
        raise Refusal.DROPOUT(model=type(model).__name__, names=", ".join([*layers[:4], *options]))


def _changes(config: Any) -> Iterator[tuple[str, int]]:
    """RoPE types that depend on the longest row, each with the length up to which they do not."""
    given = cast("dict[str, Any]", getattr(config, "rope_parameters", None) or {})
    within = [cast("dict[str, Any]", part) for part in given.values() if isinstance(part, dict)]
    for part in (given, *within):
        if part.get("rope_type") in _CHANGING:
            first = "original_max_position_embeddings"
            limit = part.get(first) or getattr(config, first, None) or config.max_position_embeddings
            yield part["rope_type"], int(limit)


# -------------------------------------------------------------------- sharded models


def _groups_of(model: nn.Module) -> tuple[Any, ...]:
    """The process groups over which weights are sharded or replicated; empty for a model of one process."""
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # gathered weights do not know their device mesh
    found: list[Any] = []
    for part in model.modules():
        if isinstance(part, FullyShardedDataParallel):
            found += [part.process_group, getattr(part, "_inter_node_pg", None)]
    for weight in model.parameters():
        if isinstance(weight, DTensor):
            found += weight.device_mesh.get_all_groups()
    return tuple(group for group in dict.fromkeys(found) if group is not None)


def too_far(off: float, most: float, groups: Sequence[Any], device: torch.device) -> str | None:
    """How far this rank, or else another one, is off, if that is more than `most`."""
    worst = most_of(groups, off, device)
    if worst <= most:
        return None
    return f"{worst:.3g} on another rank" if off <= most else f"{off:.3g}"


def most_of(groups: Sequence[Any], number: float, device: torch.device) -> float:
    """The largest number of all ranks; NaN counts as infinity. Every rank of the groups must call it."""
    if not groups:
        return number
    most = torch.tensor(number, dtype=torch.float64, device=device).nan_to_num(torch.inf)
    for group in groups:  # one dim of a mesh after the other
        dist.all_reduce(most, dist.ReduceOp.MAX, group)
    return float(most)
