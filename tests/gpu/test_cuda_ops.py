"""Layouts, pack and unpack on CUDA at sizes that only a GPU holds, under its compiler, with a host that never waits."""

from __future__ import annotations

import pytest
import torch
from test_cuda import count_syncs

from maskpack import EDGE, RowLayout, ops
from maskpack.errors import LayoutError
from maskpack.layout.span_index import MOST_TOKENS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def prefix(lengths: torch.Tensor, width: int) -> torch.Tensor:
    return torch.arange(width, device="cuda") < lengths[:, None]


@pytest.mark.parametrize("several", [False, True])
def test_positions_beyond_32_bits(several: bool) -> None:
    rows, width = 3, 3 << 28  # 2.4e9 positions
    mask = torch.zeros(rows, width, dtype=torch.bool, device="cuda")
    places = [(0, 0, 5), (1, 1000, 1300), (2, width - 700, width)]
    if several:
        places += [(2, 17, 40), (0, width - 3, width), (1, width // 2, width // 2 + 600)]
    for row, start, stop in places:
        mask[row, start:stop] = True
    layout = RowLayout.from_mask(mask)
    runs = sorted(places)
    assert [layout.table.starts.tolist(), layout.table.counts.tolist()] == [
        [start for _, start, _ in runs],
        [stop - start for _, start, stop in runs],
    ]
    x = torch.randint(0, 256, (rows, width), dtype=torch.uint8, device="cuda")
    values = ops.pack(x, layout)
    assert torch.equal(values, torch.cat([x[row, start:stop] for row, start, stop in runs]))
    back = ops.unpack(values, layout, 9)
    assert torch.equal(back, x.masked_fill_(~mask, 9))


def test_more_tokens_than_int32_counts() -> None:
    mask = torch.ones(3, 3 << 28, dtype=torch.bool, device="cuda")  # 2.4e9 of them
    with pytest.raises(LayoutError, match="the rows have 2415919104 valid tokens; expected at most 2147483647"):
        RowLayout.from_mask(mask)
    with pytest.raises(LayoutError, match="the rows have 2415919104 valid tokens; expected at most 2147483647"):
        RowLayout.from_mask(mask, num_tokens=mask.numel())
    layout = RowLayout.from_mask(mask, num_tokens=1000)
    assert layout.index.begins.tolist() == [0, 3 << 28, 3 << 29, MOST_TOKENS]
    assert layout.cu_seqlens.tolist() == [0, 1000, 1000, 1000]
    x = torch.randint(0, 256, mask.shape, dtype=torch.uint8, device="cuda")
    values = ops.pack(x, layout)
    assert torch.equal(values, x[0, :1000])
    back = ops.unpack(values, layout, 9)
    assert torch.equal(back[0, :1000], values)
    assert torch.equal(layout.indices, torch.arange(1000, device="cuda"))
    with pytest.raises(
        LayoutError, match="2415919104 valid tokens and up to 1 spans in a row; expected num_tokens=1000 and at most"
    ):
        layout.lengths  # noqa: B018


def test_rows_of_more_words_than_int32_counts() -> None:
    width, items = 3_600_000, 601
    x = torch.randint(0, 256, (1, width, items), dtype=torch.uint8, device="cuda")
    mask = torch.zeros(1, width, dtype=torch.bool, device="cuda")
    mask[:, width - 40 :] = True
    layout = RowLayout.from_mask(mask)
    values = ops.pack(x, layout)
    assert torch.equal(values, x[0, -40:])
    assert torch.equal(ops.unpack(values, layout, 7), x.masked_fill_(~mask[..., None], 7))


@pytest.mark.parametrize("rows", [1, 8193, 70_000])
def test_many_rows(rows: int) -> None:
    mask = prefix(torch.randint(0, 41, (rows,), device="cuda"), 40)
    x = torch.randn(rows, 40, device="cuda")
    layout = RowLayout.from_mask(mask)
    assert torch.equal(ops.pack(x, layout), x[mask])
    assert torch.equal(ops.unpack(x[mask], layout, 2.0), torch.where(mask, x, 2.0))
    hinted = RowLayout.from_mask(mask, num_tokens=layout.num_tokens)
    assert torch.equal(ops.pack(x, hinted), x[mask])
    assert hinted == layout


@pytest.mark.parametrize("density", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("width", [4096, 4095, 3000, 515])
def test_wide_rows(width: int, density: float) -> None:
    mask = torch.rand(5, 211, device="cuda") < density
    x = torch.randn(5, 211, width, device="cuda", dtype=torch.bfloat16)
    layout = RowLayout.from_mask(mask)
    assert torch.equal(ops.pack(x, layout), x[mask])
    assert torch.equal(ops.unpack(x[mask], layout, 1.5), torch.where(mask[..., None], x, 1.5))
    assert torch.equal(ops.pack(x[..., 1:-1], layout), x[..., 1:-1][mask])
    edges = ops.unpack(x[mask], layout, EDGE)
    assert torch.equal(edges, ops.unpack(x[mask], layout, EDGE, backend="torch"))


def test_nothing_waits() -> None:
    mask = prefix(torch.randint(0, 700, (64,), device="cuda"), 800)
    total = int(mask.sum())
    fields = [torch.randint(0, 9, (64, 800), device="cuda"), torch.randn(64, 800, device="cuda")]
    with count_syncs() as seen:
        layout = RowLayout.from_mask(mask, num_tokens=total)
        values = ops.pack(fields, layout)
        ops.unpack(values, layout, [5, EDGE])
        assert layout.cu_seqlens.dtype == torch.int32
        places, again = layout.indices, layout.to_mask()
    assert seen == []
    assert torch.equal(places, mask.view(-1).nonzero().view(-1))
    assert torch.equal(again, mask)
    with count_syncs() as seen:
        RowLayout.from_mask(mask)
        RowLayout.from_mask(mask.long())
        RowLayout.from_mask(torch.rand(64, 800, device="cuda") < 0.5)
    assert len(seen) == 3


def test_a_graph_of_everything() -> None:
    mask = prefix(torch.randint(0, 700, (64,), device="cuda"), 800)
    total = int(mask.sum())
    x = torch.randn(64, 800, device="cuda")

    def work() -> torch.Tensor:
        layout = RowLayout.from_mask(mask, num_tokens=total)
        return ops.unpack(ops.pack(x, layout), layout, 3.0)

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()
    x.normal_()
    graph.replay()
    assert torch.equal(out, torch.where(mask, x, 3.0))


def test_inductor() -> None:
    def work(x: torch.Tensor, layout: RowLayout) -> torch.Tensor:
        return ops.unpack((ops.pack(x.sin(), layout) * 2).relu(), layout, 0.5)

    compiled = torch.compile(work, fullgraph=True)
    for rows in (8, 9, 33):
        layout = RowLayout.from_mask(torch.rand(rows, 70, device="cuda") < 0.4)
        x = torch.randn(rows, 70, device="cuda", requires_grad=True)
        y = x.detach().requires_grad_()
        seen, expected = compiled(x, layout), work(y, layout)
        torch.testing.assert_close(seen, expected)
        seen.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(x.grad, y.grad)


BROKEN = {
    "a block too many": (prefix, 4_000),
    "many blocks too many": (prefix, 90_000),
    "all": (prefix, 120_000),
    "one too many": (prefix, None),
    "too few": (prefix, 17),
    "none": (prefix, 0),
    "several runs": (lambda lengths, width: torch.rand(lengths.shape[0], width, device="cuda") < 0.5, 59_000),
    "several runs, all": (lambda lengths, width: torch.rand(lengths.shape[0], width, device="cuda") < 0.5, 120_000),
}


@pytest.fixture(params=[0x7FFF1234, -3_000_000], ids=hex)
def garbage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds numbers that lead outside every tensor."""
    empty, new_empty = torch.empty, torch.Tensor.new_empty

    def filled(x: torch.Tensor) -> torch.Tensor:
        return x.fill_(request.param) if x.dtype in (torch.int32, torch.int64) and x.is_cuda else x

    monkeypatch.setattr(torch, "empty", lambda *size, **more: filled(empty(*size, **more)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *size, **more: filled(new_empty(x, *size, **more)))


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("scanner", ["Triton", "torch"])
def test_a_wrong_hint_costs_its_result_alone(
    garbage: None, monkeypatch: pytest.MonkeyPatch, name: str, scanner: str
) -> None:
    """No read elsewhere, no assertion of the device, which would end all work on it; then a LayoutError."""
    make, total = BROKEN[name]
    torch.manual_seed(0)
    mask = make(torch.randint(0, 120, (30,), device="cuda"), 4000)
    true = int(mask.sum())
    total = true + 1 if total is None else total
    x = torch.randn(30, 4000, device="cuda")
    if scanner == "torch":
        monkeypatch.setenv("MASKPACK_TRITON", "0")
    layout = RowLayout.from_mask(mask, num_tokens=total)
    monkeypatch.delenv("MASKPACK_TRITON", raising=False)
    for backend in ("triton", "torch"):
        values = ops.pack(x, layout, backend=backend)
        if name in ("too few", "one too many", "a block too many"):
            assert torch.equal(values[:true], x[mask][:total])
        for pad in (0.0, EDGE, torch.zeros(30, device="cuda")):
            assert ops.unpack(values, layout, pad, backend=backend).shape == x.shape
        leaf = x.clone().requires_grad_()
        for pad in (0.0, EDGE):
            back = ops.unpack(ops.pack(leaf, layout, backend=backend), layout, pad, backend=backend)
            (gradient,) = torch.autograd.grad(back.sum(), leaf)
            assert bool(gradient.isfinite().all())
        wide = ops.pack(x[:, :, None].repeat(1, 1, 300), layout, backend=backend)
        assert ops.unpack(wide, layout, EDGE, backend=backend).shape == (30, 4000, 300)
    places = layout.indices
    assert places.shape == (total,)
    assert not total or (int(places.min()) >= 0 and int(places.max()) < mask.numel())
    assert layout.to_mask().shape == mask.shape
    with pytest.raises(LayoutError, match=rf"{true} valid tokens and .*; expected num_tokens={total} and at most one"):
        layout.table  # noqa: B018
    torch.cuda.synchronize()
    assert torch.equal(ops.pack(x, RowLayout.from_mask(mask)), x[mask])


@pytest.mark.two_gpus
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("several", [False, True])
def test_tensors_may_lie_on_another_than_the_current_device(several: bool) -> None:
    mask = (torch.rand(30, 400) < 0.5) if several else torch.arange(400) < torch.randint(0, 400, (30, 1))
    x = torch.randn(30, 400)
    with torch.cuda.device(0):
        layout = RowLayout.from_mask(mask.to("cuda:1"))
        values = ops.pack([x.to("cuda:1"), x.to("cuda:1")[..., None].repeat(1, 1, 700)], layout)
        back = ops.unpack(values, layout, 2.0)
    assert torch.equal(values[0].cpu(), x[mask])
    assert torch.equal(back[0].cpu(), torch.where(mask, x, 2.0))
    assert torch.equal(back[1][..., 699].cpu(), torch.where(mask, x, 2.0))


def test_a_wrong_hint_is_found_on_the_host() -> None:
    mask = torch.rand(30, 40, device="cuda") < 0.5
    layout = RowLayout.from_mask(mask, num_tokens=17)
    x = torch.randn(30, 40, device="cuda")
    ops.unpack(ops.pack(x, layout), layout)
    with pytest.raises(LayoutError, match="expected num_tokens=17 and at most one"):
        layout.lengths  # noqa: B018
