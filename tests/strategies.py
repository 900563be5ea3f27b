"""Hypothesis strategies: masks of every dtype and pattern, whole RL batches, and sequences of row operations.

The shape of an example (which fields, dtypes, widths, patterns) is drawn; its values come from a seeded generator over
all bit patterns, so that NaN payloads and -0.0 are everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import oracle
import torch
from hypothesis import strategies as st
from samples import RESPONSE_FIELDS, indexes_jagged
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from maskpack import EDGE, PAD_TOKEN_ID, PER_ROW, RL_FIELDS, MaskNestingRegistry, MaskNestingSpec
from maskpack.core.pads import ANY_ZERO, SIGNED_ZERO
from maskpack.nesting import take

Path = tuple[str, ...]

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
FLOATS8 = (
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
)
SIGNED = (torch.int64, torch.int32, torch.int16, torch.int8)
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
MASK_DTYPES = (torch.bool, *SIGNED, *UNSIGNED, *FLOATS, *FLOATS8)
DTYPES = (*MASK_DTYPES, *COMPLEX)
"""Every dtype that torch computes with (not its packed sub-byte, quantized and bit-bag dtypes)."""
PLAIN_DTYPES = (torch.bool, *SIGNED, torch.uint8, *FLOATS, torch.complex64)
"""Those that TensorDict can pickle, consolidate and concatenate."""


# -------------------------------------------------------------------- values


def generators() -> st.SearchStrategy[np.random.Generator]:
    return st.integers(0, 2**32 - 1).map(np.random.default_rng)


def values(rng: np.random.Generator, shape: Sequence[int], dtype: torch.dtype, finite: bool = False) -> Tensor:
    """Random bits of `dtype`; `finite` ones are small whole numbers and halves, safe to cast and to compute with."""
    shape = tuple(shape)
    if dtype == torch.bool:
        return torch.from_numpy(rng.integers(0, 2, shape).astype(np.bool_))
    if finite:
        whole = torch.from_numpy(rng.integers(0, 100, shape))
        return whole.to(dtype) / 2 if dtype.is_floating_point and dtype.itemsize > 1 else whole.to(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.frombuffer(rng.bytes(size), f"V{dtype.itemsize}").reshape(shape).copy()
    odd = rng.random(shape) < 0.15  # zeros, and zeros with a sign bit
    raw[odd] = np.zeros((), raw.dtype)
    signed = np.zeros(dtype.itemsize, np.uint8)
    signed[-1] = 0x80
    raw[odd & (rng.random(shape) < 0.5)] = signed.view(raw.dtype)[0]
    return oracle.from_cells(raw, dtype)


def strided(rng: np.random.Generator, x: Tensor) -> Tensor:
    """The same elements in other strides, or as they are."""
    way = rng.integers(0, 4)
    if way == 0 or x.dim() < 2:
        return x
    if way == 1:
        return x.movedim(0, -1).contiguous().movedim(-1, 0)
    if way == 2:
        wider = torch.zeros((*x.shape[:-1], x.shape[-1] + 2), dtype=x.dtype)
        inner = wider[..., 1:-1]
    else:
        wider = torch.zeros((x.shape[0], 2 * x.shape[1], *x.shape[2:]), dtype=x.dtype)
        inner = wider[:, ::2]
    oracle_view(inner).copy_(oracle_view(x))
    return inner


def oracle_view(x: Tensor) -> Tensor:
    """A dtype that torch can copy, over the same memory."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x if x.dtype.is_complex else x.view(words[x.element_size()])


# -------------------------------------------------------------------- masks


@st.composite
def patterns(draw: st.DrawFn, rows: int | None = None, width: int | None = None, wide: bool = False) -> oracle.Mask:
    """Masks as lists of rows: empty, full, left and right padded, single cells, alternating, any."""
    rows = draw(st.integers(0, 5)) if rows is None else rows
    if width is None:
        width = draw(st.integers(65, 200)) if wide else draw(st.integers(0, 9))
    kinds = ("empty", "full", "right", "left", "middle", "one", "alternating", "any")
    return [_row(draw, draw(st.sampled_from(kinds)), width) for _ in range(rows)]


