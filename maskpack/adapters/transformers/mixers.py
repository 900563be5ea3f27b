"""Layers that carry state from token to token (gated delta nets, Mamba, short convolutions, linear attention) over
packed rows: their mixers alone run on rows, everything else of the model stays packed.

A *mixer* is the innermost part of such a layer that takes hidden states and a cache, and does not attend through
transformers' attention interface. While the model replays, each has a `forward` of its own, which runs one of two ways:

bounds   a a a b b c c c c c                   the library's kernels, which start anew at each bound
rows     a a a b b c c c c c  ->  c c c c c    groups of rows of similar length, pads on the right, which a causal
                                  a a a . .    mixer does not see
                                  b b

What runs is decided by behaviour, once for each kind of mixer: the kernels may be missing, and some versions of
transformers then raise, others ignore the bounds. With a tree of shared prefixes, both ways run whole rows, and each
token of the tree takes the output of the first row that has it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from maskpack.adapters.transformers import layers, passes
from maskpack.adapters.transformers.forwards import Forward
from maskpack.adapters.transformers.refusals import PADDED, Refusal, may_refuse
from maskpack.core.arguments import IntArray
from maskpack.core.index import cumulated, ranges
from maskpack.ops.prefix_attention import gather_rows
from maskpack.replay.inputs import PackedInputs

_ATTENDING = {"full_attention", "sliding_attention", "attention"}
_CARRYING = {"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", "recurrent"}
_TOKENWISE = {"moe", "mlp"}
"""Kinds of layers by `config.layer_types`: those that attend alone, that carry state, and that do neither."""
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""What the forward of an attention layer reads to attend through transformers' interface."""
_CACHES = ("cache", "cache_params", "past_key_values", "past_key_value", "layer_past")
_CACHED = (*_CACHES, "use_cache")
"""Arguments for a cache, one of which a mixer takes."""
_NONE = (*_CACHES, "attention_mask", "conv_mask", "mamba_attention_mask", "mamba_mask", "padding_mask", "mask")
"""Arguments that a mixer does not get: rows have no cache, and no pads that it would see."""
_BOUNDS, _LONGEST = ("cu_seq_lens_q", "cu_seq_lens_k"), ("max_length_q", "max_length_k")
_SHORTEST = 0.5
"""The shortest row of a group, as a share of its longest. With s, tokens and pads together are at most 1 / s times the
tokens, and the longest rows of all groups at most 1 / (1 - s) times the longest row: a mixer without kernels launches
as many loops over them. At one half, neither is more than doubled."""
KEYWORD = "mixer_rows"
"""The keyword argument of a forward pass by which layers are told the MixerRows."""
_PROBED = (9, 70)
"""Tokens of the rows that decide whether a mixer keeps rows apart: the second crosses a chunk of 64."""
_CLOSE = {torch.float32: 5e-3, torch.float64: 1e-6}
"""The largest difference of a token's outputs from those of its row alone, both as root mean squares. 0.05 in half
precision. Rounding alone stays below; a token of another row is of order 1."""


# -------------------------------------------------------------------- rows


