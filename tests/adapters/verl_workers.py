"""Workers for test_verl.py, with every method twice: as verl sends its batches, and packed. Ray imports this module."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from frozen import freeze
from tensordict import TensorDict
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu

from maskpack.adapters.verl import MaskNestingConfig, mask_nesting_dispatch, packed_endpoint

OFF = MaskNestingConfig()


def digest(value):
    """Everything that a worker can see of a value; key order aside."""
    parts = (value.batch, value.non_tensor_batch, value.meta_info) if isinstance(value, DataProto) else (value,)
    return hashlib.sha256(repr([freeze(part) for part in parts]).encode()).hexdigest()


def seen(self, data):
    """One digest a row of what this rank was given."""
    rows = len(data)
    if isinstance(data, TensorDict) and hasattr(tu, "maybe_fix_3d_position_ids"):  # not in verl 0.7.0
        tu.maybe_fix_3d_position_ids(data)  # as verl's workers do: its wire loses which dim is ragged
    if isinstance(data, DataProto):
        return DataProto(non_tensor_batch={"digest": np.array([digest(data)] * rows, dtype=object)})
    return tu.get_tensordict({"digest": [digest(data)] * rows, "rank": torch.full((rows,), self.rank)})


def score(self, data):
    """A DataProto of [B, R] fields on the response axis, with rows of their own and metrics."""
    mask = data.batch["response_mask"]
    log_probs = (data.batch["responses"].float().sin() - 1) * mask
    advantages = (data.batch["old_log_probs"].sum(1, keepdim=True) * mask).float()
    return DataProto(
        batch=TensorDict({"log_probs": log_probs, "advantages": advantages}, batch_size=[len(data)]),
        non_tensor_batch={"again": data.non_tensor_batch["uid"]},
        meta_info={"metrics": [{"loss": float(log_probs.sum())}], "temperature": data.meta_info["temperature"]},
    )


def infer(self, data):
    """As verl's engines: jagged outputs over the whole sequence, and metrics."""
    ids = data["input_ids"]
    log_probs = torch.nested.nested_tensor_from_jagged(ids.values().float().cos(), ids.offsets())
    data["input_ids"].values().zero_()  # a worker may write to what it was given
    return tu.get_tensordict({"log_probs": log_probs}, {"metrics": {"tokens": ids.values().numel()}})


def update(self, data):
    """As verl's train_mini_batch: metrics from those who speak, nothing from the others."""
    if not self.query_collect_info("actor"):
        return None
    return tu.get_tensordict({}, {"metrics": {"loss": float(data["old_log_probs"].double().sum())}})


async def later(self, data):
    return score(self, data)


def pair(method, **options):
    """The method under verl's own dispatch mode and under ours."""
    plain = register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"), **options)(method)
    packed = register(dispatch_mode=mask_nesting_dispatch("actor"), **options)(packed_endpoint(method))
    return plain, packed


class Trainer(Worker):
    """Tensor-parallel peers for each data-parallel rank; the last of them speaks."""

    def __init__(self, peers=2):
        super().__init__()
        self._register_dispatch_collect_info(
            "actor", dp_rank=self.rank // peers, is_collect=self.rank % peers == peers - 1
        )

    plain_seen, packed_seen = pair(seen)
    plain_score, packed_score = pair(score)
    plain_infer, packed_infer = pair(infer)
    plain_update, packed_update = pair(update)
    plain_score_later, packed_score_later = pair(score, blocking=False)
    plain_infer_later, packed_infer_later = pair(infer, blocking=False)
    off_score = register(dispatch_mode=mask_nesting_dispatch("actor", OFF))(packed_endpoint(score))

    plain_all_seen = register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)(seen)
    packed_all_seen = register(dispatch_mode=mask_nesting_dispatch())(packed_endpoint(seen))

    bare_score = register(dispatch_mode=mask_nesting_dispatch("actor"))(score)

    @register(dispatch_mode=mask_nesting_dispatch("actor"))
    @packed_endpoint(format="nested")
    def nested_kinds(self, data):
        kinds = [f"{name}:{value.is_nested}" for name, value in data.batch.items() if isinstance(value, torch.Tensor)]
        return DataProto(non_tensor_batch={"kinds": np.array([" ".join(kinds)] * len(data), dtype=object)})

    @register(dispatch_mode=mask_nesting_dispatch("actor"), blocking=False)
    @packed_endpoint
    def wrong_kind(self, data):
        return {"loss": 1.0}
