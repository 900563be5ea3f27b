"""Every Python block of README.md and of the pages in docs/ runs, and prints what the page says that it prints.

page -> its fences, in order -> each ```python alone, or all in one namespace -> stdout, against the ```text behind it

`PAGES` says how each page runs. A page with blocks that is neither there nor in `ELSEWHERE` fails.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from needs import needs

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
KINDS = {"python", "text", "bash", "yaml", "diff", "", "{toctree}", "{eval-rst}"}
"""Of fences. A block of code under another name would not run."""

README_PRELUDE = "from maskpack.packed.table import forget; forget()"  # encoded as in a new process
README_CHECK = """
from samples import assert_same
assert_same(mp.decompress(mp.PackedBatch.from_bytes(packed.to_bytes())), batch)
"""
DISPATCH_CHECK = """
from samples import assert_same
assert_same(again, log_probs)
assert_same(result, log_probs)
assert_same(here["advantages"], torch.zeros(4, 6))
assert [found["clip"] for found in losses] == [0.2, 0.2]
assert metrics["maskpack/dispatch/log_probs/calls"] == 1
there = samples.materialize(get=ray.get)
assert torch.equal(there["response_mask"].sum(1).float() / 8, rewards)
assert torch.equal(there["old_log_probs"], there["responses"] * -0.5)
assert torch.equal(updated.materialize(get=ray.get)["old_log_probs"], there["old_log_probs"])
"""
QUEUE_CHECK = """
from samples import PAD, assert_same, rollout
assert_same(back, batch[[4, 5, 6, 7, 0, 1, 2, 3]])
rows = rollout(objects=False)
for name in ("prompts", "responses", "input_ids"):
    rows[name] = rows[name].where(rows[name] != PAD, 0)
for count in (1, 3, len(rows)):
    assert_same(as_batch(as_bytes(rows, count)), rows)
"""
REPLAY_PRELUDE = """
import torch
from tiny_vision import IMAGE, qwen25_vl
vlm = qwen25_vl()
vlm_ids = torch.randint(1, 80, (2, 14))
vlm_ids[0, 2:6] = IMAGE  # 4 x 4 patches, of which 2 x 2 become a token
image = {"pixel_values": torch.randn(16, 24), "image_grid_thw": torch.tensor([[1, 4, 4]])}
"""
STORE_PRELUDE = f"""
import sys; sys.path.append({str(ROOT / "examples")!r})
from resume_grpo import *
folder, policy, steps = Path(), Policy(), 1
optimizer = torch.optim.Adam(policy.parameters())
"""


@dataclass(frozen=True)
class Page:
    """How a page runs.

    Attributes:
        needs: packages without which it is skipped.
        also: those of single blocks, by their number.
        script: whether its blocks build on each other; else each runs alone.
        shown: whether everything that it prints is in the page.
        before, after: code around its blocks, which the page leaves to the reader.
    """

    needs: tuple[str, ...] = ()
    also: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    script: bool = False
    shown: bool = False
    before: str = ""
    after: str = ""


PAGES = {
    "README.md": Page(script=True, before=README_PRELUDE, after=README_CHECK),
    "docs/dispatch.md": Page(needs=("ray",), script=True, after=DISPATCH_CHECK),
    "docs/fields.md": Page(),
    "docs/gpu.md": Page(script=True),
    "docs/nesting.md": Page(),
    "docs/planning.md": Page(needs=("ray",)),
    "docs/replay.md": Page(needs=("transformers",), script=True, before=REPLAY_PRELUDE),
    "docs/store.md": Page(script=True, before=STORE_PRELUDE),
    "docs/trainers.md": Page(
        also={
            0: ("verl",),
            1: ("trl",),
            2: ("transformers",),
            3: ("transformers",),
            4: ("torchrl",),
            5: ("skyrl",),
            6: ("openrlhf",),
            7: ("transfer_queue", "omegaconf"),
            9: ("ray",),
        }
    ),
    "docs/tour.md": Page(needs=("ray", "transformers"), script=True, shown=True),
    "docs/transferqueue.md": Page(
        needs=("transfer_queue",), script=True, before="import ray; ray.shutdown()", after=QUEUE_CHECK
    ),
    "docs/trl.md": Page(needs=("trl", "accelerate", "datasets")),
}
ELSEWHERE = {
    "docs/format.md": "tools/fuzz_wire.py",
    "docs/verl.md": "adapters/test_verl.py",
}
"""Pages that other files run, which look at more than that they run."""


def pages() -> dict[str, str]:
    """The text of every page, by its place."""
    files = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
    return {file.relative_to(ROOT).as_posix(): file.read_text() for file in files}


def blocks(text: str) -> Iterator[tuple[str, str | None]]:
    """Python blocks in order, each with the output that stands behind it."""
    fences = FENCE.findall(text)
    for place, (kind, code) in enumerate(fences):
        if kind == "python":
            following = fences[place + 1] if place + 1 < len(fences) else ("", "")
            yield code, following[1] if following[0] == "text" else None


def printed(code: str, name: str, names: dict[str, Any]) -> str:
    """What a block prints; a slow node may print a warning of its own through the driver."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, name, "exec"), names)
    return "".join(line for line in out.getvalue().splitlines(keepends=True) if "(raylet)" not in line)


