"""The decode kernel against naive lists of words, and against the host's decoding of whole batches. Triton interprets
the kernel here; tests/gpu/test_cuda_decode.py runs it on a GPU."""

from __future__ import annotations

import itertools
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import strategies
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import PAD, VARIANTS, workload
from strategies import Case, batches, row_ops
from tensordict import TensorDict
from test_encodings import FAMILIES, Rows, every, rows_like
from test_sharing import stored_as
from torch import Tensor

from maskpack import EDGE, PER_ROW, MaskNestingSpec, PackedBatch, RowLayout, compress, decompress, unnest
from maskpack.core.bits import root_of
from maskpack.core.tree import Node
from maskpack.errors import LayoutError
from maskpack.fields.rl_fields import RL_FIELDS
from maskpack.layout.jagged import jagged_all
from maskpack.nesting.schema import FieldForm, Schema
from maskpack.packed import pickling as pickles
from maskpack.packed.cuda import decode as staging
from maskpack.packed.cuda import job_table as jobs
from maskpack.packed.cuda import jobs as recipes
from maskpack.packed.cuda import sources
from maskpack.packed.decode import Decoder
from maskpack.packed.encodings import Plain
from maskpack.packed.references import Columns, Joined, Same

quiet = pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")


def kernel_test(test: Any) -> Any:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return pytest.mark.interpreter(pytest.mark.skipif(not interpreted, reason="needs TRITON_INTERPRET=1")(test))


CANARY = 64
"""Bytes before and behind every tensor that a kernel writes, that stay as they are."""


class Guarded:
    """Gives out memory between canaries."""

    def __init__(self) -> None:
        self._held: list[tuple[Tensor, int]] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        memory = torch.full((nbytes + 2 * CANARY,), 0xA5, dtype=torch.uint8, device=device)
        self._held.append((memory, nbytes))
        return memory[CANARY : CANARY + nbytes].view(dtype).view(tuple(shape))

    def check(self) -> None:
        for memory, nbytes in self._held:
            assert bool((memory[:CANARY] == 0xA5).all())
            assert bool((memory[CANARY + nbytes :] == 0xA5).all())


def by_kernel(packed: PackedBatch, *names: Any, format: Any = "padded", chunk: int = jobs.CHUNK) -> TensorDict:
    """decompress on the host, as it works on a GPU, every tensor by the kernel."""
    guarded = Guarded()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "uses_triton", lambda device, call: True)
        patch.setattr(staging, "_new", guarded.empty)
        patch.setattr(jobs, "CHUNK", chunk)
        patch.setattr(Decoder, "source", None)  # the host's way
        made = decompress(packed, *names, format=format, device="cpu")
    guarded.check()
    return made


def assert_decodes(packed: PackedBatch, *names: Any, chunk: int = jobs.CHUNK) -> None:
    """As the host does, bit for bit, padded and nested."""
    for format in ("padded", "nested"):
        seen = by_kernel(packed, *names, format=format, chunk=chunk)
        oracle.assert_same_batch(seen, decompress(packed, *names, format=format, device="cpu"))


# -------------------------------------------------------------------- single fields, against lists


@dataclass
class Sample:
    """Fields with the same words in different encodings.

    Attributes:
        rows: the words of each row.
        items: words of an element.
        mask: which columns are real.
    """

    rows: Rows
    items: int
    mask: list[list[bool]]
    width: int
    dtype: torch.dtype

    @property
    def layout(self) -> RowLayout:
        return RowLayout.from_mask(oracle.mask_tensor(self.mask, self.width))

    def nested(self) -> list[int]:
        return [word for row in self.rows for word in row]

    def padded(self, pads: Sequence[Sequence[int]] | None) -> list[int]:
        """Column by column; `pads` has the words of an element for each row, None for the nearest real element."""
        out: list[int] = []
        for b, (row, real) in enumerate(zip(self.rows, self.mask, strict=True)):
            elements = [row[at : at + self.items] for at in range(0, len(row), self.items)]
            for column, on in enumerate(real):
                before = sum(real[:column])
                if on:
                    out += elements[before]
                elif pads is not None:
                    out += pads[b]
                else:
                    out += elements[max(before - 1, 0)] if elements else [0] * self.items
        return out

    def packed(self, encodings: Sequence[Any], shape: Sequence[int], pad: Any, row_pads: Any = None) -> PackedBatch:
        """A batch with a field for each encoding."""
        forms = [
            FieldForm((f"f{n}",), "padded", "rows", (pad,), 1, self.dtype, device="cpu", shape=tuple(shape))
            for n in range(len(encodings))
        ]
        schema = Schema(Node((), None), tuple(forms), (("rows", self.width, 0),))
        fields = {form.path: encoding for form, encoding in zip(forms, encodings, strict=True)}
        pads = {} if row_pads is None else {form.path: row_pads for form in forms}
        return PackedBatch(len(self.rows), schema, {"rows": self.layout}, fields, {}, pads)


