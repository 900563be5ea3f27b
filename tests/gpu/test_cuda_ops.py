"""Layouts, pack and unpack on CUDA at sizes that only a GPU holds, under its compiler, with a host that never waits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernels import count_syncs

from maskpack import EDGE, RowLayout, ops
from maskpack.errors import LayoutError
from maskpack.layout.row_layout import device_spans, host_spans
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
    assert [host_spans(layout).starts.tolist(), host_spans(layout).counts.tolist()] == [
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
    assert device_spans(layout).begins.tolist() == [0, 3 << 28, 3 << 29, MOST_TOKENS]
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


def test_a_graph_of_many_fields_that_runs_beside_other_streams() -> None:
    """A captured scan counts right while others run: nothing that they write is shared."""
    lengths = torch.randint(0, 700, (300,), device="cuda")
    mask, more = prefix(lengths, 800), torch.rand(300, 800, device="cuda") < 0.5
    several = RowLayout.from_mask(more)
    total = int(mask.sum())
    fields = [torch.randint(0, 99, (300, 800), device="cuda") for _ in range(4)]
    fields += [torch.randn(300, 800, device="cuda") for _ in range(16)]
    pads = [1, 0, 7, 0, *[0.0, -0.0, 2.5, EDGE] * 4]

    def work() -> list[torch.Tensor]:
        layout = RowLayout.from_mask(mask, num_tokens=total)
        packed = ops.pack(fields, layout)
        return [*packed, *ops.unpack(packed, layout, pads), *ops.pack(fields, several), layout.cu_seqlens]

    work()
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    outs: list[list[torch.Tensor]] = []
    for graph in graphs:
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            outs.append(work())
    streams = [torch.cuda.Stream() for _ in range(3)]
    for turn in range(20):
        for field in fields:
            field.copy_(field.flip(1))
        mask.copy_(prefix(lengths.roll(turn), 800))
        torch.cuda.synchronize()
        for stream, graph in zip(streams, graphs, strict=False):
            with torch.cuda.stream(stream):
                graph.replay()
        with torch.cuda.stream(streams[2]):
            eager = work()
        torch.cuda.synchronize()
        for out in outs:
            assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(out, eager, strict=True))
        assert torch.equal(eager[0], fields[0][mask])
        assert torch.equal(eager[40], fields[0][more])
        assert torch.equal(eager[26], fields[6].where(mask, 2.5))


@pytest.mark.timeout(300)
def test_a_hundred_thousand_scans() -> None:
    """Of random shapes, checked in batches on the device."""
    random = np.random.default_rng(0)
    bad = torch.zeros((), dtype=torch.int64, device="cuda")
    pool = torch.rand(1 << 20, device="cuda")
    shapes = [(int(rows), int(width)) for rows, width in random.integers(1, (1400, 700), (100, 2))]
    for rows, width in shapes:
        noise = (
            pool[random.integers(1 << 10) :][: rows * width]
            if rows * width < 1 << 19
            else torch.rand(rows * width, device="cuda")
        )
        noise = noise.view(rows, width)
        lengths = (noise[:, :1] * (width + 1)).long()
        one = torch.arange(width, device="cuda") < lengths
        total = int(one.sum())
        ends = one.sum(1).cumsum(0)
        several = noise < 0.3
        expected = several.view(-1).nonzero().view(-1)
        for turn in range(10):
            held = [RowLayout.from_mask(one, num_tokens=total) for _ in range(95)]
            begins = torch.stack([layout.cu_seqlens for layout in held])
            starts = torch.stack([device_spans(layout).starts for layout in held])
            blocks = torch.stack([device_spans(layout).blocks for layout in held])
            bad += (begins[:, 1:] != ends).sum() + begins[:, 0].abs().sum() + starts.abs().sum()
            tokens = torch.arange(0, total, 512, device="cuda")
            bad += (blocks[:, : tokens.numel()] != torch.searchsorted(ends, tokens, right=True)).sum()
            bad += (blocks[:, -1] != rows - 1).sum()
            for _ in range(5):
                layout = RowLayout.from_mask(several)
                assert layout.num_tokens == expected.numel()
                bad += (layout.indices != expected).sum()
            assert turn or int(bad) == 0, (rows, width)
        assert int(bad) == 0, (rows, width)


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
