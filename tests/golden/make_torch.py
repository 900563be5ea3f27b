"""What torch.save writes of one batch with several versions of tensordict, which the doctor reads with any other.

`python tests/golden/make_torch.py` writes `tensordict-VERSION.pt` for the installed version if it is missing; maskpack
is not needed. 0.10.0 is of a time when a locked batch had no schema of its own, 0.14.3 of one when it had.
"""

from __future__ import annotations

from pathlib import Path

import tensordict
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

HERE = Path(__file__).parent


def batch() -> TensorDict:
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]])
    sub = TensorDict({"x": mask.bfloat16()}, [2])
    out = TensorDict({"input_ids": mask * 7, "attention_mask": mask.bool(), "sub": sub}, [2])
    out["names"] = NonTensorStack(*map(NonTensorData, ["a", "b"]))
    out["info"] = NonTensorData({"step": 1}, batch_size=[2])
    return out.lock_()


if __name__ == "__main__":
    path = HERE / f"tensordict-{tensordict.__version__}.pt"
    if not path.exists():
        torch.save(batch(), path)
