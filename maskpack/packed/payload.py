"""A report of one call in a run: what its batches weigh as a framework sends them, and packed, and the time of both.

as it is   batch --pickle--> bytes --unpickle--> batch
packed     batch --compress, pickle--> bytes --unpickle, decompress--> batch
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor

from maskpack.core.arguments import said
from maskpack.core.tensors import need_batch
from maskpack.core.tree import entry_at, has
from maskpack.errors import LayoutError
from maskpack.fields.registry import Path, show
from maskpack.nesting.schema import LAYOUTS
from maskpack.packed.batch import PackedBatch, compress, decompress
from maskpack.packed.sizes import aligned, dtype_name, figures, pickled, pickled_bytes, printable

_ROUNDS = 2
"""How often times are measured; the shortest counts, because the first round plans and gets memory."""
_reported: set[str] = set()
"""The names that were reported, or are."""
_guard = threading.Lock()


@dataclass(frozen=True)
class FieldPayload:
    """A tensor of a batch.

    Attributes:
        path: the place of the tensor in the batch.
        dtype: the dtype of its elements.
        shape: its shape; None for a ragged dim.
        form: whether it is padded (or has no padding) or nested.
        raw_bytes: bytes of its elements and, for the first field that has them, of its offsets.
        packed_bytes: `wire_bytes` of `FieldReport`.
    """

    path: Path
    dtype: torch.dtype
    shape: tuple[int | None, ...]
    form: Literal["padded", "nested"]
    raw_bytes: int
    packed_bytes: int


@dataclass(frozen=True)
class Payload:
    """A batch in one direction of a call.

    Attributes:
        rows: B.
        fields: its tensors, in key order.
        raw_bytes: the sum over the fields.
        pickled_bytes, packed_bytes: bytes of the batch as it is, and packed, each pickled by cloudpickle as Ray does.
        pickle_seconds, unpickle_seconds: times of the batch as it is; of all times, the shorter of two.
        pack_seconds, unpack_seconds: times to compress and pickle, and to unpickle and decompress.
    """

    rows: int
    fields: tuple[FieldPayload, ...]
    raw_bytes: int
    pickled_bytes: int
    packed_bytes: int
    pickle_seconds: float
    unpickle_seconds: float
    pack_seconds: float
    unpack_seconds: float

    def lines(self, direction: str) -> list[str]:
        """A table of the fields, and the times."""
        cells = [("field", "dtype", "shape", "form", "raw", "packed", "raw/packed")]
        for field in self.fields:
            shape = f"({', '.join('j' if size is None else str(size) for size in field.shape)})"
            sizes = _ratio(field.raw_bytes, field.packed_bytes)
            cells.append((printable(show(field.path)), dtype_name(field), shape, field.form, *sizes))
        cells.append(("pickled, all", "", "", "", *_ratio(self.pickled_bytes, self.packed_bytes)))
        ways = ("pickle", self.pickle_seconds, self.unpickle_seconds), ("pack", self.pack_seconds, self.unpack_seconds)
        times = "; ".join(f"{way} {1e3 * there:,.1f} + un{way} {1e3 * back:,.1f} ms" for way, there, back in ways)
        title = f"{direction}: {self.rows:,} rows, {self.raw_bytes:,} bytes of tensors"
        return [title, "", *aligned(cells, 4), "", times]


@dataclass(frozen=True)
class PayloadReport:
    """What the batches of a call weigh. `str` of it is a table.

    Attributes:
        name: of the call.
        argument: the batch that is sent.
        result: the batch that comes back; None if none was given.
    """

    name: str
    argument: Payload
    result: Payload | None

    def __str__(self) -> str:
        result = [] if self.result is None else ["", *self.result.lines("result")]
        return "\n".join([f"payload of {printable(self.name)}", "", *self.argument.lines("argument"), *result])

    def to_dict(self) -> dict[str, Any]:
        """The report as a dict for JSON."""
        out = asdict(self)
        for part in (out["argument"], out["result"]):
            for field in () if part is None else part["fields"]:
                field |= {"path": list(field["path"]), "shape": list(field["shape"])}
                field["dtype"] = str(field["dtype"]).removeprefix("torch.")
        return out


def report_once(
    batch: TensorDictBase, result: TensorDictBase | None = None, *, name: str, **options: Any
) -> PayloadReport | None:
    """Reports once in a process what the batch of a call weighs, in bytes and seconds, as it is and packed.

    Args:
        batch: the padded or nested argument of the call. Neither batch is changed; copies of them are compressed.
        result: the padded or nested result of the call, packed under the layouts of `batch`.
        name: of the call. The first call with a name measures, which takes a few times as long as sending the batch.
        options: keywords of `compress` but `like`.

    Returns:
        The report, or None if there was one of this name.

    Raises:
        LayoutError: an argument is no TensorDict, or `name` no string; and the errors of `compress`.
    """
    for given in (batch,) if result is None else (batch, result):
        need_batch(given, "report_once")

    def payload(one: TensorDictBase, **more: Any) -> tuple[Payload, PackedBatch]:
        back = partial(decompress, format="nested" if has(one, LAYOUTS) else "padded", max_bytes=None)
        return measured(one, one.clone(), one, partial(compress, **options, **more), back, lambda packed: packed)

    def measure() -> PayloadReport:
        argument, packed = payload(batch)
        return PayloadReport(name, argument, None if result is None else payload(result, like=packed)[0])

    return once(name, measure)


def once(name: Any, measure: Callable[[], PayloadReport]) -> PayloadReport | None:
    """The report, unless there is one of this name."""
    if not isinstance(name, str):
        raise LayoutError(f"report_once: name is {said(name)}; expected a string. Pass the name of the call.")
    with _guard:
        if name in _reported:
            return None
        _reported.add(name)
    try:
        return measure()
    except BaseException:
        _reported.discard(name)
        raise


def measured(
    batch: Any,
    copy: Any,
    tensors: TensorDictBase | None,
    pack: Callable[[Any], Any],
    unpack: Callable[[Any], Any],
    rows_of: Callable[[Any], PackedBatch | None],
) -> tuple[Payload, Any]:
    """Measures a batch of any framework; returns its packed form, too.

    Args:
        batch: is pickled; `copy` is packed.
        tensors: the fields of `batch`, if it has some.
        rows_of: returns the packed form of `tensors` in the packed form of `batch`.
    """
    (stream, buffers), pickling = _shortest(lambda: pickled(batch))
    unpickling = _shortest(lambda: pickle.loads(stream, buffers=buffers) is None)[1]
    (packed, (small, parts)), packing = _shortest(lambda: (one := pack(copy), pickled(one)))
    unpacking = _shortest(lambda: unpack(pickle.loads(small, buffers=parts)) is None)[1]
    rows, fields = rows_of(packed), tuple[FieldPayload, ...]()
    if rows is not None and tensors is not None:
        entries = [entry_at(tensors, form.path) for form in rows.tensors]
        sizes = zip(figures(rows, tensors, left=False).fields, entries, raw_bytes(entries), strict=True)
        fields = tuple(
            FieldPayload(one.path, one.dtype, _shape(x), "nested" if x.is_nested else "padded", raw, one.wire_bytes)
            for one, x, raw in sizes
        )
    raw, sent = sum(field.raw_bytes for field in fields), (pickled_bytes(stream, buffers), pickled_bytes(small, parts))
    return Payload(len(packed), fields, raw, *sent, pickling, unpickling, packing, unpacking), packed


def raw_bytes(tensors: Iterable[Any]) -> list[int]:
    """Bytes of each tensor; of a jagged one the values and, for the first that has them, the offsets."""
    known: set[int] = set()
    out: list[int] = []
    for x in tensors:
        parts = [x.values(), x.offsets()] if x.is_nested else [x]
        out.append(sum(part.nbytes for part in parts[:1] + [part for part in parts[1:] if id(part) not in known]))
        known |= {id(part) for part in parts[1:]}
    return out


def _shape(x: Tensor) -> tuple[int | None, ...]:
    return tuple(size if isinstance(size, int) else None for size in x.shape)


def _ratio(raw: int, packed: int) -> tuple[str, str, str]:
    return f"{raw:,}", f"{packed:,}", f"{raw / packed:,.1f}" if packed else "-"


def _shortest(work: Callable[[], Any]) -> tuple[Any, float]:
    """A result, and the shortest time to it."""
    out, times = None, list[float]()
    for _ in range(_ROUNDS):
        began = _now()
        out = work()
        times.append(_now() - began)
    return out, min(times)


def _now() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
