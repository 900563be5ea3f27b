"""Saved rollouts, looked at without a trainer: rewards and response lengths of each prompt, worst first.

    rollouts --> PackedBatch.to_arrow: a row a rollout, its tokens as a list --> pyarrow, or pandas, polars, DuckDB

    python examples/analyse_rollouts.py FILE --parquet rollouts.parquet

FILE is a `RolloutLog`, or a file or URL that `PackedBatch.save` wrote. Its fields are `responses` under a mask,
`reward` (one number a row) and `uid` (the name of the prompt, the same for all responses to it).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.compute as pc
import pyarrow.parquet

from maskpack import PackedBatch
from maskpack.store import RolloutLog

FIELDS = ("uid", "reward", "responses")


def table_of(file: str) -> Any:
    """The rollouts as a pyarrow.Table."""
    if not Path(file).is_dir():
        return PackedBatch.load(file).to_arrow(*FIELDS)
    with RolloutLog(file, mode="r") as log:
        parts = [log[rows].to_arrow(*FIELDS) for rows in log.chunks()]
    return pyarrow.concat_tables(parts)


def by_prompt(rollouts: Any) -> Any:
    """A row for each prompt: the number of its rollouts, their mean reward, and their mean and largest length."""
    tokens = pc.list_value_length(rollouts["responses"])
    return (
        rollouts.append_column("tokens", tokens)
        .group_by("uid")
        .aggregate([("reward", "count"), ("reward", "mean"), ("tokens", "mean"), ("tokens", "max")])
        .sort_by("reward_mean")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--worst", type=int, default=10, help="prompts to print")
    parser.add_argument("--parquet", help="write all rollouts to this file, too")
    given = parser.parse_args()
    rollouts = table_of(given.file)
    if given.parquet:
        pyarrow.parquet.write_table(rollouts, given.parquet)
    print(f"{'prompt':<20}{'rollouts':>10}{'reward':>10}{'tokens':>10}{'longest':>10}")
    for row in by_prompt(rollouts).slice(0, given.worst).to_pylist():
        numbers = (
            f"{row['reward_count']:>10}{row['reward_mean']:>10.3f}{row['tokens_mean']:>10.1f}{row['tokens_max']:>10}"
        )
        print(f"{row['uid']!s:<20}{numbers}")


if __name__ == "__main__":
    main()
