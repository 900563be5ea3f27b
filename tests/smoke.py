"""What an installed maskpack must do with nothing but its own dependencies: run by .ci/release, not by pytest."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from tensordict import TensorDict

warnings.simplefilter("error")

import maskpack as mp  # it is silent

assert "site-packages" in mp.__file__, f"not the installed package: {mp.__file__}"
for name in mp.__all__:
    getattr(mp, name)

mask = torch.cat([torch.arange(4) >= torch.tensor([[0], [3], [1]]), torch.arange(6) < torch.tensor([[6], [1], [0]])], 1)
ids = torch.randint(1, 90, (3, 10)) * mask
batch = TensorDict(
    {
        "prompts": ids[:, :4],
        "responses": ids[:, 4:],
        "input_ids": ids,
        "attention_mask": mask.long(),
        "advantages": torch.randn(3, 6).where(mask[:, 4:], 0),
    },
    batch_size=[3],
)


def same(other: TensorDict) -> None:
    assert list(other.keys()) == list(batch.keys())
    for key, value in batch.items():
        assert torch.equal(other[key], value), key


same(mp.unnest_batch_by_mask(mp.nest_batch_by_mask(batch, pad_token_id=0, strict_mask_nesting=True)))
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "batch.maskpack"
    mp.compress(batch, pad_token_id=0, strict_mask_nesting=True).save(file)
    packed = mp.PackedBatch.load(file)
    same(mp.decompress(packed))
    assert torch.equal(mp.decompress(packed.take([2, 0]))["input_ids"], ids[[2, 0]])
    shown = subprocess.run(
        [sys.executable, "-m", "maskpack", "inspect", str(file)], check=True, capture_output=True, text=True
    ).stdout
    assert "advantages" in shown
plan = mp.planning.plan_micro_batches(mask.sum(1), token_budget=10)
assert torch.equal(plan.restore(list(plan.apply(ids))), ids)
print(f"maskpack {mp.__version__}: installed and exact")