@dataclass(frozen=True, eq=False)
class MixerRows:
    """The whole rows of packed inputs, for mixers; the tail of `multiple_of` is one. N tokens of rows, one row after
    another, are T stored tokens, or more than T if rows share some.

    Attributes:
        stored: int64 [N], the stored token that each token of the rows is; None if it is the same.
        first: int64 [T], the token of the rows from which a stored token takes its output; None with `stored`.
        bounds: int32 [rows + 1], of the rows among the N tokens.
        lengths: int64 [rows] on the host.
        groups: (rows, longest row) of each group; the cells [rows, longest] of all groups lie one after the other.
        cells: int64 [N], the cell of each token of the rows; None if it is the same.
        ordered: whether bits may not depend on the packing: gradients of tokens that rows share are added in a fixed
            order, and no layer runs by groups of padded rows.
    """

    stored: Tensor | None
    first: Tensor | None
    bounds: Tensor
    lengths: IntArray
    groups: Sequence[tuple[int, int]]
    cells: Tensor | None
    ordered: bool = False

    @classmethod
    def of(cls, inputs: PackedInputs, ordered: bool = False) -> MixerRows:
        """One copy to the device, or four with a tree."""
        where, total = inputs.input_ids.device, inputs.input_ids.shape[1]
        tree, tail = inputs.tree, total - inputs.num_tokens
        offsets = inputs.bounds if tree is None else np.unique(tree.row_offsets)
        count = int(offsets[-1]) if offsets.size else 0
        lengths = np.append(np.diff(offsets), tail) if tail else np.diff(offsets)
        if tree is None:
            return replace(cls.of_lengths(lengths, where, inputs.cu_seqlens), ordered=ordered)
        return replace(
            cls.of_lengths(lengths, where),
            stored=_sent(np.append(tree.of_row_token, np.arange(inputs.num_tokens, total)), where),
            first=_sent(np.append(tree.source, np.arange(count, count + tail)), where),
            ordered=ordered,
        )

    @classmethod
    def of_lengths(cls, lengths: IntArray, where: torch.device, bounds: Tensor | None = None) -> MixerRows:
        """Rows that share nothing."""
        groups, cells = _grouped(lengths)
        bounds = _sent(cumulated(lengths).astype(np.int32), where) if bounds is None else bounds
        return cls(None, None, bounds, lengths, groups, _sent(cells, where))

    @cached_property
    def in_line(self) -> MixerRows:
        """The same rows one after the other, in one group."""
        return replace(self, groups=[(1, int(self.lengths.sum()))], cells=None)

    @cached_property
    def back(self) -> Tensor | None:
        """int64 [T]: the cell from which a stored token takes its output; None if it is the same."""
        if self.cells is None:
            return self.first
        return self.cells if self.first is None else self.cells.index_select(0, self.first)

    @cached_property
    def told(self) -> dict[str, Any]:
        """What kernels are told, which start anew at each bound."""
        number = torch.arange(self.lengths.size, dtype=torch.int32, device=self.bounds.device)
        rows = number.repeat_interleave(self.bounds.diff(), output_size=int(self.lengths.sum()))
        told: dict[str, Any] = dict.fromkeys(_BOUNDS, self.bounds) | {"seq_idx": rows[None]}
        return told | dict.fromkeys(_LONGEST, int(self.lengths.max()))

    @property
    def tokens(self) -> int:
        """T, the number of stored tokens."""
        return int(self.lengths.sum()) if self.first is None else self.first.shape[0]

    def cut(self, x: Tensor, dim: int) -> list[Tensor]:
        """Stored tokens, along a dim, as the cells [rows, longest] of each group; 0 in pads."""
        line = x.movedim(dim, 0)
        if self.stored is not None:
            line = (
                gather_rows(line, self.stored, self.ordered)
                if x.is_floating_point()
                else line.index_select(0, self.stored)
            )
        sizes = [rows * longest for rows, longest in self.groups]
        if self.cells is not None:
            line = line.new_zeros(sum(sizes), *line.shape[1:]).index_copy(0, self.cells, line)
        parts: Any = zip(cast("Any", line).split(sizes), self.groups, strict=True)
        return [part.unflatten(0, shape).movedim((0, 1), (dim, dim + 1)) for part, shape in parts]

    def joined(self, outs: Sequence[Any]) -> Tensor | None:
        """The outputs of all groups at the stored tokens, [1, T, ...]; None for what is no output of tokens."""
        if [out.shape[:2] if isinstance(out, Tensor) else None for out in outs] != list(self.groups):
            return None
        line = torch.cat([out.flatten(0, 1) for out in outs]) if len(outs) > 1 else outs[0].flatten(0, 1)
        return (line if self.back is None else line.index_select(0, self.back))[None]


