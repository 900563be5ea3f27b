"""The batches that every benchmark runs on, made from a seed: the fields of an `update_actor` call, padded.

    prompts  . . . # # | # # # # # . . . . . .  responses      # real, . pad
             P columns   R columns, S = P + R

    reference   synthetic lengths, GRPO, groups of 16
    tau         an agent with tools: lengths of messages, and which of them are equal, are real; GRPO, groups of 4
    mooncake    requests of a chat service with long contexts: lengths of prompt and response are real
                (`mooncake_lengths.json`), 256 drawn of 12 031; PPO with values, no two rows share a prompt

The last two are padded to the longest prompt and the longest response of the batch, the least that any padding is.
Values are synthetic in all three. Token ids are Zipf-like; a group of GRPO has equal prompts, one advantage a row and
scores at the last token only; log-probs of three policies are close to each other. PPO has advantages, returns and
values that differ from token to token.
"""

from __future__ import annotations

import numpy as np
from tensordict import TensorDict

from bench.workloads import tau
from bench.workloads.reference import lengths_of, make_batch, widths
from bench.workloads.rows import (
    PAD_ID,
    Lengths,
    Rows,
    as_batch,
    critic,
    log_probs,
    padded_to_longest,
    recorded,
    rewards,
    scaled,
    tokens,
)

__all__ = ["MOST_ROWS", "PAD_ID", "WORKLOADS", "batch_of", "lengths", "make_batch"]

WORKLOADS = {"reference": 256, "tau": tau.ROWS, "mooncake": 256}
"""Rows of a batch of each workload."""
MOST_ROWS = {"tau": tau.ROWS, "mooncake": 12_031}
"""Rows that there are."""


def batch_of(name: str, rows: int, *, scale: float = 1.0) -> TensorDict:
    """One padded batch [rows] of a workload; the same arguments give the same bits.

    Args:
        name: of WORKLOADS.
        rows: of tau, the first so many.
        scale: of all widths and lengths, each at least one token.

    Raises ValueError for a name that does not exist, and for more rows than tau or mooncake have.
    """
    if name == "reference":
        prompt_width, response_width = widths(scale)
        return make_batch(rows, prompt_width=prompt_width, response_width=response_width)
    rng, of = np.random.default_rng(1), lengths(name, rows, scale=scale)
    if name == "tau":
        shape, more = Rows.of(rng, of, tau.TRIALS), {}
        fields = tau.trajectory_fields(PAD_ID + 1, rows, scale, seed=0)
        del fields["uid"]
    else:
        shape = Rows.of(rng, of, 1)
        fields, more = tokens(shape), critic(shape)
    fields |= log_probs(shape, fields["response_mask"]) | rewards(shape, fields["response_mask"])
    return as_batch(fields | more)


def lengths(workload: str, rows: int, *, scale: float = 1.0) -> Lengths:
    """Those of `batch_of` with the same arguments.

    Raises ValueError as `batch_of` does.
    """
    if workload == "reference":
        return lengths_of(np.random.default_rng(0), rows, *widths(scale))
    if workload not in WORKLOADS:
        raise ValueError(f"lengths: workload is {workload!r}; expected one of {', '.join(WORKLOADS)}.")
    if not 1 <= rows <= MOST_ROWS[workload]:
        raise ValueError(f"lengths: rows is {rows}; {workload} has {MOST_ROWS[workload]:,}.")
    if workload == "tau":
        return tau.trials_of(scale, rows)[2]
    data = recorded("mooncake_lengths")
    chosen = np.random.default_rng(0).choice(MOST_ROWS[workload], rows, replace=False)
    return padded_to_longest(*(scaled(np.array(data[side])[chosen], scale) for side in ("prompt", "response")))
