"""Layouts, pack and unpack on CUDA at sizes that only a GPU holds, under its compiler, with a host that never waits."""

from __future__ import annotations

import pytest
import torch
from test_cuda import count_syncs

from maskpack import EDGE, LayoutError, RowLayout, ops

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


@pytest.mark.parametrize("rows", [1, 8193, 70_000])
def test_many_rows(rows: int) -> None:
    mask = prefix(torch.randint(0, 41, (rows,), device="cuda"), 40)
    x = torch.randn(rows, 40, device="cuda")
    layout = RowLayout.from_mask(mask)
    assert torch.equal(ops.pack(x, layout), x[mask])
    assert torch.equal(ops.unpack(x[mask], layout, 2.0), torch.where(mask, x, 2.0))
    promised = RowLayout.from_mask(mask, total=layout.total)
    assert torch.equal(ops.pack(x, promised), x[mask])
    assert promised == layout


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
        layout = RowLayout.from_mask(mask, total=total)
        values = ops.pack(fields, layout)
        ops.unpack(values, layout, [5, EDGE])
        assert layout.cu_seqlens.dtype == torch.int32
    assert seen == []
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
        layout = RowLayout.from_mask(mask, total=total)
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


def test_a_broken_promise_is_found_on_the_host() -> None:
    mask = torch.rand(30, 40, device="cuda") < 0.5
    layout = RowLayout.from_mask(mask, total=17)
    x = torch.randn(30, 40, device="cuda")
    ops.unpack(ops.pack(x, layout), layout)
    with pytest.raises(LayoutError, match="17 and at most one were promised"):
        layout.lengths  # noqa: B018
