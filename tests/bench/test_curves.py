"""The figures of a recorded run say what its record says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.harness.curves import write_figures

NAMES = {"svg": "http://www.w3.org/2000/svg"}
SECONDS = {"padded": [1.0, 3.0, 2.0], "packed": [0.5, 0.5, 0.75]}


@pytest.fixture
def drawn(tmp_path: Path) -> dict[str, ElementTree.Element]:
    def curve(updates: list[float]) -> dict[str, object]:
        parts = {"send": 0.5, "old": 0.25, "weights": 0.25}
        return {"seconds": [parts | {"update": update} for update in updates]}

    run = {
        "free": {"padded": {"rewards": [0.0] * 50 + [1.0] * 50}, "packed": {"rewards": [0.25, 0.75]}},
        "replay": {name: curve(updates) for name, updates in SECONDS.items()},
    }
    file = tmp_path / "run.json"
    file.write_text(json.dumps(run))
    write_figures(file, tmp_path)
    return {name: ElementTree.parse(tmp_path / f"grpo-{name}.svg").getroot() for name in ("rewards", "time")}


def test_lines_are_the_rewards(drawn: dict[str, ElementTree.Element]) -> None:
    lines = drawn["rewards"].findall("svg:polyline", NAMES)
    points = [[tuple(map(float, pair.split(","))) for pair in line.get("points", "").split()] for line in lines]
    assert [line.get("class") for line in lines] == ["line padded", "line packed"]
    assert [len(own) for own in points] == [40, 2]
    zero, one = points[0][0][1], points[0][-1][1]
    assert zero > one  # y grows downwards
    assert [y for _, y in points[0]] == [zero] * 20 + [one] * 20
    assert [y for _, y in points[1]] == [zero + (one - zero) / 4, zero + (one - zero) * 3 / 4]


def test_bars_are_the_medians(drawn: dict[str, ElementTree.Element]) -> None:
    bars = [bar for bar in drawn["time"].findall("svg:rect", NAMES) if bar.get("height") == "22"]
    assert [bar.get("class") for bar in bars] == ["send", "old", "update", "weights"] * 2
    lengths = [float(bar.get("width", "")) for bar in bars]
    for row, update in enumerate((2.0, 0.5)):
        for length, seconds in zip(lengths[4 * row : 4 * row + 4], (0.5, 0.25, update, 0.25), strict=True):
            assert length / lengths[0] == pytest.approx(seconds / 0.5, rel=0.01)
    said = " ".join(part.text or "" for part in drawn["time"].findall("svg:text", NAMES))
    assert re.findall(r"\d\.\d\d s", said) == ["3.00 s", "1.50 s"]