def words_in(x: Tensor) -> list[int]:
    x = torch.view_as_real(x) if x.dtype == torch.complex128 else x
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(-1).view(kinds[x.element_size()]).tolist()


KINDS = {torch.uint8: "uint8", torch.int16: "int16", torch.float32: "int32", torch.int64: "int64"}


@st.composite
def samples(draw: st.DrawFn, items: Sequence[int] = (1, 1, 2, 3)) -> Sample:
    dtype = draw(st.sampled_from([*KINDS, torch.complex128]))
    several = draw(st.sampled_from(items)) * (1 + (dtype == torch.complex128))
    rows = draw(rows_like(draw(st.sampled_from(FAMILIES)), np.dtype(KINDS.get(dtype, "int64"))))
    rows = [row[: len(row) // several * several] for row in rows]
    width = max([len(row) // several for row in rows], default=0) + draw(st.integers(0, 4))
    mask = []
    for row in rows:
        real = set(draw(st.permutations(range(width)))[: len(row) // several])
        start = draw(st.integers(0, width - len(real)))
        together = draw(st.booleans())
        mask.append([start <= at < start + len(real) if together else at in real for at in range(width)])
    return Sample(rows, several, mask, width, dtype)


def encodings_of(sample: Sample) -> list[Any]:
    """Every encoding that holds the rows."""
    dtype = np.dtype(KINDS.get(sample.dtype, "int64"))
    found = [*every(sample.rows, dtype), *stored_as(sample.rows, dtype)]
    if sample.items > 1:
        columns = [[row[c :: sample.items] for row in sample.rows] for c in range(sample.items)]
        made = [every(column, dtype) for column in columns]
        found += [Columns(tuple(each[n % len(each)] for each in made)) for n in range(max(map(len, made)))]
    return found


@kernel_test
@given(samples(), st.data())
def test_every_encoding_of_a_field(sample: Sample, data: st.DataObject) -> None:
    wide = sample.dtype == torch.complex128
    shape = {1: (), 2: (2,), 3: (3, 1)}[sample.items // (1 + wide)]
    chunk = data.draw(st.sampled_from([8, 1024]))
    way = data.draw(st.sampled_from(["edge", "row", "constant", "nan"]))
    pad: Any = {"edge": EDGE, "row": PER_ROW, "constant": 7, "nan": 7}[way]
    if way == "nan" and sample.dtype in (torch.float32, torch.complex128):
        pad = float("nan") if sample.dtype == torch.float32 else complex(float("nan"), -0.0)
    row_pads, pads = None, None
    if way == "row":
        row_pads = np.array([[row * 3 + half - 5 for half in range(1 + wide)] for row in range(len(sample.rows))])
        row_pads = row_pads.reshape(-1, 1 + wide).astype(KINDS.get(sample.dtype, "int64"))
        pads = [row * (sample.items // (1 + wide)) for row in row_pads.tolist()]
        row_pads = row_pads if wide else row_pads[:, 0].copy()
    elif way != "edge":
        words = words_in(torch.tensor([pad], dtype=sample.dtype))
        pads = [words * (sample.items // (1 + wide))] * len(sample.rows)
    packed = sample.packed(encodings_of(sample), shape, pad, row_pads)
    padded, nested = by_kernel(packed, chunk=chunk), by_kernel(packed, format="nested", chunk=chunk)
    for form in packed.schema.forms:
        x = padded[form.path]
        assert x.shape == (len(sample.rows), sample.width, *shape)
        assert words_in(x) == sample.padded(pads)
        assert words_in(nested[form.path].values()) == sample.nested()
        assert nested[form.path].offsets().tolist() == oracle.offsets(sample.mask)
    oracle.assert_same_batch(unnest(nested), padded)


@kernel_test
@pytest.mark.parametrize("ragged_dim", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.int16, torch.complex128])
@pytest.mark.parametrize("pad", [EDGE, 5])
def test_the_width_along_any_dim(ragged_dim: int, dtype: torch.dtype, pad: Any) -> None:
    lengths, width, shape, rng = [3, 0, 5, 1], 6, (2, 3), np.random.default_rng(0)
    wide = 1 + (dtype == torch.complex128)
    words = rng.integers(-9, 9, (sum(lengths), 6 * wide)).astype("int64" if wide == 2 else "int16")
    bounds = np.cumsum([0, *lengths])
    rows = [words[a:b].reshape(-1).tolist() for a, b in itertools.pairwise(bounds)]
    mask = [[1 <= column <= length for column in range(width)] for length in lengths]
    sample = Sample(rows, 6 * wide, mask, width, dtype)
    packed = sample.packed([Plain(words.reshape(-1)), Columns(tuple(Plain(c.copy()) for c in words.T))], shape, pad)
    forms = tuple(replace(form, ragged_dim=ragged_dim) for form in packed.schema.forms)
    packed = replace(packed, schema=replace(packed.schema, forms=forms))
    pads = None if pad is EDGE else [words_in(torch.tensor([5], dtype=dtype)) * 6] * 4
    want = np.array(sample.padded(pads)).reshape(4, width, *shape, wide)
    for name, x in by_kernel(packed, chunk=16).items():
        assert words_in(x) == np.moveaxis(want, 1, ragged_dim).reshape(-1).tolist(), name


@kernel_test
@given(samples(items=(1,)), samples(items=(1,)), st.sampled_from([8, 1024]), st.data())
def test_fields_that_are_joined(one: Sample, other: Sample, chunk: int, data: st.DataObject) -> None:
    """Heads and tails of every encoding, also empty ones."""
    count, dtype = min(len(one.rows), len(other.rows)), one.dtype
    other = replace(other, rows=other.rows if dtype == other.dtype else one.rows[::-1], dtype=dtype)
    if dtype == torch.complex128:
        return
    parts = []
    for sample in (one, other):
        width = max(map(len, sample.rows), default=0)
        mask = [[column < len(row) for column in range(width)] for row in sample.rows[:count]]
        parts.append(replace(sample, rows=sample.rows[:count], mask=mask, width=width))
    rows = [head + tail for head, tail in zip(parts[0].rows, parts[1].rows, strict=True)]
    width = max(map(len, rows), default=0) + 2
    mask = [[1 <= column <= len(row) for column in range(width)] for row in rows]
    pad = data.draw(st.sampled_from([EDGE, 3]))
    head, tail = (data.draw(st.sampled_from(encodings_of(part))) for part in parts)
    packed = joined(parts[0], head, parts[1], tail, Sample(rows, 1, mask, width, dtype), pad)
    words = words_in(torch.tensor([3], dtype=dtype))
    for name in ("whole", "again"):
        seen = by_kernel(packed, name, chunk=chunk)
        assert words_in(seen[name]) == Sample(rows, 1, mask, width, dtype).padded(
            None if pad is EDGE else [words] * count
        )
        nested = by_kernel(packed, name, format="nested", chunk=chunk)
        assert words_in(nested[name].values()) == [word for row in rows for word in row]


def joined(head: Sample, heads: Any, tail: Sample, tails: Any, whole: Sample, pad: Any) -> PackedBatch:
    """`whole` joins a field and one that is the same as another."""
    samples = {"head": head, "tail": tail, "other": tail, "whole": whole, "again": whole}
    fields = {("head",): heads, ("tail",): tails, ("other",): Same(("tail",))}
    fields |= {("whole",): Joined(("head",), ("other",)), ("again",): Joined(("head",), ("tail",))}
    forms = tuple(
        FieldForm((name,), "padded", name, (pad,), 1, head.dtype, device="cpu") for name, sample in samples.items()
    )
    schema = Schema(Node((), None), forms, tuple((name, sample.width, 0) for name, sample in samples.items()))
    layouts = {name: sample.layout for name, sample in samples.items()}
    return PackedBatch(len(head.rows), schema, layouts, fields, {}, {})


@kernel_test
def test_joined_columns() -> None:
    rng = np.random.default_rng(0)
    lengths = [([2, 0, 3], [1, 0, 4])[part] for part in (0, 1)]
    words = [rng.integers(0, 99, (sum(own), 2)) for own in lengths]
    bounds = [np.cumsum([0, *own]) for own in lengths]
    rows = [
        [words[part][bounds[part][b] : bounds[part][b + 1]].reshape(-1).tolist() for b in range(3)] for part in (0, 1)
    ]
    both = [head + tail for head, tail in zip(*rows, strict=True)]
    samples = [
        Sample(own, 2, [[column < len(row) // 2 for column in range(9)] for row in own], 9, torch.int64)
        for own in (*rows, both)
    ]
    for kinds in itertools.product([Plain, Columns], repeat=2):
        made = [
            Plain(part.reshape(-1)) if kind is Plain else Columns(tuple(Plain(c.copy()) for c in part.T))
            for kind, part in zip(kinds, words, strict=True)
        ]
        packed = joined(samples[0], made[0], samples[1], made[1], samples[2], 3)
        forms = tuple(replace(form, shape=(2,)) for form in packed.schema.forms)
        packed = replace(packed, schema=replace(packed.schema, forms=forms))
        if kinds[0] is kinds[1]:
            assert words_in(by_kernel(packed, "whole")["whole"]) == samples[2].padded([[3, 3]] * 3)
        else:
            assert_decodes(packed)


# -------------------------------------------------------------------- whole batches, against the host


def small(variant: str, rows: int = 4) -> PackedBatch:
    return compress(workload(variant, rows, 6, 24), pad_token_id=PAD)


@kernel_test
@pytest.mark.parametrize("variant", VARIANTS)
def test_workloads(variant: str) -> None:
    packed = small(variant)
    assert_decodes(packed, chunk=64)
    assert_decodes(packed[[3, 0, 0, 2]])


@kernel_test
def test_rows_of_a_workload_that_moved() -> None:
    packed = small("m-rope")
    assert_decodes(packed[1:4])
    assert_decodes(PackedBatch.cat([packed[3:], packed[:2]]))
    assert_decodes(packed[:0])
    assert_decodes(pickle.loads(pickle.dumps(packed)))
    for name in ("input_ids", "returns", "position_ids"):
        assert_decodes(packed, name)


@kernel_test
@quiet
@given(batches(), st.data())
def test_any_batch(case: Case, data: st.DataObject) -> None:
    packed = compress(case.batch, **case.options)
    assert_decodes(packed, chunk=data.draw(st.sampled_from([8, 1024])))
    for op in data.draw(row_ops(case.rows, max_size=2)):
        packed = op.on_packed(packed)
    assert_decodes(packed)


@kernel_test
def test_fields_without_words_rows_or_batch_dims() -> None:
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    fields = {"attention_mask": mask, "x": torch.zeros(2, 3, 0), "y": torch.zeros(2, 3, 2, 0), "z": torch.ones(2, 3)}
    registry = RL_FIELDS | {name: MaskNestingSpec("sequence", 0 if name != "z" else PER_ROW) for name in "xyz"}
    fields["z"] = torch.where(mask == 1, 3.0, torch.tensor([[-0.0], [7.0]]))
    assert_decodes(compress(TensorDict(fields, batch_size=[2]), registry=registry))
    empty = {name: x.zero_() for name, x in fields.items()}
    assert_decodes(compress(TensorDict(empty, batch_size=[2]), registry=registry))
    assert_decodes(compress(TensorDict({"a": torch.arange(5), "b": torch.tensor(3.5)}, batch_size=[])))
    assert_decodes(compress(TensorDict({"s": {"a": torch.ones(2, dtype=torch.bool)}}, batch_size=[2])))


@kernel_test
@pytest.mark.parametrize("name", ["alternating", "some rows", "three wide"])
def test_rows_of_many_runs(name: str) -> None:
    """Two layouts, of which one has the run table of many runs and the other that of few."""
    mask, width = strategies.MANY_RUNS[name]
    batch, registry = strategies.batch_under(mask, width)
    few = torch.arange(width) < torch.arange(len(mask))[:, None] % (width + 1)
    batch["few"], registry["few"] = few, MaskNestingSpec("few")
    batch["under few"], registry["under few"] = batch["ids"] * few, MaskNestingSpec("few")
    packed = compress(batch, registry=registry)[:12]
    assert_decodes(packed)
    for form in (packed, PackedBatch.from_bytes(packed.to_bytes())):
        nested = by_kernel(form, format="nested")
        oracle.assert_same_batch(unnest(nested), batch[:12].to("cpu"))


@kernel_test
def test_offsets_are_shared_and_values_are_not() -> None:
    packed = small("reference")
    nested = by_kernel(packed, format="nested")
    for axis in ("prompt", "sequence", "response"):
        own = [nested[form.path] for form in packed.schema.forms if form.layout == axis]
        assert len({id(x.offsets()) for x in own}) == 1
        assert len({x.values().untyped_storage().data_ptr() for x in own}) == len(own)
    assert isinstance(nested["returns"] - nested["advantages"], Tensor)
    before = nested["returns"].values().clone()
    nested["advantages"].values().fill_(9)
    assert torch.equal(nested["returns"].values(), before)
    unnest(nested)


@kernel_test
def test_a_field_that_the_kernel_cannot_decode_takes_the_hosts_way(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = small("reference")
    refused = {("responses",), ("returns",)}

    def parts(packed: Any, form: FieldForm, padded: bool) -> Any:
        return [] if form.path in refused else recipes.parts_of(packed, form, padded)

    monkeypatch.setattr(staging, "uses_triton", lambda device, call: True)
    monkeypatch.setattr(staging, "parts_of", parts)
    for format in ("padded", "nested"):
        seen = decompress(packed, format=format, device="cpu")
        monkeypatch.setattr(staging, "uses_triton", lambda device, call: False)
        oracle.assert_same_batch(seen, decompress(packed, format=format, device="cpu"))
        monkeypatch.setattr(staging, "uses_triton", lambda device, call: True)
    assert seen["returns"].offsets() is seen["advantages"].offsets()


# -------------------------------------------------------------------- memory


def arrays_in(packed: PackedBatch) -> list[np.ndarray]:
    return [array for encoding in packed.fields.values() for array in sources.arrays_of(encoding)]


def in_tensor(packed: PackedBatch) -> PackedBatch:
    """As PackedBatch.pin_memory leaves it, in memory that is not pinned."""
    fields, row_pads = pickles.copy_to_one_buffer(
        (packed.fields, packed.row_pads), lambda nbytes: torch.empty(nbytes, dtype=torch.uint8).numpy()
    )
    return replace(packed, fields=fields, row_pads=row_pads)


def test_arrays_in_one_buffer_are_one_stretch() -> None:
    packed = small("reference")
    body = staging._Body.of(arrays_in(packed))
    assert body.stretch is not None
    assert body.size == body.stretch.nbytes <= 1.1 * sum(array.nbytes for array in arrays_in(packed)) + 4096
    for array in arrays_in(packed):
        begin = body.places[id(array)]
        assert bytes(body.stretch[begin : begin + array.nbytes]) == array.tobytes()
        assert begin % array.itemsize == 0 or not array.nbytes


@pytest.mark.parametrize(
    "change",
    [
        lambda packed: packed[[3, 0, 2]],
        lambda packed: PackedBatch.cat([packed, packed]),
        lambda packed: replace(packed, fields={**packed.fields, ("prompts",): Plain(np.arange(100))}),
    ],
)
def test_arrays_from_several_buffers_are_gathered(change: Any) -> None:
    arrays = arrays_in(change(small("reference")))
    body = staging._Body.of(arrays)
    assert body.stretch is None
    ends = sorted((body.places[id(array)], body.places[id(array)] + array.nbytes) for array in arrays if array.nbytes)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends))
    assert all(begin % 16 == 0 for begin, _ in ends)
    assert ends[-1][1] <= body.size


def test_a_few_arrays_of_a_large_buffer_are_gathered() -> None:
    packed = small("routed-experts", rows=64)
    assert staging._Body.of(arrays_in(packed)).stretch is not None
    assert staging._Body.of(arrays_in(packed[:2])).stretch is None
    assert staging._Body.of([]).size == 0


def test_what_begins_at_an_odd_place_is_gathered() -> None:
    line = np.zeros(8193, np.uint8)
    arrays = [line[1:8001].view("i4"), line[8001:8193]]
    assert staging._Body.of(arrays).stretch is None
    assert staging._Body.of([line[:8000].view("i4"), line[8000:8193]]).stretch is not None


@kernel_test
@pytest.mark.parametrize("large", [1, 1 << 20])
def test_batches_from_bytes(large: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(staging, "_LARGE", large)
    packed = small("multi-turn")
    data = packed.to_bytes()
    assert_decodes(PackedBatch.from_bytes(data))
    assert_decodes(PackedBatch.from_bytes(memoryview(b"x" + data)[1:]))
    packed.save(tmp_path / "packed")
    assert_decodes(PackedBatch.load(tmp_path / "packed")[1:])


@kernel_test
def test_pinned_batches_are_copied_from_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = in_tensor(small("reference"))
    memory = root_of(arrays_in(packed)[0]).base
    assert isinstance(memory, Tensor)
    seen: list[Tensor] = []
    launch = _launch()
    monkeypatch.setattr(Tensor, "is_pinned", lambda x: x.data_ptr() == memory.data_ptr())
    monkeypatch.setattr(
        "maskpack.packed.cuda.kernel.launch", lambda body, *more: [seen.append(body), launch(body, *more)]
    )

    def straight(batch: PackedBatch, *names: str) -> bool:
        seen.clear()
        assert_decodes(batch, *names)
        inside = [memory.data_ptr() <= body.data_ptr() < memory.data_ptr() + memory.nbytes for body in seen]
        assert len(set(inside)) == 1
        return inside[0]

    assert straight(packed)
    assert straight(packed[:])
    assert straight(packed, "old_log_probs")
    assert not straight(packed[[3, 0]])
    assert not straight(PackedBatch.cat([packed, packed]))
    assert not straight(pickle.loads(pickle.dumps(packed)))
    assert not straight(PackedBatch.from_bytes(packed.to_bytes()))
    large = in_tensor(small("reference", rows=64))
    monkeypatch.setattr(Tensor, "is_pinned", lambda x: False)
    assert_decodes(large[3:5])


def _launch() -> Any:
    from maskpack.packed.cuda import kernel as _decode_kernel

    return _decode_kernel.launch


@pytest.mark.skipif(torch.cuda.is_available(), reason="for hosts without CUDA")
def test_pinning_needs_a_device() -> None:
    with pytest.raises(LayoutError, match=r"PackedBatch\.pin_memory: this process has no CUDA device; expected one\."):
        small("reference").pin_memory()


# -------------------------------------------------------------------- what the speed rests on


def test_the_kernel_and_the_host_number_the_entries_of_a_job_alike() -> None:
    pytest.importorskip("triton")
    from maskpack.packed.cuda import kernel

    names = ["first", *jobs.Target._fields, *jobs.Source._fields]
    assert [getattr(kernel, name.upper()).value for name in names] == list(range(jobs.JOB))


@pytest.mark.parametrize("shape", [(7,), (7, 2), (7, 2, 3), (7, 0), (7, 1)])
def test_jagged_tensors_made_together_are_as_torch_makes_them(shape: tuple[int, ...]) -> None:
    offsets = torch.tensor([0, 3, 3, 7])
    fields = [torch.rand(shape), torch.rand(shape).to(torch.bfloat16), torch.rand((7, 5)), torch.rand(shape) > 0.5]
    fields.append(torch.rand((*shape[::-1],)).permute(*reversed(range(len(shape)))))
    for x, seen in zip(fields, jagged_all(fields, offsets, 0, 4), strict=True):
        want = torch.nested.nested_tensor_from_jagged(x, offsets, min_seqlen=0, max_seqlen=4)
        assert (seen.shape, seen.stride(), seen.dtype) == (want.shape, want.stride(), want.dtype)
        assert vars(seen).keys() == vars(want).keys()
        assert torch._C._dispatch_keys(seen).has(torch._C.DispatchKey.NestedTensor)
        assert str(torch._C._dispatch_keys(seen)) == str(torch._C._dispatch_keys(jagged_all([x], offsets, 0, 4)[0]))
        assert seen.values().data_ptr() == x.data_ptr()
        assert seen.offsets() is offsets
        assert (seen._get_min_seqlen(), seen._get_max_seqlen()) == (0, 4)
        assert torch.equal((seen.to(torch.float32) * 2).values(), x.to(torch.float32) * 2)
        assert [row.tolist() for row in seen.unbind()] == [x[:3].tolist(), [], x[3:].tolist()]


def test_jagged_tensors_made_together_do_not_share_what_may_change() -> None:
    offsets = torch.tensor([0, 3, 3, 7])
    one, other = jagged_all([torch.zeros(7), torch.ones(7)], offsets, 0, 4)
    other._metadata_cache["max_seqlen"] = torch.zeros(9, 0)
    assert one._get_max_seqlen() == 4
    other += 1
    assert one.values().tolist() == [0] * 7
    assert other.values().tolist() == [2] * 7
    assert pickle.loads(pickle.dumps(other)).values().tolist() == [2] * 7
    assert torch.equal((one + other).values(), torch.full((7,), 2.0))
