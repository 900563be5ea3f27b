"""Replay with shared prefixes: log-probs, values and gradients against each row alone, in the same model with its own
attention; and everything that must raise instead of giving other numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from needs import needs
from torch import Tensor

import maskpack as mp
from maskpack.core import native
from maskpack.errors import ReplayError
from maskpack.ops import attention, prefix_attention
from maskpack.replay import PackedInputs, ReplayOptions, prefix_tree, response_log_probs

tf = needs("transformers")
from tiny_models import TINY, VOCABULARY, gemma3, llama, qwen3, qwen25_vl

from maskpack.adapters.transformers import model as adapter

replayable = adapter.replayable
from rows_alone import off
from tree_rows import (
    ROWS,
    SHARE,
    Row,
    all_models,
    batch_of,
    check,
    check_of,
    checkpoint,
    pair,
    truth_of,
)


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@all_models
def test_log_probs_and_gradients_are_those_of_each_row_alone(make: Any, rows: Any) -> None:
    check(make, rows, torch.float64)
    if len(rows) > 6:  # of several prefixes, and deep ones
        check(make, rows)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(3, 4), min_size=1, max_size=4), st.lists(st.integers(3, 4), max_size=6)),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([qwen3, gemma3, qwen25_vl]),
    st.integers(1, 3),
    st.sampled_from([1, 7]),
)
@settings(max_examples=40)
def test_any_rows(rows: list[Row], make: Any, min_shared: int, multiple_of: int) -> None:
    check(make, rows, options=replace(SHARE, min_shared=min_shared, multiple_of=multiple_of))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # the self-check's
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("make", [qwen3, gemma3], ids=["qwen3", "gemma3"])
def test_gradient_checkpointing_in_train_mode(make: Any, reentrant: bool) -> None:
    model, plain = pair(make)
    checkpoint(model, reentrant)
    check_of(replayable(model), plain, ROWS["groups"])


def test_positions_are_counted_where_the_batch_has_none() -> None:
    batch = batch_of(ROWS["groups"])
    with_positions = PackedInputs.of(batch, options=SHARE)
    without = PackedInputs.of(batch.exclude("position_ids"), options=SHARE)
    for name in ("input_ids", "position_ids", "cu_seqlens", "predict", "targets", "copies"):
        assert torch.equal(getattr(with_positions, name), getattr(without, name))


def test_tokens_of_other_positions_are_not_shared() -> None:
    """Equal ids, and positions of one section that differ from the third token on."""
    rows = [([5, 6, 7, 8], [9, 10]), ([5, 6, 7, 8], [11])]
    batch = batch_of(rows, mrope=True)
    batch["position_ids"][1, 2, 4:] += 1  # two columns of padding before
    inputs = PackedInputs.of(batch, options=SHARE)
    assert inputs.tree is not None
    assert inputs.tree.shared.tolist() == [0, 2]
    whole = PackedInputs.of(batch_of(rows, mrope=True), options=SHARE)
    assert whole.tree is not None
    assert whole.tree.shared.tolist() == [0, 4]


def test_a_response_without_prompt() -> None:
    """Its first token has no output that scores it, in all rows that share it."""
    rows = [([], [5, 6, 7]), ([], [5, 6, 8]), ([9], [5, 6])]
    model, _ = pair(qwen3)
    ready, batch = replayable(model), batch_of(rows)
    with pytest.raises(ReplayError, match="have a response but no prompt token"):
        response_log_probs(ready, batch, options=SHARE)
    shared, apart = (
        response_log_probs(ready, batch, options=ReplayOptions(no_prompt="skip", share_prefixes=share, min_shared=1))
        for share in (True, False)
    )
    assert off(shared, apart.values()) <= 5e-6
    assert [float(row[0].detach()) for row in shared.unbind()[:2]] == [0.0, 0.0]


def test_a_token_of_several_rows_is_computed_and_scored_once() -> None:
    rows = [([5, 6, 7], [8, 9, 10]), ([5, 6, 7], [8, 9, 11, 12]), ([5, 6, 7], [13])]
    inputs = PackedInputs.of(batch_of(rows), options=SHARE)
    assert inputs.input_ids.tolist() == [[5, 6, 7, 8, 9, 10, 11, 12, 13]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 5, 6, 3]]
    assert inputs.cu_seqlens.tolist() == [0, 3, 5, 6, 8, 9]
    assert inputs.targets.tolist() == [8, 9, 10, 11, 12, 13]
    assert inputs.predict.tolist() == [2, 3, 4, 4, 6, 2]
    assert inputs.copies is not None
    assert inputs.copies.tolist() == [0, 1, 2, 0, 1, 3, 4, 5]
    assert (inputs.num_tokens, inputs.longest_row) == (9, 7)


def test_rows_that_share_nothing_are_packed_as_ever() -> None:
    batch = batch_of(ROWS["nothing is shared"])
    one, other = PackedInputs.of(batch, options=SHARE), PackedInputs.of(batch)
    assert one.tree is None
    assert one.copies is None
    assert torch.equal(one.input_ids, other.input_ids)
    assert torch.equal(one.cu_seqlens, other.cu_seqlens)


def test_without_packing_rows_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = pair(qwen3)
    monkeypatch.setenv("MASKPACK_PACKED_REPLAY", "0")
    rows = ROWS["groups"]
    seen = response_log_probs(replayable(model), batch_of(rows), self_check=True, options=SHARE)
    assert off(seen, truth_of(plain, rows)) <= 5e-6


@pytest.mark.parametrize("form", ["padded", "nested", "packed"])
def test_the_tree_of_a_batch(form: str) -> None:
    """Its tokens are those of the inputs, and of a set of prefixes."""
    rows = ROWS["groups"]
    batch = batch_of(rows)
    if form != "padded":
        batch = mp.nest_batch_by_mask(batch, pad_token_id=0) if form == "nested" else mp.compress(batch, pad_token_id=0)
    tree = prefix_tree(batch, options=ReplayOptions(min_shared=1))
    prefixes = {tuple((prompt + response)[:n]) for prompt, response in rows for n in range(1, 20)}
    lengths = [len(prompt) + len(response) for prompt, response in rows]
    assert tree.lengths.tolist() == lengths
    assert tree.num_tokens == len(prefixes)
    assert tree.num_tokens == PackedInputs.of(batch, options=SHARE).num_tokens


# -------------------------------------------------------------------- it raises instead


def refused(message: str, model: Any, **options: Any) -> None:
    given: dict[str, Any] = {"options": SHARE} | options
    with pytest.raises(ReplayError, match=re.escape(message)):
        response_log_probs(model, batch_of(ROWS["groups"]), **given)


def test_dropout_is_refused_in_train_mode() -> None:
    config = tf.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0.0)
    ready = replayable(tf.GPT2LMHeadModel(config).train())
    refused("GPT2LMHeadModel has dropout (drop, h.0.attn.resid_dropout", ready)
    with pytest.raises(ReplayError, match="has dropout"):  # another rank may have rows that share
        response_log_probs(ready, batch_of(ROWS["nothing is shared"]), options=ReplayOptions(share_prefixes=True))
    ready.model.eval()
    response_log_probs(ready, batch_of(ROWS["groups"]), options=SHARE)


def part_in_train_mode(model: Any) -> None:
    model.eval()
    mlp = model.model.layers[0].mlp
    mlp.down_proj = torch.nn.Sequential(mlp.down_proj, torch.nn.Dropout(0.3))
    mlp.train()


DROPOUT: dict[str, Any] = {"layers.0.mlp.down_proj.1": part_in_train_mode} | {
    name: lambda model, name=name: setattr(model.config, name, 0.1)
    for name in ("hidden_dropout", "attention_dropout", "residual_dropout", "router_jitter_noise", "drop_path_rate")
}


@pytest.mark.parametrize("name", DROPOUT)
def test_dropout_and_noise_of_any_kind_are_refused_in_train_mode(name: str) -> None:
    model, _ = pair(llama)
    model.train()
    DROPOUT[name](model)
    refused(f"has dropout ({name}) and is in train mode; expected none", replayable(model))


def test_dropout_of_heads_that_do_not_run_does_not_count() -> None:
    model, _ = pair(llama)
    model.config.classifier_dropout = model.config.summary_first_dropout = 0.1
    response_log_probs(replayable(model.train()), batch_of(ROWS["groups"]), options=SHARE)


def other_tree() -> dict[str, Any]:
    return {"prefix_tree": prefix_tree(batch_of(ROWS["groups"]), options=ReplayOptions(min_shared=1))}


@pytest.mark.parametrize("given", [lambda: {"prefix_tree": None}, other_tree], ids=["none", "another"])
def test_a_model_that_keeps_the_tree_from_its_attention_is_refused(given: Any) -> None:
    model, _ = pair(qwen3)
    ready = replayable(model)
    layer = model.model.layers[1].self_attn
    own = layer.forward
    layer.forward = lambda *args, **kwargs: own(*args, **kwargs | given())
    refused("does not pass the tree of shared prefixes on to its attention", ready)


def test_a_window_that_the_attention_is_not_told_counts_whole_rows() -> None:
    model, _ = pair(llama)
    rows = [([5, 6, 7, 8, 9, 10], [11, 12, 13, 14]), ([5, 6, 7, 8, 9, 10], [15, 16, 17])]
    assert PackedInputs.of(batch_of(rows), options=SHARE).max_seqlen == 6
    model.config.sliding_window = 7
    with pytest.raises(
        ReplayError, match="a window of 7 tokens that it does not pass to its attention, and a row has 10"
    ):
        response_log_probs(replayable(model), batch_of(rows), options=SHARE)


def test_rotary_positions_that_depend_on_the_longest_row_count_whole_rows() -> None:
    """A node is shorter than the row that it is part of."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**TINY | {"max_position_embeddings": 8}, rope_parameters=rope)).eval()
    rows = [([5, 6, 7, 8, 9], [10, 11, 12, 13]), ([5, 6, 7, 8, 9], [14, 15])]
    with pytest.raises(
        ReplayError, match=re.escape("is longer than 8 tokens; a row, or the tail of multiple_of, has 9")
    ):
        response_log_probs(replayable(model), batch_of(rows), options=SHARE)