def _row(draw: st.DrawFn, kind: str, width: int) -> list[bool]:
    if kind == "any":
        rng = draw(generators())
        return (rng.random(width) < rng.random()).tolist()
    a, b = sorted((draw(st.integers(0, width)), draw(st.integers(0, width))))
    real = {
        "empty": lambda place: False,
        "full": lambda place: True,
        "right": lambda place: place < b,
        "left": lambda place: place >= a,
        "middle": lambda place: a <= place < b,
        "one": lambda place: place == a,
        "alternating": lambda place: (place + a) % 2 == 0,
    }[kind]
    return [real(place) for place in range(width)]


def mask_values(rng: np.random.Generator, mask: oracle.Mask, width: int, dtype: torch.dtype) -> Tensor:
    """A mask of `dtype`: any non-zero value at real positions, zeros (also -0.0) elsewhere."""
    real = oracle.mask_tensor(mask, width)
    if dtype == torch.bool:
        return real
    out = oracle.cells(values(rng, real.shape, dtype)).copy()
    one = oracle.pad_cell(1, dtype)[()]
    flags = real.numpy()
    bits = oracle.from_cells(out, dtype)
    zero = np.asarray(oracle.mask_rows(bits), np.bool_).reshape(flags.shape) == 0
    out[flags & zero] = one
    out[~flags & ~zero] = np.zeros((), out.dtype)
    return oracle.from_cells(out, dtype)


@dataclass
class MaskCase:
    mask: oracle.Mask
    width: int
    tensor: Tensor


@st.composite
def masks(draw: st.DrawFn, wide: bool = False, dtypes: Sequence[torch.dtype] = MASK_DTYPES) -> MaskCase:
    width = draw(st.integers(65, 200)) if wide else draw(st.integers(0, 9))
    mask = draw(patterns(width=width))
    dtype = draw(st.sampled_from(dtypes))
    rng = draw(generators())
    return MaskCase(mask, width, strided(rng, mask_values(rng, mask, width, dtype)))


# -------------------------------------------------------------------- batches


@dataclass
class Field:
    """What must become of a padded field: the mask it lies under and the dim its width runs along; `trusted` where the
    first pad of its spec is the true one."""

    mask: oracle.Mask
    axis: str
    ragged_dim: int = 1
    trusted: bool = True


@dataclass(repr=False)
class Case:
    """A batch with what is known about it.

    `nested` holds the fields that must become jagged; `lossy` those that are kept dense for a value under their mask;
    `loose` every tensor that strict mode must report.
    """

    batch: TensorDict
    registry: MaskNestingRegistry
    pad_token_id: int
    nested: dict[Path, Field] = field(default_factory=dict)
    lossy: set[Path] = field(default_factory=set)
    loose: set[Path] = field(default_factory=set)

    def __repr__(self) -> str:
        lossy = sorted("/".join(path) for path in self.lossy)
        return f"Case(pad_token_id={self.pad_token_id}, lossy={lossy}, {self.batch})"

    @property
    def rows(self) -> int:
        return self.batch.batch_size[0]

    @property
    def options(self) -> dict[str, Any]:
        return {"registry": self.registry, "pad_token_id": self.pad_token_id}


