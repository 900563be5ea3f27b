"""Two figures of a run of examples/grpo_gpus.py: rewards by step, each arm on what it samples, and the time of a step
by part, all arms on the same rows; sampling is left out, which all do alike.

    {free: {arm: {rewards, ...}}, replay: {arm: {seconds: [{part: s}], ...}}}  ->  grpo-rewards.svg, grpo-time.svg
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness.figure import svg, text

Run = Mapping[str, Any]
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
_SAID = {"send": "send", "old": "old log-probs", "update": "update", "weights": "weights"}
_GROUND = {"ink": ("#1f2328", "#d5d9de"), "paper": ("#ffffff", "#14181d"), "rule": ("#e6e8eb", "#2b313a")}
_WIDE, _LEFT, _RIGHT, _TOP, _HIGH = 560, 56, 20, 56, 180
_MEANS = 40
"""Means of so many parts of the steps are drawn."""


def write_figures(file: Path, folder: Path) -> None:
    """The figures of a recorded run, into a folder. Raises ValueError for one that did not come to its end."""
    run = json.loads(file.read_text())
    if not run["complete"]:
        raise ValueError(f"{file} is of a run that was stopped; expected a whole one.")
    (folder / "grpo-rewards.svg").write_text(rewards(run))
    (folder / "grpo-time.svg").write_text(times(run))


def rewards(run: Run) -> str:
    """A line for each arm."""
    curves = {name: _means(curve["rewards"]) for name, curve in run["free"].items()}
    steps = max(len(curve["rewards"]) for curve in run["free"].values())
    shares = {name: len(curve["rewards"]) / steps for name, curve in run["free"].items()}
    colours = _GROUND | {name: _ARMS[name] for name in curves}
    wide = _WIDE - _LEFT - _RIGHT

    def parts() -> Iterator[str]:
        yield text(_LEFT, 24, "Mean reward by step, each arm on its own samples", 'font-size="15" font-weight="bold"')
        yield from _legend([(name, name) for name in curves])
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


def times(run: Run) -> str:
    """A bar for each arm, of the medians of its parts, with the median of the steps."""
    medians = {
        name: {part: statistics.median(one[part] for one in curve["seconds"]) for part in _PARTS}
        for name, curve in run["replay"].items()
    }
    whole = {
        name: statistics.median(sum(one[part] for part in _PARTS) for one in curve["seconds"])
        for name, curve in run["replay"].items()
    }
    most = max(sum(parts.values()) for parts in medians.values())
    wide, bar = _WIDE - _LEFT - _RIGHT - 70, 34

    def parts() -> Iterator[str]:
        yield text(
            _LEFT, 24, "Seconds of a step without sampling, all on the same rows", 'font-size="15" font-weight="bold"'
        )
        yield from _legend([(part, _SAID[part]) for part in _PARTS])
        for place, (name, own) in enumerate(medians.items()):
            x, y = float(_LEFT), _TOP + place * bar
            yield text(_LEFT - 8, y + 16, name, 'text-anchor="end"')
            for part, seconds in own.items():
                length = wide * seconds / most
                yield f'<rect x="{x:.1f}" y="{y}" width="{length:.1f}" height="22" class="{part}"/>'
                x += length
            yield text(x + 8, y + 16, f"{whole[name]:.2f} s")

    rules = "".join(f".grpo-time .{part}{{fill:var(--{part})}}" for part in _PARTS)
    return svg("grpo-time", _WIDE, _TOP + bar * len(medians), "Time by part", _GROUND | _PARTS, rules, parts())


def _means(values: Sequence[float]) -> list[float]:
    """Of up to _MEANS parts of the values, as equal as they can be."""
    count = min(_MEANS, len(values))
    bounds = [len(values) * part // count for part in range(count + 1)]
    return [statistics.fmean(values[begin:end]) for begin, end in itertools.pairwise(bounds)]


def _legend(names: Sequence[tuple[str, str]]) -> Iterator[str]:
    x = float(_LEFT)
    for name, said in names:
        yield f'<rect x="{x:.1f}" y="34" width="10" height="10" class="{name}"/>'
        yield text(x + 15, 43, said)
        x += 32 + 7 * len(said)
