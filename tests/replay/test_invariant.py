"""replayable(invariant=True): the same bits of a row in every packing, on the CPU; and parts that cannot keep them,
which are refused by name."""

from __future__ import annotations

import itertools
import os
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from needs import needs
from samples import padded
from tensordict import TensorDict
from torch import Tensor, nn

from maskpack.errors import ReplayError
from maskpack.ops import attention, packed_log_probs
from maskpack.replay import PackedInputs, ReplayOptions, response_log_probs, response_values

tf = needs("transformers")
import work_replay
from ranks import run_ranks, values
from rows_alone import alone, checkpoint, close_gradients, gpt2, gradients
from tiny_models import TINY, VOCABULARY, gemma3, llama, mixtral, pair, qwen3, qwen25_vl

from maskpack.adapters.transformers import invariant
from maskpack.adapters.transformers import model as adapter

replayable = adapter.replayable

SHARE = ReplayOptions(share_prefixes=True, min_shared=1)
FULL = os.environ.get("HYPOTHESIS_PROFILE") == "full"
PACKINGS = 16 if FULL else 5
"""Of each case: all rows in one micro-batch, in as many as may be, and random packings, other ones in each case."""
DTYPES = {torch.float32: torch.int32, torch.float64: torch.int64}


def qwen3_moe(experts: str = "batched_mm", **more: Any) -> Any:
    sizes = {"head_dim": 8, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    config = tf.Qwen3MoeConfig(**TINY | sizes | more)
    config._experts_implementation = experts
    return tf.Qwen3MoeForCausalLM(config)


def gemma2(**more: Any) -> Any:
    """With soft caps, and layers whose window is shorter than most rows."""
    more = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 9.0, "sliding_window": 20} | more
    return tf.Gemma2ForCausalLM(tf.Gemma2Config(**TINY | {"head_dim": 8} | more, attn_implementation="eager"))


