"""What a type checker sees of the public surface from outside: pyright reads this file in strict mode, nothing runs it.

An `assert_type` that is wrong, or a name whose type is unknown, is an error there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from typing_extensions import assert_type

import maskpack as mp
from maskpack import ops
from maskpack.dispatch import WorkerGroup
from maskpack.views import BatchView


def wire(batch: TensorDict, path: Path) -> None:
    packed = mp.compress(batch, pad_token_id=0, strict_mask_nesting=True)
    assert_type(packed, mp.PackedBatch)
    assert_type(packed[2:5], mp.PackedBatch)
    assert_type(packed.take([0, 3]), mp.PackedBatch)
    assert_type(mp.PackedBatch.cat([packed, packed]), mp.PackedBatch)
    assert_type(len(packed), int)
    packed.save(path)
    assert_type(mp.PackedBatch.load(path), mp.PackedBatch)
    assert_type(mp.decompress(packed), TensorDict)
    assert_type(packed.narrow("routed_experts", 12, 12), mp.PackedBatch)
    assert_type(packed.narrow(("sub", "x"), -1, 1, dim=-1), mp.PackedBatch)
    assert_type(mp.decompress(packed, "responses", format="nested", device="cpu"), TensorDict)


def nesting(batch: TensorDict) -> None:
    registry = mp.RL_FIELDS | {"score": mp.MaskNestingSpec("response", pad=0.0)}
    assert_type(registry, mp.MaskNestingRegistry)
    plain = {"score": mp.MaskNestingSpec("response", pad=0.0)}
    assert_type(mp.nest_batch_by_mask(batch, plain, verify=False), TensorDict)
    pairs = {"score": ("response_mask", 0.0), "kl": (None, 0)}
    assert_type(mp.nest_batch_by_mask(batch, pairs), TensorDict)
    assert_type(mp.RL_FIELDS | pairs, mp.MaskNestingRegistry)
    nested = mp.nest_batch_by_mask(batch, registry, pad_token_id=0, strict_mask_nesting=True)
    assert_type(nested, TensorDict)
    assert_type(mp.unnest_batch_by_mask(nested), TensorDict)
    assert_type(mp.select_and_pad_to_response(nested, "score"), TensorDict)
    assert_type(mp.extract_response(nested, torch.zeros(3, 8)), Tensor)


def layouts(mask: Tensor) -> None:
    layout = mp.RowLayout.from_mask(mask)
    assert_type(layout, mp.RowLayout)
    assert_type(layout.cu_seqlens, Tensor)
    assert_type(layout.num_tokens, int)
    values: Tensor = ops.pack(mask, layout)
    padded: Tensor = ops.unpack(values, layout, 0)
    print(padded)


def plans(lengths: Sequence[int]) -> None:
    plan = mp.planning.plan_micro_batches(lengths, token_budget=4096, options=mp.planning.PlanOptions(num_updates=2))
    assert_type(plan, mp.planning.MicroBatchPlan)
    for rows in plan.micro_batches:
        print([row + 1 for row in rows])


def replay(model: mp.replay.ReplayModel, batch: TensorDict, entropy: bool) -> None:
    assert_type(mp.replay.response_log_probs(model, batch), Tensor)
    assert_type(mp.replay.response_log_probs(model, batch, temperature=0.7, entropy=False), Tensor)
    assert_type(mp.replay.response_log_probs(model, batch, entropy=True, self_check=False), tuple[Tensor, Tensor])
    assert_type(mp.replay.response_log_probs(model, batch, entropy=entropy), Tensor | tuple[Tensor, Tensor])
    assert_type(mp.replay.response_values(model, batch, lambda hidden: hidden[:, 0]), Tensor)
    outputs = mp.replay.response_outputs(model, batch, entropy=True, heads={"value": lambda hidden: hidden[:, 0]})
    assert_type(outputs.log_probs, Tensor | None)
    assert_type(outputs.heads["value"], Tensor)
    assert_type(mp.replay.compare(batch["a"], batch["b"], batch["mask"]).metrics(), dict[str, float])


def calls(group: WorkerGroup, batch: TensorDict) -> None:
    """Any stands for what else a method may return: None, a list, or a tuple."""
    assert_type(group.call("log_probs", batch), TensorDict | Any)
    assert_type(group.call("log_probs", batch, 0.7, format="nested", timeout=60.0), TensorDict | Any)
    assert_type(group.call("log_probs", batch, format="view"), BatchView | Any)
    log_probs, metrics = group.call("log_probs", batch, balance="tokens")
    print(log_probs, metrics)


def errors() -> None:
    try:
        mp.PackedBatch.from_bytes(b"")
    except mp.errors.WireFormatError as error:
        print(str(error))
