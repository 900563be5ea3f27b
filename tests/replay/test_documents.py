"""Rows that hold several documents: they are kept apart as rows are, or refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from needs import needs
from tensordict import NonTensorStack, TensorDict

import maskpack as mp
from maskpack.errors import LayoutError, ReplayError
from maskpack.replay import PackedInputs, ReplayOptions, prefix_tree, response_log_probs

needs("transformers")
import fuzz_documents
from tiny_models import pair, qwen3

from maskpack.adapters.transformers import PackedCollator, replayable

SCORED = ReplayOptions(scored=("loss_mask",))


def batch_of(**fields: list[Any]) -> TensorDict:
    """Two rows of five tokens; the first holds documents of three and two. All but the tokens that begin a row or a
    document are scored."""
    batch = {
        "input_ids": [[11, 12, 13, 14, 15, 0], [0, 21, 22, 23, 24, 25]],
        "attention_mask": [[1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1]],
        "loss_mask": [[0, 1, 1, 0, 1, 0], [0, 0, 1, 1, 1, 1]],
    }
    return TensorDict({name: torch.tensor(rows) for name, rows in (batch | fields).items()}, [2])


POSITIONS = {"position_ids": [[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]]}
NUMBERS = {"attention_mask": [[1, 1, 1, 2, 2, 0], [0, 1, 1, 1, 1, 1]]}


@pytest.mark.parametrize("seed", range(40))
def test_documents_in_rows_are_each_document_alone(seed: int) -> None:
    fuzz_documents.play(seed)


@pytest.mark.parametrize("fields", [POSITIONS, NUMBERS, POSITIONS | NUMBERS], ids=["positions", "mask", "both"])
@pytest.mark.parametrize("form", ["padded", "nested", "packed"])
def test_the_bounds_are_those_of_documents(fields: dict[str, Any], form: str) -> None:
    batch: Any = batch_of(**fields)
    batch = {"padded": lambda x, **_: x, "nested": mp.nest_batch_by_mask, "packed": mp.compress}[form](
        batch, pad_token_id=0
    )
    inputs = PackedInputs.of(batch, options=SCORED)
    assert inputs.bounds.tolist() == inputs.cu_seqlens.tolist() == [0, 3, 5, 10]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3, 4]]
    assert inputs.predict.tolist() == [0, 1, 3, 5, 6, 7, 8]
    assert inputs.max_seqlen == 5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cu_seqlens", [0, 3, 5]),
        ("cu_seq_lens_q", [0, 3, 5, 5]),
        ("seq_lens", [3, 2]),
        ("seq_lengths", [3, 2]),
        ("cu_seqlens", [0, 4, 7]),  # by columns, the last of which is padding
    ],
)
def test_bounds_of_a_batch_of_one_row(name: str, value: list[int]) -> None:
    mask = torch.tensor([[0, 1, 1, 1, 1, 1, 0]])
    fields = {"input_ids": torch.arange(7)[None], "attention_mask": mask, "loss_mask": mask}
    loss = torch.tensor([[0, 0, 1, 1, 0, 1, 0]])
    for batch in (
        TensorDict(fields | {name: torch.tensor([value]), "loss_mask": loss}, [1]),
        TensorDict(fields | {name: torch.tensor(value), "loss_mask": loss}, []),
    ):
        assert PackedInputs.of(batch, options=SCORED).bounds.tolist() == [0, 3, 5]


@pytest.mark.parametrize("value", [[0, 3], [1, 3, 5], [0, 4, 3, 5], [0.0, 5.0], [0, 3, 9]])
def test_bounds_that_are_not_those_of_the_row(value: list[int]) -> None:
    mask = torch.ones(1, 5, dtype=torch.int64)
    batch = TensorDict(
        {"input_ids": mask, "attention_mask": mask, "loss_mask": mask, "cu_seqlens": torch.tensor([value])}, [1]
    )
    with pytest.raises(ReplayError, match=r'"cu_seqlens" is .*5 valid tokens and 5 columns.*drop the field'):
        PackedInputs.of(batch, options=SCORED)
    del batch["cu_seqlens"]
    batch["loss_mask"] = torch.tensor([[0, 1, 1, 1, 1]])
    assert PackedInputs.of(batch, options=SCORED).bounds.tolist() == [0, 5]


def test_lengths_of_several_rows_say_nothing_of_documents() -> None:
    batch = batch_of(seq_lens=[5, 5])
    assert PackedInputs.of(batch, options=SCORED).bounds.tolist() == [0, 5, 10]


@pytest.mark.parametrize("row", [[0, 0, 2, 4, 6, 8], [0, 0, 1, 2, 2, 3], [0, 3, 4, 5, 8, 9]])
def test_positions_that_neither_count_on_nor_begin_anew(row: list[int]) -> None:
    batch = batch_of(position_ids=[[0, 1, 2, 3, 4, 0], row])
    with pytest.raises(ReplayError, match=r'"position_ids" goes from \d to \d in row 1, from column') as caught:
        PackedInputs.of(batch, options=SCORED)
    assert "or drop the field" in str(caught.value)
    del batch["position_ids"]
    assert PackedInputs.of(batch, options=SCORED).bounds.tolist() == [0, 5, 10]


def test_positions_over_masked_columns() -> None:
    """They count columns, or valid tokens; a document may begin behind the hole."""
    batch = batch_of(attention_mask=[[1, 1, 0, 0, 1, 1], [0, 1, 1, 1, 1, 1]])
    for row, bounds in {
        (0, 1, 2, 3, 4, 5): [0, 4, 9],
        (0, 1, 0, 0, 2, 3): [0, 4, 9],
        (0, 1, 0, 0, 0, 1): [0, 2, 4, 9],
    }.items():
        batch["position_ids"] = torch.tensor([[*row], [0, 0, 1, 2, 3, 4]])
        inputs = PackedInputs.of(batch, options=ReplayOptions(scored=("loss_mask",), no_prompt="skip"))
        assert inputs.bounds.tolist() == bounds


@pytest.mark.parametrize("row", [[0, 1, 2, 3, 1, 2], [0, 4, 5, 6, 0, 1], [0, 4, 5, 6, 2, 3]])
def test_positions_that_go_back_begin_a_document_wherever_it_counts_from(row: list[int]) -> None:
    batch = batch_of(position_ids=[[0, 1, 2, 3, 4, 0], row], loss_mask=[[0, 1, 1, 1, 1, 0], [0, 0, 1, 1, 0, 1]])
    assert PackedInputs.of(batch, options=SCORED).bounds.tolist() == [0, 5, 8, 10]


def test_sections_of_images_are_no_documents() -> None:
    """Of M-RoPE, they stay, jump and go back; after the frames of a video the first one does, too."""
    sections = [[0, 1, 1, 5, 5, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]]
    batch = batch_of(attention_mask=[[1] * 6, [1] * 6], position_ids=[sections, sections])
    assert PackedInputs.of(batch, options=SCORED).bounds.tolist() == [0, 6, 12]


def test_a_document_that_begins_with_a_scored_token() -> None:
    batch = batch_of(**POSITIONS, loss_mask=[[0, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1]])
    with pytest.raises(ReplayError, match=r"documents in rows \[0\] begin with a response token, which no output"):
        PackedInputs.of(batch, options=SCORED)
    skips = ReplayOptions(scored=("loss_mask",), no_prompt="skip")
    assert PackedInputs.of(batch, options=skips).predict.tolist() == [0, 1, 3, 5, 6, 7, 8]
    batch["loss_mask"][0, 3] = 0
    assert PackedInputs.of(batch, options=SCORED).predict.tolist() == [0, 1, 3, 5, 6, 7, 8]


def test_trees_of_plans_have_a_row_for_each_document() -> None:
    with pytest.raises(ReplayError, match=r"row 0 holds several documents.*Give each document a row"):
        prefix_tree(batch_of(**POSITIONS), options=SCORED)
    assert prefix_tree(batch_of(), options=SCORED).num_rows == 2


def test_images_belong_to_rows() -> None:
    batch = batch_of(**POSITIONS)
    batch["multi_modal_inputs"] = NonTensorStack({"pixel_values": torch.ones(1, 2)}, {})
    with pytest.raises(ReplayError, match=r"row 0 holds several documents.*images and videos belong to rows"):
        PackedInputs.of(batch, options=SCORED)


def test_the_self_check_compares_documents() -> None:
    replay = replayable(pair(qwen3)[0])
    whole = response_log_probs(replay, batch_of(**NUMBERS), options=SCORED, self_check=True)
    apart = batch_of(
        input_ids=[[11, 12, 13, 0, 0, 0], [14, 15, 0, 0, 0, 0]],
        attention_mask=[[1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0]],
        loss_mask=[[0, 1, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0]],
    )
    alone = response_log_probs(replay, apart, options=SCORED)
    assert torch.allclose(whole.values()[:5], alone.values(), atol=1e-5)


# -------------------------------------------------------------------- the collator


def test_the_collator_keeps_numbered_rows_apart() -> None:
    out = PackedCollator()([{"input_ids": [5, 6, 7, 8, 9], "attention_mask": [1, 1, 1, 2, 2]}])
    assert out["cu_seq_lens_q"].tolist() == [0, 3, 5]
    assert out["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert out["labels"].tolist() == [[-100, 6, 7, -100, 9]]


def test_the_collator_refuses_other_ways_to_tell_rows_apart() -> None:
    sample: dict[str, Any] = {"input_ids": [5, 6, 7, 8, 9]}
    for name, value in {"seq_idx": [0, 0, 0, 1, 1], "cu_seq_lens_q": [0, 3, 5]}.items():
        with pytest.raises(LayoutError, match=f'sample 0 has a field "{name}", which tells rows apart.*"seq_lengths"'):
            PackedCollator()([{**sample, name: value}])
    with pytest.raises(LayoutError, match=r"seq_lengths \[2, 3\], and the numbers .* change after \[3, 2\] tokens"):
        PackedCollator()([{**sample, "attention_mask": [1, 1, 1, 2, 2], "seq_lengths": [2, 3]}])
    for lengths in ([3, 2], [3, 1, 1]):
        out = PackedCollator()([{**sample, "attention_mask": [1, 1, 1, 2, 2], "seq_lengths": lengths}])
        assert out["cu_seq_lens_q"].tolist() == [0, *np.cumsum(lengths).tolist()]