class _Maker:
    """Fills one (sub-)batch. `axes` are the masks by axis name; an axis that is missing leaves its fields dense."""

    def __init__(
        self,
        draw: st.DrawFn,
        rng: np.random.Generator,
        case: Case,
        axes: dict[str, tuple[oracle.Mask, int]],
        scope: Path,
        finite: bool,
        stray: bool,
    ) -> None:
        self.draw, self.rng, self.case, self.axes, self.scope = draw, rng, case, axes, scope
        self.finite, self.stray = finite, stray
        self.entries: dict[str, Any] = {}

    def wants(self) -> bool:
        return self.draw(st.booleans())

    def padded(
        self,
        name: str,
        axis: str,
        width: int,
        dtype: torch.dtype,
        pad: Any = 0,
        trailing: Sequence[int] = (),
        ragged_dim: int = 1,
        data: Tensor | None = None,
    ) -> None:
        """A field [B, width, *trailing] that holds its pad where the axis is empty, maybe with one other value."""
        path = (*self.scope, name)
        shape = (self.case.rows, width, *trailing)
        x = values(self.rng, shape, dtype, self.finite) if data is None else data
        if axis not in self.axes:
            self.entries[name] = x.movedim(1, ragged_dim).contiguous()
            self.case.loose.add(path)
            return
        mask = self.axes[axis][0]
        flags = oracle.mask_tensor(mask, width).numpy()
        if pad is EDGE:
            x = oracle.unpack(oracle.pack(x, mask), mask, width, oracle.EDGE)
        array = oracle.cells(x).copy()
        if pad in (PER_ROW, SIGNED_ZERO):
            pads = values(self.rng, (self.case.rows,), dtype, self.finite)
            if pad is SIGNED_ZERO:
                pads = torch.tensor([0.0, -0.0]).to(dtype)[torch.from_numpy(self.rng.integers(0, 2, self.case.rows))]
            pads = oracle.cells(pads)
            array[~flags] = np.broadcast_to(pads.reshape(-1, *[1] * (array.ndim - 1)), array.shape)[~flags]
        elif pad is ANY_ZERO:
            signs = self.rng.integers(0, 2, (self.case.rows, width if array.ndim == 2 else 1))
            zeros = oracle.cells(torch.tensor([0.0, -0.0]).to(dtype)[torch.from_numpy(signs)])
            zeros = zeros.reshape(*signs.shape, *[1] * (array.ndim - 2))
            array[~flags] = np.broadcast_to(zeros, array.shape)[~flags]
        elif pad is not EDGE:
            array[~flags] = oracle.pad_cell(pad, dtype)[()]
        if self.stray and not flags.all() and x.numel() and self.draw(st.integers(0, 5)) == 0:
            empty = np.argwhere(~flags)
            row, place = empty[self.rng.integers(len(empty))]
            part = array[row, place]
            flipped = np.frombuffer(part.tobytes(), np.uint8).copy()
            flipped[0] ^= 1
            array[row, place] = flipped.view(array.dtype).reshape(np.shape(part))
        now = oracle.from_cells(array, dtype)
        held = [oracle.fits(now, mask, self.as_oracle(pad)) for pad in self.pads(name, dtype)]
        if any(held):
            self.case.nested[path] = Field(mask, axis, ragged_dim, held[0])
        else:
            self.case.lossy.add(path)
            self.case.loose.add(path)
        x = oracle.from_cells(array, dtype).movedim(1, ragged_dim)
        self.entries[name] = strided(self.rng, x.contiguous() if self.wants() else x)

    def pads(self, name: str, dtype: torch.dtype) -> list[Any]:
        """What the registry lets the field be padded with, as far as its dtype can hold it."""
        signed = dtype not in UNSIGNED and dtype != torch.bool
        return [pad for pad in self.case.registry[name].pads if signed or not isinstance(pad, int) or pad >= 0]

    def as_oracle(self, pad: Any) -> Any:
        special = {
            EDGE: oracle.EDGE,
            PER_ROW: oracle.PER_ROW,
            SIGNED_ZERO: oracle.SIGNED_ZERO,
            ANY_ZERO: oracle.ANY_ZERO,
            PAD_TOKEN_ID: self.case.pad_token_id,
        }
        return special.get(pad, pad)

    def dense(self, name: str, x: Tensor, loose: bool = False) -> None:
        self.entries[name] = x
        if loose:
            self.case.loose.add((*self.scope, name))

    def fields(self, prompt: int, response: int, two_axes: bool) -> None:
        """Any of the fields of fields.md but the masks and those that tell where the columns split."""
        draw, sequence = self.draw, prompt + response
        token = self.case.pad_token_id
        floats = st.sampled_from((torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64))
        if self.wants():
            self.padded("input_ids", "sequence", sequence, torch.int64, token)
        way = draw(st.integers(0, 3))
        if way:
            heads = [(), (3,), (4,)][way - 1]
            dtype = draw(st.sampled_from((torch.int64, torch.int32)))
            self.padded("position_ids", "sequence", sequence, dtype, EDGE, heads, 1 + len(heads))
        for name in draw(st.lists(st.sampled_from(RESPONSE_FIELDS), max_size=4, unique=True)):
            whole = two_axes and prompt > 0 and draw(st.integers(0, 3)) == 0
            pad = draw(st.sampled_from((0, 0, 0, SIGNED_ZERO, ANY_ZERO, ANY_ZERO, PER_ROW if self.stray else 0)))
            self.padded(name, *(("sequence", sequence) if whole else ("response", response)), draw(floats), pad)
        if draw(st.integers(0, 3)) == 0:
            dtype, pad = draw(
                st.sampled_from(
                    ((torch.int16, 0), (torch.int16, -1), (torch.int64, 0), (torch.int64, -1), (torch.uint8, 0))
                )
            )
            self.padded("routed_experts", "sequence", sequence, dtype, pad, (2, 2))
        if draw(st.integers(0, 3)) == 0:
            self.padded("teacher_ids", "sequence", sequence, torch.int32, token, (2,))
            self.padded("teacher_logprobs", "sequence", sequence, torch.float32, 0, (2,))

    def response_mask(self, name: str, width: int) -> None:
        """Zeros and ones, weights, or one value; always data on the response axis."""
        dtype, items = self.draw(
            st.sampled_from(
                (
                    (torch.int64, [0, 1]),
                    (torch.int64, [1]),
                    (torch.int64, [1, 2, 0]),
                    (torch.bool, [0, 1]),
                    (torch.int32, [1]),
                    (torch.float32, [0.5, 2, 0]),
                    (torch.bfloat16, [0, 1]),
                )
            )
        )
        picked = self.rng.choice(np.asarray(items), (self.case.rows, width))
        self.padded(name, "response", width, dtype, data=torch.from_numpy(picked).to(dtype))

    def objects(self) -> None:
        rows = self.case.rows
        makers = {
            "uid": lambda row: f"u{row // 2}",
            "raw_prompt": lambda row: [{"role": "user", "content": "x" * row}],
            "extra_info": lambda row: {"index": row, "nested": {"a": [row, None]}},
            "multi_modal_inputs": lambda row: {"pixel_values": torch.full((row, 2), float(row)), "n": np.arange(row)},
            "__num_turns__": lambda row: row,
        }
        for name in self.draw(st.lists(st.sampled_from(sorted(makers)), max_size=3, unique=True)):
            if rows:
                self.entries[name] = NonTensorStack(*[NonTensorData(makers[name](row)) for row in range(rows)])
        if self.wants():
            self.entries["temperature"] = NonTensorData(0.7, batch_size=[rows])
        if self.wants():
            self.entries["global_token_num"] = NonTensorData(list(range(rows)), batch_size=[rows])

    def made(self) -> TensorDict:
        order = list(self.entries)
        self.rng.shuffle(order)
        return TensorDict({name: self.entries[name] for name in order}, batch_size=[self.case.rows])


