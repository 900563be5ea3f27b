"""The Triton kernels of scan, pack and unpack: the bits of the naive loops, on a GPU or interpreted on the host.
tests/ops/test_ops.py packs and unpacks anything by them."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import oracle
import pytest
import strategies
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels import DEVICE, IS_GPU, kernel_marks
from oracle import assert_same_tensor
from strategies import generators, patterns
from torch import Tensor

from maskpack import EDGE, RowLayout, ops
from maskpack.errors import LayoutError
from maskpack.layout import scan
from maskpack.layout.row_layout import anchored, device_spans, host_spans
from maskpack.layout.span_index import BLOCK, SpanIndex, index_of, places_of, spans_of

pytestmark = kernel_marks
TRAILING = ((), (1,), (3,), (2, 2), (0,), (130,))
CANARY = 77


class Compiled:
    """A compiled kernel, interpreted: runs with addresses, and only with arguments of the kind it was compiled for."""

    def __init__(self, kernel: Any, arguments: Sequence[Any], options: dict[str, Any]) -> None:
        self.kernel = kernel
        self.arguments = arguments
        self.options = options

    def __call__(self, programs: int, arguments: Sequence[Any]) -> None:
        kinds = zip(self.kernel.arg_names, self.arguments, arguments, strict=True)
        self.kernel[(programs,)](*[self.pointer(name, first, now) for name, first, now in kinds], **self.options)

    def pointer(self, name: str, first: Any, now: Any) -> Any:
        """An argument as the interpreter takes it; `first` is the one that the kernel was compiled for."""
        if isinstance(first, tuple):
            assert type(now) is tuple
            return tuple([self.pointer(name, a, b) for a, b in zip(first, now, strict=True)])
        if not hasattr(first, "data_ptr"):
            assert type(now) is type(first), name
            if name in (self.kernel.kwargs["do_not_specialize"] or ()):
                assert -(2**31) <= min(first, now) <= max(first, now) < 2**31, name
            else:
                assert now == first, name
            return now
        assert type(now) is int
        if name not in (self.kernel.kwargs["do_not_specialize_on_alignment"] or ()):
            assert (now % 16 == 0) == (first.data_ptr() % 16 == 0), name
        import triton

        if not now:  # of an empty tensor
            return first
        if isinstance(first, Tensor):
            return torch.frombuffer((ctypes.c_uint8 * first.itemsize).from_address(now), dtype=first.dtype)
        byte = torch.frombuffer((ctypes.c_uint8 * 1).from_address(now), dtype=torch.uint8)
        return triton.reinterpret(byte, first.dtype)


@pytest.fixture(scope="module", autouse=True)
def remembered() -> Iterator[None]:
    """The interpreter has no compiled kernels: these stand in for them, so that launches are remembered here too."""
    if IS_GPU:
        yield
        return
    from maskpack.layout.launch_triton import Launch

    def first(launch: Any, programs: int, arguments: Sequence[Any], *, remember: bool = True) -> None:
        interpreted(launch, programs, arguments, remember=remember)
        if remember:
            launches.append(launch)
            launch._remembered = Compiled(launch._kernel, arguments, launch._options)

    interpreted, launches = Launch.first, list[Launch]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "first", first)
        yield
    for launch in launches:  # other files of the process have the interpreter as it is
        launch._remembered = None


@st.composite
def masks(draw: st.DrawFn) -> oracle.Mask:
    width = draw(st.sampled_from([0, 1, 2, 7, 8, 31, 32, 33, 64, 200]))
    return draw(patterns(rows=draw(st.integers(0, 5)), width=width))


def width_of(mask: oracle.Mask) -> int:
    return len(mask[0]) if mask else 3


def on_device(mask: oracle.Mask) -> Tensor:
    return oracle.mask_tensor(mask, width_of(mask)).to(DEVICE)


def layout_of(mask: oracle.Mask) -> RowLayout:
    return RowLayout.from_mask(on_device(mask))


def loops(mask: oracle.Mask) -> dict[str, list[Any]]:
    """What an index holds, token by token."""
    rows = oracle.mask_to_runs(mask)
    several = any(len(row) > 1 for row in rows)
    starts, lengths, of_rows = [], [], []
    for number, row in enumerate(rows):
        for start, length in row if several else row or [(0, 0)]:
            starts.append(start)
            lengths.append(length)
            of_rows.append(number)
    run_of_token = [run for run, length in enumerate(lengths) for _ in range(length)]
    found: dict[str, list[Any]] = {
        "starts": starts,
        "begins": [sum(lengths[:run]) for run in range(len(lengths) + 1)],
        "blocks": [*run_of_token[::BLOCK], max(len(lengths) - 1, 0)],
    }
    if several:
        tokens = [sum(map(sum, mask[:row])) for row in range(len(mask) + 1)]
        columns = range(0, len(mask[0]), 32)
        found |= {
            "rows": of_rows,
            "splits": [sum(map(len, rows[:row])) for row in range(len(rows) + 1)],
            "cu_seqlens": tokens,
            "bits": [[sum(1 << i for i, on in enumerate(row[at : at + 32]) if on) for at in columns] for row in mask],
            "before": [[tokens[n] + sum(row[:at]) for at in columns] for n, row in enumerate(mask)],
        }
        if len(starts) * 8 > len(run_of_token):
            found["places"] = [place for place, on in enumerate(itertools.chain(*mask)) if on]
    return found


def assert_index(index: SpanIndex, mask: oracle.Mask) -> None:
    expected = loops(mask)
    for name, part in zip(SpanIndex._fields, index, strict=True):
        assert (part is None) == (name not in expected), name
        if part is not None:
            assert part.dtype == torch.int32
            seen = part.cpu().to(torch.int64)
            seen = seen & 0xFFFFFFFF if name == "bits" else seen[: len(expected[name])]
            assert seen.tolist() == expected[name], name


# -------------------------------------------------------------------- masks to runs


@given(masks(), st.sampled_from([torch.bool, torch.int64, torch.uint8, torch.float32, torch.bfloat16]))
def test_the_index_of_a_mask(mask: oracle.Mask, dtype: torch.dtype) -> None:
    if not mask or not mask[0]:
        return
    from maskpack.layout import scan_triton as scan_kernels

    tensor = on_device(mask).to(dtype)
    total = sum(map(sum, mask))
    scanned = scan_kernels.scan_rows(tensor, total // BLOCK + 3, None)
    counts = scanned.counts[: 3 * len(mask)].view(3, -1)
    assert counts.tolist() == [
        [sum(row) for row in mask],
        [len(row) for row in oracle.mask_to_runs(mask)],
        [row.index(True) if any(row) else 0 for row in mask],
    ]
    runs, most = int(counts[1].sum()), int(counts[1].max())
    assert scanned.counts[counts.numel() :][:3].tolist() == [total, runs, most]
    index = SpanIndex(scanned.starts, scanned.begins, scanned.blocks)
    assert scanned.bounded is None
    if most > 1:
        index = scan_kernels.list_spans(tensor, scanned, total, runs)
    assert_index(index, mask)


@given(masks())
def test_the_index_of_a_table_and_back(mask: oracle.Mask) -> None:
    layout = RowLayout.from_mask(oracle.mask_tensor(mask, width_of(mask)))
    index = index_of(host_spans(layout), layout.width, DEVICE)
    if mask and mask[0]:
        assert_index(index, mask)
    if index.splits is not None:
        assert [part.tolist() for part in spans_of(index)] == [part.tolist() for part in host_spans(layout)]


def test_many_rows_and_long_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 90, (2500, 1), generator=generator)
    groups = [torch.arange(40) < torch.randint(0, 41, (rows, 1), generator=generator) for rows in (255, 256, 1026)]
    holes = torch.arange(8).repeat(4, 600, 1) % 6 > 1  # one row of several spans
    holes[range(4), [0, 299, 511, 599], 3] = False
    for mask in (
        *(*groups, *holes),
        torch.rand(257, 40, generator=generator) < 0.5,
        torch.arange(90) < lengths,
        torch.arange(5000) < torch.tensor([[4999], [0], [2048], [5000]]),
        torch.rand(1100, 9, generator=generator) < 0.5,
        torch.rand(3, 3001, generator=generator) < 0.5,
    ):
        padded = torch.nn.functional.pad(mask, (3, 5)).to(DEVICE)
        assert_index(_scanned(padded[:, 3:-5]), mask.tolist())


@pytest.mark.parametrize("width", [8, 9, 64])
@pytest.mark.parametrize("density", [0.1, 0.9])
def test_bytes_that_no_bool_has_are_tokens(width: int, density: float) -> None:
    """Or else the kernel that lists spans writes more than the one before has counted. An error comes later."""
    mask = torch.rand(5, width, generator=torch.Generator().manual_seed(width)) < density
    values = 1 + torch.arange(mask.numel()).view_as(mask) * 37 % 255
    assert_index(_scanned((mask * values).to(torch.uint8).view(torch.bool).to(DEVICE)), mask.tolist())


def _scanned(mask: Tensor) -> SpanIndex:
    from maskpack.layout import scan_triton as scan_kernels

    total = int((mask.view(torch.uint8) != 0).sum())
    scanned = scan_kernels.scan_rows(mask, total // BLOCK + 3, None)
    spans = scanned.counts[mask.shape[0] : 2 * mask.shape[0]]
    if int(spans.max()) <= 1:
        return SpanIndex(scanned.starts, scanned.begins, scanned.blocks)
    return scan_kernels.list_spans(mask, scanned, total, int(spans.sum()))


# -------------------------------------------------------------------- moves


@given(masks(), generators())
def test_several_fields_at_once(mask: oracle.Mask, rng: np.random.Generator) -> None:
    kinds = [(dtype, ()) for dtype in (torch.int64, torch.float32, torch.bool, torch.float32, *[torch.int32] * 17)]
    kinds[3:3] = [(torch.int16, (3,)), (torch.uint8, (4,))]
    layout = layout_of(mask)
    fields = [strategies.values(rng, (len(mask), width_of(mask), *trailing), dtype) for dtype, trailing in kinds]
    packed = ops.pack([field.to(DEVICE) for field in fields], layout, backend="triton")
    pads = [rng.integers(0, 2) for _ in kinds]
    back = ops.unpack(packed, layout, pads, backend="triton")
    for field, values, padded, pad in zip(fields, packed, back, pads, strict=True):
        assert_same_tensor(values.cpu(), oracle.pack(field, mask))
        assert_same_tensor(padded.cpu(), oracle.unpack(values.cpu(), mask, width_of(mask), int(pad)))


# -------------------------------------------------------------------- nothing else is written


@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("trailing", [(), (3,), (700,)])
def test_no_byte_outside_is_written(monkeypatch: pytest.MonkeyPatch, trailing: tuple[int, ...], density: float) -> None:
    held: list[Tensor] = []

    new_empty = Tensor.new_empty

    def framed(self: Tensor, *shape: int, **more: Any) -> Tensor:
        if more:  # a call of the interpreter
            return new_empty(self, *shape, **more)
        size = torch.Size(shape).numel()
        held.append(torch.full((size + 2 * 4096,), CANARY, dtype=self.dtype, device=self.device))
        return held[-1][4096 : 4096 + size].view(shape)

    monkeypatch.setattr(Tensor, "new_empty", framed)
    mask = torch.rand(7, 37, generator=torch.Generator().manual_seed(3)) < density
    layout = RowLayout.from_mask(mask.to(DEVICE))
    x = torch.randint(0, 50, (7, 37, *trailing), dtype=torch.int32).to(DEVICE)
    values = ops.pack(x, layout, backend="triton")
    for pad in (5, EDGE):
        ops.unpack(values, layout, pad, backend="triton")
    assert len(held) == 3
    for frame in held:
        assert bool((frame[:4096] == CANARY).all())
        assert bool((frame[-4096:] == CANARY).all())
        assert not bool((frame[4096:-4096] == CANARY).any())


# -------------------------------------------------------------------- gradients, hints, compilers


@pytest.mark.parametrize("density", [0.0, 0.5, 1.0])
def test_gradients_of_outputs_that_are_not_used(density: float) -> None:
    generator = torch.Generator().manual_seed(7)
    mask = torch.rand(4, 6, generator=generator) < density
    layout = RowLayout.from_mask(mask.to(DEVICE))
    x, y, z = (torch.randn(4, 6, generator=generator).to(DEVICE).requires_grad_() for _ in range(3))
    weights = torch.randn(layout.num_tokens, generator=generator).to(DEVICE)
    packed = ops.pack([x, y.detach(), z], layout, backend="triton")
    assert [out.requires_grad for out in packed] == [True, False, True]
    first, second = torch.autograd.grad((packed[2] * weights).sum(), [x, z], allow_unused=True)
    assert first is None
    expected = torch.zeros(4, 6).masked_scatter(mask, weights.cpu())
    assert torch.equal(second.cpu(), expected)
    back = ops.unpack([packed[0], weights, packed[2]], layout, [1.0, 2.0, 3.0], backend="triton")
    assert [out.requires_grad for out in back] == [True, False, True]
    (first,) = torch.autograd.grad((back[0] ** 3).sum(), x, create_graph=True)
    assert torch.equal(first.detach().cpu(), (3 * x.detach().cpu() ** 2).masked_fill(~mask, 0.0))
    (second,) = torch.autograd.grad((first * y.detach()).sum(), x)
    torch.testing.assert_close(second.cpu(), (6 * x * y).detach().cpu().masked_fill(~mask, 0.0))


@given(generators())
def test_one_layout_and_fields_of_many_kinds(rng: np.random.Generator) -> None:
    """In turn, so that each launch is told from those of other strides, alignments and pads."""
    mask = rng.random((6, 21)) < 0.4
    layout = RowLayout.from_mask(torch.from_numpy(mask).to(DEVICE))
    for _ in range(6):
        dtype = [torch.uint8, torch.int16, torch.float32, torch.int64][rng.integers(4)]
        trailing = TRAILING[rng.integers(len(TRAILING))]
        whole = strategies.values(rng, (8, 24, *trailing), dtype).to(DEVICE)
        row, col = rng.integers(0, 3, 2)
        x = whole[row : row + 6, col : col + 21]
        values = ops.pack(x, layout, backend="triton")
        assert_same_tensor(values.cpu(), oracle.pack(x.cpu(), mask.tolist()))
        pad = [0, 1, 3, EDGE, strategies.values(rng, (6,), dtype).to(DEVICE)][rng.integers(5)]
        tokens = torch.cat([values[:1], values])[1:] if rng.integers(2) else values
        back = ops.unpack(tokens, layout, pad, backend="triton")
        pad = oracle.EDGE if pad is EDGE else pad.cpu() if isinstance(pad, Tensor) else pad
        assert_same_tensor(back.cpu(), oracle.unpack(values.cpu(), mask.tolist(), 21, pad))


def _there_and_back(x: Tensor, layout: RowLayout) -> Tensor:
    return ops.unpack(ops.pack(x * 2, layout, backend="triton") + 1, layout, 3.0, backend="triton")


def test_one_graph_for_a_compiler() -> None:
    compiled = torch.compile(_there_and_back, fullgraph=True, backend="aot_eager")
    for seed in range(3):
        mask = torch.rand(3, 9 + seed, generator=torch.Generator().manual_seed(seed)) < 0.5
        layout = RowLayout.from_mask(mask.to(DEVICE))
        assert device_spans(layout).starts.device == DEVICE  # read once before: the host has it there
        x = torch.randn(3, 9 + seed, device=DEVICE, requires_grad=True)
        (gradient,) = torch.autograd.grad(compiled(x, layout).sum(), x)
        assert torch.equal(compiled(x, layout).cpu(), torch.where(mask, x.cpu() * 2 + 1, 3.0))
        assert torch.equal(gradient.cpu(), 2.0 * mask)


PROMISED = {
    "one": torch.arange(70) < torch.tensor([[3], [0], [70], [31]]),
    "long": torch.arange(2000) < torch.tensor([[0], [150], [0], [250], [0]]),
    "none": torch.zeros(3, 700, dtype=torch.bool),
    "late": torch.arange(1500) >= torch.tensor([[1490], [3], [1500], [0]]),
    "two runs": torch.arange(700) % 9 < torch.tensor([[9], [4], [0], [5]]),
    "groups": torch.arange(40) < 17 * torch.arange(520)[:, None] % 41,
}
BROKEN = [
    *(("one", total) for total in (0, 60, 103, 104, 105, 280)),
    *(("long", total) for total in (399, 400, 913, 5000)),
    *(("none", total) for total in (0, 2100)),
    *(("late", total) for total in (512, 3007, 4600)),
    *(("two runs", total) for total in (18, 200, 1500)),
]


@pytest.fixture(params=[0x7FFF1234, -3_000_000], ids=hex)
def garbage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds numbers that lead outside every tensor."""
    empty, new_empty = torch.empty, Tensor.new_empty

    def filled(x: Tensor) -> Tensor:
        return x.fill_(request.param) if x.dtype in (torch.int32, torch.int64) and x.device.type != "meta" else x

    monkeypatch.setattr(torch, "empty", lambda *size, **more: filled(empty(*size, **more)))
    monkeypatch.setattr(Tensor, "new_empty", lambda x, *size, **more: filled(new_empty(x, *size, **more)))


