"""Benchmarks import one way: cases, rivals, workloads, harness. No case imports another."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ORDER = ("harness", "workloads", "rivals", "cases")
FILES = [path.relative_to(ROOT) for path in sorted((ROOT / "bench").rglob("*.py")) if path.parent.name != "bench"]


def imported(source: str) -> set[tuple[str, ...]]:
    """The modules of bench that a source imports, wherever it does, by their parts below bench."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {tuple(name.split(".")[1:]) for name in found if name.startswith("bench.")}


def forbidden(file: Path, source: str) -> list[str]:
    """`file` is bench/PACKAGE/..., and the registry may import the package of the cases, which it walks through."""
    package, *inner = file.with_suffix("").parts[1:]
    own_case = inner[0] if package == "cases" else None
    return [
        ".".join(parts)
        for parts in imported(source)
        if (ORDER.index(parts[0]) > ORDER.index(package) and file.name != "registry.py")
        or (parts[0] == package == "cases" and parts[1] != own_case)
    ]


@pytest.mark.parametrize("file", FILES, ids=str)
def test_imports_go_one_way(file: Path) -> None:
    assert not forbidden(file, (ROOT / file).read_text())


@pytest.mark.parametrize(
    ("file", "source", "wrong"),
    [
        ("harness/page.py", "def late():\n    from bench.workloads import tau", ["workloads.tau"]),
        ("workloads/tau.py", "import bench.rivals.nesting", ["rivals.nesting"]),
        ("cases/ops/peer.py", "from bench.cases.ops.batches import joined\nfrom bench.rivals import plans", []),
        ("cases/ops/peer.py", "from bench.cases import nest", ["cases.nest"]),
        ("cases/nest.py", "from bench.cases.ops import host", ["cases.ops.host"]),
    ],
)
def test_a_forbidden_import_would_be_seen(file: str, source: str, wrong: list[str]) -> None:
    assert forbidden(Path("bench", file), source) == wrong
