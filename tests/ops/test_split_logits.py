"""packed_log_probs(logits=, group=): bias, LoRA, scale and soft cap of heads that are split over ranks."""

from __future__ import annotations

import pytest
from needs import needs

needs("transformers")  # the workers of replay are in the same file

import work_heads
from ranks import run_ranks, values


@pytest.mark.parametrize(
    ("ranks", "dtype", "limit"), [(2, "float64", 1e-12), (3, "float64", 1e-12), (2, "float32", 2e-5)]
)
def test_results_and_gradients_are_those_of_one_process(ranks: int, dtype: str, limit: float) -> None:
    assert max(values(run_ranks(work_heads.split, ranks, dtype))) <= limit


def test_ranks_compare_what_must_be_the_same() -> None:
    first, second = values(run_ranks(work_heads.differences, 2))
    for said in (first, second):
        for seen, want in zip(said[:-1], (
            "scale is [1.0, 2.0] on ranks [0, 1]; expected the same",
            "softcap is [30.0, inf]",
            "the bias and LoRA is ['a bias, rank 0', 'no bias, rank 0']",
            "the bias and LoRA is ['no bias, rank 3', 'no bias, rank 2']",
            "lora_a.requires_grad is [False, True]",
            "lora_scale is [1.0, 2.0]",
        ), strict=True):  # fmt: skip
            assert want in seen
    assert "arguments of ranks [1] are invalid" in first[-1]
    assert "softcap is -1.0; expected a finite number above 0" in second[-1]