def hinted(mask: Tensor, total: int) -> RowLayout:
    num_tokens, cache = scan.on_device(mask.to(DEVICE), total)
    layout = RowLayout(*mask.shape, num_tokens, DEVICE)
    layout.__dict__.update(cache)
    return layout


def as_scanned(mask: Tensor) -> Tensor:
    """With one run a row, from its first real position on, as long as the row has real positions."""
    first = mask.to(torch.uint8).argmax(1, keepdim=True)
    column = torch.arange(mask.shape[1])
    return (column >= first) & (column < first + mask.sum(1, keepdim=True))


@pytest.mark.parametrize(("name", "total"), [*BROKEN, ("groups", 10_000), ("groups", 10_404), ("groups", 10_900)])
def test_what_follows_from_a_hint_leads_nowhere_else(garbage: None, name: str, total: int) -> None:
    mask = PROMISED[name]
    layout = hinted(mask, total)
    index = device_spans(layout)
    lengths = mask.sum(1).tolist()
    begins = [sum(lengths[:row]) for row in range(len(lengths) + 1)]
    assert index.begins.tolist() == begins
    assert layout.cu_seqlens.tolist() == [min(begin, total) for begin in begins]
    assert index.starts.tolist() == [row.index(True) if any(row) else 0 for row in mask.tolist()]
    last = len(lengths) - 1
    row_of_token = [row for row, length in enumerate(lengths) for _ in range(length)] + [last] * (total + 1)
    *blocks, end = index.blocks.tolist()
    assert blocks == row_of_token[:total:BLOCK]
    assert row_of_token[total] <= end <= last


