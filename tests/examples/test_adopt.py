"""The trainer into which a page brings maskpack: every step trains as the one before it did, and the page shows the
steps as they are."""

from __future__ import annotations

import difflib
import importlib
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from needs import needs

needs("ray")
needs("transformers")

from own_ray import own_ray

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples/adopt"
STEPS = ("plain", "step_1_dispatch", "step_2_registry", "step_3_nested", "step_4_packed")
BLOCK = re.compile(r"^```diff\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CLOSE = 1e-6  # of losses around 0.1, and of weights around 1


def changes(before: str, after: str) -> list[str]:
    """A unified diff of two steps, with a line around each change, without its header."""
    texts = [(FOLDER / f"{name}.py").read_text().splitlines() for name in (before, after)]
    return list(difflib.unified_diff(*texts, n=1, lineterm=""))[2:]


def test_the_page_shows_the_steps() -> None:
    shown = [block.splitlines() for block in BLOCK.findall((ROOT / "docs/adopt.md").read_text())]
    assert shown == [changes(*pair) for pair in itertools.pairwise(STEPS)]


def test_the_page_counts_the_lines() -> None:
    counts = re.findall(r"^\| \[\d\].*?\| (\d+) added, (\d+) removed \|", (ROOT / "docs/adopt.md").read_text(), re.M)
    for (added, removed), pair in zip(counts, itertools.pairwise(STEPS), strict=True):
        lines = changes(*pair)
        assert int(added) == sum(line.startswith("+") for line in lines)
        assert int(removed) == sum(line.startswith("-") for line in lines)


@pytest.fixture(scope="module")
def trained() -> Iterator[Any]:
    """`trained(name)` runs a step and gives its losses and weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        with own_ray(FOLDER, ROOT, num_cpus=2):
            yield lambda name: importlib.import_module(name).train(2)
        for name in STEPS:
            sys.modules.pop(name, None)


@pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")
def test_every_step_trains_as_the_one_before(trained: Any) -> None:
    losses, weights = trained("plain")
    assert len(set(losses)) == len(losses) == 2
    for name in STEPS[1:]:
        own, there = trained(name)
        if name in ("step_1_dispatch", "step_2_registry"):
            assert own == losses
            assert torch.equal(there, weights)
        else:
            assert own == pytest.approx(losses, abs=CLOSE)
            assert torch.allclose(there, weights, rtol=0, atol=CLOSE)
        assert not torch.equal(there, torch.zeros_like(there))
