"""The cases: `python -m bench NAME` imports the module of that name in bench.cases, which registers one function.

    @case("verl-engine", help="...", on="both", tiny={...})      in bench/cases/verl_engine.py, or a folder of that name
    def run(...) -> RowGroups

There is no other list of them.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from bench import cases
from bench.harness.report import RowGroups

Run = Callable[..., RowGroups]

_CASES: dict[str, Case] = {}


@dataclass(frozen=True)
class Case:
    """A benchmark.

    Attributes:
        run: rows, where the case has any, and rounds -> the figures, each group of them as soon as it is measured.
            Raises NotExact if what is compared differs.
        help: a line for the user.
        on: the machine that its figures are for.
        tiny: further arguments of `run` with which it ends in seconds on a CPU.
        rows: of the batch, by default; None for a case whose batches have their own.
        workloads: whether `run` has `workload`, a name of bench.workloads. Targets are those of the reference workload:
            of another one, figures have none.
        groups: values of `only`, if `run` has it.
        plots: what `run` draws into the file `plot`, if it does.
        keeps_memory: whether glibc is told to keep what is freed.
    """

    run: Run
    help: str
    on: Literal["cpu", "gpu", "both"]
    tiny: Mapping[str, Any]
    rows: int | None = 256
    workloads: bool = False
    groups: Sequence[str] = field(default=())
    plots: str = ""
    keeps_memory: bool = True


def case(name: str, **about: Any) -> Callable[[Run], Run]:
    """Registers a function under the name of its module; `about` are the attributes of Case."""

    def register(run: Run) -> Run:
        _CASES[name] = Case(run, **about)
        return run

    return register


def names() -> list[str]:
    return sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(cases.__path__))


def load(name: str) -> Case:
    """Raises ModuleNotFoundError if the case needs a package that is not installed."""
    importlib.import_module(f"bench.cases.{name.replace('-', '_')}")
    return _CASES[name]
