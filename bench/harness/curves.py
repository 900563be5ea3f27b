"""Two figures of whole runs: rewards by step, each arm on what it samples, of a run of examples/grpo_gpus.py; and the
time of a step by part, of `bench run`, which samples nothing.

    {free: {arm: {rewards, ...}}}                                  ->  grpo-rewards.svg
    {rows: [{case, name: "PART, ARM", value: milliseconds}, ...]}  ->  grpo-time.svg
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness.figure import svg, text

Record = Mapping[str, Any]
_ARMS = {  # by arm, light and dark
    "padded": ("#93a4b8", "#6b7f96"),
    "packed": ("#1d4ed8", "#7aa5ff"),
    "exact": ("#c2410c", "#fb923c"),
}
_PARTS = {
    "send": ("#e0b100", "#b58f00"),
    "old": ("#0f766e", "#2dd4bf"),
    "update": ("#1d4ed8", "#7aa5ff"),
    "weights": ("#93a4b8", "#6b7f96"),
}
_SAID = {"send": "send", "old": "old log-probs", "update": "update", "weights": "weights back"}
_GROUND = {"ink": ("#1f2328", "#d5d9de"), "paper": ("#ffffff", "#14181d"), "rule": ("#e6e8eb", "#2b313a")}
_WIDE, _LEFT, _RIGHT, _TOP, _HIGH = 560, 56, 20, 56, 180
_MEANS = 40
"""Means of so many parts of the steps are drawn."""


def write_figures(run: Path, timed: Path, folder: Path) -> None:
    """The figures of a recorded run and of a record of `bench run`, into a folder. Raises ValueError for one that did
    not come to its end."""
    records = [json.loads(file.read_text()) for file in (run, timed)]
    for file, record in zip((run, timed), records, strict=True):
        if not record.get("complete", True):
            raise ValueError(f"{file} is of a run that was stopped; expected a whole one.")
    (folder / "grpo-rewards.svg").write_text(rewards(records[0]))
    (folder / "grpo-time.svg").write_text(times(records[1]))


def rewards(run: Record) -> str:
    """A line for each arm."""
    curves = {name: _means(curve["rewards"]) for name, curve in run["free"].items()}
    steps = max(len(curve["rewards"]) for curve in run["free"].values())
    shares = {name: len(curve["rewards"]) / steps for name, curve in run["free"].items()}
    colours = _GROUND | {name: _ARMS[name] for name in curves}
    wide = _WIDE - _LEFT - _RIGHT

    def parts() -> Iterator[str]:
        yield text(_LEFT, 24, "Mean reward by step, each arm on its own samples", 'font-size="15" font-weight="bold"')
        yield from _legend([(name, name) for name in curves], _LEFT)
        for tick in (0, 0.25, 0.5, 0.75, 1):
            y = _TOP + _HIGH * (1 - tick)
            yield f'<path d="M{_LEFT} {y:.1f}h{wide}" class="rule"/>'
            yield text(_LEFT - 8, y + 4, f"{tick:g}", 'text-anchor="end"')
        for tick in range(5):
            yield text(_LEFT + wide * tick / 4, _TOP + _HIGH + 18, f"{steps * tick // 4}", 'text-anchor="middle"')
        for name, means in curves.items():
            points = " ".join(
                f"{_LEFT + wide * shares[name] * (place + 0.5) / len(means):.1f},{_TOP + _HIGH * (1 - mean):.1f}"
                for place, mean in enumerate(means)
            )
            yield f'<polyline points="{points}" class="line {name}"/>'

    rules = ".grpo-rewards .rule{stroke:var(--rule)}.grpo-rewards .line{fill:none;stroke-width:2}" + "".join(
        f".grpo-rewards .{name}{{stroke:var(--{name})}}.grpo-rewards rect.{name}{{fill:var(--{name})}}"
        for name in curves
    )
    return svg("grpo-rewards", _WIDE, _TOP + _HIGH + 30, "Rewards by step", colours, rules, parts())


def times(record: Record) -> str:
    """A group of bars for each case, a bar for each arm, and the sum of its parts. Raises ValueError without any."""
    found: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))  # case, arm, part
    for row in record["rows"]:
        if match := re.fullmatch(rf"({'|'.join(_PARTS)}), (.*)", row["name"]):
            found[row["case"]][match[2]][match[1]] = row["value"] / 1e3
    if not found:
        raise ValueError(
            f"no row is of a part of a step; expected names such as {next(iter(_PARTS))!r}, a comma and an arm."
        )
    most = max(sum(own.values()) for arms in found.values() for own in arms.values())
    wide, left, bar = _WIDE - 2 * _RIGHT - 70, _RIGHT, 38

    def parts() -> Iterator[str]:
        yield text(left, 24, "Seconds of a step without sampling", 'font-size="15" font-weight="bold"')
        yield from _legend([(part, _SAID[part]) for part in _PARTS], left)
        y = _TOP
        for case, arms in found.items():
            yield text(left, y + 14, case, 'font-weight="bold"')
            y += 24
            for arm, own in arms.items():
                yield text(left, y + 12, arm)
                x = float(left)
                for part in _PARTS:
                    length = wide * own[part] / most
                    yield f'<rect x="{x:.1f}" y="{y + 16}" width="{length:.1f}" height="14" class="{part}"/>'
                    x += length
                yield text(x + 8, y + 27, f"{sum(own.values()):.2f} s")
                y += bar

    high = _TOP + sum(24 + bar * len(arms) for arms in found.values())
    rules = "".join(f".grpo-time .{part}{{fill:var(--{part})}}" for part in _PARTS)
    return svg("grpo-time", _WIDE, high, "Time by part", _GROUND | _PARTS, rules, parts())


def _means(values: Sequence[float]) -> list[float]:
    """Of up to _MEANS parts of the values, as equal as they can be."""
    count = min(_MEANS, len(values))
    bounds = [len(values) * part // count for part in range(count + 1)]
    return [statistics.fmean(values[begin:end]) for begin, end in itertools.pairwise(bounds)]


def _legend(names: Sequence[tuple[str, str]], left: float) -> Iterator[str]:
    x = left
    for name, said in names:
        yield f'<rect x="{x:.1f}" y="34" width="10" height="10" class="{name}"/>'
        yield text(x + 15, 43, said)
        x += 32 + 7 * len(said)
