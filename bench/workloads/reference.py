"""The synthetic workload: log-normal lengths, 8.4 % of S real; P = 2048, R = 14336: 1 097 728 bytes a row; GRPO, 16
rows share a prompt.
"""

from __future__ import annotations

import numpy as np
from tensordict import TensorDict

from bench.workloads.rows import Lengths, Rows, as_batch, log_normal, log_probs, rewards, tokens

PROMPT_WIDTH, RESPONSE_WIDTH = 2048, 14_336

_GROUP = 16
_FILL = 0.084  # real share of S
_PROMPT_FILL = 0.074  # real share of P: together with _FILL this gives the 72 kB a row that jagged values take


def make_batch(
    rows: int = 256,
    *,
    prompt_width: int = PROMPT_WIDTH,
    response_width: int = RESPONSE_WIDTH,
    group: int = _GROUP,
    seed: int = 0,
) -> TensorDict:
    """One padded batch [rows], `group` of which share a prompt; the same arguments give the same bits."""
    rng = np.random.default_rng(seed)
    shape = Rows.of(rng, lengths_of(rng, rows, prompt_width, response_width, group), group)
    fields = tokens(shape)
    fields |= log_probs(shape, fields["response_mask"])
    return as_batch(fields | rewards(shape, fields["response_mask"]))


def widths(scale: float) -> tuple[int, int]:
    return max(1, round(scale * PROMPT_WIDTH)), max(1, round(scale * RESPONSE_WIDTH))


def lengths_of(
    rng: np.random.Generator, rows: int, prompt_width: int, response_width: int, group: int = _GROUP
) -> Lengths:
    groups = -(-rows // group)
    prompt = np.repeat(log_normal(rng, groups, 0.5, _PROMPT_FILL * prompt_width, prompt_width), group)[:rows]
    mean = _FILL * (prompt_width + response_width) - (prompt.mean() if rows else 0)
    return Lengths(prompt, log_normal(rng, rows, 1.0, mean, response_width), prompt_width, response_width)