@pytest.mark.parametrize(("name", "total"), BROKEN)
def test_a_wrong_hint(garbage: None, name: str, total: int) -> None:
    mask = PROMISED[name]
    true, seen = int(mask.sum()), as_scanned(mask)
    layout = hinted(mask, total)
    x = torch.arange(1, 1 + mask.numel()).view(mask.shape)
    whole = torch.zeros(mask.numel(), dtype=torch.int64)
    whole[:true] = x[seen]
    values, pairs = ops.pack([x.to(DEVICE), torch.stack([x, -x], 2).to(DEVICE)], layout, backend="triton")
    assert torch.equal(values.cpu(), whole[:total])
    assert torch.equal(pairs.cpu(), torch.stack([whole, -whole], 1)[:total])
    back, edges = (out.cpu() for out in ops.unpack([values, values], layout, [-1, EDGE], backend="triton"))
    assert torch.equal(back[~seen], torch.full_like(back[~seen], -1))
    for padded in (back, edges):
        assert torch.equal(padded[seen][:total], whole[: min(total, true)])
    if total == true and torch.equal(mask, seen):
        assert torch.equal(layout.to("cpu").to_mask(), mask)
        return
    runs = max(len(row) for row in oracle.mask_to_runs(mask.tolist()))
    with pytest.raises(
        LayoutError, match=rf"{true} valid tokens and up to {runs} spans in a row; expected num_tokens={total} an"
    ):
        host_spans(layout)


