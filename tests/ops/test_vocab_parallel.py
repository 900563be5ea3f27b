"""packed_log_probs(group=): heads split over 2 and 4 ranks, on gloo, against one process and a program in float64.
The ranks run what work_vocab.py has."""

from __future__ import annotations

from typing import Any

import pytest
import work_vocab
from ranks import run_ranks, values
from work_vocab import Case, case

from maskpack.ops import log_probs as module

BOUNDS = {  # where slices end; the last end is V
    2: {"even": [258, 515], "uneven": [500, 515], "first empty": [0, 515], "last empty": [515, 515]},
    4: {"even": [128, 256, 384, 515], "uneven": [3, 400, 401, 515], "empty": [0, 300, 300, 515]},
}
EXACT = {"float32": 5e-6, "float64": 1e-12, "bfloat16": 5e-6, "float16": 5e-6}
GRADIENTS = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 1e-2}


def ran(work: Any, ranks: int, *args: Any) -> list[Any]:
    return values(run_ranks(work, ranks, *args))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_results_and_gradients_are_those_of_one_process(ranks: int) -> None:
    cases: list[Case] = [
        case(37, 65, bounds, dtype, temperature=temperature, use=use)
        for dtype in ("float32", "float64")
        for bounds in BOUNDS.get(ranks, {"all": [515]}).values()
        for temperature, use in ((1.0, "LE"), (0.6, "L"), (3, "E"))
    ]
    cases += [case(tokens, 5, [0] * (ranks - 1) + [3], dtype) for tokens in (0, 1) for dtype in ("float32", "bfloat16")]
    for of_rank in ran(work_vocab.compare, ranks, cases):
        for given, seen in zip(cases, of_rank, strict=True):
            assert seen["same"], given
            assert max(seen["log_probs"], seen["entropy"]) < EXACT[given["dtype"]], given
            assert max(seen["hidden"], seen["weight"]) < GRADIENTS[given["dtype"]], given


@pytest.mark.parametrize("work", [work_vocab.compare_narrow, work_vocab.compare_rounded])
@pytest.mark.parametrize("ranks", [2, 4])
def test_half_precision_is_as_exact_as_on_one_process(ranks: int, work: Any) -> None:
    """Tokens kept, not kept, kept on some ranks alone; sure ones among them; chunks, blocks and slices."""
    places = BOUNDS[ranks]
    cases = [
        case(300, 33, bounds, dtype, **more)
        for dtype in ("bfloat16", "float16")
        for bounds, more in (
            (places["even"], {"keep": 0}),
            (places["even"], {"keep": 1 << 30, "temperature": 0.6}),
            (places["even"], {"keep": 140 * 2 * 256, "use": "L", "sure": 12.0}),
            (places["uneven"], {"keep": 1 << 30, "use": "L", "sure": 12.0}),
            (places["uneven"], {"keeps": [0, 1 << 30, 1 << 17, 0][:ranks]}),
            (places["uneven"], {"keep": 1 << 30, "use": "E", "sharpness": 4.0}),
        )
    ]
    for of_rank in ran(work, ranks, cases):
        for given, seen in zip(cases, of_rank, strict=True):
            assert seen["same"], given
            assert max(seen["log_probs"], seen["entropy"]) < EXACT[given["dtype"]], given
            for name in ("hidden", "weight"):
                assert seen[name] < 1.25 * seen["alone"][name] + 1e-4, (name, given)


def test_any_sizes_bounds_and_options() -> None:
    for of_rank in ran(work_vocab.random_rounds, 4, 100):
        assert len(of_rank) == 100
        for seen in of_rank:
            limit = 1e-11 if seen["dtype"] == "float64" else 2e-5 * (1 + seen["sharpness"])
            assert seen["same"], seen
            assert max(seen[name] for name in ("log_probs", "entropy", "hidden", "weight")) < limit, seen


def test_large_logits_lose_no_digits() -> None:
    """The log-sum-exp of 1000 would be 3e-5 off."""
    for seen in ran(work_vocab.huge_logits, 2):
        assert max(seen["log_probs"]) < 1.5e-7
        assert max(seen["entropy"]) < 1.5e-6


@pytest.mark.parametrize("ranks", [1, 3])
def test_unknown_ids_give_nan_on_all_ranks(ranks: int) -> None:
    for log_probs, entropy, gradients in ran(work_vocab.unknown_ids, ranks):
        assert log_probs == [False, True, True, True, True, False]
        assert not any(entropy)
        assert [size > 0 for size in gradients] == [True, False, False, False, False, True]


# -------------------------------------------------------------------- memory


