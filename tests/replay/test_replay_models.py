"""response_log_probs over tiny models of transformers, against each row alone in the same model with its own attention;
and everything that must raise instead of giving other numbers."""

from __future__ import annotations

import copy
import functools
import importlib
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from needs import needs
from tensordict import TensorDict
from torch import Tensor

from maskpack.errors import ReplayError
from maskpack.planning import plan_ranks
from maskpack.replay import PackedInputs, ReplayOptions, response_log_probs, response_values

tf = needs("transformers")
from rows_alone import (
    LIMIT,
    PATH,
    ROWS,
    all_models,
    alone,
    batch_of,
    check,
    checkpoint,
    close_gradients,
    for_model,
    gpt2,
    gradients,
    off,
    refused,
    replayable,
    truth_of,
)
from tiny_models import SLIDING, TINY, VOCABULARY, gemma3, llama, pair, qwen3, qwen25_vl
from work_rows import merged_rows

from maskpack.adapters.transformers import model as adapter


@all_models
def test_log_probs_and_gradients_are_those_of_each_row_alone(make: Any) -> None:
    model, plain = pair(make)
    seen, truth = check(replayable(model), plain, for_model(make))
    assert [len(row) for row in seen.unbind()] == [r for _, r in ROWS]
    assert truth.min().item() < -3


@all_models
def test_temperature_entropy_and_a_tail(make: Any) -> None:
    model, plain = pair(make)
    options = {"temperature": 0.6, "entropy": True, "options": ReplayOptions(multiple_of=64)}
    check(replayable(model), plain, for_model(make, seed=1), **options)


def test_sections_of_positions_matter() -> None:
    """The same text with other positions is another text to M-RoPE; three sections and four say the same."""
    model, plain = pair(qwen25_vl)
    three, four, text = (batch_of(ids=ids) for ids in ("mrope3", "mrope4", "edge"))
    ready = replayable(model)
    seen = [response_log_probs(ready, batch, self_check=True) for batch in (three, four, text)]
    assert torch.equal(seen[0].values(), seen[1].values())
    assert off(seen[2], seen[0].values()) > 0.01
    assert off(seen[2], truth_of(plain, text)[0]) <= LIMIT


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # the self-check's
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("make", [qwen3, gemma3, gpt2], ids=["qwen3", "gemma3", "gpt2"])
def test_gradient_checkpointing_in_train_mode(make: Any, reentrant: bool) -> None:
    """The backward pass runs layers again, and their attention is told the bounds again. The self-check of the forward
    pass, which gives the model its own attention for a moment, is over by then."""
    model, plain = pair(make)
    model.train()
    checkpoint(model, reentrant)
    check(replayable(model), plain, batch_of(), self_check=True)


def test_the_cache_of_the_configuration_is_not_used() -> None:
    model, plain = pair(llama, use_cache=True)
    batch = batch_of()
    ready = replayable(model)
    for _ in range(2):
        assert off(response_log_probs(ready, batch, self_check=True), truth_of(plain, batch)[0]) <= LIMIT
    assert model.config.use_cache