@pytest.mark.parametrize("garbage", [0x7FFF1234], indirect=True)
@pytest.mark.parametrize("total", [30, 600])
def test_wide_rows_and_gradients_of_a_wrong_hint(garbage: None, total: int) -> None:
    mask = torch.arange(200) < torch.tensor([[9], [25], [0]])
    rank = mask.view(-1).cumsum(0).view(mask.shape)
    x = torch.randn(3, 200, 300, generator=torch.Generator().manual_seed(0))
    leaf = x.to(DEVICE).requires_grad_()
    layout = hinted(mask, total)
    values = ops.pack(leaf, layout, backend="triton")
    whole = torch.zeros(600, 300)
    whole[:34] = x[mask]
    assert torch.equal(values.detach().cpu(), whole[:total])
    back = ops.unpack(values, layout, 2.0, backend="triton")
    kept = (mask & (rank <= total))[..., None].expand(x.shape)
    lost = (mask & (rank > total))[..., None].expand(x.shape)
    assert torch.equal(back.detach().cpu(), x.where(kept, 2.0).masked_fill(lost, 0.0))
    (gradient,) = torch.autograd.grad(back.sum(), leaf)
    assert torch.equal(gradient.cpu(), kept.to(x.dtype))


def test_sums_beyond_int32_are_stored_as_the_largest() -> None:
    """Of counts that no test has the memory for: negative bounds would lead before every tensor."""
    import triton.language as tl

    from maskpack.layout import scan_triton as scan_kernels

    lengths = [2**31 - 1, 5, 0, 2**31 - 1]
    counts = [*lengths, *[1] * 4, *[0] * 4]
    line = torch.tensor(
        [*counts, *[77] * 3, *[77] * 5, *[77] * 5, *[77] * 8, *[77] * 6], dtype=torch.int32, device=DEVICE
    )
    scan_kernels._sum_up[(1,)](line, 4, 8, 9, True, tl.int64, BLOCK, 256, 1024)
    largest = 2**31 - 1
    assert line[:12].tolist() == counts
    assert line[12:15].tolist() == [largest, 4, 1]
    assert line[15:20].tolist() == [0, largest, largest, largest, largest]
    assert line[20:25].tolist() == [0, 1, 2, 3, 4]
    assert line[25:33].tolist() == [0] * 7 + [3]
    assert line[33:].tolist() == [0, 9, 9, 9, 9, 77]