# -------------------------------------------------------------------- the self-check


def test_the_self_check_compares_again_when_rows_share() -> None:
    """Ranks of a sharded model agree on share_prefixes, not on trees: it is the option that makes the path."""
    model, _ = pair(qwen3)
    ready = replayable(model)
    compared: list[int] = []
    own = model.forward
    model.forward = lambda *args, **kwargs: compared.append(kwargs["input_ids"].numel()) or own(*args, **kwargs)
    for rows, seen in (
        ([([5, 6], [7])], [3]),  # a first row
        ([([5, 6], [7]), ([8], [9, 10, 11])], [3, 4]),  # a later one
        ([([5, 6], [7]), ([5, 6], [8, 9, 10])], [3, 4, 5]),  # one that shares
        ([([5, 6], [7]), ([8], [9])], [3, 4, 5]),
        ([([5, 6], [7])], [3, 4, 5]),
    ):
        response_log_probs(ready, batch_of(rows), options=SHARE)
        assert compared == seen


def test_the_self_check_sees_a_wrong_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that do not see the nodes above them, in every layer."""
    attention = adapter.packed_attention
    monkeypatch.setattr(adapter, "packed_attention", lambda *given, tree, **more: attention(*given, **more))
    model, _ = pair(qwen3)
    refused("log-probs of Qwen3ForCausalLM are off by", replayable(model))


class Shifted(torch.autograd.Function):
    """Its input. The gradient of a token becomes that of the next one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        return slopes[0].roll(1, 0)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("wrong", [0, 1, 2, None], ids=["queries", "keys", "values", "none"])
