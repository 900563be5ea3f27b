"""`python -m bench CASE [--rows N] [--rounds K] [--json FILE]`: a table on stdout, progress on stderr.

`--workload reference|tau|mooncake` is for payload, dispatch, plan and replay: the batch, or lengths, that they run on.
`python -m bench all --report FILE.md` measures all that runs on this machine and writes one page of it, a chart and the
figures beside it; with `--recorded FOLDER` it measures nothing and shows the figures there.
`python -m bench dispatch --plot FILE` draws a chart too, so does `plan`; `ops --only GROUP,GROUP` measures in part, so
does `replay`.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from bench.measure import keep_memory
from bench.page import recorded, write_page
from bench.report import Row, commit, table, write_json
from bench.workloads import MOST_ROWS, WORKLOADS


def _case(module: str) -> Callable[..., list[Row]]:
    """The `run` of a module of this package, which is imported when it runs: dispatch needs Ray, ops does not."""
    return lambda *given, **more: importlib.import_module(f"bench.{module}").run(*given, **more)


CASES = {
    "payload": _case("payload"),
    "nest": _case("nest"),
    "dispatch": _case("dispatch"),
    "ops": _case("ops"),
    "plan": _case("plan"),
    "replay": _case("replay"),
    "prefixes": _case("prefixes"),
    "routes": _case("routes"),
    "ranks": _case("ranks"),
    "trl": _case("trl_grpo"),
    "verl": _case("verl"),
    "verl-engine": _case("verl_engine"),
    "dataplane": _case("dataplane"),
    "endurance": lambda rows, rounds: _case("endurance")(1000 * rounds),
}
AS_IT_COMES = {"dispatch", "dataplane", "endurance"}
"""Cases whose memory is what trainers have: glibc is not told to keep what is freed."""
ON_THE_CPU, ON_A_GPU = ("payload", "nest", "dispatch", "plan"), ("ops", "replay", "prefixes", "routes")
CHARTS = ("dispatch", "plan")
ON_WORKLOADS = ("payload", "dispatch", "plan", "replay")
_WITHOUT_A_NAME = [("reference", case) for case in ON_THE_CPU]  # they run on it anyway
GROUPED = ("payload", "ops", "replay", "prefixes", "ranks", "trl")
_HELP = """payload: bytes on the wire; nest: time to nest and restore; dispatch: time to a Ray actor, and over a link;
ops: kernels on a GPU, ten times in a round; plan: micro-batches and ranks of 8,192 and 65,536 lengths, and those of the
batch; replay: log-probs by models on a GPU, a round for three, and with --workload by a tiny one on the CPU; prefixes:
the same, prompts of groups computed once; routes: the same by a mixture of experts, with the experts of the batch;
ranks: work that two GPUs share, a round for three; trl: a step of TRL's GRPOTrainer without generation, a round for
three; verl: arguments of a worker call;
verl-engine: log-probs and gradients by its FSDP2 engine; dataplane: bytes and times of TransferQueue, with its own
storage and with ours; endurance: memory over 1000 dispatches a round; all: what runs on this machine, as a page"""
_PLOT_HELP = "also draw a chart there, as SVG; dispatch: times against the link; plan: tokens of each micro-batch"
_WORKLOAD_HELP = f"{', '.join(ON_WORKLOADS)}: what they run on; default: reference, and for replay models on a GPU"
_ONLY = (
    "payload: variants of the batch; ops: layout,pack,unpack,wide,decode,peer,logprobs; replay, prefixes: small,large; "
    "replay: hybrid,images; prefixes: agent; ranks: context,heads; trl: tiny,small"
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Benchmarks of maskpack.")
    parser.add_argument("case", choices=[*CASES, "all"], help=_HELP)
    parser.add_argument("--workload", choices=WORKLOADS, help=_WORKLOAD_HELP)
    parser.add_argument("--rows", type=_positive, help="rows of the batch (default 256; of tau, the 200 that it has)")
    parser.add_argument("--rounds", type=_positive, default=9, help="timed rounds, medians are shown (default 9)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help=_PLOT_HELP)
    parser.add_argument("--only", type=_names, metavar="GROUPS", help=_ONLY)
    parser.add_argument("--report", type=Path, metavar="FILE.md", help="all: the page to write")
    parser.add_argument("--recorded", type=Path, metavar="FOLDER", help="all: show the figures there instead")
    given = parser.parse_args(arguments)
    if (given.case == "all") != (given.report is not None) or (given.recorded and given.case != "all"):
        parser.error("all needs --report, and no other case takes --report or --recorded")
    if given.case == "all":
        _all(given)
        return
    if given.plot is not None and given.case not in CHARTS:
        parser.error(f"--plot is for {' and '.join(CHARTS)}; {given.case} has no chart")
    if given.only is not None and given.case not in GROUPED:
        parser.error(f"--only is for {' and '.join(GROUPED)}; {given.case} has no groups")
    if given.workload is not None and given.case not in ON_WORKLOADS:
        parser.error(f"--workload is for {', '.join(ON_WORKLOADS)}; {given.case} has no other")
    if given.workload is not None and given.only is not None:
        parser.error("--only is for the case without --workload")
    if given.json is not None:
        commit()  # without one, fail before the measurement
    if given.case not in AS_IT_COMES:
        keep_memory()
    options = ("plot", "only", "workload")
    more = {name: getattr(given, name) for name in options if getattr(given, name) is not None}
    rows = CASES[given.case](given.rows or WORKLOADS[given.workload or "reference"], given.rounds, **more)
    print(table(rows))
    if given.json is not None:
        write_json(rows, given.json)


def _all(given: argparse.Namespace) -> None:
    """Each case in a process of its own: what one leaves behind would be in the figures of the next."""
    if given.recorded is None:
        commit()
        given.report.parent.mkdir(parents=True, exist_ok=True)
        plain = (*ON_THE_CPU, *(ON_A_GPU if torch.cuda.is_available() else ()))
        more = [(case, name) for name in WORKLOADS for case in ON_WORKLOADS if (name, case) not in _WITHOUT_A_NAME]
        for case, workload in [*((case, None) for case in plain), *more]:
            rows = min(given.rows or WORKLOADS[workload or "reference"], MOST_ROWS.get(workload, sys.maxsize))
            sizes = ["--rows", str(rows), "--rounds", str(given.rounds)]
            named = [] if workload is None else ["--workload", workload]
            file = given.report.with_name("-".join([case, *named[1:]]) + ".json")
            subprocess.run([sys.executable, "-m", "bench", case, *sizes, *named, "--json", str(file)], check=True)
    write_page(recorded(given.recorded or given.report.parent), given.report)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def _names(text: str) -> list[str]:
    return text.split(",")


if __name__ == "__main__":
    main()
