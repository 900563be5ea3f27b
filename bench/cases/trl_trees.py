"""The rows of TRL's AsyncGRPOTrainer: samples are asked for, added and packed, by TRL's TreeRow and by maskpack's.

    groups     prompts and completions of equal lengths, as `n` of a request gives them
    turns      conversations that go on by a turn at a time, each turn a sample, and fork

One row takes all samples. Tensors of both are compared bit by bit before anything is timed; times are of one core.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench.harness.measure import NotExact, interleaved, torch_threads
from bench.harness.registry import case
from bench.harness.report import Row, RowGroups, ratios
from maskpack.adapters.trl.tree_row import TreeRow

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # TRL says that its module is experimental
    from trl.experimental.async_grpo.packing import TreeRow as TheirRow

TRL, OURS = "TRL", "maskpack"
_WORDS = 151_000


@dataclass(frozen=True)
class Size:
    """`prompts` of `prompt` tokens; `samples` of each, that have `completion` tokens more, or `turns` turns of them."""

    prompts: int
    samples: int
    prompt: int
    completion: int
    turns: int = 1

    def __str__(self) -> str:
        each = f"{self.turns} turns of {self.completion:,}" if self.turns > 1 else f"{self.completion:,}"
        return f"{self.prompts} prompts x {self.samples} x ({self.prompt:,} + {each})"

    def rollout(self) -> list[dict[str, Any]]:
        source = np.random.default_rng(0)
        made: list[dict[str, Any]] = []
        for group in range(self.prompts):
            prompt = source.integers(0, _WORDS, self.prompt)
            for _ in range(self.samples):
                ids = prompt
                for _ in range(self.turns):
                    ids = np.append(ids, source.integers(0, _WORDS, self.completion))
                    mask = (np.arange(ids.size) >= ids.size - self.completion).astype(np.int64)
                    log_probs = -source.random(ids.size).astype(np.float32)
                    made.append(
                        {
                            "input_ids": ids,
                            "completion_mask": mask,
                            "old_log_probs": log_probs,
                            "advantage": float(source.standard_normal()),
                            "group_id": group,
                        }
                    )
        return made


SIZES = (Size(4, 8, 2_048, 512), Size(16, 16, 2_048, 512), Size(8, 8, 1_024, 4_096), Size(4, 8, 1_024, 512, turns=6))


@case(
    "trl-trees",
    help="rows of TRL's AsyncGRPOTrainer, packed as trees",
    on="cpu",
    rows=None,
    tiny={"sizes": [Size(2, 3, 40, 12), Size(2, 2, 20, 8, turns=2)]},
)
def run(rounds: int, *, sizes: Sequence[Size] = SIZES) -> RowGroups:
    """Raises NotExact if a tensor of a row differs."""
    with torch_threads(1):
        for size in sizes:
            yield _measured(size, rounds)


def _measured(size: Size, rounds: int) -> list[Row]:
    samples = size.rollout()
    budget = sum(len(sample["input_ids"]) for sample in samples)
    kinds: Mapping[str, Any] = {TRL: TheirRow, OURS: TreeRow}

    def filled(kind: Any) -> Any:
        row = kind()
        for sample in samples:
            if not row.fits(sample, budget):
                raise NotExact(f"{size}: a sample does not fit into {budget} tokens")
            row.add(sample)
        return row

    rows = {name: filled(kind) for name, kind in kinds.items()}
    theirs, ours = (rows[name].pack() for name in (TRL, OURS))
    odd = [name for name in theirs if not torch.equal(theirs[name], ours[name])]
    if odd or theirs.keys() != ours.keys() or rows[TRL].load != rows[OURS].load:
        raise NotExact(f"{size}: {', '.join(odd) or 'fields or loads'} differ from those of TRL")
    works: dict[str, Any] = {f"fits and add, {name}": lambda kind=kind: filled(kind) for name, kind in kinds.items()}
    works |= {f"pack, {name}": row.pack for name, row in rows.items()}
    ms = interleaved(works, rounds)
    ms |= {f"all, {name}": ms[f"fits and add, {name}"] + ms[f"pack, {name}"] for name in kinds}
    name = str(size)
    return [
        Row(name, "tokens of the samples", budget, "tokens"),
        Row(name, "tokens of the row", theirs["input_ids"].numel(), "tokens"),
        *(Row(name, work, value, "ms") for work, value in ms.items()),
        *ratios(name, ms, [(f"all, {TRL}", f"all, {OURS}", None)]),
    ]
