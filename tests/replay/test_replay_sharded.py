"""Replay of a model that FSDP shards over two ranks: the numbers of each row alone, gradients of all ranks, and the
comparison of a row, which the ranks make together."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from needs import needs

needs("transformers")

import work_replay
from ranks import run_ranks, values
from work_replay import SHARING, UNEQUAL


@pytest.mark.parametrize(
    ("tied", "sharing", "way"),
    [
        *((tied, None, way) for tied in (False, True) for way in ("", "all parts")),
        *((False, sharing, "") for sharing in SHARING),
        *((tied, "rank 0 shares", "all parts") for tied in (False, True)),
    ],
)
def test_sharded_replay_is_that_of_each_row_alone(tied: bool, sharing: str | None, way: str) -> None:
    """Also where a rank has a tree and another has none, and where a rank has more rows to compare than another."""
    for off in values(run_ranks(work_replay.sharded, 2, tied, sharing, way)):
        assert off.keys() == {"packed", "gradients", "planned", "padded"}
        assert off["gradients"] <= 1e-5
        assert max(off["packed"], off["planned"], off["padded"]) <= 5e-6


def test_shards_with_copies_have_the_gradients_of_all_rows() -> None:
    for off in values(run_ranks(work_replay.sharded, 4, False, None, "2 x 2")):
        assert off["gradients"] <= 1e-5
        assert max(off["packed"], off["planned"], off["padded"]) <= 5e-6


def test_a_rank_without_rows_takes_part_in_all_passes() -> None:
    for off in values(run_ranks(work_replay.without_rows, 2)):
        assert off["passes"] > 1
        assert off["gradients"] <= 1e-5
        assert off["packed"] <= 5e-6


def test_a_checkpoint_in_the_middle_ends_with_the_same_bits(tmp_path: Path) -> None:
    for seen in values(run_ranks(work_replay.resumed, 2, str(tmp_path))):
        assert seen["differing"] == 0
        assert seen["begun"] > 1000


def test_a_pass_without_gradients_leaves_shards() -> None:
    """A weight that stayed whole would be read by the next pass, whatever became of its shards."""
    for seen in values(run_ranks(work_replay.gathered_without_gradients, 2)):
        assert seen["whole"] == 0
        assert seen["off"] <= 5e-6


def test_an_output_layer_in_shards_without_a_root_is_named() -> None:
    for said in values(run_ranks(work_replay.head_of_its_own, 2)):
        assert said.startswith("replayable: the output layer of LlamaForCausalLM is sharded; expected its whole")


# -------------------------------------------------------------------- the comparison of a row


def check_compared(found: list[dict[tuple[str, str], dict[str, Any]]]) -> None:
    for kind, case in found[0]:
        ranks = [own[kind, case] for own in found]
        where = f"{kind}, {case}: {ranks}"
        assert max(off for own in ranks for off in own["off"]) < 2e-6, where
        calls = [len(own["calls"]) for own in ranks]
        if case == "nobody has a row":
            assert calls == [0, 0], where
            continue
        assert calls == [1, 1], where  # of three replays, and the ranks together
        assert [own["calls when asked"] for own in ranks] == [1, 1], where
        assert [len(own["calls when wrong"]) for own in ranks] == [3, 3], where
        wrong = [sum(map(sum, rows)) and len(rows) > 1 for rows in UNEQUAL[case]]  # who sees that rows are merged
        for own, sees in zip(ranks, wrong, strict=True):
            for said in own["wrong"]:
                assert isinstance(said, str), where
                assert re.match("replayable: packed log-probs of (FSDP)?LlamaForCausalLM are off by", said), where
                assert sees or "on another rank" in said, where


def test_ranks_compare_a_row_together() -> None:
    """Whatever rows they have: where one of them is wrong all of them raise."""
    check_compared(values(run_ranks(work_replay.compared, 2, ["fsdp2"])))


def test_models_are_compared_however_they_are_sharded() -> None:
    kinds = [kind for kind in work_replay.SHARDED if kind != "fsdp2"]
    check_compared(values(run_ranks(work_replay.compared, 2, kinds)))


def check_trees(found: list[dict[tuple[str, ...], dict[str, Any]]]) -> None:
    """Ranks compare in the same calls: in the first, and in the first in which rows of one of them share."""
    for kind, *cases in found[0]:
        first = next(call for call, case in enumerate(cases) if any(SHARING[case]))
        wanted = [int(call in (0, first)) for call in range(len(cases))]
        for rank, own in enumerate(ranks[(kind, *cases)] for ranks in found):
            where = f"{kind}, {cases}, rank {rank}: {own}"
            assert own["runs"] == wanted, where
            assert max(own["off"]) < 2e-6, where
            assert isinstance(own["wrong"], str), where
            assert re.match("replayable: packed log-probs of (FSDP)?LlamaForCausalLM are off by", own["wrong"]), where
            assert ("on another rank" in own["wrong"]) == (rank == 1), where


def test_ranks_compare_a_row_together_if_only_some_share_prefixes() -> None:
    check_trees(values(run_ranks(work_replay.compared_trees, 2, ["fsdp2"])))


def test_models_compare_shared_prefixes_however_they_are_sharded() -> None:
    kinds = [kind for kind in work_replay.SHARDED if kind != "fsdp2"]
    check_trees(values(run_ranks(work_replay.compared_trees, 2, kinds)))


def test_all_ranks_refuse_dropout_if_only_some_share_prefixes() -> None:
    for said in values(run_ranks(work_replay.dropout_with_trees, 2)):
        assert "has dropout (attention_dropout) and is in train mode" in said


def test_a_sharded_model_of_values_is_compared() -> None:
    ranks = values(run_ranks(work_replay.values_compared, 2))
    for (said, off), where in zip(ranks, ("", " on another rank"), strict=True):
        assert re.match(
            f"replayable: packed hidden states of (FSDP)?LlamaModel are off by [0-9.e]*{where} from its", said
        )
        assert off < 5e-6


def test_a_model_inside_what_is_sharded_is_refused() -> None:
    for said in values(run_ranks(work_replay.inside_a_sharded_module, 2)):
        assert len(said) == 3
        assert all("lies inside a module that FSDP shards; expected the root" in message for message in said)
