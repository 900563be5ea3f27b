"""Further arms of examples/grpo_gpus.py, as trainers have them without maskpack:

    trimmed            rows sorted by length, each micro-batch cut to its longest rows
    packed by hand     verl's use_remove_padding and use_liger, with a head on all tokens of a micro-batch

and maskpack without shared prefixes.

Rows are divided among ranks so that tokens are balanced, as verl's balance_batch does, and micro-batches have a token
budget; the plans are maskpack's. They attend by torch's varlen FlashAttention 2, as the packed arms do on a GPU.
"""

from __future__ import annotations

from types import MethodType
from typing import Any, ClassVar

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from bench.rivals import heads
from bench.rivals.packed_rows import VARLEN, PackedRows, hidden, with_liger
from examples.grpo_gpus import Packed, PackedRank, Padded, PaddedRank
from maskpack.planning import agree_on_count, plan_micro_batches, plan_ranks
from maskpack.replay import ReplayOptions


class VarlenRank(PaddedRank):
    """Padded rows, of which attention sees the tokens."""

    def prepare(self) -> None:
        self.policy.set_attn_implementation(VARLEN)


class TrimmedRank(VarlenRank):
    """Micro-batches of rows times the longest of them, up to the token budget; of logits, half as many."""

    def parts(self, batch: TensorDict) -> list[tuple[Tensor, bool]]:
        lengths, responses = batch["attention_mask"].sum(1), batch["response_mask"].sum(1) + 1
        budget, bins = self.settings.token_budget, [list[int]()]
        for row in lengths.argsort(descending=True).tolist():
            rows = [*bins[-1], row]
            if bins[-1] and len(rows) * max(int(lengths[rows[0]]), 2 * int(responses[rows].max())) > budget:
                bins.append([])
            bins[-1].append(row)
        counts = torch.tensor(len(bins))
        torch.distributed.all_reduce(counts, torch.distributed.ReduceOp.MAX)  # FSDP gathers in each
        parts = [(torch.tensor(rows), True) for rows in bins]
        return parts + [(parts[-1][0][-1:], False)] * (int(counts) - len(parts))

    def log_probs(self, rows: TensorDict) -> Tensor:
        prompt, columns = rows["prompts"].shape[1], rows["attention_mask"].any(0).nonzero()
        begin, end = int(columns[0]), int(columns[-1]) + 1
        names = ("input_ids", "attention_mask", "position_ids")
        cut = {name: rows[name][:, begin:end] for name in names}
        cut |= {name: rows[name][:, : end - prompt] for name in ("responses", "response_mask")}
        return super().log_probs(TensorDict(cut, rows.batch_size))


class ByHandRank(VarlenRank):
    """The head is one of bench/rivals/heads.py. Liger's layers on a GPU."""

    head: ClassVar[str] = heads.PLAIN

    def prepare(self) -> None:
        super().prepare()
        head = heads.importable([self.head], self.device)[0][self.head]
        if self.device.type == "cuda":
            with_liger(self.policy)

        def forward(policy: Any, part: PackedRows) -> Tensor:
            return head(hidden(policy, part), policy.lm_head.weight, part.labels)

        self.policy.forward = MethodType(forward, self.policy)  # FSDP calls it, with whole weights

    def parts(self, batch: TensorDict) -> list[tuple[Tensor, bool]]:
        lengths = batch["attention_mask"].sum(1).numpy()
        plan = agree_on_count(lambda: plan_micro_batches(lengths, self.settings.token_budget))
        rows = [torch.from_numpy(np.asarray(rows)) for rows in plan.micro_batches]
        return [(own, not is_dummy) for own, is_dummy in zip(rows, plan.is_dummy, strict=True)]

    def log_probs(self, rows: TensorDict) -> Tensor:
        if "advantages" not in rows:
            rows = rows.copy().set("advantages", rows["response_mask"])
        part = PackedRows.of(rows, range(len(rows)))
        return self.policy(part)[part.scored].float()


class FlashRank(ByHandRank):
    head = heads.FLASH


class FusedRank(ByHandRank):
    head = heads.VERL


class UnsharedRank(PackedRank):
    options = ReplayOptions()


class _Balanced(Padded):
    def division(self, rows: slice) -> list[Tensor]:
        lengths = self._batch["attention_mask"][rows].sum(1).numpy()
        plans = plan_ranks(lengths, self.group.num_ranks, self.settings.token_budget)
        return [torch.from_numpy(np.asarray(own)) + rows.start for own in plans.rows]


class PaddedVarlen(Padded):
    worker = VarlenRank


class Trimmed(_Balanced):
    worker = TrimmedRank


class ByHand(_Balanced):
    worker = ByHandRank


class ByHandFlash(_Balanced):
    worker = FlashRank


class ByHandFused(_Balanced):
    worker = FusedRank


class Unshared(Packed):
    worker = UnsharedRank


BY_HAND: dict[str, type[Padded]] = {heads.FLASH: ByHandFlash, heads.VERL: ByHandFused, heads.PLAIN: ByHand}
"""By the name of the head."""


def by_hand(device: torch.device) -> tuple[dict[str, type[Padded]], dict[str, str]]:
    """The arms with the heads of trainers that this machine has, else the plain one; and why it has not the others."""
    found, missing = heads.importable((heads.FLASH, heads.VERL), device)
    return {name: BY_HAND[name] for name in found or (heads.PLAIN,)}, missing