def qwen35(**more: Any) -> Any:
    delta = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    kinds = {"linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "head_dim": 8}
    return tf.Qwen3_5ForCausalLM(tf.Qwen3_5TextConfig(**TINY | delta | kinds | more))


MODELS = {make.__name__: make for make in (qwen3, llama, gemma3, qwen3_moe)}


# -------------------------------------------------------------------- rows


def batch_of(rows: list[list[int]]) -> TensorDict:
    """All tokens but the first of a row are its response."""
    ids, mask = padded(rows), padded([[1] * len(row) for row in rows])
    fields = {"input_ids": ids, "attention_mask": mask, "responses": ids[:, 1:], "response_mask": mask[:, 1:]}
    return TensorDict(fields, [len(rows)])


def rows_of(rng: np.random.Generator, count: int = 24) -> list[list[int]]:
    return [rng.integers(3, VOCABULARY, length).tolist() for length in rng.integers(2, 101, count)]


def trees_of(rng: np.random.Generator) -> list[list[int]]:
    """Four trees of six rows, which part at several levels."""
    rows: list[list[int]] = []
    for _ in range(4):
        trunk = rng.integers(3, VOCABULARY, 70).tolist()
        rows += [
            trunk[:at] + rng.integers(3, VOCABULARY, rng.integers(1, 30)).tolist() for at in (9, 9, 33, 33, 64, 70)
        ]
    return rows


def packings(rng: np.random.Generator, rows: int, count: int) -> Iterator[list[list[int]]]:
    """All rows in another order, in one to twelve micro-batches; first in one, then in about twelve."""
    for number in range(count):
        cuts = np.sort(rng.integers(1, rows, (0, 11)[number] if number < 2 else rng.integers(0, 12)))
        yield [part.tolist() for part in np.split(rng.permutation(rows), cuts) if len(part)]


def bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(DTYPES[x.dtype])


def differing(replay: Any, rows: list[list[int]], count: int, seed: int = 5, **options: Any) -> int:
    """Log-probs of which a bit differs in some packing from those of the row alone, without shared prefixes."""
    batch, rng = batch_of(rows), np.random.default_rng(seed)
    truth = [bits(response_log_probs(replay, batch[b : b + 1]).values()) for b in range(len(rows))]
    assert sum(map(len, truth)) == sum(map(len, rows)) - len(rows)
    off = 0
    for packing in packings(rng, len(rows), count):
        for part in packing:
            seen = response_log_probs(replay, batch[part], **options).unbind()
            off += sum(int((bits(x) != truth[row]).sum()) for row, x in zip(part, seen, strict=True))
    return off


CASES = {
    f"{name}-{dtype}-{'gradients' if gradients else 'no gradients'}-{'shared' if shares else 'whole'}": (
        *(MODELS[name], dtype, gradients, shares),
    )
    for (at, name), (wide, dtype), gradients, shares in itertools.product(
        enumerate(MODELS), enumerate(DTYPES), (False, True), (False, True)
    )
    if FULL or (at + wide + gradients + shares) % 2 == 0
}
"""Of each model every pair of options, and all three in every other model."""


@pytest.mark.parametrize(("make", "dtype", "with_gradients", "shares"), CASES.values(), ids=CASES)
def test_no_bit_differs(
    make: Callable[..., Any], dtype: torch.dtype, with_gradients: bool, shares: bool, request: pytest.FixtureRequest
) -> None:
    model, _ = pair(make, dtype)
    seed = zlib.crc32(request.node.name.encode())
    rng = np.random.default_rng(3)
    options = {"options": SHARE} if shares else {}
    rows = trees_of(rng) if shares else rows_of(rng)
    with torch.set_grad_enabled(with_gradients):
        assert differing(replayable(model, invariant=True), rows, PACKINGS, seed, **options) == 0


def test_soft_caps_and_windows() -> None:
    replay, rng = replayable(pair(gemma2)[0], invariant=True), np.random.default_rng(3)
    assert differing(replay, rows_of(rng), 5) == 0
    assert differing(replay, trees_of(rng), 5, options=SHARE) == 0


@torch.no_grad()
def test_bits_do_differ_without_it() -> None:
    """Else the tests above would prove nothing. Which rows differ depends on the processor: on one only those of three
    tokens, on another only longer ones."""
    rng = np.random.default_rng(3)
    short = [rng.integers(1, 97, 3).tolist() for _ in range(8)]
    assert differing(replayable(pair(qwen3)[0]), short + rows_of(rng), 5) > 0
    assert differing(replayable(pair(qwen3)[0]), trees_of(rng), 5, options=SHARE) > 0


@torch.no_grad()
def test_bits_with_gradients_are_those_without() -> None:
    replay, batch = replayable(pair(qwen3)[0], invariant=True), batch_of(rows_of(np.random.default_rng(1)))
    without = response_log_probs(replay, batch)
    with torch.enable_grad():
        assert torch.equal(
            bits(response_log_probs(replay, batch[[3, 1]]).values()), bits(torch.cat([without[3], without[1]]))
        )


@torch.no_grad()
def test_values_and_entropies() -> None:
    replay, batch = replayable(pair(qwen3)[0], invariant=True), batch_of(rows_of(np.random.default_rng(1)))
    head = nn.Linear(32, 1)
    values, (_, entropies) = response_values(replay, batch, head), response_log_probs(replay, batch, entropy=True)
    for row in (0, 5, 11):
        part = batch[row : row + 1]
        assert torch.equal(bits(response_values(replay, part, head)[0]), bits(values[row]))
        assert torch.equal(bits(response_log_probs(replay, part, entropy=True)[1][0]), bits(entropies[row]))


@pytest.mark.parametrize("shares", [False, True], ids=["whole", "shared"])
@pytest.mark.parametrize("make", [qwen3, gemma3], ids=["qwen3", "gemma3"])
def test_log_probs_and_gradients_are_right(make: Callable[..., Any], shares: bool) -> None:
    """Tokens of the tail leak nowhere, neither into results nor into gradients. In another run, no bit differs."""
    model, plain = pair(make)
    batch = batch_of(trees_of(np.random.default_rng(2))[:9])
    replay, options = replayable(model, invariant=True), SHARE if shares else ReplayOptions()
    seen = response_log_probs(replay, batch, options=options).values()
    truth = torch.cat([logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]] for logits, ids, _ in alone(plain, batch)])
    assert float((seen - truth).detach().abs().max()) < 5e-6
    own, wanted = gradients(model, seen), gradients(plain, truth)
    for got, want in zip(own, wanted, strict=True):
        assert float((got - want).norm()) <= 2e-5 * float(want.norm()) + 1e-9
    again = gradients(model, response_log_probs(replay, batch, options=options).values())
    assert all(torch.equal(*both) for both in zip(own, again, strict=True))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # the self-check's
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    model, _ = pair(qwen3)
    batch = batch_of(trees_of(np.random.default_rng(2))[:6])
    whole = gradients(model, response_log_probs(replayable(model, invariant=True), batch, options=SHARE).values())
    checkpoint(model, reentrant)
    model.enable_input_require_grads()
    model.train()
    seen = gradients(model, response_log_probs(replayable(model, invariant=True), batch, options=SHARE).values())
    close_gradients(seen, whole)