def test_a_rank_holds_half_of_the_weight_and_of_the_logits() -> None:
    """The largest storage of the forward pass is the logits of a piece, whatever the vocabulary."""
    vocabulary, tokens = 131_072, 1000
    (whole,) = ran(work_vocab.bytes_of, 1, vocabulary, tokens, None)
    piece = 1008 * module._PIECE_COLUMNS * 4
    assert whole["largest"] == piece
    for seen in ran(work_vocab.bytes_of, 2, vocabulary, tokens, None):
        assert seen["largest"] == piece
        assert 2 * seen["weight"] == whole["weight"]


def test_a_rank_keeps_its_part_of_the_distributions() -> None:
    (whole,) = ran(work_vocab.bytes_of, 1, 4096, 300, 300 * 4096 * 2)
    assert whole["kept"] == 300 * 4096 * 2
    for seen in ran(work_vocab.bytes_of, 2, 4096, 300, 300 * 4096 * 2):
        assert (2 * seen["kept"], 2 * seen["weight"]) == (whole["kept"], whole["weight"])


# -------------------------------------------------------------------- DTensor


def test_a_dtensor_has_its_gradient_as_a_dtensor() -> None:
    vocabularies = [16, 13, 5, 1]  # 4, 4, 4, 1 rows a rank; 2, 2, 1, 0; 1, 0, 0, 0
    ranks = ran(work_vocab.of_dtensors, 4, vocabularies)
    assert [[seen["rows"] for seen in of_rank] for of_rank in ranks] == [
        [4, 4, 2, 1],
        [4, 4, 2, 0],
        [4, 4, 1, 0],
        [4, 1, 0, 0],
    ]
    for of_rank in ranks:
        for vocabulary, seen in zip(vocabularies, of_rank, strict=True):
            assert seen["layout"] == (True, True, (vocabulary, 3))
            assert seen["outputs"] < 5e-6
            assert max(seen["hidden"], seen["weight"]) < 1e-5 or vocabulary == 1


def test_other_dtensors_are_refused() -> None:
    for *seen, states, states_of_slices in ran(work_vocab.refused_dtensors, 4):
        for error in (states, states_of_slices):
            assert "DTensors among them; expected plain hidden and token_ids" in error
        named = ["Shard(dim=0)", "Replicate()", "Shard(dim=1)", "Partial(sum)", "mesh (2, 2)", "group has the ranks"]
        named.append("on ranks [3, 2, 1, 0]; group has the ranks [0, 1, 2, 3]")
        assert all(error.startswith("packed_log_probs: lm_head_weight is a DTensor (8, 4) of ") for error in seen)
        for error, name in zip(seen, named, strict=True):
            assert name in error
        assert "without group" in seen[0]
        assert all("expected Shard(0) over one mesh dim" in error for error in seen[1:5])


def test_replay_takes_the_group_of_the_model() -> None:
    assert max(ran(work_vocab.replayed, 2)) < 5e-6


# -------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_raise_and_none_waits(ranks: int) -> None:
    of_ranks = ran(work_vocab.failures, ranks)
    last, everyone = ranks - 1, list(range(ranks))
    same = "on ranks " + str(everyone) + "; expected the same on all ranks of group"
    for rank, seen in enumerate(of_ranks):
        assert list(seen) == [*work_vocab.FAILURES, *work_vocab.EVERYWHERE]
        for name, (error, after) in seen.items():
            assert error.startswith("packed_log_probs: "), name
            assert after == pytest.approx(1 / (3 * ranks)), name
            if name in list(work_vocab.FAILURES)[:7]:
                assert (f"arguments of ranks [{last}] are invalid" in error) == (rank != last), name
        assert "temperature is 0; expected a finite number" in of_ranks[last]["temperature of 0"][0]
        for name, shown in {
            "fewer tokens": "the number of hidden states is [5, ",
            "other width": "the width of hidden is [4, ",
            "other dtype": "the dtype of hidden is ['float32', ",
            "other temperature": "temperature is [1.0, ",
            "other entropy": "entropy is [False, ",
            "gradient": "hidden.requires_grad is [False, ",
            "other ids": "a checksum of token_ids is [",
            "other order of ids": "a checksum of token_ids is [",
        }.items():
            assert shown in seen[name][0], name
            assert same in seen[name][0], name
        assert f"no row on any of the ranks {everyone}" in seen["no rows"][0]
        assert f"token_ids lie in [0, 99]; expected [0, {3 * ranks})" in seen["ids of no row"][0]
        assert "token_ids lie in [-100, 3]" in seen["negative ids"][0]


def test_groups_of_ranks_with_other_tokens() -> None:
    """Tensor-parallel pairs compute; the group of all, data-parallel pairs too, is found out by the tokens."""
    for error, said in ran(work_vocab.pairs_of_ranks, 4):
        assert error < 5e-6
        assert "a checksum of token_ids is [" in said
        assert "ranks with tokens of their own leave group out" in said
