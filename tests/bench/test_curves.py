"""The figures of a recorded run say what its record says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.harness.curves import write_figures

NAMES = {"svg": "http://www.w3.org/2000/svg"}
PARTS = ("send", "old", "update", "weights")
SECONDS = {  # by case and arm, in the order of PARTS
    "one": {"padded": (0.5, 0.25, 2.0, 0.25), "by hand, in place": (0.5, 0.25, 0.5, 0.25)},
    "two": {"padded": (1.0, 1.0, 1.0, 1.0)},
}


def write(folder: Path, run: bool = True, timed: bool = True) -> None:
    named = [  # a case records its parts in any order
        {"case": case, "name": f"{part}, {arm}", "value": own * 1e3}
        for case, arms in SECONDS.items()
        for arm, seconds in arms.items()
        for part, own in reversed([*zip(PARTS, seconds, strict=True)])
    ]
    others = [{"case": "one", "name": name, "value": 7.0} for name in ("log-probs and update, padded", "peak, padded")]
    curves = {"padded": {"rewards": [0.0] * 50 + [1.0] * 50}, "packed": {"rewards": [0.25] * 25 + [0.75] * 25}}
    (folder / "run.json").write_text(json.dumps({"complete": run, "free": curves}))
    (folder / "timed.json").write_text(json.dumps({"complete": timed, "rows": others + named}))
    write_figures(folder / "run.json", folder / "timed.json", folder)


@pytest.fixture
def drawn(tmp_path: Path) -> dict[str, ElementTree.Element]:
    write(tmp_path)
    return {name: ElementTree.parse(tmp_path / f"grpo-{name}.svg").getroot() for name in ("rewards", "time")}


@pytest.mark.parametrize("name", ["run", "timed"])
def test_a_run_that_was_stopped_is_not_drawn(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}\.json is of a run that was stopped"):
        write(tmp_path, **{name: False})
    assert not list(tmp_path.glob("*.svg"))


def test_a_record_without_parts_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"free": {"padded": {"rewards": [0.5]}}}))
    (tmp_path / "timed.json").write_text('{"rows": []}')
    with pytest.raises(ValueError, match="no row is of a part of a step; expected names such as 'send'"):
        write_figures(tmp_path / "run.json", tmp_path / "timed.json", tmp_path)


def test_lines_are_the_rewards(drawn: dict[str, ElementTree.Element]) -> None:
    lines = drawn["rewards"].findall("svg:polyline", NAMES)
    points = [[tuple(map(float, pair.split(","))) for pair in line.get("points", "").split()] for line in lines]
    assert [line.get("class") for line in lines] == ["line padded", "line packed"]
    assert [len(own) for own in points] == [40, 40]
    zero, one = points[0][0][1], points[0][-1][1]
    assert zero > one  # y grows downwards
    assert [y for _, y in points[0]] == [zero] * 20 + [one] * 20
    low, high = (zero + (one - zero) * share for share in (0.25, 0.75))
    assert [y for _, y in points[1]] == [low] * 20 + [high] * 20
    left = float(drawn["rewards"].findall("svg:path", NAMES)[0].get("d", "").split()[0][1:])
    ends = [own[-1][0] - left for own in points]
    assert ends[1] == pytest.approx(ends[0] / 2, abs=0.1)  # it has half of the steps


def test_bars_are_the_parts(drawn: dict[str, ElementTree.Element]) -> None:
    bars = [bar for bar in drawn["time"].findall("svg:rect", NAMES) if bar.get("height") == "14"]
    assert [bar.get("class") for bar in bars] == [*PARTS] * 3
    expected = [own for arms in SECONDS.values() for seconds in arms.values() for own in seconds]
    lengths = [float(bar.get("width", "")) for bar in bars]
    for length, seconds in zip(lengths, expected, strict=True):
        assert length / lengths[0] == pytest.approx(seconds / expected[0], rel=0.01)
    wide, high = (float(drawn["time"].get(size, "")) for size in ("width", "height"))
    bars_of = [bars[first : first + 4] for first in range(0, 12, 4)]
    for own in bars_of:  # one after the other, each arm in a row of its own
        begins = [float(bar.get("x", "")) for bar in own]
        ends = [begin + float(bar.get("width", "")) for begin, bar in zip(begins, own, strict=True)]
        assert begins[1:] == pytest.approx(ends[:-1], abs=0.11)
        assert ends[-1] < wide
        assert len({bar.get("y") for bar in own}) == 1
        assert float(own[0].get("y", "")) + 14 < high
    assert len({own[0].get("y") for own in bars_of}) == 3
    said = [part.text or "" for part in drawn["time"].findall("svg:text", NAMES)]
    arms = [arm for own in SECONDS.values() for arm in own]
    assert [text for text in said if text in {*SECONDS, *arms}] == [
        "one",
        "padded",
        "by hand, in place",
        "two",
        "padded",
    ]
    assert [text for text in said if re.fullmatch(r"\d\.\d\d s", text)] == ["3.00 s", "1.50 s", "4.00 s"]