@torch.no_grad()
def test_models_whose_rows_are_short_or_have_places_of_images() -> None:
    """Positions of the tail and rows of the probe stay within the limits of the model, ids of the probe are text."""
    rows = [row[:40] for row in rows_of(np.random.default_rng(3), 8)]
    assert differing(replayable(pair(gpt2)[0], invariant=True), rows, 5) == 0
    model, _ = pair(qwen25_vl)
    model.config.image_token_id, model.config.video_token_id = 1, 2
    assert differing(replayable(model, invariant=True), rows, 5) == 0


def test_the_tail() -> None:
    inputs = PackedInputs.of(batch_of([[5, 6, 7], [8, 9]]), options=ReplayOptions(multiple_of=4))
    longer = inputs.with_tail(12)
    assert longer.input_ids.tolist() == [[5, 6, 7, 8, 9] + [0] * 7]
    assert longer.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 0, 1, 2, 0]]
    assert longer.cu_seqlens.tolist() == [0, 3, 5, 12]
    assert longer.max_seqlen == 7
    assert inputs.with_tail(5).cu_seqlens.tolist() == [0, 3, 5]
    with pytest.raises(ReplayError, match=r"PackedInputs\.with_tail: total is 4; expected a whole number from 5"):
        inputs.with_tail(4)


# -------------------------------------------------------------------- refusals


class MeanNorm(nn.Module):
    """A norm that looks at all tokens of a pass."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean((0, 1), keepdim=True) * 1e-3


class WideLinear(nn.Linear):
    """A product that is another one from `most` tokens on."""

    most = 400

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out * (1 + 2**-20) if x.shape[-2] >= self.most else out


def refused(replay: Any, part: str, rows: list[list[int]] | None = None, **options: Any) -> None:
    with pytest.raises(ReplayError, match=f"invariant=True, but bits of {re.escape(part)} of .*; expected the same"):
        response_log_probs(replay, batch_of(rows or [[5, 6, 7], [8, 9]]), self_check=False, **options)


def test_a_norm_over_all_tokens_is_refused() -> None:
    model, _ = pair(qwen3)
    model.model.layers[1].post_attention_layernorm = MeanNorm()
    for _ in range(2):  # it stays refused
        refused(replayable(model, invariant=True), "model.layers.1.post_attention_layernorm (MeanNorm)")


def test_a_difference_that_a_later_part_rounds_away_is_refused() -> None:
    model, _ = pair(qwen3, torch.float64)
    model.model.layers[0].mlp.up_proj.__class__ = WideLinear
    model.model.layers[0].mlp.register_forward_hook(lambda _part, _args, out: out.to(torch.bfloat16).double())
    refused(replayable(model, invariant=True), "model.layers.0.mlp.up_proj (WideLinear)")


def test_a_product_that_is_another_one_at_a_later_size_is_refused() -> None:
    """The probe has fewer than 600 tokens here."""
    model, _ = pair(qwen3)
    model.model.layers[0].mlp.up_proj.__class__ = WideLinear
    model.model.layers[0].mlp.up_proj.most = 4_000
    replay, rows = replayable(model, invariant=True), [[5, 6, 7] * 30] * 50
    response_log_probs(replay, batch_of(rows[:40]))
    said = (
        "bits of model.layers.0.mlp.up_proj (WideLinear) of Qwen3ForCausalLM differ between 4544 tokens and 128 of them"
    )
    for _ in range(2):
        with pytest.raises(ReplayError, match=re.escape(said)):
            response_log_probs(replay, batch_of(rows))


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_products_of_experts_with_few_tokens_are_refused(experts: str) -> None:
    """A product for each expert, with as many tokens as chose it."""
    model, _ = pair(qwen3_moe, experts=experts)
    part = "model.layers.0.mlp.experts (Qwen3MoeExperts)"
    replay = replayable(model, invariant=True)
    refused(replay, part)
    with pytest.raises(
        ReplayError, match=re.escape('set_experts_implementation("batched_mm"), or leave invariant out')
    ):
        response_log_probs(replay, batch_of([[5, 6, 7]]))


def test_layers_that_carry_state_are_refused() -> None:
    """They run on groups of rows, whose sizes depend on the packing."""
    replay = replayable(pair(qwen35)[0], invariant=True)
    for options in ({}, {"options": SHARE}):
        with pytest.raises(ReplayError, match="Qwen3_5GatedDeltaNet: invariant=True, but it runs by groups of padded"):
            response_log_probs(replay, batch_of([[5, 6, 7], [8, 9]]), self_check=False, **options)


def test_without_a_tail_products_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of one token, or in float64 an odd number, runs other kernels."""
    monkeypatch.setattr(invariant.Sizes, "of", lambda *_: invariant.Sizes(1, 1))
    refused(replayable(pair(qwen3)[0], invariant=True), "model.layers.0.self_attn.q_proj (Linear)")


