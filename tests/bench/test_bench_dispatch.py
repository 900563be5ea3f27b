"""The dispatch benchmark checks bits, switches Ray's flag as Ray does, models what it says, leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import ray
import torch

import maskpack
from bench import __main__ as command
from bench import dispatch, dispatch_forms, dispatch_model, dispatch_tcp, link
from bench.dispatch_forms import FORMS, JAGGED, PADDED, TRUSTED, VERIFIED, VERIFIED_PADDED, ZERO_COPY
from bench.measure import NotExact
from bench.workloads import PAD_ID, make_batch

P, R, ROWS = 37, 229, 33
SMALL = {"prompt_width": P, "response_width": R}
ROOT = Path(__file__).resolve().parents[2]

has_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, link._TOOLS)),
    reason="network namespaces need root and some tools",
)


@pytest.fixture(scope="module")
def sender():
    batch = make_batch("reference", ROWS, **SMALL)
    with dispatch_forms.local_ray(batch), closing(dispatch_forms.Sender(batch, keep=False)) as sender:
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


def test_a_form_that_says_nested_and_is_padded_is_refused(sender, monkeypatch):
    monkeypatch.setitem(FORMS, JAGGED, replace(FORMS[JAGGED], encode=lambda batch: batch))
    with pytest.raises(NotExact, match="not jagged"):
        sender.check(JAGGED, dispatch_forms.digest(sender.batch))


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


def test_phases_add_up_to_less_than_the_whole(sender):
    seconds = sender.send(VERIFIED, then_read=True)
    assert list(seconds) == ["encode", "put", "get", "restore", "read", "end to end"]
    assert 0 < sum(seconds.values()) - seconds["end to end"] < seconds["end to end"]


def test_rounds_that_warm_up_do_not_count():
    calls = iter([*[1e9] * dispatch_forms.WARM, 1.0, 3.0, 2.0])
    assert dispatch_forms.medians({"a": lambda: {"end to end": next(calls)}}, 3) == {"a": {"end to end": 2000.0}}


# -------------------------------------------------------------------- the zero-copy flag


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


def test_rays_environment_variable_sets_the_same_reducer():
    """What `set_zero_copy` does is all that the variable does in the process that sends."""
    program = (
        "import ray, torch\n"
        "from ray.cloudpickle import CloudPickler\n"
        "from bench import dispatch_forms as forms\n"
        "with forms.local_ray(forms.TensorDict({}, [])):\n"
        "    ray.put(0)  # the context is made when it is first needed\n"
        "    before = dict(CloudPickler.dispatch)\n"
        "    assert before[torch.Tensor] is forms.zero_copy_tensors_reducer\n"
        "    forms.set_zero_copy(False)\n"
        "    assert torch.Tensor not in CloudPickler.dispatch\n"
        "    forms.set_zero_copy(True)\n"
        "    assert dict(CloudPickler.dispatch) == before\n"
    )
    environment = {**os.environ, "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


# -------------------------------------------------------------------- the case


def test_the_case_runs_with_its_targets_and_draws_its_chart(tmp_path, sender, monkeypatch):
    monkeypatch.setattr(dispatch, "local_ray", _running)  # this process has a Ray already
    file = tmp_path / "chart.svg"
    rows = dispatch.run(ROWS, 1, **SMALL, speeds=(), plot=file)
    assert len({(row.case, row.name) for row in rows}) == len(rows)
    assert all(row.value >= 0 for row in rows)
    names = {row.name for row in rows}
    for form in FORMS:
        assert {f"{phase}, {form}" for phase in ("end to end", "encode", "put", "get", "restore")} <= names
    targets = {row.name: row.target for row in rows if row.target}
    assert targets[f"end to end, {PADDED} / {VERIFIED}"] == ">= 16"
    assert targets[f"end to end, {ZERO_COPY} / {TRUSTED}"] == ">= 2"
    assert targets["put + get, maskpack / put + get, floor"] == "<= 1.3"
    assert not any("read" in name or "malloc" in name for name in targets)
    ElementTree.parse(file)


class _running:
    def __init__(self, batch):
        assert ray.is_initialized()

    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass


def test_plot_is_refused_elsewhere(tmp_path, capsys):
    with pytest.raises(SystemExit):
        command.main(["nest", "--plot", str(tmp_path / "chart.svg")])
    assert "nest has no chart" in capsys.readouterr().err


# -------------------------------------------------------------------- model and chart

MODEL = dispatch_model.Model(
    {ZERO_COPY: 40.0, JAGGED: 140.0, VERIFIED: 50.0, TRUSTED: 30.0},
    {ZERO_COPY: 281_000_000, JAGGED: 21_000_000, VERIFIED: 6_000_000, TRUSTED: 6_000_000},
)
PHASES = {name: {"end to end": 100.0, "get": 1.0} for name in link.FORMS}
CROSSINGS = [link.Crossing(10, 9.5, PHASES), link.Crossing(None, 20.0, PHASES)]


def test_the_model_adds_the_bytes_at_the_speed_of_the_link():
    assert MODEL.at(ZERO_COPY, 10) == pytest.approx(40 + 224.8)  # 281 MB at 1.25 GB/s
    assert MODEL.at(VERIFIED, 1) == pytest.approx(50 + 48)


def test_at_break_even_both_take_as_long():
    speed = MODEL.break_even(VERIFIED)
    assert speed == pytest.approx(220)
    assert MODEL.at(VERIFIED, speed) == pytest.approx(MODEL.at(ZERO_COPY, speed))
    assert MODEL.break_even(TRUSTED) is None
    assert MODEL.break_even(ZERO_COPY) is None
    rows = {row.name: row.value for row in dispatch_model.report(MODEL, CROSSINGS)}
    assert [name for name in rows if "break-even" in name] == [
        f"break-even of {name} with {ZERO_COPY}" for name in (JAGGED, VERIFIED)
    ]
    name = f"link, 10 Gbit/s: {VERIFIED}, measured / model at its TCP speed"
    assert rows[name] == pytest.approx(100 / MODEL.at(VERIFIED, 9.5))


@pytest.mark.parametrize("crossings", [[], CROSSINGS])
def test_the_chart_has_a_line_a_form_a_dot_a_measurement_and_a_diamond_a_break_even(crossings):
    root = ElementTree.fromstring(dispatch_model.chart(MODEL, crossings, 256))
    svg = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{svg}polyline")) == 4
    dots = root.findall(f"{svg}circle")
    assert len(dots) == 4 * (len(crossings) + 1)  # one each for one machine
    assert len([path for path in root.findall(f"{svg}path") if path.get("class") == "mark"]) == 2
    width, height = float(root.get("width")), float(root.get("height"))
    for dot in dots:
        assert 0 < float(dot.get("cx")) < width
        assert 0 < float(dot.get("cy")) < height
    texts = [text.text for text in root.findall(f"{svg}text")]
    assert any("220 Gbit/s" in text for text in texts)
    assert f"Faster than {ZERO_COPY}, up to 400 Gbit/s: {TRUSTED}" in texts


# -------------------------------------------------------------------- the link


def test_targets_of_the_link_are_on_the_verified_form():
    rows = link.report([link.Crossing(10, 9.5, PHASES), link.Crossing(25, 20.0, PHASES), *CROSSINGS[1:]])
    targets = {row.name: row.target for row in rows if row.target}
    assert targets == {
        f"10 Gbit/s: {ZERO_COPY} / {VERIFIED}": ">= 10",
        f"25 Gbit/s: {ZERO_COPY} / {VERIFIED}": ">= 5",
    }
    assert rows[0].value == pytest.approx(9.5e9 / 8 / 1e6)


@pytest.mark.parametrize("reason", ["root", "tc", "Operation not permitted"])
def test_without_what_it_needs_the_link_says_so(monkeypatch, capsys, reason):
    def refused(*command):
        raise subprocess.CalledProcessError(1, command, stderr="mount --make-shared: Operation not permitted\n")

    monkeypatch.setattr(os, "geteuid", lambda: 1000 if reason == "root" else 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == reason else tool)
    monkeypatch.setattr(link, "_run", refused)
    assert link.measure(ROWS, 1, link.SPEEDS, **SMALL) == []
    shown = capsys.readouterr().err
    assert "link: skipped" in shown
    assert reason in shown


def test_a_stream_is_measured():
    module = [sys.executable, "-m", "bench.dispatch_tcp", "sink", "127.0.0.1"]
    with subprocess.Popen(module, cwd=ROOT, stdout=subprocess.PIPE, text=True) as sink:
        try:
            assert dispatch_tcp.source("127.0.0.1", int(sink.stdout.readline())) > 0
        finally:
            sink.kill()


@has_namespaces
def test_a_batch_crosses_a_link_and_nothing_is_left():
    before = _namespaces()
    (crossing,) = link.measure(ROWS, 1, [10], **SMALL)
    assert list(crossing.ms) == list(link.FORMS)
    assert 0 < crossing.tcp < 11
    assert _namespaces() == before
    assert not _processes("bench.dispatch_far")


@has_namespaces
def test_what_fails_inside_leaves_no_namespace_and_no_process():
    before = _namespaces()
    with pytest.raises(ValueError, match="inside"), link._namespaces() as (near, _):  # noqa: PT012
        assert near in _namespaces()
        with link._process(near, "sh", "-c", "sleep 4242 & sleep 4243"):
            while len(_processes("sleep 424")) < 2:
                pass
            raise ValueError("inside")
    assert _namespaces() == before
    assert not _processes("sleep 424")


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