def test_a_hint_on_a_device_is_checked_when_the_layout_is_read() -> None:
    mask = torch.tensor([[0, 1, 1], [0, 0, 0], [1, 0, 0]])
    assert hinted(mask, 3) == RowLayout.from_mask(mask)
    assert hinted(mask, 3).cu_seqlens.tolist() == [0, 2, 2, 3]
    assert hinted(mask, 1).cu_seqlens.tolist() == [0, 1, 1, 1]
    with pytest.raises(LayoutError, match="expected num_tokens=1"):
        hinted(mask, 1).offsets  # noqa: B018
    assert hinted(mask, 9).cu_seqlens.tolist() == [0, 2, 2, 3]
    assert anchored(hinted(mask, 3), 1).lengths.tolist() == [2, 0, 1]
    for total in (0, 2, 4, 9):
        with pytest.raises(
            LayoutError, match=rf"has 3 valid tokens and up to 1 spans in a row; expected num_tokens={total} and at mo"
        ):
            hinted(mask, total).lengths  # noqa: B018
    with pytest.raises(
        LayoutError, match=r"2 valid tokens and up to 2 spans in a row; expected num_tokens=2 and at most one"
    ):
        host_spans(hinted(torch.tensor([[1, 0, 1]]), 2))


@pytest.mark.parametrize("spans_per_row", [[1, 1], [1, 2]])
def test_more_tokens_than_int32_counts_are_refused_when_they_are_counted(
    monkeypatch: pytest.MonkeyPatch, spans_per_row: list[int]
) -> None:
    from maskpack.layout import scan_triton as scan_kernels

    def scan_rows(real: Tensor, *_: Any) -> scan_kernels.Scan:
        counts = torch.tensor([[2**31 - 2, 2], spans_per_row, [0, 0]], dtype=torch.int32)
        begins = torch.zeros(3, dtype=torch.int32)
        totals = torch.tensor([2**31 - 1, sum(spans_per_row), max(spans_per_row)], dtype=torch.int32)
        return scan_kernels.Scan(torch.cat([counts.view(-1), totals]), counts[2], begins, begins, torch.zeros(9), None)

    monkeypatch.setattr(scan_kernels, "scan_rows", scan_rows)
    message = r"^RowLayout.from_mask: the rows have 2147483648 valid tokens; expected at most 2147483647"
    with pytest.raises(LayoutError, match=message):
        scan.on_device(torch.ones(2, 3), None)


@given(patterns(), st.data())
def test_places_of_any_hint_are_inside(mask: oracle.Mask, data: st.DataObject) -> None:
    rows, width = len(mask), width_of(mask)
    if not rows * width:
        return
    total = data.draw(st.integers(0, rows * width))
    index = scan.on_device(torch.tensor(mask).to(DEVICE), total)[1]["_index"]
    places = places_of(index, rows, width, total)
    assert (places.dtype, len(places)) == (torch.int64, total)
    assert all(0 <= place < rows * width for place in places.tolist())
    if all(len(row) <= 1 for row in oracle.mask_to_runs(mask)):
        real = [row * width + column for row in range(rows) for column in range(width) if mask[row][column]]
        assert places.tolist()[: len(real)] == real[:total]
