"""The GPU benchmark, on the CPU at tiny sizes: it checks bits before it times, rivals are right, targets apply."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch.nn.functional import log_softmax

from bench import baselines, gpu, ops_decode, ops_log_probs, ops_peer
from bench import ops as case
from bench import ops_rivals as rivals
from bench.measure import NotExact
from bench.workloads import make_batch
from maskpack import ops

CPU = torch.device("cpu")
ROWS, SIZES = 5, case.Sizes(20, 37, 229, wide=(5, 33, 8), copies=(1 << 10, 1 << 12))


@pytest.fixture(autouse=True)
def one_replay(monkeypatch):
    monkeypatch.setattr(case, "_REPLAYS", 1)


def run(*groups):
    return case.run(ROWS, 1, sizes=SIZES, only=groups)


# -------------------------------------------------------------------- the case


def test_the_case_runs_with_its_targets(measured):
    rows = measured("ops", lambda rows, rounds, **more: case.run(rows, rounds, sizes=SIZES, **more))
    targets = {key: row["target"] for key, row in rows.items() if row["target"]}
    for mask in (case.ONE, case.SEVERAL, case.SCATTERED):
        scattered = mask == case.SCATTERED
        assert targets[f"ops layout, {mask}", "maskpack, host synchronisations"] == "<= 1"
        assert targets.get((f"ops layout, {mask}", "maskpack, wall")) == ("<= 150" if mask == case.ONE else "<= 250")
        assert targets[f"ops pack, {mask}", "maskpack, device"] == ("<= 150" if scattered else "<= 50")
        assert targets[f"ops pack from the mask, {mask}, 10 fields", "maskpack, host synchronisations"] == "<= 1"
        assert targets[f"ops pack of one field, {mask}", "maskpack, device"] == ("<= 20" if scattered else "<= 12")
        assert targets[f"ops unpack, {mask}", "maskpack, device"] == "<= 260"
    wide = [key for key in rows if key[0].startswith("ops rows") and key[1] == "packed bytes"]
    assert [rows[key]["value"] for key in wide] == [2 * 8 * int(density * 5 * 33) for density in case.DENSITIES]
    for count, nested, padded in ((ROWS, 8, 7), (8 * ROWS, 20, 15)):
        name = f"ops decode, {count} rows"
        assert targets[name, "copy of the padded batch, pinned / nested, pinned"] == f">= {nested}"
        assert targets[name, "copy of the padded batch, pinned / padded, pinned"] == f">= {padded}"
    synchronisations = {name: to for name, to in targets.items() if name[1].endswith("synchronisations")}
    from_masks = "ops layout", "ops nest", "ops pack from the mask"
    assert {to for (name, _), to in synchronisations.items() if not name.startswith(from_masks)} == {"<= 0"}
    assert targets[f"ops nest, {ROWS} rows", "nest, verify=always, host synchronisations"] == "<= 2"


def test_groups_run_alone_and_are_named(measured):
    rows = measured("ops", lambda rows, rounds, **more: case.run(rows, rounds, sizes=SIZES, **more), "--only", "wide")
    assert {name.split(",")[0] for name, _ in rows} == {"ops", "ops rows of 8 bf16"}
    with pytest.raises(ValueError, match="pakc"):
        run("pack", "pakc")


def test_the_command_runs_without_ray():
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "from bench import __main__ as command\n"
        "try:\n    command.main(['ops', '--only', 'nothing'])\n"
        "except ValueError as error:\n    print(error)\n"
    )
    root = Path(case.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert "no group nothing" in done.stdout


# -------------------------------------------------------------------- exactness


def _spoil(tensor):
    """A copy whose last bit differs."""
    tensor = tensor.clone()
    tensor.view(torch.uint8).view(-1)[-1] ^= 1
    return tensor


@pytest.mark.parametrize(
    ("owner", "name", "group"),
    [
        (ops, "pack", "pack"),
        (ops, "pack", "wide"),
        (ops, "unpack", "unpack"),
        (ops, "unpack", "wide"),
        (rivals, "cu_seqlens", "layout"),
        (rivals, "pack_by_index", "pack"),
        (rivals, "unpack_by_runs", "unpack"),
        (rivals, "pad_input", "wide"),
    ],
)
def test_a_lost_bit_raises(monkeypatch, owner, name, group):
    exact = getattr(owner, name)

    def lossy(*given):
        out = exact(*given)
        return [*out[:-1], _spoil(out[-1])] if isinstance(out, list) else _spoil(out)

    monkeypatch.setattr(owner, name, lossy)
    with pytest.raises(NotExact, match="maskpack" if owner is ops else None):
        run(group)


@pytest.mark.parametrize("form", ["nested", "padded"])
def test_a_lost_bit_of_decompress_raises(monkeypatch, form):
    exact = ops_decode.decompress

    def lossy(*given, **more):
        batch = exact(*given, **more)
        if more["format"] == form:
            field = batch["entropys"]
            (field.values() if field.is_nested else field)[-1].view(-1)[-1] = 7.0
        return batch

    monkeypatch.setattr(ops_decode, "decompress", lossy)
    with pytest.raises(NotExact, match=f"{form}.*entropys"):
        run("decode")


# -------------------------------------------------------------------- workloads and rivals


def test_masks_have_the_density_and_the_runs_that_their_names_say():
    masks = case.Stage(gpu.Clock(CPU, 1), SIZES).masks
    runs = {name: (mask & ~mask.roll(1, 1)).sum(1) + (mask[:, 0] & mask[:, -1]) for name, mask in masks.items()}
    assert list(masks) == [case.ONE, case.SEVERAL, case.SCATTERED, case.ALL]
    assert runs[case.ONE].eq(1).all()
    assert runs[case.SEVERAL].max() > 1
    assert masks[case.ONE].float().mean() == pytest.approx(0.084, abs=0.005)
    assert masks[case.SCATTERED].float().mean() == pytest.approx(0.084, abs=0.02)
    assert runs[case.SCATTERED].sum() > 0.8 * masks[case.SCATTERED].sum()
    assert masks[case.ALL].all()


@pytest.mark.parametrize("density", [0.0, 0.5])
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

    rows = [packed[begin:end] for begin, end in itertools.pairwise(cumulated)]
    jagged = rivals.unpack_by_jagged([values], torch.tensor(cumulated), 13, [9])
    assert jagged[0].tolist() == [row + [9] * (13 - len(row)) for row in rows]

    wide, zeros = torch.stack([values, -values], 1), torch.where(mask, x, 0)
    for unpack in (rivals.unpack_by_scatter, rivals.pad_input):
        assert unpack(wide, index, (7, 13)).tolist() == torch.stack([zeros, -zeros], 2).tolist(), unpack.__name__


# -------------------------------------------------------------------- the clock


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
    assert times["waits"].over(times["flows"]) == times["waits"].wall / times["flows"].wall


def test_figures_in_a_loop_come_with_those_by_the_wall():
    times = gpu.Clock(CPU, 1).measure({"maskpack": lambda: None, "flows": lambda: None}, loop=True)
    assert all(time.loop is not None and time.loop <= 1e6 for time in times.values())
    names = [row.name for row in case.figures("c", times, {})]
    assert names[:4] == ["maskpack, device", "maskpack, wall", "maskpack, host", "maskpack, loop"]
    assert names[5:8] == ["flows, device", "flows, wall", "flows, loop"]


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


# -------------------------------------------------------------------- from one GPU to another


def test_batches_cross_between_two_processes():
    rows = ops_peer.measured("gloo", 2, ops_peer.Sizes(ROWS, 37, 229))
    assert len({(row.case, row.name) for row in rows}) == len(rows) == 2 * (4 + 5 + 2 + 2 * 3 + 4)
    assert {row.case for row in rows} == {"ops peer, 5 rows", "ops peer, 40 rows"}
    assert all(math.isfinite(row.value) and row.value > 0 for row in rows)
    for case_name in ("ops peer, 5 rows", "ops peer, 40 rows"):
        figures = {row.name: row.value for row in rows if row.case == case_name}
        sent = [figures[f"{name}, crossing"] for name in ("padded tensors", "jagged values and offsets", "packed")]
        assert sent == sorted(sent, reverse=True)


def test_figures_of_peers_are_of_what_both_did():
    tensors = (lambda: None), (lambda tensors: None)
    ways = {name: ops_peer.Way(tensors, tensors, "nested") for name in (ops_peer._PADDED, ops_peer._JAGGED)}
    ways[ops_peer._NESTED] = ops_peer.Way(tensors, tensors, "nested", ("nest", "send"))
    ways |= {
        name: ops_peer.Way(tensors, tensors, "nested", ("encode", "send", "decode"))
        for name in ops_peer._PACKED.values()
    }
    sender = {name: [ops_peer.Marks(1.0, 1.25, 1.75)] for name in ways}
    receiver = {name: [ops_peer.Marks(0.5, 2.0, 3.0)] for name in ways}
    receiver[ops_peer._PADDED] = [ops_peer.Marks(0.5, 4.0, 5.0)]
    rows = {row.name: row.value for row in ops_peer._figures("c", ways, sender, receiver)}
    assert rows["padded tensors, wall"] == 4000
    assert rows["packed, to nested, wall"] == 2000
    stages = [rows[f"packed, to nested, {stage}"] for stage in ("encode", "send", "decode")]
    assert stages == [250, 750, 1000]
    assert rows["padded tensors / packed, to padded"] == 2


def test_a_bit_that_is_lost_on_the_way_raises(monkeypatch):
    batch = make_batch("reference", ROWS, prompt_width=37, response_width=229)
    peer = ops_peer._Peer(1, CPU, None, batch)
    spoilt = batch.clone()
    spoilt["entropys"] = _spoil(spoilt["entropys"])
    monkeypatch.setattr(peer, "_run", lambda way: (spoilt, None))
    with pytest.raises(NotExact, match=r"ops peer, 5 rows, padded tensors.*entropys"):
        peer.rows(1)


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="for machines without two GPUs")
def test_peers_need_two_gpus(capsys):
    assert {row.case for row in run("peer")} == {"ops, what the device can do"}
    assert capsys.readouterr().err == "ops peer: skipped, because this machine has fewer than two GPUs\n"


# -------------------------------------------------------------------- log-probs


def test_log_probs_run_at_a_tiny_size():
    sizes = ops_log_probs.Sizes(rows=4, width=9, hidden=8, vocabulary=50, sample=5)
    rows = ops_log_probs.rows(sizes, (0.3, 1.0), rounds=1, device=CPU)
    assert len({(row.case, row.name) for row in rows}) == len(rows) == 2 * (28 + 4 * 6)
    assert {row.case for row in rows} == {"logprobs density 0.3, 10 rows", "logprobs density 1, 36 rows"}
    assert all(math.isfinite(row.value) and row.value >= 0 for row in rows)
    assert all(row.target is None for row in rows)  # the targets are those of the full size on a GPU


def test_log_probs_and_gradients_are_compared_with_the_truth(monkeypatch):
    problem = ops_log_probs.make(ops_log_probs.Sizes(rows=4, width=30, hidden=16, vocabulary=300), 0.6, CPU)
    sure = ops_log_probs.with_sure_tokens(problem)
    hidden = ops.pack(sure.hidden.detach(), sure.layout).double().requires_grad_()
    weight = sure.weight.detach().double().requires_grad_()
    truth = log_softmax(hidden @ weight.T, -1).gather(1, sure.ids[:, None])[:, 0]
    for work in ops_log_probs.WORKS.values():
        assert (work(sure) - truth).abs().max() < 0.2  # bfloat16
    gradients = torch.autograd.grad(truth, (hidden, weight), sure.slopes.double())
    for seen, want in zip(ops_log_probs._gradients(sure), gradients, strict=True):
        torch.testing.assert_close(seen, want, rtol=1e-12, atol=1e-12)
    errors = ops_log_probs.gradient_errors(problem)
    assert errors["weight"]["ours"] < errors["weight"]["full logits"]
    works = ops_log_probs.WORKS | {"ours": lambda problem: ops_log_probs.packed(problem) * 1.1}
    monkeypatch.setattr(ops_log_probs, "WORKS", works)
    with pytest.raises(NotExact, match=r"the gradient of ours is 0\..* off the truth \(hidden\); that of plain torch"):
        ops_log_probs.gradient_errors(problem)
