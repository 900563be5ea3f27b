"""PackedInputs: the inputs of a model for packed rows, without padding.

    rows          p p r r r | p r | p p p r r        p prompt, r response tokens: input_ids [1, T]
    position_ids  0 1 2 3 4 | 0 1 | 0 1 2 3 4        start at 0 in every row
    cu_seqlens    0          5     7           12    the bounds of the rows, for varlen attention; of the documents
                                                     of a row, if it holds several (`documents`)
    predict         ^ ^ ^     ^         ^ ^          positions whose outputs score the next token, a response token

Response tokens may be anywhere in a row but at its first place, as those of a loss mask.

A tail that rounds T up is a row of its own: no other token attends to it, and `predict` has no position in it.

With shared prefixes the tokens are those of a PrefixTree, whose nodes are the rows of `cu_seqlens`. A response token
that several rows share is scored once:

    rows          p p r r r | p p r x             tree   p p r +-- r r
    input_ids     p p r r r x                                  +-- x
    cu_seqlens    0     3   5 6                   copies 0 1 2 | 0 3       the scored token that each response token is
    predict         ^ ^ ^                                                  the outputs at 1 2 3 2 score 2 3 4 5
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.distributed import ProcessGroup

from maskpack.core.arguments import whole
from maskpack.core.index import IntArray
from maskpack.core.tensors import device_here
from maskpack.core.tree import dense_at, entry_at, has, need_batch
from maskpack.errors import ReplayError
from maskpack.fields.options import registry_of
from maskpack.fields.registry import Key, MaskNestingRegistry, Path, path_of, show
from maskpack.layout.jagged import Jagged, host_offsets, jagged, values_of
from maskpack.layout.prefix_tree import PrefixTree
from maskpack.layout.row_layout import RowLayout
from maskpack.nesting.documents import BOUNDS, LENGTHS, documents_of, row_of_document
from maskpack.nesting.nested import NOTHING
from maskpack.nesting.response import RESPONSE, SEQUENCE, ResponseAxis, scoring
from maskpack.nesting.schema import FieldForm, Schema
from maskpack.ops import pack_torch as plain
from maskpack.ops.context_parallel import need_group
from maskpack.packed.batch import PackedBatch, decompress
from maskpack.packed.decode import shape_in
from maskpack.replay.context import ContextShard, need_same, shard_of
from maskpack.replay.media import Media
from maskpack.replay.options import DEFAULT, NoPrompt, ReplayOptions, need_options
from maskpack.replay.routes import RoutedExperts

_CPU = torch.device("cpu")
LOSS_MASK: Path = ("loss_mask",)
"""The mask of the tokens to score, if a batch gives no response axis and the options name no mask."""
_DIMS = {"input_ids": 1, "position_ids": 2, "routed_experts": 3}
"""The most dims of the packed tokens of a field."""


@dataclass(frozen=True, eq=False)
class PackedInputs:
    """The inputs of a model for packed rows, all on one device.

    Attributes:
        input_ids: int64 [1, T].
        position_ids: int64 [1, T]; [n, 1, T] for M-RoPE.
        cu_seqlens: int32 [rows + 1]. Rows without tokens are left out; a tail counts as a row, and so does each
            document of a row that holds several. With a tree, the rows are its nodes.
        max_seqlen: the number of tokens of the longest of these rows.
        predict: int64 [N], the positions in T whose outputs score the N scored response tokens.
        targets: int64 [N], the ids of these tokens.
        scored: int64 [n], the indices of the scored tokens among all response tokens; None if all are scored.
        copies: int64 [n], which of the N each of them is; None if n is N, in the same order.
        response: the RowLayout of the response axis.
        bounds: int64 [rows + 1] on the host: `cu_seqlens` without the tail.
        num_tokens: T without the tail.
        tree: the tree of the rows; None if they share nothing, or were not asked to.
        share_prefixes: whether they were asked to. All ranks of a sharded model agree on it, but not on a tree.
        context: the shard of this rank, after `shard`; None for all tokens.
        routed_experts: the experts that routers have to choose for the T tokens; None if they choose themselves.
        media: the images and videos of the rows, on the device; None for text.

    After `shard`, `input_ids`, `position_ids`, `routed_experts`, `predict` and `targets` are those of the shard, and
    `predict` counts from its first token. All others describe the whole.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    predict: Tensor
    targets: Tensor
    scored: Tensor | None
    copies: Tensor | None
    response: RowLayout
    bounds: IntArray
    num_tokens: int
    tree: PrefixTree | None = None
    share_prefixes: bool = False
    context: ContextShard | None = None
    routed_experts: RoutedExperts | None = None
    media: Media | None = None

    @classmethod
    def of(
        cls,
        batch: TensorDictBase | PackedBatch,
        *,
        device: torch.device | str | None = None,
        options: ReplayOptions = DEFAULT,
    ) -> PackedInputs:
        """Packs the rows of a batch as inputs of a model, without padding.

        Args:
            batch: token ids, and the fields of the sequence and response axes: `attention_mask` and `responses`, the
                layouts of a nested or packed batch, or jagged `input_ids` and `responses`, or a jagged `loss_mask`.
                Padding may be on the left, on the right or on both sides.
                Without `position_ids`, positions count the valid tokens of each row. Where they go back inside a row
                (of M-RoPE, to zeros), where the numbers of the mask change, or at the `cu_seqlens` or `seq_lens` of a
                batch of one row, another document begins, which is kept apart as a row is. One synchronisation if
                positions or the mask are on CUDA, and more if there are several documents in a row. Images and videos
                are in `multi_modal_inputs`, a dict of tensors for each row, or in jagged fields `pixel_values`,
                `image_grid_thw`, `pixel_values_videos`, `video_grid_thw` and `image_sizes`.
            device: the device of the inputs; by default that of the batch. The batch itself does not move.
            options: all but `chunk` and `keep`.

        Raises:
            ReplayError: no token ids, a field of another shape or dtype, audio, a response without a prompt, experts
                that are not different, or positions of a row that neither count on nor begin anew.
            LayoutError: a batch without a sequence and a response axis.
        """
        call = "PackedInputs.of"
        need_options(options, call)
        device = None if device is None else device_here(device, call)
        rows = _Rows.of(batch, options, device, call, on_host=options.share_prefixes)
        where = rows.device if device is None else device
        predict, scored = _predict(rows, options.no_prompt, call)
        scores, copies, tree = predict + 1, None, None
        if options.share_prefixes:
            rows, tree = rows.once(options.min_shared, call)
        if tree is not None:
            predict, scores, copies = _scored_once(
                tree.of_row_token[predict], tree.of_row_token[scores], tree.num_tokens
            )
        tokens, multiple = rows.ids.shape[0], options.multiple_of
        bounds = np.unique(rows.documents) if tree is None else np.append(tree.nodes.starts, tree.num_tokens)
        ids, positions = (_sent(x, where).long() for x in (rows.ids, rows.positions))
        routes = None if rows.routes is None else rows.routes.to(where)
        total = tokens + (-tokens % multiple or (0 if tokens else multiple))
        placed = positions[None] if positions.dim() == 1 else positions.T[:, None]
        return cls(
            **_with_tail(ids[None], placed, routes, bounds, total),
            predict=_sent(torch.from_numpy(predict), where),
            targets=ids.index_select(0, _sent(torch.from_numpy(scores), where)),
            scored=None if scored is None else _sent(torch.from_numpy(scored), where),
            copies=None if copies is None else _sent(torch.from_numpy(copies), where),
            response=rows.axis.response.to(where),
            bounds=bounds,
            num_tokens=tokens,
            tree=tree,
            share_prefixes=options.share_prefixes,
            media=None if rows.media is None else rows.media.to(torch.device(where)),
        )

    def with_tail(self, total: int) -> PackedInputs:
        """Returns the inputs with a tail that makes T `total`, at least `num_tokens`. Its position ids are those of the
        longest row, again and again, so that they are within the limits of a model for which the rows are.

        Raises:
            ReplayError: a smaller total, or the inputs are a shard.
        """
        call, tokens = "PackedInputs.with_tail", self.num_tokens
        total = whole(total, "total", tokens, call, error=ReplayError)
        if self.context is not None:
            raise ReplayError(f"{call}: the inputs are a shard; expected whole ones. Take PackedInputs.of.")
        routes = self.routed_experts
        routes = None if routes is None else replace(routes, ids=routes.ids[:tokens])
        ids, positions = self.input_ids[:, :tokens], self.position_ids[..., :tokens]
        padded = _with_tail(ids, positions, routes, self.bounds, total)
        padded["position_ids"][..., tokens:] %= max(self.longest_row, 1)
        return replace(self, **padded)

    def shard(self, group: ProcessGroup, *, temperature: float = 1.0) -> PackedInputs:
        """Returns the inputs of this rank for context parallelism: one of equal, consecutive shards of the T tokens.

        The tail is made longer so that T is a multiple of the number of ranks.

        Args:
            group: the context-parallel ranks. All of them call this with the same rows.
            temperature: of the log-probs to come; it is compared, too.

        One small collective compares the rows; it and the division take two synchronisations on CUDA.

        Raises:
            ReplayError: on all ranks, if their rows or temperatures differ; or the inputs are a shard already.
        """
        return self._shard(group, {"temperature": temperature})

    def _shard(self, group: ProcessGroup, options: Mapping[str, float | bool | None]) -> PackedInputs:
        """`shard`, which compares further options of OPTIONS."""
        call = "PackedInputs.shard"
        if self.context is not None:
            raise ReplayError(f"{call}: the inputs are a shard already; expected whole ones. Take PackedInputs.of.")
        need_group(group, call)
        routes = self.routed_experts
        ids = self.input_ids[0] if routes is None else torch.cat([self.input_ids[0], routes.ids.flatten()])
        named = "token ids" if routes is None else "token ids and routed experts"
        same = {named: ids, "position ids": self.position_ids, "bounds": self.cu_seqlens}
        options = {**options, "share_prefixes": self.share_prefixes, "gradients": torch.is_grad_enabled()}
        options["routed_experts"] = routes is not None
        need_same({**same, "scored tokens": self.predict}, options, group, call)
        total = -(-self.input_ids.shape[1] // group.size()) * group.size()
        ids, positions = (x[..., : self.num_tokens] for x in (self.input_ids, self.position_ids))
        routes = None if routes is None else replace(routes, ids=routes.ids[: self.num_tokens])
        whole = _with_tail(ids, positions, routes, self.bounds, total)
        context, own = shard_of(self.predict, total, group)
        here = slice(context.begin, context.begin + context.size)
        whole.update({name: whole[name][..., here] for name in ("input_ids", "position_ids")})
        if routes is not None:
            whole["routed_experts"] = replace(routes, ids=whole["routed_experts"].ids[here])
        return replace(
            self, **whole, predict=self.predict[own] - context.begin, targets=self.targets[own], context=context
        )

    def collected(self, own: Tensor, tokens: IntArray) -> Tensor:
        """Returns the entries [n, ...] of some tokens, without gradient, from a tensor [T, ...] like `input_ids[0]`.

        `tokens` counts all T tokens. For a shard, all ranks must call, and all get the result."""
        if self.context is not None:
            return self.context.collected(own, tokens)
        return own.detach().index_select(0, torch.from_numpy(tokens).to(own.device))

    @property
    def longest_row(self) -> int:
        """The number of tokens of the longest row of the batch, or of the tail."""
        return self.max_seqlen if self.tree is None else max(self.max_seqlen, int(self.tree.lengths.max(initial=0)))


def prefix_tree(batch: TensorDictBase | PackedBatch, *, options: ReplayOptions = DEFAULT) -> PrefixTree:
    """The trie of the rows of a batch, for `tree=` of plans.

    Args:
        batch: as for `PackedInputs.of`. One synchronisation for the ids and one for the positions if they are on CUDA.
        options: those of the replay that follows; its `share_prefixes` does not matter here.

    Raises:
        ReplayError: as `PackedInputs.of`, or a row holds several documents.
    """
    need_options(options, "prefix_tree")
    rows = _Rows.of(batch, options, _CPU, "prefix_tree", on_host=True)
    _need_one_document(rows.documents, rows.sequence, "the tree of a plan has one path for each row", "prefix_tree")
    return rows.tree(options.min_shared)


def _need_one_document(documents: IntArray, sequence: RowLayout, why: str, call: str) -> None:
    row = row_of_document(documents, sequence)
    if row is not None:
        raise ReplayError(
            f"{call}: row {row} holds several documents; expected one in each row, because {why}. Give each document "
            "a row."
        )


def _with_tail(
    ids: Tensor, positions: Tensor, routes: RoutedExperts | None, bounds: IntArray, total: int
) -> dict[str, Any]:
    """The fields of PackedInputs for tokens [..., T], with a tail after them that makes T `total`."""
    tail = total - ids.shape[-1]
    ends = (np.append(bounds, total) if tail else bounds).astype(np.int32)
    counted = torch.arange(tail, device=ids.device, dtype=positions.dtype)
    return {
        "input_ids": torch.cat([ids, ids.new_zeros((1, tail))], -1),
        "position_ids": torch.cat([positions, counted.expand(*positions.shape[:-1], tail)], -1),
        "cu_seqlens": _sent(torch.from_numpy(ends), ids.device),
        "max_seqlen": int(np.diff(ends).max(initial=0)),
        "routed_experts": None if routes is None else routes.with_tail(tail),
    }


@dataclass(frozen=True)
class _Rows:
    """The tokens of a batch, one row after another.

    Attributes:
        ids: integers [T].
        positions: integers [T] or [T, n].
        documents: where documents begin among the tokens, and T: the row offsets, if each row is one.
        counted: whether positions are the places in the documents, because the batch has none.
        routes: the experts of the tokens, if they were asked for.
        device: where the ids were found.
        tokens: int64 [response tokens]: their indices in T.
        picked: bool [response tokens] on the host: those at which no mask of `scored` is 0.
        media: the images and videos of the rows.
    """

    ids: Tensor
    positions: Tensor
    documents: IntArray
    counted: bool
    routes: RoutedExperts | None
    device: torch.device
    sequence: RowLayout
    axis: ResponseAxis
    tokens: IntArray
    picked: npt.NDArray[np.bool_]
    media: Media | None

    @classmethod
    def of(
        cls,
        batch: TensorDictBase | PackedBatch,
        options: ReplayOptions,
        device: torch.device | None,
        call: str,
        *,
        on_host: bool,
    ) -> _Rows:
        """With `on_host`, tokens are copied to the host. Those of a PackedBatch are decoded on `device`."""
        fields, axis = _fields(batch, options, _CPU if on_host and device is not None else device, call)
        sequence, name = axis.need_sequence(call), show(options.input_ids)
        ids, positions, experts = (_packed(fields, field, sequence, call, most) for field, most in _DIMS.items())
        if ids is None:
            raise ReplayError(
                f'{call}: the batch has no field "{name}"; expected token ids. Keep it in the batch. If they have '
                'another name, pass it: ReplayOptions(input_ids="tokens").'
            )
        if options.routed_experts and experts is None:
            raise ReplayError(
                f'{call}: the batch has no field "routed_experts"; expected the experts of each token [B, S, layers, '
                "k]. Have the rollout engine return them, or leave routed_experts out."
            )
        for field, x in ((name, ids), ("position_ids", positions)):
            if x is not None and (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool):
                raise ReplayError(f'{call}: field "{field}" is {x.dtype}; expected integers. Fix the producer.')
        numbers = [_on(fields[path], sequence) for path in _masks(options, call) if path in fields]
        given = {name: fields[name].value for name in (*BOUNDS, *LENGTHS) if name in fields}
        numbers = [line for line in numbers if line is not None and line.dim() == 1 and line.dtype != torch.bool]
        documents = documents_of(sequence, positions, numbers, given, call)
        counted, where = positions is None, ids.device
        if positions is None:
            starts = np.repeat(documents[:-1], np.diff(documents))
            positions = torch.from_numpy(np.arange(sequence.num_tokens) - starts)
        if on_host:
            ids, positions, experts = ids.cpu(), positions.cpu(), None if experts is None else experts.cpu()
        routes = None if experts is None else RoutedExperts.of(experts, np.unique(documents)[1:], call)
        media = Media.of(batch, sequence.lengths, call, compare=on_host)
        if media is not None:
            _need_one_document(documents, sequence, "images and videos belong to rows", call)
        tokens = axis.tokens(call)
        picked = _picked(fields, options, axis, tokens, call)
        return cls(ids, positions, documents, counted, routes, where, sequence, axis, tokens, picked, media)

    def once(self, min_shared: int, call: str) -> tuple[_Rows, PrefixTree | None]:
        """Each token of the tree once, and the tree. The same rows and None if they share nothing."""
        tree = self.tree(min_shared)
        if tree.num_tokens == self.sequence.num_tokens:
            return self, None
        source, copied = torch.from_numpy(tree.source), torch.from_numpy(tree.source[tree.of_row_token])
        compared = [self.ids, self.positions] + ([] if self.routes is None else [self.routes.ids])
        if not all(torch.equal(x.index_select(0, copied), x) for x in compared):
            raise ReplayError(
                f"{call}: rows have other tokens or positions than their prefix tree; expected the same. This is a "
                "defect of maskpack: report it, and leave share_prefixes out."
            )
        ids, positions, *routed = (x.index_select(0, source) for x in compared)
        routes = None if self.routes is None else replace(self.routes, ids=routed[0])
        return replace(self, ids=ids, positions=positions, routes=routes), tree

    def tree(self, min_shared: int) -> PrefixTree:
        """The trie of the rows, which are on the host. Those with other images have no token in common: the ids of all
        images are equal."""
        positions = None if self.counted else self.positions.numpy()
        beside = [] if positions is None else [positions if positions.ndim == 2 else positions[:, None]]
        if self.routes is not None:
            beside.append(self.routes.codes())
        if self.media is not None:
            beside.append(np.repeat(self.media.of_row, self.sequence.lengths)[:, None])
        positions = np.concatenate(beside, 1) if beside else None
        return PrefixTree.from_ids(self.ids.numpy(), self.documents, positions, min_shared=min_shared)


def _scored_once(predict: IntArray, scores: IntArray, tokens: int) -> tuple[IntArray, IntArray, IntArray]:
    """Outputs `predict` [n] that score tokens `scores` [n] of a tree, each token once: both [N], and which of the N
    each of the n is. A token has one output that scores it: at the token before it in the tree."""
    scored = np.zeros(tokens, np.bool_)
    scored[scores] = True
    scoring = np.empty(tokens, np.int64)
    scoring[scores] = predict
    own = np.flatnonzero(scored)
    return scoring[own], own, (np.cumsum(scored) - 1)[scores]


class _Field(NamedTuple):
    """A field, its path in the batch, its row offsets if they are on the host, and whether it may be [T, *F]."""

    path: Path
    value: Tensor
    offsets: IntArray | None = None
    is_flat: bool = False


def _fields(
    batch: TensorDictBase | PackedBatch, options: ReplayOptions, device: torch.device | None, call: str
) -> tuple[dict[Key, _Field], ResponseAxis]:
    """The fields of tokens that the batch has, those of a packed one on a device; and its response axis."""
    places: dict[Key, Path] = {"input_ids": path_of(options.input_ids), "position_ids": ("position_ids",)}
    if options.routed_experts:
        places["routed_experts"] = ("routed_experts",)
    places |= {path: path for path in (LOSS_MASK, *map(path_of, options.scored), *_masks(options, call))}
    places |= {name: (name,) for name in (*BOUNDS, *LENGTHS)}
    if not isinstance(batch, PackedBatch):
        need_batch(batch, call)
        entries = {name: entry_at(batch, path) for name, path in places.items()}
        fields = {name: _Field(places[name], value) for name, value in entries.items() if isinstance(value, Tensor)}
    else:
        fields = _decoded(batch, places, device)
    if "input_ids" in fields and not fields["input_ids"].value.is_nested and fields["input_ids"].value.dim() == 1:
        fields = {name: field._replace(is_flat=True) for name, field in fields.items()}
    axis = axis_of(batch, options, call)
    forms = cast("PackedBatch", batch).forms if isinstance(batch, PackedBatch) else axis.nested.forms
    form = forms.get(("position_ids",))
    if "position_ids" in fields and (form is None or form.kind == "jagged"):
        fields["position_ids"] = _by_tokens(fields["position_ids"], axis.need_sequence(call), call)
    return fields, axis


def _by_tokens(field: _Field, sequence: RowLayout, call: str) -> _Field:
    """Positions of which the rows [n, j] were taken for [j, n], as torch takes those of equal lengths: with the ragged
    dim that they have. Raises ReplayError if it may be either."""
    own = Jagged.of(field.value) if field.value.is_nested else None
    if own is None or own.dim != 1 or own.values.dim() != 2 or not sequence.num_rows:
        return field
    offsets = host_offsets(field.value, sequence) if field.offsets is None else field.offsets
    field, lengths, tokens = field._replace(offsets=offsets), np.diff(offsets), own.values.shape[1]
    sections = int(lengths.max(initial=0))
    if lengths.size != sequence.num_rows or (lengths != sections).any() or (sequence.lengths != tokens).any():
        return field
    rows = own.values[: lengths.sum()].reshape(sequence.num_rows, sections, tokens)
    if sections != tokens:
        return field._replace(
            value=jagged(rows.mT.flatten(0, 1), sequence.to(rows.device)), offsets=sequence.row_offsets
        )
    if not torch.equal(rows, rows.mT):
        raise ReplayError(
            f'{call}: field "{show(field.path)}" has rows of {tokens} x {tokens} numbers, of which either dim may be '
            "the tokens; expected a ragged dim that tells. Build it from its values [n, T]: "
            "torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=2)."
        )
    return field


def _masks(options: ReplayOptions, call: str) -> list[Path]:
    """The masks that the registry names for the sequence axis."""
    ways = registry_of(options.registry, call).axes.get(SEQUENCE, ())
    return [path_of(way.source) for way in ways if way.form == "mask"]


def axis_of(batch: TensorDictBase | PackedBatch, options: ReplayOptions, call: str) -> ResponseAxis:
    """The response axis of a batch, by the registry of the options."""
    registry = registry_of(options.registry, call)
    has_mask = (
        LOSS_MASK in cast("PackedBatch", batch).forms if isinstance(batch, PackedBatch) else has(batch, *LOSS_MASK)
    )
    whole, (line, in_row) = bool(options.scored) or has_mask, _line_of(batch, options)
    if not isinstance(batch, PackedBatch):
        return ResponseAxis.of(batch, registry, call, or_sequence=whole, line=line, in_row=in_row)
    columns, schema = _columns(batch, registry), cast("Schema", batch.schema)
    nested, padded = NOTHING._replace(layouts=batch.layouts), {name for name, _, _ in schema.axes}
    return ResponseAxis.of(
        columns, registry, call, or_sequence=whole, line=line, in_row=in_row, nested=nested, padded=padded
    )


def _columns(packed: PackedBatch, registry: MaskNestingRegistry) -> TensorDictBase:
    """The jagged fields from which the registry takes those of the two axes that a packed batch does not name."""
    names = {name for name in (SEQUENCE, RESPONSE) if name not in packed.layouts}
    sources = {path_of(way.source) for name in names for way in registry.axes.get(name, ())}
    paths = [form.path for form in packed.tensors if form.path in sources and form.kind in ("jagged", "flat")]
    return decompress(packed, *paths, format="nested", device=_CPU) if paths else TensorDict()


def _line_of(batch: TensorDictBase | PackedBatch, options: ReplayOptions) -> tuple[RowLayout | None, bool]:
    """The tokens of a batch [T] or [1, T] as one row, if it has fields that say where the documents in it are; and
    whether it is [1, T]."""

    def shape_at(path: Path) -> tuple[int, ...] | None:
        if isinstance(batch, PackedBatch):
            form = cast("FieldForm | None", batch.forms.get(path))
            return shape_in(batch, form) if form is not None and form.kind == "dense" else None
        tensor = dense_at(batch, path)
        return None if tensor is None else tuple(tensor.shape)

    shape = shape_at(path_of(options.input_ids))
    if not shape or shape[:-1] not in ((), (1,)):
        return None, False
    known = any(shape_at((name,)) for name in (*BOUNDS, *LENGTHS, "position_ids"))
    return RowLayout.from_lengths([shape[-1]]) if known else None, len(shape) == 2


def _decoded(packed: PackedBatch, places: Mapping[Key, Path], device: torch.device | None) -> dict[Key, _Field]:
    """Ids and experts on a device; what is looked at here on the host, unless `device` is None."""
    paths = {name: path for name, path in places.items() if path in packed.numbers}
    far = {name for name in paths if name in ("input_ids", "routed_experts") or device is None}
    fields: dict[Key, _Field] = {}
    for names, where in ((far, device), (paths.keys() - far, _CPU)):
        own = [paths[name] for name in paths if name in names]
        nested = decompress(packed, *own, format="nested", device=where) if own else TensorDict()
        for name in names:
            layout = packed.forms[paths[name]].layout
            offsets = None if layout is None else packed.layouts[layout].row_offsets
            fields[name] = _Field(paths[name], entry_at(nested, paths[name]), offsets)
    return fields


def _packed(fields: Mapping[Key, _Field], name: Key, sequence: RowLayout, call: str, most: int = 1) -> Tensor | None:
    """A field of the sequence axis as packed tokens: [T], or [T, n] for n position ids a token, of at most so many
    dims. None if there is none."""
    if name not in fields:
        return None
    packed = _on(fields[name], sequence)
    if packed is None:
        path, value, *_ = fields[name]
        if value.is_nested:
            raise ReplayError(
                f'{call}: field "{show(path)}" has {value.values().shape[0]} tokens in rows of other lengths than the '
                f"sequence axis, which has {sequence.num_tokens} tokens. Nest it under the sequence axis."
            )
        raise ReplayError(
            f'{call}: field "{show(path)}" is {tuple(value.shape)}; the sequence axis is ({sequence.num_rows}, '
            f"{sequence.width}). Fix the producer."
        )
    if packed.dim() > most:
        raise ReplayError(
            f'{call}: field "{show(fields[name].path)}" is {tuple(packed.shape)} packed; expected one number for each '
            "token, or of position ids a few. Fix the producer."
        )
    return packed


def _on(field: _Field, layout: RowLayout) -> Tensor | None:
    """The tokens of a field on a layout, packed; None if the field has other rows."""
    _, value, offsets, is_flat = field
    if value.is_nested:
        if Jagged.of(value) is None:
            return None
        offsets = host_offsets(value, layout) if offsets is None else offsets
        return values_of(value)[: layout.num_tokens] if np.array_equal(offsets, layout.row_offsets) else None
    if value.dim() == 3 and value.shape[2] == layout.width:  # M-RoPE, [B, n, S]
        value = value.movedim(2, 1)
    if tuple(value.shape[:2]) == (layout.num_rows, layout.width):
        return plain.pack(value, layout.to(value.device))
    return value if is_flat and value.dim() != 2 and value.shape[:1] == (layout.num_tokens,) else None


def _picked(
    fields: Mapping[Key, _Field], options: ReplayOptions, axis: ResponseAxis, tokens: IntArray, call: str
) -> npt.NDArray[np.bool_]:
    """bool [response tokens]: those at which no mask of `options.scored` is 0."""
    picked = np.ones(tokens.size, np.bool_)
    own_mask = [] if options.scored or axis.response is not axis.sequence else [LOSS_MASK]
    for path in own_mask or map(path_of, options.scored):
        if path not in fields:
            raise ReplayError(
                f'{call}: the batch has no field "{show(path)}"; expected a mask of the tokens to score. Keep '
                "it in the batch, or leave it out of ReplayOptions(scored=)."
            )
        own = _on(fields[path], axis.response)
        if axis.counted and not fields[path].value.is_nested and axis.response.width == axis.need_sequence(call).width:
            own = _by_spec(path, own, options, call)
        if own is None:
            own = _packed(fields, path, axis.need_sequence(call), call)
            assert own is not None
            own = own.index_select(0, _sent(torch.from_numpy(tokens), own.device))
        if own.dim() > 1:
            raise ReplayError(
                f'{call}: field "{show(path)}" is {tuple(own.shape)} packed; expected one number for each token. Fix '
                "the producer."
            )
        picked &= own.ne(0).cpu().numpy()
    return picked


def _by_spec(path: Path, on_response: Tensor | None, options: ReplayOptions, call: str) -> Tensor | None:
    """`on_response`, or None for a field of the sequence axis, which is as wide: its columns are other tokens, because
    the response axis tells only lengths. The registry says which it is. Raises ReplayError if it does not."""
    spec = registry_of(options.registry, call).find(path)
    axes = [] if spec is None else [mask for mask in spec.masks if mask in (RESPONSE, SEQUENCE)]
    if not axes:
        raise ReplayError(
            f'{call}: field "{show(path)}" may be on the axis "{RESPONSE}" or "{SEQUENCE}", which are as wide; '
            "expected a spec that names its axis. Add it to the registry."
        )
    return on_response if axes[0] == RESPONSE else None


def _sent(x: Tensor, device: torch.device) -> Tensor:
    """Copies to a device. A copy from the host does not synchronise; a copy to the host does."""
    return x.to(device, non_blocking=x.device.type == "cpu")


def _predict(rows: _Rows, no_prompt: NoPrompt, call: str) -> tuple[IntArray, IntArray | None]:
    """The positions whose outputs score response tokens; and the indices of the scored tokens, or None for all."""
    begins = np.zeros(rows.sequence.num_tokens + 1, np.bool_)
    begins[rows.documents] = True
    first = begins[rows.tokens] & rows.picked
    if first.any() and no_prompt == "error":
        if rows.documents is not rows.sequence.row_offsets:
            raise ReplayError(
                f"{call}: documents in rows {np.unique(rows.axis.row_of_token[first])[:8].tolist()} begin with a "
                "response token, which no output scores; expected a prompt token first. Pass a mask that is 0 there, "
                'ReplayOptions(scored=("loss_mask",)), or ReplayOptions(no_prompt="skip").'
            )
        raise ReplayError(
            f"{call}: rows {rows.axis.row_of_token[first][:8].tolist()} have a response but no prompt token; expected "
            "at least one, whose output scores the first response token. Drop these rows, or pass "
            'ReplayOptions(no_prompt="skip").'
        )
    scored = np.flatnonzero(rows.picked & ~first)
    return scoring(rows.tokens[scored]), None if scored.size == rows.tokens.size else scored