def jagged(rng: np.random.Generator, rows: int, dtype: torch.dtype, trailing: Sequence[int] = ()) -> Tensor:
    bounds = np.concatenate([[0], np.cumsum(rng.integers(0, 4, rows))])
    packed = values(rng, (int(bounds[-1]), *trailing), dtype)
    return torch.nested.nested_tensor_from_jagged(packed, torch.from_numpy(bounds))


@st.composite
def batches(
    draw: st.DrawFn,
    *,
    min_rows: int = 0,
    finite: bool = False,
    stray: bool = True,
    home_jagged: bool = True,
    objects: bool = True,
    generic: bool = True,
    dtypes: Sequence[torch.dtype] = DTYPES,
    device: bool = True,
) -> Case:
    """Whole RL batches: any subset of the fields of fields.md with other fields beside them. `dtypes` are those of
    the fields that may have any; `device` lets batches have one."""
    rng = draw(generators())
    rows = draw(st.integers(min_rows, 4))
    prompt, response = draw(st.integers(0, 3)), draw(st.integers(0, 5))
    if draw(st.integers(0, 7)) == 0:  # long runs
        response += draw(st.integers(70, 120))
    sequence = prompt + response
    case = Case(
        TensorDict({}, batch_size=[rows]),
        RL_FIELDS,
        draw(st.sampled_from((0, 7, 151643))),
    )
    mask = draw(_attention(rows, prompt, response))
    if not draw(st.integers(0, 4)):
        axes: dict[str, tuple[oracle.Mask, int]] = {}
    else:
        axes = {"sequence": (mask, sequence)}
    maker = _Maker(draw, rng, case, axes, (), finite, stray)
    splitters = draw(
        st.sets(st.sampled_from(("prompts", "responses", "response_mask", "max_prompt_length", "max_response_length")))
    )
    attention = bool(axes)
    if attention:
        if splitters:
            axes["prompt"] = [row[:prompt] for row in mask], prompt
            axes["response"] = [row[prompt:] for row in mask], response
        dtype = draw(st.sampled_from((torch.int64, torch.bool, torch.int32, torch.float32, torch.uint8)))
        ones = torch.from_numpy(rng.integers(1, 3, (rows, sequence)) if maker.wants() else np.ones((rows, sequence)))
        maker.padded("attention_mask", "sequence", sequence, dtype, data=ones.to(dtype))
        weak = ("attention_mask",) in case.lossy
        if weak:  # the flipped bit made a real position: take it as the mask that it is now
            case.lossy.discard(("attention_mask",))
            case.loose.discard(("attention_mask",))
            mask = oracle.mask_rows(maker.entries["attention_mask"])
            axes["sequence"] = mask, sequence
            if splitters:
                axes["prompt"] = [row[:prompt] for row in mask], prompt
                axes["response"] = [row[prompt:] for row in mask], response
        case.nested[("attention_mask",)] = Field(mask, "sequence")
        if splitters and draw(st.integers(0, 5)) == 0:
            maker.response_mask("loss_mask", response)
        if "response_mask" in splitters:
            maker.response_mask("response_mask", response)
    elif "response_mask" in splitters:
        axes["response"] = [[True] * response for _ in range(rows)], response
        maker.stray = False
        maker.response_mask("response_mask", response)
        maker.stray = stray
        axes["response"] = oracle.prefix(oracle.mask_rows(maker.entries["response_mask"])), response
        case.nested[("response_mask",)] = Field(axes["response"][0], "response")
    if "responses" in splitters:
        maker.padded("responses", "response", response, torch.int64, case.pad_token_id)
    if "prompts" in splitters:
        maker.padded("prompts", "prompt", prompt, torch.int64, case.pad_token_id)
    elif home_jagged and draw(st.integers(0, 5)) == 0:
        own = jagged(rng, rows, torch.int64)
        off = "prompt" in axes and own.offsets().diff().tolist() != oracle.lengths(axes["prompt"][0])
        maker.dense("prompts", own, loose=off)
    for name, number in (("max_prompt_length", prompt), ("max_response_length", response)):
        if name in splitters:
            maker.entries[name] = NonTensorData(number, batch_size=[rows])
    if not attention or splitters:
        maker.fields(prompt, response, two_axes=attention)
    _beside(draw, rng, case, maker, sequence, attention, home_jagged, generic, dtypes)
    if objects:
        maker.objects()
    _below(draw, rng, case, maker, prompt, response, attention, bool(splitters))
    case.batch = maker.made()
    if device and draw(st.booleans()):
        case.batch = TensorDict(dict(case.batch.items()), batch_size=[rows], device="cpu")
    if draw(st.booleans()):
        case.batch.lock_()
    return case


