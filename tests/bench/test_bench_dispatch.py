"""The dispatch benchmark checks bits, switches Ray's flag as Ray does, models what it says, leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import warnings
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import ray
import torch
from ray._private import ray_constants
from ray.cloudpickle import CloudPickler

import maskpack
from bench import dispatch, dispatch_forms, dispatch_model, link
from bench.dispatch_forms import FORMS, JAGGED, PADDED, TRUSTED, VERIFIED, VERIFIED_PADDED, ZERO_COPY
from bench.measure import NotExact
from bench.workloads import PAD_ID, batch_of

ROWS = 33
SCALE = 0.016
BATCH = batch_of("reference", ROWS, scale=SCALE)

has_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, link._TOOLS)),
    reason="network namespaces need root and some tools",
)


@pytest.fixture(scope="module")
def reducers():
    """A Ray that was started with its flag for zero-copy tensors, which is then off; what its pickler had with it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_constants, "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS", True)
        with dispatch_forms.local_ray(BATCH):
            ray.put(0)  # the context is made when it is first needed
            flagged = dict(CloudPickler.dispatch)
            dispatch_forms.set_zero_copy(False)
            yield flagged


@pytest.fixture(scope="module")
def sender(reducers):
    with closing(dispatch_forms.Sender(BATCH, keep=False)) as sender:
        yield sender


# -------------------------------------------------------------------- bits


def test_every_form_arrives_with_its_bits(sender):
    dispatch.check(sender)


