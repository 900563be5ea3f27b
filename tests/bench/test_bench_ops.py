"""The GPU benchmark, on the CPU at tiny sizes: it checks bits before it times, rivals are right, targets apply."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

from bench import __main__ as command
from bench import baselines, gpu, ops_decode, report
from bench import ops as case
from bench import ops_rivals as rivals
from bench.measure import NotExact
from maskpack import RowLayout, ops

CPU = torch.device("cpu")
ROWS, SIZES = 5, case.Sizes(20, 37, 229, wide=(5, 33, 8), copies=(1 << 10, 1 << 12))


@pytest.fixture(autouse=True)
def one_replay(monkeypatch):
    monkeypatch.setattr(case, "_REPLAYS", 1)


def run(*groups):
    return case.run(ROWS, 1, sizes=SIZES, only=groups)


def targets(rows):
    return {(row.case, row.name): row.target for row in rows if row.target is not None}


# -------------------------------------------------------------------- groups and targets


def test_layout_has_its_rows_and_targets():
    rows = run("layout")
    general = {"maskpack, wall": "<= 60", "maskpack, host synchronisations": "<= 1"}
    promised = {"maskpack, total promised, device": "<= 20", "maskpack, total promised, host synchronisations": "<= 0"}
    wanted = {
        case.ONE: general | promised,
        case.SEVERAL: general,
        case.SCATTERED: {"maskpack, host synchronisations": "<= 1"},
        case.ALL: general | promised,
    }
    assert targets(rows) == {
        (f"ops layout, {mask}", name): to for mask, all in wanted.items() for name, to in all.items()
    }
    assert {row.case for row in rows} == {f"ops layout, {mask}" for mask in wanted} | {"ops, what the device can do"}


def test_pack_and_unpack_have_their_rows_and_targets():
    rows = run("unpack", "pack")
    wanted = {}
    for mask in (case.ONE, case.SEVERAL, case.SCATTERED):
        scattered = mask == case.SCATTERED
        wanted[f"ops pack, {mask}", "maskpack, device"] = "<= 215" if scattered else "<= 50"
        wanted[f"ops pack, {mask}", "maskpack, host"] = "<= 120"
        wanted[f"ops pack, {mask}", "maskpack, host synchronisations"] = "<= 0"
        wanted[f"ops unpack, {mask}", "maskpack, device"] = "<= 290"
        wanted[f"ops unpack, {mask}", "maskpack, host synchronisations"] = "<= 0"
        if not scattered:
            wanted[f"ops unpack, {mask}", "maskpack / writing the output alone"] = "<= 1.35"
    assert targets(rows) == wanted
    names = [row.name for row in rows if row.case == f"ops pack, {case.ONE}"]
    assert names.index("maskpack, device") < names.index("x[mask], device") < names.index("x[mask] / maskpack")
    assert all(row.value > 0 for row in rows if row.unit in ("us", "x", "TB/s"))
    cases = list(dict.fromkeys(row.case.split(",")[0] for row in rows))
    assert cases == ["ops", "ops pack", "ops unpack"]  # in the order of the report, whatever was asked


def test_wide_rows_have_their_rows_and_targets():
    wanted = {}
    for density in (0.05, 0.3, 1.0):
        rows = f"ops rows of 8 bf16, {density} dense"
        wanted[f"{rows}, pack", "maskpack / index_select, index given"] = "<= 1.05"
        wanted[f"{rows}, pack", "maskpack, host synchronisations"] = "<= 0"
        wanted[f"{rows}, unpack", "maskpack, host synchronisations"] = "<= 0"
        if density < 1:
            wanted[f"{rows}, unpack", "maskpack / writing the output alone"] = "<= 1.2"
    rows = run("wide")
    assert targets(rows) == wanted
    packed = [row.value for row in rows if row.name == "packed bytes"]
    assert packed == [2 * 8 * int(density * 5 * 33) for density in (0.05, 0.3, 1.0)]


def test_decode_has_its_rows_and_targets():
    rows = [row for row in run("decode") if row.case.startswith("ops decode")]
    wanted = {}
    for count, nested, padded in ((ROWS, 8, 7), (8 * ROWS, 20, 15)):
        name = f"ops decode, {count} rows"
        wanted[name, "copy of the padded batch, pinned / nested, pinned"] = f">= {nested}"
        wanted[name, "copy of the padded batch, pinned / padded, pinned"] = f">= {padded}"
        for ours in ("nested", "nested, pinned", "padded", "padded, pinned"):
            wanted[name, f"{ours}, host synchronisations"] = "<= 0"
    assert targets(rows) == wanted
    value = {(row.case, row.name): row.value for row in rows}
    assert value[f"ops decode, {8 * ROWS} rows", "padded"] == 8 * value[f"ops decode, {ROWS} rows", "padded"]
    assert value[f"ops decode, {ROWS} rows", "padded"] == ROWS * (4 * 8 * 229 + 8 * 37 + 8 * 229 * 2 + 3 * 8 * 266)


def test_a_group_that_does_not_exist_is_named():
    with pytest.raises(ValueError, match="pakc"):
        run("pack", "pakc")


# -------------------------------------------------------------------- exactness


def _spoil(tensor):
    """A copy whose last bit differs."""
    tensor = tensor.clone()
    tensor.view(torch.uint8).view(-1)[-1] ^= 1
    return tensor


@pytest.mark.parametrize("name", ["pack", "unpack"])
@pytest.mark.parametrize("group", ["fields", "wide"])
def test_a_lost_bit_of_ours_raises(monkeypatch, name, group):
    exact = getattr(ops, name)

    def lossy(*given):
        out = exact(*given)
        return [*out[:-1], _spoil(out[-1])] if isinstance(out, list) else _spoil(out)

    monkeypatch.setattr(ops, name, lossy)
    with pytest.raises(NotExact, match="maskpack"):
        run(name if group == "fields" else "wide")


@pytest.mark.parametrize(
    ("group", "name"),
    [
        ("layout", "cu_seqlens"),
        ("pack", "pack_by_mask"),
        ("pack", "pack_by_index"),
        ("pack", "pack_by_unpadding"),
        ("pack", "pack_by_nested"),
        ("unpack", "unpack_by_index"),
        ("unpack", "unpack_by_masked_scatter"),
        ("unpack", "unpack_by_mask"),
        ("unpack", "unpack_by_runs"),
        ("unpack", "unpack_by_jagged"),
        ("wide", "unpack_by_scatter"),
        ("wide", "pad_input"),
    ],
)
def test_a_lost_bit_of_a_rival_raises(monkeypatch, group, name):
    exact = getattr(rivals, name)

    def lossy(*given):
        out = exact(*given)
        return [*out[:-1], _spoil(out[-1])] if isinstance(out, list) else _spoil(out)

    monkeypatch.setattr(rivals, name, lossy)
    with pytest.raises(NotExact):
        run(group)


def test_a_layout_of_another_mask_raises(monkeypatch):
    exact = RowLayout.from_mask

    def lossy(mask, **more):
        mask = mask.clone()
        mask[-1, mask[-1].nonzero()[-1]] = False
        return exact(mask) if not more else exact(mask, num_tokens=more["num_tokens"] - 1)

    monkeypatch.setattr(RowLayout, "from_mask", lossy)
    with pytest.raises(NotExact):
        run("layout")


@pytest.mark.parametrize("layout", ["nested", "padded"])
def test_a_lost_bit_of_decompress_raises(monkeypatch, layout):
    exact = ops_decode.decompress

    def lossy(*given, **more):
        batch = exact(*given, **more)
        if more["layout"] == layout:
            field = batch["entropys"]
            (field.values() if field.is_nested else field)[-1].view(-1)[-1] = 7.0
        return batch

    monkeypatch.setattr(ops_decode, "decompress", lossy)
    with pytest.raises(NotExact, match=f"{layout}.*entropys"):
        run("decode")


# -------------------------------------------------------------------- workloads


def test_masks_have_the_density_and_the_runs_that_their_names_say():
    masks = case.Stage(gpu.Clock(CPU, 1), SIZES).masks
    runs = {name: torch.tensor(_runs(mask.tolist())) for name, mask in masks.items()}
    assert list(masks) == [case.ONE, case.SEVERAL, case.SCATTERED, case.ALL]
    assert runs[case.ONE].eq(1).all()
    assert runs[case.ALL].eq(1).all()
    assert runs[case.SEVERAL].max() > 1
    assert masks[case.ONE].float().mean() == pytest.approx(0.084, abs=0.005)
    assert masks[case.SCATTERED].float().mean() == pytest.approx(0.084, abs=0.02)
    assert runs[case.SCATTERED].sum() > 0.8 * masks[case.SCATTERED].sum()
    assert masks[case.ALL].all()


def _runs(mask):
    """The number of runs of each row."""
    return [sum(real and not before for before, real in zip([False, *row], row, strict=False)) for row in mask]


@pytest.mark.parametrize(("rows", "width", "total"), [(5, 33, 8), (5, 33, 164), (5, 33, 165), (4, 7, 0), (1, 9, 3)])
def test_uneven_rows_are_as_many_as_asked(rows, width, total):
    mask = case.uneven_rows(rows, width, total)
    assert mask.shape == (rows, width)
    assert mask.sum() == total
    assert all(row == sorted(row, reverse=True) for row in mask.tolist())


def test_fields_are_four_of_integers_and_six_of_floats():
    fields = case.Stage(gpu.Clock(CPU, 1), SIZES).fields
    assert [x.dtype for x in fields] == [torch.int64] * 4 + [torch.float32] * 6
    assert all(x.shape == (20, 266) and x.unique().numel() > 1000 for x in fields)


# -------------------------------------------------------------------- rivals


@pytest.mark.parametrize("density", [0.0, 0.1, 0.5, 1.0])
def test_rivals_agree_with_naive_loops(density):
    random = torch.Generator().manual_seed(int(10 * density))
    mask = torch.rand((7, 13), generator=random) < density
    x = torch.randint(0, 1000, mask.shape, generator=random)
    packed = [x[b, s].item() for b in range(7) for s in range(13) if mask[b, s]]
    index = torch.tensor([13 * b + s for b in range(7) for s in range(13) if mask[b, s]], dtype=torch.int64)
    lengths = [sum(row) for row in mask.tolist()]
    cumulated = [sum(lengths[:b]) for b in range(8)]
    padded = [[x[b, s].item() if mask[b, s] else 9 for s in range(13)] for b in range(7)]

    assert rivals.cu_seqlens(mask).tolist() == cumulated
    unpadding = rivals.unpadding(mask)
    assert unpadding.indices.tolist() == index.tolist()
    assert (unpadding.cu_seqlens.tolist(), unpadding.longest) == (cumulated, max(lengths))
    for pack in (rivals.pack_by_mask, rivals.pack_by_unpadding, rivals.pack_by_nested):
        assert pack([x], mask)[0].tolist() == packed, pack.__name__
    assert rivals.pack_by_index([x], index)[0].tolist() == packed
    assert rivals.compiled_pack_by_index(CPU)([x], index)[0].tolist() == packed

    values, runs = torch.tensor(packed, dtype=torch.int64), baselines.mask_runs(mask)
    assert rivals.mask_of_runs(runs, 13).tolist() == mask.tolist()
    unpacked = {
        "index": rivals.unpack_by_index([values], index, (7, 13), [9]),
        "masked_scatter": rivals.unpack_by_masked_scatter([values], mask, [9]),
        "mask": rivals.unpack_by_mask([values], mask, [9]),
        "runs": rivals.unpack_by_runs([values], runs, 13, [9]),
    }
    for name, (out,) in unpacked.items():
        assert out.tolist() == padded, name
    assert rivals.write_outputs([values], (7, 13), [9])[0].tolist() == [[9] * 13] * 7

    left = [row[:n] + [9] * (13 - n) for n, row in zip(lengths, _rows(packed, cumulated), strict=True)]
    jagged = rivals.unpack_by_jagged([values], torch.tensor(cumulated), 13, [9])
    assert jagged[0].tolist() == left

    wide, zeros = torch.stack([values, -values], 1), torch.where(mask, x, 0)
    for unpack in (rivals.unpack_by_scatter, rivals.pad_input):
        assert unpack(wide, index, (7, 13)).tolist() == torch.stack([zeros, -zeros], 2).tolist(), unpack.__name__


def _rows(packed, cumulated):
    return [packed[begin:end] for begin, end in itertools.pairwise(cumulated)]


# -------------------------------------------------------------------- the clock


def test_all_times_contain_the_work_and_medians_are_of_interleaved_rounds():
    calls = []

    def work(name, seconds):
        calls.append(name)
        time.sleep(seconds)

    works = {"a": lambda: work("a", 0.001), "b": lambda: work("b", 0.02)}
    times = gpu.Clock(CPU, 3).measure(works)
    for way in ("device", "wall", "host"):
        assert 1000 <= getattr(times["a"], way) < getattr(times["b"], way) >= 20_000, way
    assert "".join(calls) == "aabb" + 3 * "abbaabba"  # twice each for the synchronisations, then three ways of timing
    assert times["b"].over(times["a"]) == times["b"].device / times["a"].device


def test_the_warnings_of_torch_are_counted_as_synchronisations():
    def work():
        warnings.warn("something else", stacklevel=1)
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally at x.cpp:1.)", stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        times = gpu.Clock(CPU, 1).measure({"waits": work, "flows": lambda: None})
    assert (times["waits"].syncs, times["flows"].syncs) == (3, 0)
    assert times["waits"].device is None  # it could not be captured
    assert times["waits"].best == times["waits"].wall
    assert times["flows"].best == times["flows"].device
    assert times["waits"].over(times["flows"]) == times["waits"].wall / times["flows"].wall


def test_figures_show_ours_in_all_ways_and_the_others_in_their_best():
    times = {
        "maskpack": gpu.Times(10.0, 20.0, 5.0, 0),
        "flows": gpu.Times(30.0, 50.0, 6.0, 0),
        "waits": gpu.Times(None, 80.0, 70.0, 2),
    }
    rows = case.figures("c", times, {"maskpack, wall": "<= 19"}, {("maskpack", "flows"): "<= 0.5"})
    assert [(row.name, row.value, row.unit, row.target, row.met) for row in rows] == [
        ("maskpack, device", 10.0, "us", None, None),
        ("maskpack, wall", 20.0, "us", "<= 19", False),
        ("maskpack, host", 5.0, "us", None, None),
        ("maskpack, host synchronisations", 0, "syncs", None, None),
        ("flows, device", 30.0, "us", None, None),
        ("waits, wall", 80.0, "us", None, None),
        ("waits, host synchronisations", 2, "syncs", None, None),
        ("flows / maskpack", 3.0, "x", None, None),
        ("waits / maskpack", 4.0, "x", None, None),
        ("maskpack / flows", 10 / 30, "x", "<= 0.5", True),
    ]


def test_uploads_are_counted_from_the_trace(monkeypatch):
    clock = gpu.Clock(CPU, 1)
    assert clock.uploads(lambda: torch.ones(3).to(torch.float64)) == (0, 0)
    events = [
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "args": {"bytes": 40}},
        {"cat": "gpu_memcpy", "name": "CopyHostToDevice", "args": {"bytes": 2}},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pageable)", "args": {"bytes": 1}},
        {"cat": "kernel", "name": "Memcpy HtoD", "args": {}},
        {"name": "process_name"},
    ]

    def export(profile, file):
        Path(file).write_text(json.dumps({"traceEvents": events}))

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", export)
    assert clock.uploads(lambda: None) == (42, 2)


# -------------------------------------------------------------------- the command


def test_the_command_takes_groups_and_writes_json(tmp_path, capsys, monkeypatch):
    small = lambda rows, rounds, **more: case.run(rows, rounds, sizes=SIZES, **more)  # noqa: E731
    monkeypatch.setitem(command.CASES, "ops", small)
    monkeypatch.setenv("MASKPACK_COMMIT", "0123abc")
    file = tmp_path / "figures.json"
    command.main(["ops", "--rows", "5", "--rounds", "1", "--only", "pack,wide", "--json", str(file)])
    written = json.loads(file.read_text())
    assert written["commit"] == "0123abc"
    cases = {row["case"].split(",")[0] for row in written["rows"]}
    assert cases == {"ops", "ops pack", "ops rows of 8 bf16"}
    assert "ops pack, scattered" in capsys.readouterr().out


def test_groups_are_refused_for_other_cases(capsys):
    with pytest.raises(SystemExit):
        command.main(["nest", "--only", "pack"])
    assert "nest has no groups" in capsys.readouterr().err


def test_the_command_runs_without_ray():
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "from bench import __main__ as command\n"
        "try:\n    command.main(['ops', '--only', 'nothing'])\n"
        "except ValueError as error:\n    print(error)\n"
    )
    root = Path(command.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert "no group nothing" in done.stdout


def test_the_gpu_is_named_where_there_is_one(monkeypatch):
    triton = pytest.importorskip("triton")
    assert "gpu" not in report.machine()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert report.machine()["gpu"] == "NVIDIA H200"
    assert report.versions()["triton"] == triton.__version__


def test_the_table_rounds_each_unit():
    rows = [report.Row("c", "n", 12.345, unit) for unit in ("us", "GB/s", "TB/s", "GiB", "syncs")]
    shown = [line.split()[1] for line in report.table(rows).splitlines()[1:]]
    assert shown == ["12.3", "12.3", "12.35", "12.35", "12"]