@st.composite
def _attention(draw: st.DrawFn, rows: int, prompt: int, response: int) -> oracle.Mask:
    if draw(st.booleans()):
        return draw(patterns(rows, prompt + response))
    mask = []
    for _ in range(rows):
        p, r = draw(st.integers(0, prompt)), draw(st.integers(0, response))
        mask.append([False] * (prompt - p) + [True] * (p + r) + [False] * (response - r))
    return mask


def _beside(
    draw: st.DrawFn,
    rng: np.random.Generator,
    case: Case,
    maker: _Maker,
    sequence: int,
    attention: bool,
    home_jagged: bool,
    generic: bool,
    dtypes: Sequence[torch.dtype],
) -> None:
    """Fields that lie under no mask, and one of any dtype that does."""
    rows = case.rows
    if generic and attention and maker.wants():
        dtype = draw(st.sampled_from(dtypes))
        pads = [0, 1] if dtype in UNSIGNED or dtype == torch.bool else [0, -1]
        pad = draw(st.sampled_from([*pads, PER_ROW, *([0.5, -0.0, SIGNED_ZERO, ANY_ZERO] if dtype in FLOATS else [])]))
        trailing = draw(st.sampled_from(((), (2,), (0,), (1, 3))))
        case.registry = RL_FIELDS | {"generic": MaskNestingSpec("sequence", pad)}
        maker.padded("generic", "sequence", sequence, dtype, pad, trailing)
    if maker.wants():
        maker.dense("reward_baselines", values(rng, (rows,), torch.float32))
    if maker.wants():
        maker.dense("dummy_tensor", values(rng, (rows, 1), torch.uint8))
    if maker.wants():
        maker.dense("unknown", values(rng, (rows, 3), draw(st.sampled_from(dtypes)), maker.finite), loose=True)
    if maker.wants():
        maker.dense("weight", values(rng, (rows,), draw(st.sampled_from(dtypes)), maker.finite))
    if home_jagged and draw(st.integers(0, 3)) == 0:
        first = jagged(rng, rows, draw(st.sampled_from(FLOATS)), draw(st.sampled_from(((), (2,)))))
        maker.dense("rows", first)
        if maker.wants():
            again = values(rng, first.values().shape, torch.int64)
            maker.dense("rows_too", torch.nested.nested_tensor_from_jagged(again, first.offsets()))