@all_models
def test_without_packing_the_numbers_are_the_same(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASKPACK_PACKED_REPLAY", "0")
    model, plain = pair(make)
    own = model.config._attn_implementation
    monkeypatch.setattr(adapter, "packed_attention", None)  # nobody calls it
    check(replayable(model), plain, for_model(make), options=ReplayOptions(multiple_of=64))
    assert model.config._attn_implementation == own


@all_models
@pytest.mark.parametrize(
    "rows",
    [[(1, 1)], [(1, 0), (1, 1), (0, 0), (1, 0)], [(6, 9)], [(2, 0), (3, 0)], [(0, 0), (0, 0)], []],
    ids=["two tokens", "lengths 0 and 1", "one row", "no responses", "no tokens", "no rows"],
)
def test_small_batches(make: Any, rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = pair(make)
    batch = for_model(make, rows)
    for packing in ("1", "0"):
        monkeypatch.setenv("MASKPACK_PACKED_REPLAY", packing)
        seen = response_log_probs(replayable(model), batch)
        assert seen.size(0) == len(rows)
        assert off(seen, truth_of(plain, batch)[0]) <= LIMIT
        seen.values().sum().backward()


def test_ranks_without_rows_add_nothing_to_the_gradients() -> None:
    """Two rows on four ranks, each of which runs the model."""
    model, plain = pair(qwen3)
    batch, ready = batch_of(((2, 3), (4, 7))), replayable(model)
    plans = plan_ranks([5, 11], 4, 99, loss_tokens=[3, 7])
    summed = [torch.zeros_like(weight) for weight in model.parameters()]
    for rows, plan in zip(plans.rows, plans.plans, strict=True):
        part = batch[torch.tensor(rows, dtype=torch.int64)]
        assert response_log_probs(ready, part, plan=plan).size(0) == len(rows)
        (log_probs,) = [response_log_probs(ready, own) for own in plan.apply(part)]
        (weights,) = plan.loss_weights("token-mean", gradients="sum")
        model.zero_grad()
        of_tokens = torch.from_numpy(weights).float().repeat_interleave(log_probs.offsets().diff())
        (of_tokens * log_probs.values()).sum().backward()
        summed = [total + weight.grad for total, weight in zip(summed, model.parameters(), strict=True)]
    truth_of(plain, batch)[0].mean().backward()
    close_gradients(summed, [weight.grad for weight in plain.parameters()])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_pass_the_self_check(dtype: torch.dtype) -> None:
    model, plain = pair(qwen3, dtype)
    batch = batch_of()
    ready = replayable(model)
    seen = response_log_probs(ready, batch, self_check=True)
    assert seen.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert off(seen.float(), truth_of(plain, batch)[0]) <= {torch.float64: LIMIT}.get(dtype, 0.2)
    assert ready._checked == {(dtype, *PATH): adapter.LATER}


def test_an_own_attention_in_float32_passes_in_float64() -> None:
    """The eager attention of transformers computes its softmax in float32."""
    model, plain = pair(qwen3, torch.float64, attn_implementation="eager")
    seen = response_log_probs(replayable(model), batch_of(), self_check=True)
    assert off(seen, truth_of(plain, batch_of())[0].double()) <= LIMIT


def test_autocast_passes_the_self_check() -> None:
    """Hidden states are float32, and as precise as bfloat16; queries and keys are wider than values."""
    model, plain = pair(llama)
    batch, ready = batch_of(), replayable(model)
    with torch.autocast("cpu", torch.bfloat16):
        seen = response_log_probs(ready, batch, self_check=True)
        truth, _ = truth_of(plain, batch)
    assert 1e-4 < off(seen, truth_of(plain, batch)[0]) < 0.2
    assert off(seen, truth) < 0.2
    assert ready._checked == {(torch.bfloat16, *PATH): adapter.LATER}


# -------------------------------------------------------------------- it raises instead


def packed_call(model: Any, **more: Any) -> Any:
    """The model itself on packed ids, with everything that it needs unless `more` says otherwise."""
    inputs = PackedInputs.of(batch_of())
    given_to = {
        "input_ids": inputs.input_ids,
        "position_ids": inputs.position_ids,
        "use_cache": False,
        "cu_seq_lens_q": inputs.cu_seqlens,
        "max_length_q": inputs.max_seqlen,
    }
    return model(**{name: value for name, value in (given_to | more).items() if value is not None})


@all_models
def test_without_bounds_the_attention_raises(make: Any) -> None:
    model, _ = pair(make)
    replayable(model)
    for missing in ("cu_seq_lens_q", "max_length_q"):
        with pytest.raises(ReplayError, match="did not receive cu_seq_lens_q and max_length_q; expected the bounds"):
            packed_call(model, **{missing: None})
    with pytest.raises(ReplayError, match="did not receive"):
        model(input_ids=torch.ones(1, 3, dtype=torch.long))


def test_everything_else_that_it_would_have_to_guess_raises() -> None:
    model, _ = pair(llama)
    replayable(model)
    total = sum(map(sum, ROWS))
    assert packed_call(model).logits.shape == (1, total, VOCABULARY)
    some, two_rows = torch.zeros(4), torch.arange(total).expand(2, total)
    for message, wrong in {
        "packed attention with s_aux; expected causal attention": {"s_aux": some},
        "with block_indices, indices; expected causal attention": {"indices": some, "block_indices": some},
        "with attention that is not causal; expected": {"is_causal": False},
        "2 batch rows": {"input_ids": two_rows * 0 + 1, "position_ids": two_rows},
        "cu_seqlens run from": {"cu_seq_lens_q": torch.tensor([0, 3], dtype=torch.int32)},
    }.items():
        with pytest.raises(ReplayError, match=message):
            packed_call(model, **wrong)


@pytest.mark.parametrize("shape", [(1, 40), (1, 1, 40, 40)])
@pytest.mark.parametrize("fill", [torch.ones, torch.zeros])
def test_a_mask_raises(fill: Any, shape: tuple[int, ...]) -> None:
    """transformers would drop a 2-D mask on the way to an attention that it does not know."""
    model, _ = pair(llama)
    ready = replayable(model)
    for call in (packed_call, lambda model, **more: packed_call(model.model, **more)):
        with pytest.raises(ReplayError, match="LlamaModel: packed attention received an attention_mask; expected bou"):
            call(model, attention_mask=fill(*shape))
    own = ready.release()
    assert own(input_ids=torch.ones(1, 40, dtype=torch.long), attention_mask=torch.ones(1, 40)).logits.shape[1] == 40


def test_models_that_share_a_configuration_share_its_attention() -> None:
    config = tf.LlamaConfig(**TINY)
    config._attn_implementation = "eager"
    first, second = (tf.LlamaForCausalLM(config).eval() for _ in range(2))
    ready = [replayable(model) for model in (first, second)]
    for one in ready:
        response_log_probs(one, batch_of(), self_check=True)
    assert ready[1].release().config._attn_implementation == "eager"


def test_compiled_models_are_unwrapped() -> None:
    model, plain = pair(llama)
    seen = response_log_probs(replayable(torch.compile(model, backend="eager")), batch_of(), self_check=True)
    assert off(seen, truth_of(plain, batch_of())[0]) <= LIMIT


class More(torch.nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


MORE: dict[str, Callable[[Any], Any]] = {
    "a hook": lambda layer: layer.register_forward_hook(lambda *given: given[2] * 2),
    "a hook before": lambda layer: layer.register_forward_pre_hook(lambda *given: (given[1][0] * 2,)),
    # as libraries that move layers between devices do
    "a forward": lambda layer: setattr(layer, "forward", lambda x, own=layer.forward: 2 * own(x)),
    "a class": lambda layer: setattr(layer, "__class__", More),
}


@pytest.mark.parametrize("change", MORE.values(), ids=MORE)
def test_an_output_layer_that_is_more_than_a_weight_raises(change: Any) -> None:
    """Also one that came after the model passed its self-check."""
    model, _ = pair(llama)
    ready = replayable(model)
    response_log_probs(ready, batch_of())
    change(model.lm_head)
    refused(ready, r"layer of LlamaForCausalLM is a .*(Linear|More), or has hooks; expected tor")


def phi3_long() -> Any:
    turns = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [8.0] * 4, "rope_theta": 1e4}
    turns |= {"original_max_position_embeddings": 8}
    return tf.Phi3ForCausalLM(tf.Phi3Config(**TINY | {"rope_parameters": turns, "original_max_position_embeddings": 8}))


def llama_dynamic() -> Any:
    turns = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    return llama(rope_parameters=turns, max_position_embeddings=8)


@pytest.fixture(params=[phi3_long, llama_dynamic])
def rotary(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    return request.param().eval()


@pytest.fixture(params=["0", "1"])
def packing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MASKPACK_PACKED_REPLAY", request.param)
    return request.param


def test_rotary_positions_that_depend_on_the_longest_row_raise(rotary: Any, packing: str) -> None:
    plain = copy.deepcopy(rotary)
    ready = replayable(rotary)
    short = batch_of(((2, 3), (4, 4), (1, 2)))
    assert off(response_log_probs(ready, short, self_check=True), truth_of(plain, short)[0]) <= LIMIT
    refused(ready, r"change for all rows where one is longer than 8 tokens; a row, .* has 15")
    moved = short.clone().set("position_ids", (short["attention_mask"].cumsum(1) - 1).clamp(min=0) + 3)
    refused(ready, r"change for all rows where one is longer than 8 tokens; a row, .* has 11", moved)
    if packing == "1":
        refused(ready, "or the tail of multiple_of, has 48", short, options=ReplayOptions(multiple_of=64))


def test_rotary_positions_do_not_remember_a_longer_pass(rotary: Any, packing: str) -> None:
    """The longest row has exactly the limit, at which transformers keeps the frequencies of an evaluation before."""
    for rows in (((1, 1), (2, 3), (4, 4)), ((4, 4), (2, 3))):
        batch = batch_of(rows)
        truth = torch.cat([truth_of(copy.deepcopy(rotary), batch[b : b + 1])[0] for b in range(len(rows))])
        longer = copy.deepcopy(rotary)
        longer(input_ids=torch.randint(3, VOCABULARY, (1, 20)))
        for self_check in (False, True):
            seen = response_log_probs(replayable(longer), batch, self_check=self_check)
            assert off(seen, truth) <= LIMIT


def test_a_model_without_weights_is_named() -> None:
    with torch.device("meta"):
        model = llama()
    refused(replayable(model), "the weights of LlamaForCausalLM are on the meta device; expected weights")


def test_an_encoder_and_a_decoder_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = tf.BartConfig(vocab_size=VOCABULARY, d_model=32, encoder_ffn_dim=32, decoder_ffn_dim=32, **sizes)
    for packing in "01":
        monkeypatch.setenv("MASKPACK_PACKED_REPLAY", packing)
        with pytest.raises(ReplayError, match="BartForConditionalGeneration has an encoder and a decoder"):
            replayable(tf.BartForConditionalGeneration(config))


def test_the_padded_path_has_its_self_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASKPACK_PACKED_REPLAY", "0")
    model, plain = pair(llama)
    ready = replayable(model)
    forward = model.forward
    model.forward = lambda *ids, **given_to: _halved(forward(*ids, **given_to))
    refused(ready, r"padded log-probs of LlamaForCausalLM are off by .* Use its own forward")
    model.forward = forward
    assert off(response_log_probs(ready, batch_of()), truth_of(plain, batch_of())[0]) <= LIMIT


def _halved(out: Any) -> Any:
    out.logits = out.logits / 2
    return out


def test_a_mask_that_comes_to_a_layer_raises() -> None:
    model, _ = pair(llama)
    replayable(model)
    layer, states = model.model.layers[0].self_attn, torch.zeros(1, 5, 32)
    bounds = {"cu_seq_lens_q": torch.tensor([0, 5], dtype=torch.int32), "max_length_q": 5}
    places = torch.arange(5)[None]
    turns = model.model.rotary_emb(states, places)
    assert layer(states, position_embeddings=turns, attention_mask=None, **bounds)[0].shape == (1, 5, 32)
    with pytest.raises(ReplayError, match="LlamaAttention: packed attention with a mask; expected causal attention"):
        layer(states, position_embeddings=turns, attention_mask=torch.zeros(1, 1, 5, 5), **bounds)


@pytest.mark.parametrize("call", [response_log_probs, lambda *given: response_values(*given, torch.nn.Linear(32, 1))])
def test_a_model_that_was_not_made_replayable_is_named(call: Any) -> None:
    model, _ = pair(llama)
    with pytest.raises(ReplayError, match=r"model is a LlamaForCausalLM; expected a ReplayModel. Pass what maskpack"):
        call(model, batch_of())
    with pytest.raises(ReplayError, match="replayable: got a Replayable; expected a model of transformers"):
        replayable(replayable(model))


def test_a_cache_with_tokens_raises() -> None:
    model, plain = pair(llama)
    cache = plain(input_ids=torch.ones(1, 3, dtype=torch.long), use_cache=True).past_key_values
    replayable(model)
    total = sum(map(sum, ROWS))
    with pytest.raises(ReplayError, match=f"{total + 3} keys for {total} queries; expected as many: a cache was in"):
        packed_call(model, use_cache=True, past_key_values=cache)


def test_dropout_raises_in_train_mode() -> None:
    model, plain = pair(llama, attention_dropout=0.1)
    ready = replayable(model)
    assert off(response_log_probs(ready, batch_of()), truth_of(plain, batch_of())[0]) <= LIMIT
    model.train()
    refused(ready, r"dropout 0\.1")


def test_an_attention_that_is_not_causal_raises() -> None:
    model, _ = pair(llama)
    ready = replayable(model)
    model.model.layers[1].self_attn.is_causal = False
    refused(ready, "LlamaAttention: packed attention with attention that is not causal")


def test_sinks_raise() -> None:
    model = tf.GptOssForCausalLM(tf.GptOssConfig(**TINY, head_dim=8, num_local_experts=2)).eval()
    refused(replayable(model), "GptOssAttention: packed attention with s_aux; ")


def qwen2_moe(**more: Any) -> Any:
    sizes = {
        "num_experts": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "max_window_layers": 2,
    }
    sizes["num_experts_per_tok"] = 1
    return tf.Qwen2MoeForCausalLM(tf.Qwen2MoeConfig(**TINY | sizes | more))


def test_a_window_that_the_attention_is_not_told_raises() -> None:
    """Qwen2-MoE puts it into its masks only."""
    batch = batch_of()
    model, _ = pair(qwen2_moe, use_sliding_window=True, sliding_window=5)
    assert set(model.config.layer_types) == {"sliding_attention", "full_attention"}
    refused(replayable(model), r"Qwen2MoeAttention: the layer has a window of 5 tokens .* a row has 15", batch)
    for options in ({"use_sliding_window": True, "sliding_window": 15}, {}):
        model, plain = pair(qwen2_moe, **options)
        assert off(response_log_probs(replayable(model), batch), truth_of(plain, batch)[0]) <= LIMIT


# -------------------------------------------------------------------- values


def critic(**more: Any) -> Any:
    """One number for each token, from a layer with a bias."""
    return tf.Qwen3ForTokenClassification(tf.Qwen3Config(**TINY | {"head_dim": 8, "num_labels": 1} | more))


def bare(**more: Any) -> Any:
    return tf.Gemma3TextModel(tf.Gemma3TextConfig(**TINY | {"head_dim": 8} | SLIDING | more))


def critic_truth(model: Any, batch: TensorDict) -> Tensor:
    """Values of all response tokens, row after row: what the model says at the token before."""
    out = [logits[nth - 1] for logits, _, responses in alone(model, batch) for nth in responses]
    return torch.cat(out)


@pytest.mark.parametrize("side", ["both", "left"])
def test_values_of_a_critic_and_their_gradients(side: str) -> None:
    model, plain = pair(critic)
    batch = batch_of(side=side)
    seen = response_values(
        replayable(model), batch, model.score, self_check=True, options=ReplayOptions(multiple_of=32)
    )
    truth = critic_truth(plain, batch)
    assert truth.std().item() > 0.1
    assert off(seen, truth) <= LIMIT * truth.abs().max().item()
    close_gradients(gradients(model, seen.values()), gradients(plain, truth))


@pytest.mark.parametrize("make", [bare, llama])
def test_values_of_models_without_a_value_head(make: Any) -> None:
    """Also of a policy with a value head beside its own."""
    model, plain = pair(make)
    head, batch = torch.nn.Linear(32, 1), batch_of()
    seen = response_values(replayable(model), batch, head, self_check=True)
    base = getattr(plain, "model", plain)
    truth = [
        head(base(input_ids=ids[mask.bool()][None], use_cache=False).last_hidden_state[0])[p - 1 : p + r - 1, 0]
        for ids, mask, (p, r) in zip(batch["input_ids"], batch["attention_mask"], ROWS, strict=True)
        if p + r
    ]
    assert off(seen, torch.cat(truth)) <= LIMIT


def test_a_model_of_values_has_no_log_probs() -> None:
    ready = replayable(pair(critic)[0])
    refused(ready, "Qwen3ForTokenClassification has no output layer that scores tokens")


def test_the_self_check_of_a_model_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that are off by one show in hidden states."""
    monkeypatch.setattr(adapter, "packed_attention", wrong_bounds(adapter.packed_attention))
    model, _ = pair(critic)
    with pytest.raises(ReplayError, match="packed hidden states of Qwen3ForTokenClassification are off by"):
        response_values(replayable(model), batch_of(), model.score)
    response_values(replayable(model), batch_of(), model.score, self_check=False)


def wrong_bounds(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def moved(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, **more: Any) -> Tensor:
        bounds = bounds.clone()
        bounds[1:-1] -= 1
        return attend(query, key, value, bounds, longest + 1, **more)

    return moved


def rwkv() -> Any:
    return tf.RwkvForCausalLM(tf.RwkvConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2)).eval()


def test_layers_that_never_attend_through_the_interface_are_found() -> None:
    """No configuration says so of this one; it would carry the state of a row into the next."""
    for model in (rwkv(), tf.BloomForCausalLM(tf.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_head=4)).eval()):
        with pytest.raises(ReplayError, match="Model takes no position_ids; expected"):
            replayable(model)
    model, _ = pair(llama)
    model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    refused(replayable(model), "LlamaForCausalLM attended 1 times in 2 layers; expected every layer")


def test_models_with_other_layers_replay_without_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As their errors say. Packing is refused for the same object as well."""
    model = llama(layer_types=["full_attention", "chunked_attention"]).eval()
    plain = copy.deepcopy(model)
    monkeypatch.setenv("MASKPACK_PACKED_REPLAY", "0")
    ready = replayable(model)
    assert off(response_log_probs(ready, batch_of()), truth_of(plain, batch_of())[0]) <= LIMIT
    monkeypatch.delenv("MASKPACK_PACKED_REPLAY")
    refused(ready, "has layers of kind chunked_attention")


# -------------------------------------------------------------------- the self-check


def dense_calls(model: Any) -> list[int]:
    """Tokens of each forward pass of the whole model from now on: those of self-checks, as replay needs no logits."""
    seen: list[int] = []

    def note(_: Any, __: Any, given_to: Any) -> None:
        seen.append(given_to["input_ids"].numel())

    model.register_forward_pre_hook(note, with_kwargs=True)
    return seen


@all_models
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_self_check_finds_an_attention_that_ignores_bounds(make: Any, dtype: torch.dtype, monkeypatch: Any) -> None:
    monkeypatch.setattr(adapter, "packed_attention", merged_rows)
    model, plain = pair(make, dtype)
    batch = for_model(make)
    ready = replayable(model)
    for self_check in (None, True):
        refused(ready, r"packed log-probs of .* are off by .* expected at most 0\.0001", batch, self_check=self_check)
    assert not ready._checked
    assert model.config.get_text_config()._attn_implementation == adapter.NAME
    assert off(response_log_probs(ready, batch, self_check=False), truth_of(plain, batch)[0]) > 0.1


def test_the_self_check_finds_positions_that_are_not_taken() -> None:
    """Rotary positions are relative, so they may begin anywhere; learned ones may not."""
    model, plain = pair(gpt2)
    ready = replayable(model)
    forward = model.transformer.forward

    @functools.wraps(forward)
    def without(*ids: Any, **given_to: Any) -> Any:
        return forward(*ids, **given_to | {"position_ids": None})

    model.transformer.forward = without
    refused(ready, "packed log-probs of GPT2LMHeadModel are off by")
    assert off(response_log_probs(ready, batch_of(), self_check=False), truth_of(plain, batch_of())[0]) > 0.1


def test_the_self_check_finds_rotary_positions_that_depend_on_the_rest() -> None:
    model, _ = pair(llama)
    ready = replayable(model)
    rotary = model.model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda x, position_ids: forward(x, position_ids * x.shape[1] / 16)
    refused(ready, "packed log-probs of LlamaForCausalLM are off by")


@all_models
def test_of_a_long_row_both_ends_are_compared(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of the tokens between them are not made, where the model can leave them out."""
    monkeypatch.setattr(adapter, "_COMPARED", 2)
    model, plain = pair(make)
    ready = replayable(model)
    shapes: list[Any] = []
    model.register_forward_hook(lambda _, __, out: shapes.append(tuple(out.logits.shape)))
    batch = for_model(make)
    assert off(response_log_probs(ready, batch, self_check=True), truth_of(plain, batch)[0]) <= LIMIT
    assert shapes == [(1, 4, VOCABULARY)]  # of 15 tokens
    forward = model.forward
    model.forward = lambda *ids, **given_to: forward(*ids, **given_to)  # who wraps it does not say what it takes
    response_log_probs(ready, batch, self_check=True)
    assert shapes[1:] == [(1, 15, VOCABULARY)]
    del model.forward
    for lengths in ([(2, 3), (4, 7)], [(2, 3), (1, 2)]):
        with monkeypatch.context() as patch:
            patch.setattr(adapter, "packed_attention", wrong_bounds(adapter.packed_attention))
            refused(ready, "are off by", for_model(make, lengths), self_check=True)


def capped_by(own: str, cap: float | None) -> Any:
    """A Gemma 2 whose scores reach its cap."""
    config = tf.Gemma2Config(**TINY | {"head_dim": 8, "attn_logit_softcapping": cap, "final_logit_softcapping": None})
    config._attn_implementation = own
    torch.manual_seed(1)
    return tf.Gemma2ForCausalLM(config).eval()


@pytest.fixture
def other_attention() -> Iterator[Callable[..., str]]:
    """`other_attention(name, applies)` is a scaled dot product that ignores caps, as sdpa of some versions, or applies
    them, without a parameter of that name."""
    interface = tf.AttentionInterface
    eager = importlib.import_module("transformers.models.gemma2.modeling_gemma2").eager_attention_forward
    made: list[str] = []

    def attention(applies: bool) -> str:
        def run(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: Any = None, **more: Any) -> Any:
            module.num_key_value_groups = query.shape[1] // key.shape[1]
            return eager(module, query, key, value, mask, 0.0, scaling, more.get("softcap") if applies else None)

        made.append(f"caps {applies}")
        interface.register(made[-1], run)
        tf.AttentionMaskInterface.register(made[-1], tf.masking_utils.eager_mask)
        return made[-1]

    yield attention
    for name in made:
        interface._global_mapping.pop(name)
        tf.AttentionMaskInterface._global_mapping.pop(name)
    adapter._ignores_caps.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cap_that_the_own_attention_ignores_is_named(dtype: torch.dtype, other_attention: Any) -> None:
    """Packed rows have it; so the two would differ, in half precision within its tolerance."""
    ignoring, applying = other_attention(False), other_attention(True)
    model = capped_by(ignoring, 0.5).to(dtype)
    for self_check in (None, True):
        with pytest.raises(ReplayError, match=r'has a soft cap of 0.5 in .*"caps False" ignores it.*"eager"'):
            response_log_probs(replayable(model), batch_of(), self_check=self_check)
    seen = response_log_probs(replayable(model), batch_of(), self_check=False)
    for own, cap in (("eager", 0.5), (applying, 0.5), (ignoring, None)):
        other = capped_by(own, cap).to(dtype)
        again = response_log_probs(replayable(other), batch_of(), self_check=True)
        assert torch.equal(again.values(), seen.values()) == (cap is not None)


def test_nan_does_not_pass_the_self_check() -> None:
    model, _ = pair(llama)
    ready = replayable(model)
    model.lm_head.weight.data[0, 0] = torch.nan
    refused(ready, "are off by nan")


def test_the_self_check_runs_once_for_each_replayable() -> None:
    """On the longest row but the first. A second model of a class may have another configuration."""
    ready = {name: replayable(pair(make)[0]) for name, make in (("qwen3", qwen3), ("llama", llama))}
    ready["again"] = replayable(pair(llama)[0])
    ready["wide"] = replayable(pair(llama, torch.float64)[0])
    calls = {name: dense_calls(one.model) for name, one in ready.items()}
    batch = batch_of(((6, 8), (2, 3), (3, 4), (1, 1)))
    for _ in range(3):
        for one in ready.values():
            response_log_probs(one, batch)
    assert calls == {"qwen3": [7], "llama": [7], "again": [7], "wide": [7]}
    for self_check in (True, False, True):
        response_log_probs(ready["llama"], batch, self_check=self_check)
    assert calls["llama"] == [7] * 3


def test_a_row_alone_does_not_pass_for_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first row of all sees nothing of others, however wrong the bounds are."""
    model, _ = pair(llama)
    ready = replayable(model)
    calls = dense_calls(model)
    with monkeypatch.context() as patch:
        patch.setattr(adapter, "packed_attention", merged_rows)
        for _ in range(3):
            response_log_probs(ready, batch_of([(2, 3)]))
        assert calls == [5]
        refused(ready, "are off by")
    response_log_probs(ready, batch_of())
    assert len(calls) == 3
    for rows in (ROWS, [(2, 3)]):
        response_log_probs(ready, batch_of(rows))
    assert len(calls) == 3


def test_rows_too_short_to_compare_do_not_pass() -> None:
    model, _ = pair(llama)
    ready = replayable(model)
    calls = dense_calls(model)
    response_log_probs(ready, batch_of([(1, 0), (1, 0), (0, 0)]))
    response_log_probs(ready, batch_of([(0, 0)]))
    assert (calls, ready._checked) == ([], {})
    response_log_probs(ready, batch_of([(2, 3), (1, 0)]))  # the first is the only one that scores a token
    assert (calls, ready._checked) == ([5], {(torch.float32, *PATH): adapter.FIRST})


# -------------------------------------------------------------------- several threads


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns after a few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(works: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each gives, in a thread of its own; they begin together."""
    ready = threading.Barrier(len(works))

    def begun(work: Callable[[], Any]) -> Any:
        torch.set_num_threads(1)
        ready.wait()
        return work()

    with ThreadPoolExecutor(len(works)) as threads:
        return [result.result() for result in [threads.submit(begun, work) for work in works]]


def in_another_thread(work: Callable[[], Any]) -> Any:
    return at_once([work])[0]


def bits(tensors: Sequence[Tensor]) -> list[Any]:
    return [x.detach().view(torch.int32).tolist() for x in tensors]


def test_layers_that_attend_in_another_thread_do_not_count() -> None:
    model, _ = pair(llama)
    other = replayable(pair(llama)[0])
    ready = replayable(model)

    def not_attending(hidden_states: Tensor, **_: Any) -> Any:
        in_another_thread(lambda: response_log_probs(other, batch_of()))
        return hidden_states, None

    model.model.layers[1].self_attn.forward = not_attending
    refused(ready, "LlamaForCausalLM attended 1 times in 2 layers; expected every layer")


def test_a_replay_that_ends_in_another_thread_ends_no_other() -> None:
    """The error tells a model that loses the bounds from one that is run without replay."""
    model, _ = pair(llama)
    other = replayable(pair(llama)[0])
    ready = replayable(model)
    forward = model.model.layers[1].self_attn.forward

    def without_bounds(*states: Tensor, cu_seq_lens_q: Tensor, **more: Any) -> Any:
        in_another_thread(lambda: response_log_probs(other, batch_of()))
        return forward(*states, **more)

    model.model.layers[1].self_attn.forward = without_bounds
    refused(ready, "the model does not pass the bounds of rows on to its attention")


def test_a_row_is_compared_while_another_thread_replays_the_model() -> None:
    """One is inside its first layer while the other runs from its begin to its end: packed, and alone."""
    model, plain = pair(llama)
    ready = replayable(model)
    batch, truth = batch_of(), truth_of(plain, batch_of())[0]
    layer = model.model.layers[0]
    seen: list[Tensor] = []

    def interrupted(packed: bool, _: Any, __: Any, given_to: Any) -> None:
        if ("cu_seq_lens_q" in given_to) is packed:
            hook.remove()
            for self_check in (True, False):
                seen.append(
                    in_another_thread(
                        lambda self_check=self_check: response_log_probs(ready, batch, self_check=self_check)
                    )
                )

    for packed in (True, False):
        hook = layer.register_forward_pre_hook(functools.partial(interrupted, packed), with_kwargs=True)
        seen.append(response_log_probs(ready, batch, self_check=True))
    assert len(seen) == 6
    assert max(off(values, truth) for values in seen) <= LIMIT


@pytest.mark.parametrize("threads", [2, 8])
def test_threads_replay_as_one(threads: int, restless: None) -> None:
    """Models of their own, and models that they share, from the first call on: with the bits of one thread."""
    makes = [qwen3, llama, gemma3, gpt2]
    batches = [batch_of(ROWS[first : first + 5], seed=first) for first in range(4)]

    def all_batches(own: Any, self_check: bool | None) -> list[Tensor]:
        return [response_log_probs(own, batch, self_check=self_check).values() for _ in range(3) for batch in batches]

    alone = {make: bits(all_batches(replayable(pair(make)[0]), None)) for make in makes}
    shared = {make: replayable(pair(make)[0]) for make in makes}

    def work(number: int) -> list[Any]:
        make, common = makes[number % 4], makes[number // 2 % 4]
        own = replayable(pair(make)[0])
        mine = bits(all_batches(own, None)) == alone[make]
        return [mine, bits(all_batches(shared[common], True if number % 2 else None)) == alone[common]]

    assert at_once([functools.partial(work, number) for number in range(threads)]) == [[True, True]] * threads


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # the self-check's
def test_a_row_is_compared_while_another_thread_runs_layers_again(restless: None) -> None:
    """Of one checkpointed model."""
    model, _ = pair(llama)
    model.train()
    checkpoint(model, False)
    ready = replayable(model)
    weights = list(model.parameters())
    done = threading.Event()

    def gradients_of(number: int) -> list[Any]:
        values = response_log_probs(ready, batch_of(seed=number), self_check=False).values()
        return bits(torch.autograd.grad(values.sum(), weights))

    def trained() -> list[Any]:
        try:
            return [gradients_of(number % 3) for number in range(12)]
        finally:
            done.set()

    def compared() -> list[Any]:
        seen = [response_log_probs(ready, batch_of(), self_check=True).values()]
        while not done.is_set():
            seen.append(response_log_probs(ready, batch_of(), self_check=True).values())
        return bits(seen)

    gradient = [gradients_of(number) for number in range(3)] * 4
    values = bits([response_log_probs(ready, batch_of(), self_check=True).values()])
    seen, others = at_once([trained, compared])
    assert seen == gradient
    assert others == values * len(others)


# -------------------------------------------------------------------- the attention that a model has


@all_models
def test_release_gives_the_model_back(make: Any) -> None:
    model, plain = pair(make)
    batch = for_model(make)
    prompt = torch.arange(3, 9)[None]
    ready = replayable(model)
    first = response_log_probs(ready, batch)
    with pytest.raises(ReplayError):
        model(input_ids=prompt)
    assert ready.release() is model
    assert model.config._attn_implementation == plain.config._attn_implementation
    assert torch.equal(model(input_ids=prompt).logits, plain(input_ids=prompt).logits)
    if make is llama:
        options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
        assert torch.equal(model.generate(prompt, **options), plain.generate(prompt, **options))
    assert torch.equal(response_log_probs(ready, batch).values(), first.values())
    with pytest.raises(ReplayError):
        model(input_ids=prompt)
    ready.release()
    ready.release()
    assert torch.equal(model(input_ids=prompt).logits, plain(input_ids=prompt).logits)


def test_a_configuration_with_a_way_of_its_own_to_say_its_attention() -> None:
    """As some models of transformers have; a row is compared by the model's own all the same."""

    class Own(tf.LlamaConfig):
        _attn_implementation = property(
            lambda self: self._attn_implementation_internal,
            lambda self, name: setattr(self, "_attn_implementation_internal", name),
        )

    model, plain = pair(llama)
    model.config.__class__ = Own
    ready = replayable(model)
    calls = dense_calls(model)
    for _ in range(2):
        assert off(response_log_probs(ready, batch_of(), self_check=True), truth_of(plain, batch_of())[0]) <= LIMIT
    assert len(calls) == 2
    assert model.config._attn_implementation == adapter.NAME
    assert ready.release().config._attn_implementation == "sdpa"


def test_a_model_made_replayable_again_keeps_its_own_attention() -> None:
    model, _ = pair(llama)
    model.set_attn_implementation("eager")
    first = replayable(model)
    second = replayable(model)
    assert model.config._attn_implementation == adapter.NAME
    second.release()
    assert model.config._attn_implementation == "eager"
    model.set_attn_implementation("sdpa")
    response_log_probs(first, batch_of())
    second.release()
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("own", ["sdpa", "eager"])
def test_copies_of_a_replayable_model_know_its_own_attention(own: str) -> None:
    model, plain = pair(llama)
    for one in (model, plain):
        one.set_attn_implementation(own)
    replayable(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert replayable(other).release().config._attn_implementation == own
    assert replayable(model.model).release().config._attn_implementation == own
    assert "maskpack" not in replayable(model).model.config.to_json_string()
    other = replayable(copy.deepcopy(model)).release()
    assert torch.equal(other(input_ids=torch.ones(1, 3).long()).logits, plain(torch.ones(1, 3).long()).logits)


def test_parts_of_a_model_keep_their_own_attention() -> None:
    model, _ = pair(qwen25_vl)
    model.set_attn_implementation({"": "sdpa", "text_config": "sdpa", "vision_config": "eager"})

    def seen() -> list[str]:
        config = model.config
        return [part._attn_implementation for part in (config, config.text_config, config.vision_config)]

    ready = replayable(model)
    assert adapter.NAME in seen()
    ready.release()
    assert seen() == ["sdpa", "sdpa", "eager"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_run_again_after_a_release_raise(reentrant: bool) -> None:
    """Reentrant checkpoints do not notice what they run."""
    model, _ = pair(llama)
    model.train()
    model.enable_input_require_grads()
    checkpoint(model, reentrant)
    ready = replayable(model)
    seen = response_log_probs(ready, batch_of(), self_check=False)
    ready.release()
    with pytest.raises(ReplayError, match="LlamaAttention: packed rows reached the model's own attention; expected"):
        seen.values().sum().backward()