def _sent(numbers: npt.NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(numbers).to(device, non_blocking=True)


def _grouped(lengths: IntArray) -> tuple[list[tuple[int, int]], IntArray]:
    """Groups of rows, from the longest rows to the shortest, and the cell of each token."""
    order = np.argsort(-lengths, kind="stable")
    falling = lengths[order]
    groups: list[tuple[int, int]] = []
    starts = np.zeros(lengths.size, np.int64)
    begin = cell = 0
    while begin < falling.size:
        longest = int(falling[begin])
        end = int(np.searchsorted(-falling, -_SHORTEST * longest, side="right"))
        starts[order[begin:end]] = cell + longest * np.arange(end - begin)
        groups.append((end - begin, longest))
        cell += (end - begin) * longest
        begin = end
    return groups, ranges(starts, lengths)


# -------------------------------------------------------------------- the mixers of a model


class Mixers:
    """The mixers of a model, which replace their forward while it replays.

    Attributes:
        attending: how many layers attend.
        count: how many mixers run in a forward pass.
    """

    def __init__(self, model: Any, base: Any, config: Any) -> None:
        self._who = type(model).__name__
        kinds: Any = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
        self._kinds: list[str] = list(kinds or ())  # empty if the configuration does not say
        self._found: dict[str, tuple[nn.Module, MixerForward]] = {}
        self._empty: list[int] = []
        self._outer: list[str] = []
        self.attending, self.count = int(config.num_hidden_layers), 0
        if set(self._kinds) <= _ATTENDING:
            return
        self.attending = 0
        forwards: dict[Any, MixerForward] = {}
        decoder: Any = model.get_decoder() if callable(getattr(model, "get_decoder", None)) else base
        parts: list[nn.Module] = list((decoder if isinstance(decoder, nn.Module) else base).modules())
        lists = (part for part in parts if isinstance(part, nn.ModuleList) and len(part) == len(self._kinds))
        for number, layer in enumerate(next(lists, nn.ModuleList())):
            kind = self._kinds[number]
            attends = any(_attends(part) for part in layer.modules())
            self.attending += attends or kind in _ATTENDING
            inner, outer = _mixers_in(layer) if kind in _CARRYING else ([], [])
            self._outer += [f"layer {number}, {name}" for name in outer]
            for name, part in inner:
                name = f"layer {number}, {name}"
                self._found[name] = part, forwards.setdefault(_key_of(part), MixerForward(part))
                again = [
                    x for x in layer.modules() if hasattr(x, "gradient_checkpointing") and part in list(x.modules())
                ]
                layers.listen([layer, *again][-1])  # the innermost part that a backward pass may run again by itself
                if _no_rows_left not in cast("Any", part)._forward_pre_hooks.values():  # it stays with the mixer
                    part.register_forward_pre_hook(_no_rows_left)
            self.count += len(inner)
            if kind in _CARRYING and not inner:
                self._empty.append(number)

    @property
    def pure(self) -> bool:
        """Whether no layer attends, so that nothing but mixers sees other tokens."""
        return bool(self._found) and self.attending == 0

    def check(self, inputs: PackedInputs | None = None) -> None:
        """Raises ReplayError for layers that packed rows would leak through, and for inputs that mixers cannot run."""
        who = self._who
        unknown = sorted(set(self._kinds) - _ATTENDING - _CARRYING - _TOKENWISE)
        if unknown:
            raise Refusal.LAYERS(model=who, kinds=", ".join(unknown))
        numbers = [number for number, kind in enumerate(self._kinds) if kind in _CARRYING]
        missing = self._empty if self.count else numbers
        if missing:
            number = min(missing)
            raise Refusal.NO_MIXER(model=who, kind=self._kinds[number], number=number, names=", ".join(_CACHED))
        if self._outer:
            raise Refusal.TWO_MIXERS(part=self._outer[0], model=who)
        for name, (part, _) in self._found.items():
            if "forward" in vars(part) and not MixerForward.has(part):
                seen = f"{name} of {who} ({type(part).__name__})"
                raise Refusal.REPLACED(part=seen, remedy=f"Replay it {PADDED}")
            for inner in list(part.modules())[1:]:
                if isinstance(inner, FSDPModule | FullyShardedDataParallel):
                    raise Refusal.SHARDED_PART(part=f"{name} of {who}", kind=type(inner).__name__)
        if inputs is not None and inputs.context is not None and self.count:
            raise Refusal.IN_CONTEXT(what=f"{who}, which has layers that carry state ({next(iter(self._found))}),")

    def rows(self, inputs: PackedInputs, ordered: bool = False) -> MixerRows | None:
        """What layers are told; None for a model without mixers."""
        return MixerRows.of(inputs, ordered) if self.count else None

    @property
    def parts(self) -> list[nn.Module]:
        """All mixers."""
        return [part for part, _ in self._found.values()]

    def install(self) -> None:
        for part, forward in self._found.values():
            if not MixerForward.has(part):
                forward.install(part)

    def check_run(self, packed: passes.Pass) -> None:
        """Raises ReplayError if a layer neither attended through the interface nor ran its mixers."""
        if packed.attended < self.attending:
            raise Refusal.ATTENDED(model=self._who, seen=packed.attended, layers=self.attending)
        if packed.mixed < self.count:
            raise Refusal.MIXED(model=self._who, seen=packed.mixed, count=self.count)

    def ways(self) -> dict[str, str]:
        """How each mixer runs: "bounds", or "rows" with why; "not run yet"."""
        return {name: forward.way for name, (_, forward) in self._found.items()}


def _no_rows_left(part: nn.Module, _args: tuple[Any, ...]) -> None:
    """A forward pre-hook of mixers: the forward of their class would carry tokens of one row into the next. It fires if
    a backward pass runs layers again (gradient checkpointing) after `release`."""
    if KEYWORD in layers.told() and not MixerForward.has(part):
        raise Refusal.RELEASED(type(part).__name__, part="forward, which carries state from one row to the next")


def _mixers_in(layer: nn.Module) -> tuple[list[tuple[str, nn.Module]], list[str]]:
    """The parts of a layer that take a cache and do not attend, without those that have such a part within; and the
    names of these outer ones, which may carry state beside it, unless they are layers themselves."""
    parts: list[tuple[str, nn.Module]] = list(cast("Any", layer).named_modules())
    taking = [(name, part) for name, part in parts if part is not layer and _takes_cache(part)]
    own = [part for _, part in parts if _takes_cache(part) or _attends(part)]
    outer = [(name, part) for name, part in taking if any(x in own for x in list(part.modules())[1:])]
    within = [(name, part) for name, part in taking if (name, part) not in outer]
    mixers = {id(part) for _, part in within}
    around = [(name, part) for name, part in outer if any(id(x) in mixers for x in part.modules())]
    return within, [name for name, part in around if not hasattr(part, "gradient_checkpointing")]


def _takes_cache(part: nn.Module) -> bool:
    """Whether a part takes a cache, and does not attend by itself."""
    names = inspect.signature(cast("Any", type(part)).forward).parameters
    return any(name in names for name in _CACHED) and not _attends(part)


def _attends(part: nn.Module) -> bool:
    code = getattr(inspect.unwrap(cast("Any", type(part)).forward), "__code__", None)
    return code is not None and _INTERFACE in code.co_names


def _key_of(part: nn.Module) -> Any:
    """Mixers of one kind and shape."""
    shapes = {name: tuple(weight.shape) for name, weight in part.named_parameters()}
    return cast("Any", type(part)).forward, tuple(shapes.items())


# -------------------------------------------------------------------- the forward of a mixer


class MixerForward(Forward):
    """What `mixer.forward(...)` calls while the model replays, for all mixers of one kind and shape."""

    def __init__(self, part: nn.Module) -> None:
        kind = cast("Any", type(part))
        self._own, self._who = kind.forward, kind.__name__
        self._signature = inspect.signature(self._own)
        parameters = self._signature.parameters.values()
        self._any = any(x.kind is x.VAR_KEYWORD for x in parameters)
        self._names = [x.name for x in parameters if x.kind is not x.VAR_KEYWORD][1:]
        self._input = self._names[0]
        self._ways: dict[Any, str] = {}

    @property
    def way(self) -> str:
        return "; ".join(dict.fromkeys(self._ways.values())) or "not run yet"

    def __call__(self, part: nn.Module, *args: Any, **kwargs: Any) -> Any:
        running = passes.current()
        if running is not None and running.own:
            return self._own(part, *args, **kwargs)
        rows = layers.told().get(KEYWORD)
        own = None if running is None else running.rows  # FSDP copies arguments that are dataclasses
        if running is not None and getattr(rows, "lengths", None) is not getattr(own, "lengths", None):
            raise Refusal.NOT_PASSED(self._who, what="the rows", parts="layers", keyword=KEYWORD, without=PADDED)
        if not isinstance(rows, MixerRows):
            raise Refusal.NOT_RECEIVED(self._who, part="layer", keywords=KEYWORD)
        given = self._given(part, args, kwargs, rows)
        if running is not None:
            running.mixed += 1
        by_bounds = self._keeps_rows_apart(part, given)
        if rows.ordered and not by_bounds:
            raise Refusal.INVARIANT_ROWS(self._who, way=self.way)
        return self._by_bounds(part, given, rows) if by_bounds else self._by_rows(part, given, rows)

    def _given(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], rows: MixerRows) -> dict[str, Any]:
        """The arguments that the forward names, by name; the hidden states first."""
        known = {name: x for name, x in kwargs.items() if name in self._names}
        bound = self._signature.bind_partial(part, *args, **known).arguments
        given = {name: x for name, x in bound.items() if name in self._names}
        if "use_cache" in self._names:
            given["use_cache"] = False
        hidden = given.get(self._input)
        if not isinstance(hidden, Tensor) or hidden.shape[:2] != (1, rows.tokens):
            seen = tuple(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
            raise Refusal.MIXER_INPUT(self._who, name=self._input, seen=seen, tokens=rows.tokens)
        odd = [name for name in _NONE if given.get(name) is not None]
        if odd:
            raise Refusal.MIXER_GIVEN(self._who, names=", ".join(odd))
        return given

    # ---------------------------------------------------------------- two ways

    def _by_rows(self, part: nn.Module, given: dict[str, Any], rows: MixerRows, **told: Any) -> Any:
        """By groups of padded rows."""
        parts = {name: self._parts(name, x, rows) for name, x in given.items()}
        outs = [
            self._own(part, **{name: x[nth] for name, x in parts.items()} | told) for nth in range(len(rows.groups))
        ]
        several = isinstance(outs[0], tuple | list)
        columns = list(zip(*outs, strict=True)) if several else [tuple(outs)]
        back = [rows.joined(column) for column in columns]
        if back[0] is None:
            seen = [str(tuple(out.shape)) if isinstance(out, Tensor) else type(out).__name__ for out in columns[0]]
            raise Refusal.MIXER_OUTPUT(self._who, seen=", ".join(dict.fromkeys(seen)), groups=rows.groups)
        return tuple(back) if several else back[0]

    def _by_bounds(self, part: nn.Module, given: dict[str, Any], rows: MixerRows) -> Any:
        """By kernels that start anew at each bound."""
        told = {name: x for name, x in rows.in_line.told.items() if self._any or name in self._names}
        return self._by_rows(part, given, rows.in_line, **told)

    def _parts(self, name: str, x: Any, rows: MixerRows) -> list[Any]:
        """An argument for each group: entries of tokens in their cells, anything else as it is."""
        if isinstance(x, tuple | list):
            each = [self._parts(name, entry, rows) for entry in cast("Sequence[Any]", x)]
            return [tuple(column) for column in zip(*each, strict=True)] if each else [x] * len(rows.groups)
        if not isinstance(x, Tensor) or x.dim() == 0:
            return [x] * len(rows.groups)
        dim = self._dim_of(name, x, rows.tokens)
        return rows.cut(x.select(dim - 1, 0), dim - 1)

    def _dim_of(self, name: str, x: Tensor, tokens: int) -> int:
        """The dim of tokens: 1, or 2 of the sections of M-RoPE."""
        for dim in (1, 2):
            if x.shape[dim - 1 : dim + 1] == (1, tokens):
                return dim
        raise Refusal.MIXER_ENTRY(self._who, name=name, seen=tuple(x.shape), tokens=tokens)

    # ---------------------------------------------------------------- which way

    def _keeps_rows_apart(self, part: nn.Module, given: dict[str, Any]) -> bool:
        hidden = given[self._input]
        device, half = hidden.device.type, torch.is_autocast_enabled(hidden.device.type)
        key = device, hidden.dtype, half and torch.get_autocast_dtype(device), part.training
        if key not in self._ways:
            self._ways[key] = self._decided(part, given)
        return self._ways[key] == "bounds"

    def _decided(self, part: nn.Module, given: dict[str, Any]) -> str:
        """Runs two rows of random hidden states together with their bounds, and each alone. What the mixer raises with
        bounds says that it does not take them: kernels that are missing, or that do not fit. Memory that ran out and a
        device that failed do not say so, and are raised."""
        if not (self._any or any(name in self._names for name in (*_BOUNDS, *_LONGEST, "seq_idx"))):
            return "rows: its forward takes no bounds"
        hidden = given[self._input]
        device = hidden.device
        devices = [] if device.type == "cpu" else [device]
        source = torch.Generator(device).manual_seed(0)
        with torch.no_grad(), torch.random.fork_rng(devices, device_type=device.type):  # of a mixer with dropout
            both, other = (self._probe(given, source) for _ in range(2))
            other[self._input][:, _PROBED[0] :] = both[self._input][:, _PROBED[0] :]
            rows = MixerRows.of_lengths(np.array(_PROBED), device)
            try:
                seen, again = (_outputs(self._by_bounds(part, x, rows)) for x in (both, other))
            except Exception as error:
                if not may_refuse(error):
                    raise
                return f"rows: {type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
            truth = _outputs(self._by_rows(part, both, rows))
        if len(seen) != len(truth) or any(not _same(*xs) for xs in zip(seen, truth, strict=True)):
            return "rows: with bounds, outputs differ from those of each row alone"
        if any(not torch.equal(x[:, _PROBED[0] :], y[:, _PROBED[0] :]) for x, y in zip(seen, again, strict=True)):
            return "rows: with bounds, one row changes the outputs of the next"
        return "bounds"

    def _probe(self, given: dict[str, Any], source: torch.Generator) -> dict[str, Any]:
        """Arguments as those given, of other tokens."""
        tokens = sum(_PROBED)

        def like(name: str, x: Any) -> Any:
            if isinstance(x, tuple | list):
                return tuple(like(name, entry) for entry in cast("Sequence[Any]", x))
            if not isinstance(x, Tensor) or x.dim() == 0:
                return x
            dim = self._dim_of(name, x, given[self._input].shape[1])
            if name == "position_ids":
                places = torch.cat([torch.arange(count, device=x.device) for count in _PROBED]).to(x.dtype)
                return places.expand(*x.shape[:dim], tokens)
            if name == self._input:
                return torch.randn(1, tokens, *x.shape[2:], generator=source, device=x.device).to(x.dtype)
            return x.detach().index_select(dim, torch.arange(tokens, device=x.device) % x.shape[dim])

        return {name: like(name, x) for name, x in given.items()}


def _outputs(out: Any) -> list[Tensor]:
    """Those of tokens."""
    outs = cast("Sequence[Any]", out) if isinstance(out, tuple | list) else [out]
    return [x for x in outs if isinstance(x, Tensor)]


def _same(seen: Tensor, truth: Tensor) -> bool:
    """Whether outputs [1, n, ...] are the same within rounding, token by token."""
    off = (seen - truth)[0].double().flatten(1).square().mean(1).sqrt()
    return bool((off <= _CLOSE.get(seen.dtype, 0.05) * truth.double().square().mean().sqrt()).all())