def _below(
    draw: st.DrawFn,
    rng: np.random.Generator,
    case: Case,
    maker: _Maker,
    prompt: int,
    response: int,
    attention: bool,
    split: bool,
) -> None:
    """Sub-TensorDicts: one under the masks around it, one with masks of its own, one empty."""
    way = draw(st.integers(0, 6))
    if way in (1, 3) and (not attention or split):
        inner = _Maker(draw, rng, case, maker.axes, ("meta",), maker.finite, maker.stray)
        inner.fields(prompt, response, two_axes=attention)
        inner.objects()
        if maker.wants():
            deeper = _Maker(draw, rng, case, maker.axes, ("meta", "deep"), maker.finite, maker.stray)
            deeper.fields(prompt, response, two_axes=False)
            inner.entries["deep"] = deeper.made()
        maker.entries["meta"] = inner.made()
    if way in (2, 3):
        p, r = draw(st.integers(0, 2)), draw(st.integers(0, 3))
        mask = draw(_attention(case.rows, p, r))
        axes = {
            "sequence": (mask, p + r),
            "prompt": ([row[:p] for row in mask], p),
            "response": ([row[p:] for row in mask], r),
        }
        own = _Maker(draw, rng, case, axes, ("own",), maker.finite, maker.stray)
        own.stray = False
        own.padded(
            "attention_mask", "sequence", p + r, torch.int64, data=torch.ones(case.rows, p + r, dtype=torch.int64)
        )
        own.padded("responses", "response", r, torch.int64, case.pad_token_id)
        own.stray = maker.stray
        own.fields(p, r, two_axes=True)
        maker.entries["own"] = own.made()
    if way == 4:
        maker.entries["nothing"] = TensorDict({}, batch_size=[case.rows])


# -------------------------------------------------------------------- row operations


