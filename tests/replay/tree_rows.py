"""Batches whose rows share prefixes, and what each row alone gives: log-probs and gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from needs import needs
from tensordict import TensorDict
from torch import Tensor

from maskpack.replay import ReplayOptions, response_log_probs

tf = needs("transformers")
import rows_alone
import tiny_models
from rows_alone import gradients, off
from tiny_models import VOCABULARY, gemma3, llama, qwen3, qwen25_vl

from maskpack.adapters.transformers import model as adapter

replayable = adapter.replayable

SHARE = ReplayOptions(share_prefixes=True, min_shared=1)
Row = tuple[list[int], list[int]]
"""The ids of a prompt and of its response."""
LIMITS = {torch.float32: (5e-6, 1e-5), torch.float64: (1e-10, 1e-10)}
"""The largest error of a log-prob, and of the gradient of a weight relative to its norm."""
MODELS = {make.__name__: make for make in (qwen3, llama, gemma3, qwen25_vl)}
all_models = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def wide_norms(model: Any) -> None:
    """Norms in the dtype of the model; transformers computes them in float32."""

    def norm(layer: Any, x: Tensor) -> Tensor:
        eps = getattr(layer, "variance_epsilon", getattr(layer, "eps", None))
        scale = layer.weight + 1 if "Gemma" in type(layer).__name__ else layer.weight
        return scale * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()

    for layer in model.modules():
        if "RMSNorm" in type(layer).__name__:
            layer.forward = functools.partial(norm, layer)


def pair(make: Callable[..., Any], dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any]:
    """As tiny_models.pair; in float64, norms are too."""
    both = tiny_models.pair(make, dtype, **options)
    if dtype == torch.float64:
        for model in both:
            wide_norms(model)
    return both


# -------------------------------------------------------------------- rows


def drawn(rng: np.random.Generator, count: int, most: int = VOCABULARY) -> list[int]:
    return rng.integers(3, most, count).tolist()


def groups(sizes: Sequence[int], prompt: int = 6, response: int = 8, seed: int = 0) -> list[Row]:
    """Groups with a prompt each, shuffled; some responses are empty, some begin alike."""
    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    for size in sizes:
        own = drawn(rng, int(rng.integers(1, prompt + 1)))
        rows += [(own, drawn(rng, int(rng.integers(0, response + 1)), 6)) for _ in range(size)]
    return [rows[at] for at in rng.permutation(len(rows))]


ROWS: dict[str, list[Row]] = {
    "groups": groups([4, 3, 1, 5]),
    "one group": groups([6]),
    "one row": [([5, 6], [7, 8, 9])],
    "identical rows": [([5, 6], [7, 8, 9])] * 3 + [([5, 6], [7, 8])] * 2,
    "rows that extend each other": [([5, 6], list(range(7, 7 + n))) for n in (4, 0, 2, 9, 1)],
    "nothing is shared": [([b + 5, 6], [7, 8]) for b in range(4)],
    "empty responses": [([5, 6, 7], []), ([5, 6, 7], []), ([5, 6], []), ([5, 6, 8], [9])],
    "rows without tokens": [([], []), ([5, 6], [7]), ([5, 6], [8]), ([], [])],
    "prompt and response at other places": [([5], [6, 7, 8]), ([5, 6], [7, 8]), ([5, 6, 7], [8]), ([5, 6, 7, 8], [])],
    "a deep trie": [([5], [6] * n + [7] * 3) for n in range(1, 9)],
}


def batch_of(rows: Sequence[Row], *, side: str = "both", mrope: bool = False, extra: int = 2) -> TensorDict:
    """Prompts padded on the left and responses on the right, or both on one side; `extra` columns more than needed."""
    prompt, response = (extra + max(map(len, column)) for column in zip(*rows, strict=True))
    lengths = [(len(own), len(answer)) for own, answer in rows]
    batch = rows_alone.batch_of(lengths, prompt, response, ids="mrope3" if mrope else "edge", side=side)
    tokens = [token for own, answer in rows for token in (*own, *answer)]
    batch["input_ids"][batch["attention_mask"] != 0] = torch.tensor(tokens, dtype=torch.int64)  # and parts of it
    return batch


def for_model(make: Callable[..., Any], rows: Sequence[Row], **more: Any) -> TensorDict:
    return batch_of(rows, mrope=make is qwen25_vl, **more)


def truth_of(model: Any, rows: Sequence[Row], mrope: bool = False) -> Tensor:
    """Log-probs of all response tokens, row after row, each row alone."""
    return rows_alone.truth_of(model, batch_of(rows, mrope=mrope))[0]


def close(seen: list[Tensor], truth: list[Tensor], limit: float = 1e-5) -> None:
    """Relative to the norm of each; for those that are rounding errors alone, to a tenth of the largest."""
    assert len(seen) == len(truth) > 0
    largest = max(float(want.norm()) for want in truth)
    for got, want in zip(seen, truth, strict=True):
        assert float((got - want).norm()) <= limit * max(float(want.norm()), largest / 10)


def check(make: Callable[..., Any], rows: Sequence[Row], dtype: torch.dtype = torch.float32, **more: Any) -> None:
    """Log-probs and the gradients of all weights are those of each row alone."""
    model, plain = pair(make, dtype)
    check_of(replayable(model), plain, rows, mrope=make is qwen25_vl, **more)


def check_of(
    ready: Any, plain: Any, rows: Sequence[Row], *, side: str = "both", mrope: bool = False, **more: Any
) -> None:
    seen = response_log_probs(
        ready, batch_of(rows, side=side, mrope=mrope), **{"self_check": True, "options": SHARE} | more
    )
    truth = truth_of(plain, rows, mrope)
    limit, gradient_limit = LIMITS[next(plain.parameters()).dtype]
    assert seen.offsets().diff().tolist() == [len(response) for _, response in rows]
    assert seen.values().shape == truth.shape
    if not truth.numel():
        return
    assert off(seen, truth) <= limit
    close(gradients(ready.model, seen.values()), gradients(plain, truth), gradient_limit)


def checkpoint(model: Any, reentrant: bool) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    model.train()