def run(name: str, text: str, page: Page, only: int | None = None) -> None:
    """All blocks of a page, or one."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(page.before, names)
    for number, (code, shown) in enumerate(blocks(text)):
        if only in (None, number):
            seen = printed(code, name, names if page.script else {"__name__": "__main__"})
            if page.shown or shown is not None:
                assert seen == (shown or ""), f"{name} prints something else than it shows:\n{seen}"
    exec(page.after, names)


def runs() -> list[Any]:
    """A script as a whole, and of other pages each block."""
    found: list[Any] = []
    for name, page in PAGES.items():
        numbers = [None] if page.script else range(len(list(blocks((ROOT / name).read_text()))))
        found += [pytest.param(name, number, id=name if number is None else f"{name}-{number}") for number in numbers]
    return found


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    """Pages show how to configure loggers."""
    loggers = [logging.getLogger(), logging.getLogger("maskpack")]
    before = [(logger.level, list(logger.handlers)) for logger in loggers]
    yield
    for logger, (level, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers[:] = handlers


@pytest.mark.usefixtures("logging_as_before")
@pytest.mark.parametrize(("name", "number"), runs())
def test_blocks_run(
    name: str, number: int | None, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = PAGES[name]
    packages = (*page.needs, *page.also.get(-1 if number is None else number, ()))
    for package in packages:
        needs(package)
    if "ray" in packages:
        request.getfixturevalue("local_ray")
    monkeypatch.chdir(tmp_path)  # pages save files
    run(name, pages()[name], page, number)


# -------------------------------------------------------------------- nothing is left out


def test_every_page_with_blocks_is_listed() -> None:
    assert {name for name, text in pages().items() if BLOCK.search(text)} == {*PAGES, *ELSEWHERE}
    assert not PAGES.keys() & ELSEWHERE.keys()


@pytest.mark.parametrize(("name", "file"), ELSEWHERE.items())
def test_other_files_run_the_other_pages(name: str, file: str) -> None:
    assert f'"{Path(name).name}"' in (ROOT / "tests" / file).read_text()


@pytest.mark.parametrize("name", pages())
def test_every_fence_is_of_a_kind_that_is_looked_at(name: str) -> None:
    text = pages()[name]
    fences = FENCE.findall(text)
    assert {kind for kind, _ in fences} <= KINDS
    assert text.count("```") == 2 * len(fences)
    assert len(BLOCK.findall(text)) == len(list(blocks(text)))


@pytest.mark.parametrize("name", sorted(pages().keys() - {"docs/figures.md", "docs/models.md"}))
def test_no_page_has_more_than_3000_words(name: str) -> None:
    assert len(pages()[name].split()) <= (4300 if name == "docs/format.md" else 3000)


WIDEST = 88
"""Columns of code, which a page shows without scrolling."""


@pytest.mark.parametrize("name", sorted(pages().keys() - {"docs/adopt.md"}))  # whose code is of examples/
def test_code_is_as_wide_as_a_page(name: str) -> None:
    lines = [line for code, _ in blocks(pages()[name]) for line in code.splitlines()]
    assert [line for line in lines if len(line) > WIDEST] == []


# -------------------------------------------------------------------- the picture of a batch


def test_the_picture_is_what_its_program_draws() -> None:
    spec = importlib.util.spec_from_file_location("draw_batch", DOCS / "draw_batch.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (DOCS / "batch.svg").read_text() == module.draw()


# -------------------------------------------------------------------- what would be seen


def test_a_page_that_says_what_is_not_so_would_be_seen() -> None:
    page = "```python\nprint(6 * 7)\n```\n\n```text\n41\n```\n"
    with pytest.raises(AssertionError, match="prints something else than it shows"):
        run("page", page, Page())
    run("page", page.replace("41", "42"), Page())


def test_an_output_that_is_not_shown_would_be_seen() -> None:
    page = "```python\nprint(6 * 7)\n```\n"
    with pytest.raises(AssertionError, match="prints something else than it shows"):
        run("page", page, Page(shown=True))


def test_blocks_of_a_script_share_their_names() -> None:
    page = "```python\nx = 1\n```\n\n```python\nassert x == 1\n```\n"
    run("page", page, Page(script=True))
    with pytest.raises(NameError):
        run("page", page, Page())


def missing_files(text: str) -> set[str]:
    """Files that a page names, from the root of the repository, and that are not there."""
    return {
        name for name in re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|c|json|md|txt))`", text) if not (ROOT / name).is_file()
    }


@pytest.mark.parametrize("name", ["docs/house.md", "docs/decisions.md", "CONTRIBUTING.md"])
def test_files_that_are_named_are_there(name: str) -> None:
    assert missing_files((ROOT / name).read_text()) == set()


def test_a_missing_file_would_be_seen() -> None:
    assert missing_files("`maskpack/errors.py`, `maskpack/error.py`") == {"maskpack/error.py"}
