"""Further arms of examples/grpo_gpus.py, as trainers have them without maskpack:

    trimmed            rows sorted by length, each micro-batch cut to its longest rows
    packed by hand     verl's use_remove_padding and use_liger, with a head on all tokens of a micro-batch

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
from examples.grpo_gpus import Padded, PaddedRank
from maskpack.planning import agree_on_count, plan_micro_batches, plan_ranks


class VarlenRank(PaddedRank):
    """Padded rows, of which attention sees the tokens."""

    def prepare(self) -> None:
        self.policy.set_attn_implementation(VARLEN)


class TrimmedRank(VarlenRank):
    def parts(self, batch: TensorDict) -> list[Tensor]:
        """Of rows times the longest of them, up to half of the token budget: logits are of whole rows, and float32."""
        lengths, most = batch["attention_mask"].sum(1), self.settings.token_budget // 2
        order = lengths.argsort(descending=True)
        bins: list[list[int]] = [[]]
        for row in order.tolist():
            if bins[-1] and int(lengths[bins[-1][0]]) * (len(bins[-1]) + 1) > most:
                bins.append([])
            bins[-1].append(row)
        counts = torch.tensor(len(bins))
        torch.distributed.all_reduce(counts, torch.distributed.ReduceOp.MAX)  # FSDP gathers in each
        while len(bins) < counts:
            longest = max(bins, key=len)
            half = len(longest) // 2
            bins.append(longest[half:])
            del longest[half:]
        return [torch.tensor(rows) for rows in bins]

    def log_probs(self, rows: TensorDict) -> Tensor:
        prompt, columns = rows["prompts"].shape[1], rows["attention_mask"].any(0).nonzero()
        begin, end = int(columns[0]), int(columns[-1]) + 1
        names = ("input_ids", "attention_mask", "position_ids")
        cut = {name: rows[name][:, begin:end] for name in names}
        cut |= {name: rows[name][:, : end - prompt] for name in ("responses", "response_mask")}
        return super().log_probs(TensorDict(cut, rows.batch_size))


class ByHandRank(VarlenRank):
    """The head is the first of `names` that this machine has."""

    names: ClassVar[tuple[str, ...]] = (heads.FLASH, heads.PLAIN)

    def prepare(self) -> None:
        super().prepare()
        found, missing = heads.importable(self.names, self.device)
        head = next(iter(found.values()))
        self.missing = missing
        if self.device.type == "cuda":
            with_liger(self.policy)

        def forward(policy: Any, part: PackedRows) -> Tensor:
            return head(hidden(policy, part), policy.lm_head.weight, part.labels)

        self.policy.forward = MethodType(forward, self.policy)  # FSDP calls it, with whole weights

    def parts(self, batch: TensorDict) -> list[Tensor]:
        lengths = batch["attention_mask"].sum(1).numpy()
        plan = agree_on_count(lambda: plan_micro_batches(lengths, self.settings.token_budget))
        return [torch.from_numpy(np.asarray(rows)) for rows in plan.micro_batches]

    def log_probs(self, rows: TensorDict) -> Tensor:
        if "advantages" not in rows:
            rows = rows.copy().set("advantages", rows["response_mask"])
        part = PackedRows.of(rows, range(len(rows)))
        return self.policy(part)[part.scored].float()


class ByHandFusedRank(ByHandRank):
    names = (heads.VERL, heads.PLAIN)


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


class ByHandFused(_Balanced):
    worker = ByHandFusedRank