def test_the_self_check_sees_gradients_of_attention(
    wrong: int | None, share: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs are right. Nothing reaches the parameters, nor their hooks."""
    attend = attention._RUN["rows"]

    def attended(*given: Any) -> Tensor:
        return attend(*(cast("Any", Shifted).apply(x) if at == wrong else x for at, x in enumerate(given)))

    monkeypatch.setitem(attention._RUN, "rows", attended)
    model, _ = pair(qwen3)
    reached: list[Tensor] = []
    for weight in model.parameters():
        weight.register_hook(reached.append)
    ready, batch = replayable(model), batch_of(ROWS["groups"])
    with torch.no_grad():
        response_log_probs(ready, batch, options=ReplayOptions(share_prefixes=share, min_shared=1))
    if wrong is None:
        response_log_probs(ready, batch, options=ReplayOptions(share_prefixes=share, min_shared=1))
    else:
        with pytest.raises(ReplayError, match="gradients of packed attention in Qwen3ForCausalLM are off by"):
            response_log_probs(ready, batch, options=ReplayOptions(share_prefixes=share, min_shared=1))
    assert not reached
    assert all(weight.grad is None for weight in model.parameters())


def test_the_self_check_sees_gradients_of_shared_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = prefix_attention._Gathered.backward
    shifted = staticmethod(lambda ctx, *slopes: (gathered(ctx, slopes[0].roll(1, 0))[0], None, None))
    monkeypatch.setattr(prefix_attention._Gathered, "backward", shifted)
    model, _ = pair(qwen3)
    response_log_probs(replayable(model), batch_of(ROWS["groups"]))
    refused("gradients of packed attention in Qwen3ForCausalLM are off by", replayable(model))


def test_a_tree_of_other_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-check does not see it: it compares the tokens of the tree."""
    model, _ = pair(qwen3)
    rows = [([5, 6, 7], [8, 9, 10]), ([5, 6, 7], [11, 9, 10])]
    order = native.order_prefixes

    def one_more(*given: Any) -> tuple[Any, Any]:
        rows_of, shared = order(*given)
        return rows_of, shared + (shared > 0)

    monkeypatch.setattr(native, "order_prefixes", one_more)
    with pytest.raises(ReplayError, match="rows have other tokens or positions than their prefix tree"):
        response_log_probs(replayable(model), batch_of(rows), options=SHARE)


def test_wrong_positions_give_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = pair(qwen3)
    of = PackedInputs.of.__func__

    def begun_anew(cls: Any, *given: Any, **more: Any) -> Any:
        inputs = of(cls, *given, **more)
        starts = torch.from_numpy(np.repeat(inputs.tree.nodes.depths, inputs.tree.nodes.counts))
        inputs.position_ids.sub_(starts)
        return inputs

    monkeypatch.setattr(PackedInputs, "of", classmethod(begun_anew))
    # it compares with these positions, so that a row alone is as wrong: numbers differ from those of rows alone
    seen = response_log_probs(replayable(model), batch_of(ROWS["groups"]), self_check=False, options=SHARE)
    _, plain = pair(qwen3)
    assert off(seen, truth_of(plain, ROWS["groups"])) > 1e-2
