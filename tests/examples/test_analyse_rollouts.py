"""The example that looks at saved rollouts, against loops over the padded batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import warm_workers
from command_line import output_of
from needs import needs
from tensordict import NonTensorStack, TensorDict

from maskpack import compress
from maskpack.store import RolloutLog

EXAMPLES = Path(__file__).parents[2] / "examples"


def rollouts(first: int, lengths: list[int]) -> TensorDict:
    mask = (torch.arange(6) < torch.tensor(lengths)[:, None]).long()
    batch = TensorDict({"responses": mask * 5, "response_mask": mask}, [len(lengths)])
    batch["reward"] = torch.arange(first, first + len(lengths)).float() / 4
    return batch.set("uid", NonTensorStack(*[f"prompt {(first + row) % 2}" for row in range(len(lengths))]))


@pytest.mark.parametrize("kind", ["log", "file"])
def test_rewards_and_lengths_of_each_prompt(kind: str, tmp_path: Path) -> None:
    needs("pyarrow")
    parts = [rollouts(0, [1, 2, 6]), rollouts(3, [4, 0])]
    file = tmp_path / kind
    if kind == "log":
        with RolloutLog(file) as log:
            for part in parts:
                log.append(compress(part, pad_token_id=0))
    else:
        compress(torch.cat(parts), pad_token_id=0).save(file)
    program = EXAMPLES / "analyse_rollouts.py"
    shown = output_of(*warm_workers.python(), program, file, "--parquet", tmp_path / "rows")
    lines = [line.split() for line in shown.splitlines()[1:]]
    assert lines == [
        ["prompt", "0", "3", "0.500", "2.3", "6"],  # rewards 0, 1/2, 1; tokens 1, 6, 0
        ["prompt", "1", "2", "0.500", "3.0", "4"],  # rewards 1/4, 3/4; tokens 2, 4
    ]
    import pyarrow.parquet

    saved = pyarrow.parquet.read_table(tmp_path / "rows")
    assert saved["responses"].to_pylist() == [[5] * length for length in (1, 2, 6, 4, 0)]
    assert saved["uid"].to_pylist() == ["prompt 0", "prompt 1", "prompt 0", "prompt 1", "prompt 0"]
