"""What is said of planted faults is looked at: anchors, tests that are gone, faults that nobody catches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plant
import pytest


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tests/core").mkdir(parents=True)
    (tmp_path / "tests/core/test_one.py").write_text("def test_a(): pass\n\n\ndef test_b(): pass\n")
    (tmp_path / "code.py").write_text("x = 1\ny = 2\n")
    return tmp_path


def fault(**changed: Any) -> dict[str, Any]:
    found = {"core/test_one.py": ["test_a", "test_b"]}
    return {"id": "core-01", "file": "code.py", "old": "x = 1", "wrong": "x is 2", "caught": found, **changed}


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({}, []),
        ({"old": "z"}, ["core-01: code.py has its anchor 0 times"]),
        ({"old": "="}, ["core-01: code.py has its anchor 2 times"]),
        ({"file": "gone.py"}, ["core-01: gone.py has its anchor 0 times"]),
        ({"caught": {"core/test_one.py": ["test_c"]}}, ["core-01: no test core/test_one.py::test_c"]),
        ({"caught": {"gone.py": ["test_a"]}}, ["core-01: no test gone.py::test_a"]),
        ({"caught": {}}, ["core-01: no test catches it: x is 2"]),
    ],
)
def test_what_is_wrong_is_named(changed: dict[str, Any], wrong: list[str], tree: Path) -> None:
    assert plant.check([fault(**changed)], tree) == wrong


def test_a_fault_whose_last_test_goes_is_wrong(tree: Path) -> None:
    faults = [fault()]
    for left in ("test_b", ""):
        (tree / "tests/core/test_one.py").write_text(f"def {left}(): pass\n" if left else "")
        assert plant.check(faults, tree) != []
        plant.forget(faults, plant.tests_of(tree))
        assert (plant.check(faults, tree) == []) == bool(left)


def test_the_last_result_is_noted() -> None:
    faults = [fault(caught={})]
    for tier, caught in ((1, {}), (2, {"core/test_one.py": ["test_a"]}), (1, {})):
        plant.note(faults, [{"id": "core-01", "tier": tier, "caught": caught}])
    assert (faults[0]["caught"], faults[0]["tier"]) == ({"core/test_one.py": ["test_a"]}, 2)
    plant.note(faults, [{"id": "core-01", "tier": 1, "caught": {"core/test_one.py": ["test_b"]}}])
    assert faults[0]["caught"] == {"core/test_one.py": ["test_b"]}
    assert "tier" not in faults[0]


def test_a_plan_of_cases_has_the_first_and_the_last() -> None:
    assert plant.spread([*range(9)], 4) == [0, 2, 5, 8]
    assert plant.spread([*range(3)], 4) == [0, 1, 2]
    assert plant.spread([*range(3)], 1) == [0]


@pytest.mark.parametrize("status", [3, 4])
def test_a_run_without_tests_catches_nothing(status: int, tmp_path: Path) -> None:
    run = plant.Run(tmp_path, tmp_path, ["tests/gone"], None, 4)
    run.record.write_text("")
    (tmp_path / "output").write_text("no such file")
    with pytest.raises(RuntimeError, match=f"ended with {status}: no such file"):
        run.ended(status << 8)


def test_a_test_that_ends_its_process_has_caught_the_fault(tmp_path: Path) -> None:
    run = plant.Run(tmp_path, tmp_path, ["tests/core"], None, 4)
    run.record.write_text("begins a\nfails a\nends a\nbegins b\n")
    assert not run.ended(11)  # the others are still to run
    assert (run.failed, run.done) == ({"a", "b"}, {"a", "b"})