def test_attention_by_whole_rows_is_refused_over_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_row_by_blocks", attention._row)
    replay = replayable(pair(qwen3)[0], invariant=True)
    refused(replay, "model.layers.0.self_attn (Qwen3Attention)", [[5, 6, 7], [5, 6, 8]], options=SHARE)


def test_a_head_whose_bits_depend_on_the_packing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def scored(rows: Tensor, *given: Any, **more: Any) -> Tensor:
        return packed_log_probs(rows, *given, **more) * (1 if rows.shape[0] <= 128 else 1 + 2**-20)

    monkeypatch.setattr(adapter, "packed_log_probs", scored)
    with pytest.raises(ReplayError, match=r"bits of the output layer of Qwen3ForCausalLM .* log-probs of a row"):
        response_log_probs(replayable(pair(qwen3)[0], invariant=True), batch_of([[5, 6, 7]]))


def test_what_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ReplayError, match="replayable: invariant is 'yes'; expected True or False"):
        replayable(pair(qwen3)[0], invariant="yes")
    batch = batch_of([[5, 6, 7]])
    dropping = pair(gpt2, resid_pdrop=0.1)[0].train()
    with pytest.raises(ReplayError, match="has dropout"):
        response_log_probs(replayable(dropping, invariant=True), batch)
    monkeypatch.setenv("MASKPACK_PACKED_REPLAY", "0")
    with pytest.raises(ReplayError, match="invariant=True with MASKPACK_PACKED_REPLAY=0; expected packed rows"):
        response_log_probs(replayable(pair(qwen3)[0], invariant=True), batch)


# -------------------------------------------------------------------- the probe


def test_the_probe_runs_once_for_each_path_and_leaves_no_trace() -> None:
    model, _ = pair(mixtral)
    model.config._experts_implementation = "batched_mm"
    model.register_buffer("seen", torch.zeros(1))
    passes: list[int] = []

    def counting(part: Any, _args: Any, kwargs: Any) -> None:
        passes.append(kwargs["input_ids"].shape[1])
        model.seen += 1
        torch.rand(1)

    model.model.register_forward_pre_hook(counting, with_kwargs=True)
    replay, batch = replayable(model, invariant=True), batch_of(trees_of(np.random.default_rng(1)))
    hooks = [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules()]
    tensors = [x.clone() for x in model.parameters()]
    torch.manual_seed(7)
    with torch.no_grad():
        response_log_probs(replay, batch, self_check=False)
    state = torch.get_rng_state()
    assert len(passes) > 6
    assert model.seen == 1
    torch.manual_seed(7)
    torch.rand(1)  # of the one pass of the batch
    assert torch.equal(state, torch.get_rng_state())
    assert hooks == [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules()]
    for options, more in ((ReplayOptions(), 1), (SHARE, 2), (SHARE, 1)):
        before = len(passes)
        with torch.no_grad():
            response_log_probs(replay, batch, self_check=False, options=options)
        assert (len(passes) - before == 1) == (more == 1)
    before = len(passes)
    response_log_probs(replay, batch, self_check=False)
    assert len(passes) > before + 1  # with gradients
    assert all(weight.grad is None for weight in model.parameters())
    assert all(torch.equal(*both) for both in zip(tensors, model.parameters(), strict=True))
    assert set(passes) <= {count for count in passes if count % 64 == 0 and count >= 128}


def test_ranks_of_a_sharded_model_probe_together() -> None:
    for seen in values(run_ranks(work_replay.sharded_bits, 2)):
        assert seen["differing"] == 0
        assert all("invariant=True, but bits of" in said for said in seen["refused"])
        assert seen["context"].startswith("replayable: invariant=True with context_group; expected all tokens of a row")