def test_a_bit_lost_on_the_way_is_named(sender, monkeypatch):
    def lossy(batch):
        changed = batch.clone()
        changed["advantages"].view(-1)[-1] = -0.0
        return maskpack.compress(changed, pad_token_id=PAD_ID)

    expected = dispatch_forms.digest(sender.batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", maskpack.errors.MaskpackWarning)
        for name, seen in ((VERIFIED_PADDED, "advantages"), (VERIFIED, "not jagged")):  # the field travels dense
            monkeypatch.setitem(FORMS, name, replace(FORMS[name], encode=lossy))
            with pytest.raises(NotExact, match=seen):
                sender.check(name, expected)


def test_log_probs_that_come_back_wrong_are_refused(sender, monkeypatch):
    assert sender.round_trip(VERIFIED)["end to end"] > 0
    decompress = maskpack.decompress
    monkeypatch.setattr(maskpack, "decompress", lambda packed: decompress(packed).apply(lambda x: x + 1))
    with pytest.raises(NotExact, match="log-probs"):
        sender.round_trip(VERIFIED)


def test_a_digest_sees_signs_of_zero_dtypes_shapes_and_order(sender):
    batch = sender.batch
    expected = dispatch_forms.digest(batch)
    signed = batch.clone()
    signed["entropys"][:, -1] = -0.0
    for other in (signed, batch[:-1], batch.select(*reversed(list(batch.keys()))), batch.float()):
        assert dispatch_forms.digest(other) != expected
    assert dispatch_forms.digest(batch.clone()) == expected


def test_the_flag_is_all_that_the_variable_of_ray_sets(reducers):
    assert torch.Tensor not in CloudPickler.dispatch
    dispatch_forms.set_zero_copy(True)
    try:
        assert dict(CloudPickler.dispatch) == reducers
    finally:
        dispatch_forms.set_zero_copy(False)


def test_the_flag_makes_views_of_the_object_store(sender):
    tensor = torch.arange(100_000)

    def got_twice(on):
        dispatch_forms.set_zero_copy(on)
        try:
            ref = ray.put(tensor)
        finally:
            dispatch_forms.set_zero_copy(False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of arrays that cannot be written
            return ray.get(ref), ray.get(ref)

    for on in (True, False):
        first, second = got_twice(on)
        assert torch.equal(first, tensor)
        assert (first.data_ptr() == second.data_ptr()) == on


# -------------------------------------------------------------------- the case


def test_the_case_runs_with_its_targets_and_draws_its_chart(tmp_path, sender, measured, monkeypatch):
    monkeypatch.setattr(dispatch, "local_ray", lambda batch: nullcontext())  # this process has a Ray already
    file = tmp_path / "chart.svg"
    rows = measured(
        "dispatch",
        lambda rows, rounds, **more: dispatch.run(ROWS, rounds, scale=SCALE, speeds=(), **more),
        *("--plot", str(file)),
    )
    names = {name for _, name in rows}
    for form in FORMS:
        assert {f"{phase}, {form}" for phase in ("end to end", "encode", "put", "get", "restore")} <= names
    targets = {name: row["target"] for (_, name), row in rows.items() if row["target"]}
    assert targets[f"end to end, {PADDED} / {VERIFIED}"] == ">= 16"
    assert targets[f"end to end, {ZERO_COPY} / {TRUSTED}"] == ">= 2"
    assert targets[f"end to end, {ZERO_COPY} / {VERIFIED}"] == ">= 2"
    assert targets[f"end to end, {ZERO_COPY} / {VERIFIED_PADDED}"] == ">= 1.1"
    assert targets["put + get, maskpack / put + get, floor"] == "<= 1.2"
    assert targets["8 ranks, maskpack / put + get, floor"] == "<= 2"
    ElementTree.parse(file)


@pytest.mark.parametrize("workload", ["tau", "mooncake"])
def test_a_real_workload_is_dispatched_in_every_form_without_targets(tmp_path, sender, measured, monkeypatch, workload):
    monkeypatch.setattr(dispatch, "local_ray", lambda batch: nullcontext())
    monkeypatch.setattr(dispatch, "keep_memory", lambda: None)
    file = tmp_path / "chart.svg"
    rows = measured(
        "dispatch",
        lambda rows, rounds, **more: dispatch.run(rows, rounds, scale=0.01, speeds=(), **more),
        *("--workload", workload, "--plot", str(file)),
    )
    assert {case for case, _ in rows} == {f"dispatch {workload}", f"dispatch model, {workload}"}
    assert not any(row["target"] for row in rows.values())
    for form in FORMS:
        assert (f"dispatch {workload}", f"end to end, {form}") in rows
    assert f"5 rows of the {workload} workload" in file.read_text()


# -------------------------------------------------------------------- model and chart

MODEL = dispatch_model.Model(
    {ZERO_COPY: 40.0, JAGGED: 140.0, VERIFIED: 50.0, TRUSTED: 30.0},
    {ZERO_COPY: 281_000_000, JAGGED: 21_000_000, VERIFIED: 6_000_000, TRUSTED: 6_000_000},
)
PHASES = {name: {"end to end": 100.0, "get": 1.0} for name in link.FORMS}
CROSSINGS = [link.Crossing(10, 9.5, PHASES), link.Crossing(None, 20.0, PHASES)]


def test_the_model_adds_the_bytes_at_the_speed_of_the_link():
    assert MODEL.at(ZERO_COPY, 10) == pytest.approx(40 + 224.8)  # 281 MB at 1.25 GB/s
    speed = MODEL.break_even(VERIFIED)
    assert speed == pytest.approx(220)
    assert MODEL.at(VERIFIED, speed) == pytest.approx(MODEL.at(ZERO_COPY, speed))
    assert MODEL.break_even(TRUSTED) is None
    rows = {row.name: row.value for row in dispatch_model.report(MODEL, CROSSINGS)}
    assert f"break-even of {VERIFIED} with {ZERO_COPY}" in rows
    name = f"link, 10 Gbit/s: {VERIFIED}, measured / model at its TCP speed"
    assert rows[name] == pytest.approx(100 / MODEL.at(VERIFIED, 9.5))


# -------------------------------------------------------------------- the link


def test_the_link_has_its_target():
    targets = {row.name: row.target for row in link.report(CROSSINGS) if row.target}
    assert targets == {f"10 Gbit/s: {ZERO_COPY} / {VERIFIED}": ">= 12"}


@pytest.mark.parametrize("reason", ["root", "tc", "Operation not permitted"])
def test_without_what_it_needs_the_link_says_so(monkeypatch, capsys, reason):
    def refused(*command):
        raise subprocess.CalledProcessError(1, command, stderr="mount --make-shared: Operation not permitted\n")

    monkeypatch.setattr(os, "geteuid", lambda: 1000 if reason == "root" else 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == reason else tool)
    monkeypatch.setattr(link, "_run", refused)
    assert link.measure("reference", ROWS, 1, link.SPEEDS, scale=SCALE) == []
    shown = capsys.readouterr().err
    assert "link: skipped" in shown
    assert reason in shown


@has_namespaces
def test_a_batch_crosses_a_link_and_nothing_is_left():
    before = _namespaces()
    (crossing,) = link.measure("tau", ROWS, 1, [10], scale=SCALE)
    assert list(crossing.ms) == list(link.FORMS)
    assert 0 < crossing.tcp < 11
    assert _namespaces() == before
    assert not _processes("bench.dispatch_far")


def _namespaces() -> list[str]:
    return sorted(os.listdir("/run/netns")) if os.path.isdir("/run/netns") else []


def _processes(text: str) -> list[str]:
    """Of all processes, the command lines that begin with a program and then `text`."""
    lines = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                continue
            if line.startswith(text) or f" -m {text}" in line:
                lines.append(line)
    return lines
