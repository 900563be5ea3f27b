"""The figures of a recorded run say what its record says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.harness.curves import write_figures

NAMES = {"svg": "http://www.w3.org/2000/svg"}
UPDATES = {"padded": [1.0, 3.0, 2.0], "packed": [0.5, 0.75, 0.25]}
OLD = {"padded": [0.25, 0.25, 0.5], "packed": [1.0, 0.25, 0.25]}


@pytest.fixture
def drawn(tmp_path: Path) -> dict[str, ElementTree.Element]:
    def curve(name: str) -> dict[str, object]:
        both = zip(UPDATES[name], OLD[name], strict=True)
        return {
            "seconds": [{"sample": 9, "send": 0.5, "old": old, "update": one, "weights": 0.25} for one, old in both]
        }

    run = {
        "complete": True,
        "free": {"padded": {"rewards": [0.0] * 50 + [1.0] * 50}, "packed": {"rewards": [0.25] * 25 + [0.75] * 25}},
        "replay": {name: curve(name) for name in UPDATES},
    }
    file = tmp_path / "run.json"
    file.write_text(json.dumps(run))
    write_figures(file, tmp_path)
    return {name: ElementTree.parse(tmp_path / f"grpo-{name}.svg").getroot() for name in ("rewards", "time")}


def test_a_run_that_was_stopped_is_not_drawn(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"complete": false}')
    with pytest.raises(ValueError, match="of a run that was stopped"):
        write_figures(tmp_path / "run.json", tmp_path)


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


def test_bars_are_the_medians(drawn: dict[str, ElementTree.Element]) -> None:
    bars = [bar for bar in drawn["time"].findall("svg:rect", NAMES) if bar.get("height") == "22"]
    assert [bar.get("class") for bar in bars] == ["send", "old", "update", "weights"] * 2
    lengths = [float(bar.get("width", "")) for bar in bars]
    for row, (old, update) in enumerate(((0.25, 2.0), (0.25, 0.5))):
        for length, seconds in zip(lengths[4 * row : 4 * row + 4], (0.5, old, update, 0.25), strict=True):
            assert length / lengths[0] == pytest.approx(seconds / 0.5, rel=0.01)
    said = " ".join(part.text or "" for part in drawn["time"].findall("svg:text", NAMES))
    assert re.findall(r"\d\.\d\d s", said) == ["3.25 s", "1.75 s"]