@dataclass(frozen=True)
class RowOp:
    """One operation on rows: on anything with TensorDict's row interface, and on a plain list of row numbers."""

    name: str
    arg: Any

    def on_list(self, rows: list[int], even_chunks: bool) -> list[int]:
        """Of a list of rows. `even_chunks` as PackedBatch.chunk cuts them, otherwise as torch.chunk does."""
        if self.name == "slice":
            return rows[self.arg]
        if self.name == "index":
            return [rows[place] for place in self.arg]
        if self.name == "mask":
            return [row for row, kept in zip(rows, self.arg, strict=True) if kept]
        if self.name == "cat":
            return rows + rows
        if self.name == "split":
            sizes = self.arg
        elif even_chunks:
            least, more = divmod(len(rows), self.arg)
            sizes = [least + (part < more) for part in range(self.arg)]
        else:
            size = -(-len(rows) // self.arg)
            sizes = [min(size, len(rows) - begin) for begin in range(0, len(rows), size)]
        parts, begin = [], 0
        for size in sizes:
            parts.append(rows[begin : begin + size])
            begin += size
        return [row for part in reversed(parts) for row in part]

    def on_batch(self, batch: TensorDictBase) -> TensorDictBase:
        if not indexes_jagged():
            return take(batch, self.on_list([*range(len(batch))], even_chunks=False))
        if self.name in ("slice", "index"):
            return batch[self.arg]
        if self.name == "mask":
            return batch[torch.tensor(self.arg, dtype=torch.bool)]
        return self._joined(batch, torch.cat)

    def on_packed(self, packed: Any) -> Any:
        if self.name == "mask":
            return packed[torch.tensor(self.arg, dtype=torch.bool)]
        if self.name in ("slice", "index"):
            return packed[self.arg]
        return self._joined(packed, type(packed).cat)

    def _joined(self, batch: Any, cat: Any) -> Any:
        if self.name == "cat":
            return cat([batch, batch])
        return cat(list(getattr(batch, self.name)(self.arg))[::-1])


@st.composite
def row_ops(draw: st.DrawFn, rows: int, max_size: int = 4, empty: bool = True) -> list[RowOp]:
    """Operations that fit a batch of `rows` rows, one after the other. `empty` allows results without rows."""
    ops: list[RowOp] = []
    for _ in range(draw(st.integers(1, max_size))):
        least = 0 if empty else 1
        names = ["slice", "index", "mask", "cat"] if rows <= 16 else ["slice", "index", "mask"]
        names = [*names, "split", "chunk"] if rows else names
        name = draw(st.sampled_from(names))
        if name == "slice":
            start = draw(st.integers(0, max(rows - least, 0)))
            arg: Any = slice(start, draw(st.integers(start + least, max(rows, start + least))), draw(st.integers(1, 3)))
        elif name == "index":
            arg = draw(st.lists(st.integers(-rows, rows - 1), min_size=least, max_size=6)) if rows else []
        elif name == "mask":
            arg = draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
            if not empty and not any(arg):
                arg = [True] * rows
        elif name == "cat":
            arg = None
        elif name == "split":
            cuts = sorted(draw(st.lists(st.integers(1, rows - 1), max_size=3, unique=True))) if rows > 1 else []
            arg = [stop - begin for begin, stop in zip([0, *cuts], [*cuts, rows], strict=True)]
        else:
            arg = draw(st.integers(1, rows + 2))
        op = RowOp(name, arg)
        ops.append(op)
        rows = len(op.on_list(list(range(rows)), even_chunks=True))
    return ops


def rows_after(ops: Sequence[RowOp], rows: int, even_chunks: bool) -> list[int]:
    picked = list(range(rows))
    for op in ops:
        picked = op.on_list(picked, even_chunks)
    return picked


# -------------------------------------------------------------------- padded fields


def padded(rng: np.random.Generator, packed: Tensor, mask: oracle.Mask, width: int, pad: Any) -> Tensor:
    """Packed values [T, *F] in their places of [B, width, *F], with a number or a pad of maskpack between them."""
    rows, dtype = len(mask), packed.dtype
    signs = torch.from_numpy(rng.integers(0, 2, (rows, width)))
    zeros = torch.tensor([0.0, -0.0]).to(dtype)[signs] if dtype in FLOATS else torch.zeros(rows, width, dtype=dtype)
    if pad is EDGE:
        return oracle.unpack(packed, mask, width, oracle.EDGE)
    if pad is PER_ROW:
        return oracle.unpack(packed, mask, width, values(rng, (rows,), dtype))
    if pad is ANY_ZERO and packed.dim() == 1 and dtype in FLOATS:
        return torch.where(oracle.mask_tensor(mask, width), oracle.unpack(packed, mask, width), zeros)
    if pad in (SIGNED_ZERO, ANY_ZERO):
        return oracle.unpack(packed, mask, width, zeros[:, 0] if width else zeros.new_zeros(rows))
    return oracle.unpack(packed, mask, width, pad)
