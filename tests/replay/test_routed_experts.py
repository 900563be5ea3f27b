"""response_log_probs(routed_experts=True) against each row alone in the same model, whose routers are loops over tokens
that weigh the experts of the batch; and everything that must raise."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from needs import needs
from rows_alone import LIMIT, ROWS, batch_of, check, checkpoint, off, owners, truth_of
from tensordict import TensorDict
from torch import Tensor

import maskpack as mp
from maskpack.errors import ReplayError
from maskpack.replay import PackedInputs, ReplayOptions, response_log_probs
from maskpack.replay.inputs import prefix_tree

tf = needs("transformers")
from tiny_models import TINY, mixtral, qwen3

from maskpack.adapters.transformers import experts as adapter
from maskpack.adapters.transformers import replayable


def qwen3_moe(**more: Any) -> Any:
    sizes = {"head_dim": 8, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
    return tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**TINY | sizes | {"norm_topk_prob": True} | more))


DEEPSEEK = {
    "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2,
    "moe_intermediate_size": 16, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 6, "routed_scaling_factor": 1.5,
}  # fmt: skip


def deepseek() -> Any:
    """Its first layer is dense; its router has a bias, groups of experts and a factor. Its heads of values are narrower
    than those of queries."""
    sizes = DEEPSEEK | {"first_k_dense_replace": 1, "num_hidden_layers": 3}
    return tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(**TINY | sizes))


def deepseek_v2() -> Any:
    """Its router masks scores of groups that it does not choose, and weighs by what topk returns."""
    sizes = DEEPSEEK | {"first_k_dense_replace": 0, "topk_method": "group_limited_greedy", "norm_topk_prob": False}
    return tf.DeepseekV2ForCausalLM(tf.DeepseekV2Config(**TINY | sizes))


def qwen35_moe() -> Any:
    """Its first layer carries state; both have routers and shared experts."""
    sizes = {
        "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16, "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    }  # fmt: skip
    return tf.Qwen3_5MoeForCausalLM(tf.Qwen3_5MoeTextConfig(**TINY | sizes))


MODELS: dict[str, tuple[Callable[[], Any], int, int, int]] = {  # of routers, chosen experts, experts
    "qwen3_moe": (qwen3_moe, 2, 3, 8),
    "mixtral": (mixtral, 2, 2, 6),
    "deepseek": (deepseek, 2, 2, 8),
    "deepseek_v2": (deepseek_v2, 2, 2, 8),
    "qwen35_moe": (qwen35_moe, 2, 3, 8),
}
ROUTED: dict[str, Any] = {"options": ReplayOptions(routed_experts=True)}
all_models = pytest.mark.parametrize("name", MODELS)


def made(name: str) -> tuple[Any, Any]:
    torch.manual_seed(3)
    model = MODELS[name][0]().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.3 if weight.dim() > 1 else 1)
        for part in model.modules():
            if hasattr(part, "e_score_correction_bias"):
                part.e_score_correction_bias.normal_()
        for path, weight in model.named_parameters():
            weight.mul_(0.3 if "linear_attn" in path and weight.dim() > 1 else 1)  # rounding grows in a state
    return model, copy.deepcopy(model)


def routed(name: str, batch: TensorDict, layers: int | None = None, dtype: torch.dtype = torch.int32) -> TensorDict:
    """With different experts for each token and router, and 0 where there is no token."""
    _, routers, chosen, experts = MODELS[name]
    source = torch.Generator().manual_seed(8)
    shape = (*batch["attention_mask"].shape, layers or routers)
    ids = torch.rand(*shape, experts, generator=source).argsort(-1)[..., :chosen]
    batch["routed_experts"] = (ids * batch["attention_mask"][..., None, None]).to(dtype)
    return batch


def weights_of(router: Any, hidden: Tensor, chosen: list[list[int]]) -> Tensor:
    """The weights of experts, token by token, as the definition of each kind of model has them."""
    kind, out = type(router).__name__, []
    for state, ids in zip(hidden, chosen, strict=True):
        logits = torch.stack([(state * row).sum() for row in router.weight])
        if kind.startswith("DeepseekV2"):
            p = logits.exp() / logits.exp().sum()
            out.append(torch.stack([router.routed_scaling_factor * p[i] for i in ids]))
        elif kind.startswith("Deepseek"):
            scores = [1 / (1 + (-logits[i]).exp()) for i in ids]
            out.append(torch.stack([router.routed_scaling_factor * one / (sum(scores) + 1e-20) for one in scores]))
        else:
            p = logits.exp() / logits.exp().sum()
            out.append(torch.stack([p[i] / sum(p[j] for j in ids) for i in ids]))
    return torch.stack(out)


def alone(name: str, plain: Any, batch: TensorDict, column: Callable[[int], int] = int) -> Tensor:
    """Log-probs of all response tokens, row after row: the routers of `plain` are replaced by the loops above, but for
    the last token, at which they choose themselves."""
    routers = [part for part in plain.modules() if type(part).__name__.endswith(("TopKRouter", "TopkRouter"))]
    assert len(routers) == MODELS[name][1]
    out = []
    for b in range(batch.batch_size[0]):
        real = batch["attention_mask"][b] != 0
        for nth, router in enumerate(routers):
            chosen = batch["routed_experts"][b, real, column(nth)].tolist()

            def forward(hidden: Tensor, router: Any = router, chosen: Any = chosen) -> Any:
                hidden = hidden.reshape(-1, hidden.shape[-1])
                logits, weights, ids = type(router).forward(router, hidden)
                given = weights_of(router, hidden[:-1], chosen[:-1])
                return logits, torch.cat([given, weights[-1:]]), torch.cat([torch.tensor(chosen[:-1]).long(), ids[-1:]])

            if len(chosen) > 1:
                router.forward = forward
        out.append(truth_of(plain, batch[b : b + 1])[0])
        for router in routers:
            vars(router).pop("forward", None)
    return torch.cat(out)


# -------------------------------------------------------------------- right numbers


@all_models
def test_log_probs_and_gradients_are_those_of_each_row_alone(name: str) -> None:
    model, plain = made(name)
    batch = routed(name, batch_of())
    ready = replayable(model)
    _, truth = check(ready, plain, batch, alone(name, plain, batch), **ROUTED)
    assert off(response_log_probs(ready, batch), truth) > 0.01


@all_models
def test_layers_of_the_model_or_those_with_a_router(name: str) -> None:
    model, plain = made(name)
    layers = model.config.num_hidden_layers
    batch = routed(name, batch_of(seed=2), layers)
    first = layers - MODELS[name][1]
    seen = response_log_probs(replayable(model), batch, **ROUTED)
    assert off(seen, alone(name, plain, batch, lambda nth: nth + first)) <= LIMIT


@all_models
def test_checkpointed_layers_choose_the_same_again(name: str) -> None:
    model, plain = made(name)
    model.train()
    checkpoint(model, False)
    batch, tail = routed(name, batch_of()), ReplayOptions(routed_experts=True, multiple_of=32)
    check(replayable(model), plain, batch, alone(name, plain, batch), options=tail)


def groups(name: str) -> TensorDict:
    """Rows 1 to 3 have one prompt; rows 1 and 2 also its experts, and two response tokens with theirs."""
    batch = routed(name, batch_of(((3, 4), (6, 9), (6, 5), (6, 7), (2, 2))))
    ids, experts = batch["input_ids"], batch["routed_experts"]
    ids[2:4, :6] = ids[1, :6]
    ids[2, 6:8] = ids[1, 6:8]
    experts[2, :8] = experts[1, :8]
    batch["responses"] = ids[:, 6:].clone()
    return batch


@all_models
def test_tokens_are_shared_only_with_their_experts(name: str) -> None:
    model, plain = made(name)
    batch = groups(name)
    shared = [ReplayOptions(share_prefixes=True, min_shared=1, routed_experts=on) for on in (True, False)]
    with_experts, without = (PackedInputs.of(batch, options=options) for options in shared)
    total = int(batch["attention_mask"].sum())
    assert (total - with_experts.num_tokens, total - without.num_tokens) == (8, 14)
    assert (
        prefix_tree(batch, options=ReplayOptions(min_shared=1, routed_experts=True)).num_tokens
        == with_experts.num_tokens
    )
    check(replayable(model), plain, batch, alone(name, plain, batch), self_check=True, options=shared[0])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64], ids=str)
def test_forms_and_dtypes_are_equal_bit_for_bit(dtype: torch.dtype) -> None:
    ready = replayable(made("qwen3_moe")[0])
    batch = routed("qwen3_moe", batch_of())
    truth = response_log_probs(ready, batch, **ROUTED).values()
    batch["routed_experts"] = batch["routed_experts"].to(dtype)
    for one in (batch, mp.nest_batch_by_mask(batch, pad_token_id=0), mp.compress(batch, pad_token_id=0)):
        assert torch.equal(response_log_probs(ready, one, **ROUTED).values(), truth)


def test_a_plan_and_padded_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = made("deepseek")
    batch = routed("deepseek", batch_of())
    ready = replayable(model)
    truth = alone("deepseek", plain, batch)
    plan = mp.planning.plan_micro_batches(batch["attention_mask"].sum(1).numpy(), 16).with_count(len(ROWS) + 1)
    assert off(response_log_probs(ready, batch, plan=plan, **ROUTED), truth) <= LIMIT
    monkeypatch.setenv("MASKPACK_PACKED_REPLAY", "0")
    assert off(response_log_probs(ready, batch, self_check=True, **ROUTED), truth) <= LIMIT


def test_a_router_chooses_where_the_batch_says_nothing() -> None:
    """-1, and whatever stands at the last token of a row."""
    model, plain = made("qwen3_moe")
    ready = replayable(model)
    batch = routed("qwen3_moe", batch_of())
    none = batch.clone()
    none["routed_experts"].fill_(-1)
    assert torch.equal(
        response_log_probs(ready, none, **ROUTED).values(),
        response_log_probs(ready, batch).values(),
    )
    last = batch.clone()
    for b in range(len(ROWS)):
        real = last["attention_mask"][b].nonzero()[:, 0]
        last["routed_experts"][b, real[-1:]] = 0
    assert (
        off(
            response_log_probs(ready, last, **ROUTED),
            alone("qwen3_moe", plain, batch),
        )
        <= LIMIT
    )


def test_the_model_is_as_before() -> None:
    """Its padded passes, and copies of it."""
    model, plain = made("mixtral")
    batch = routed("mixtral", batch_of())
    ready = replayable(model)
    seen = response_log_probs(ready, batch, **ROUTED)
    copied = replayable(copy.deepcopy(ready.release()))
    assert torch.equal(response_log_probs(copied, batch, **ROUTED).values(), seen.values())
    ids = torch.arange(3, 12)[None]
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, plain(input_ids=ids, use_cache=False).logits)


def test_nothing_stays_behind_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that is interrupted leaves no mode behind, which would choose for other models."""
    model, plain = made("qwen3_moe")
    batch = routed("qwen3_moe", batch_of())
    ready = replayable(model)
    truth = response_log_probs(ready, batch, **ROUTED).values()

    class Interrupted(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.topk:
                raise KeyboardInterrupt
            return func(*args, **(kwargs or {}))

    with Interrupted(), pytest.raises(KeyboardInterrupt):
        response_log_probs(ready, batch, **ROUTED)
    assert torch.overrides._len_torch_function_stack() == 0
    assert torch.equal(response_log_probs(ready, batch, **ROUTED).values(), truth)
    ids = torch.arange(3, 12)[None]
    own = ready.release()(input_ids=ids, use_cache=False).logits
    assert torch.equal(own, plain(input_ids=ids, use_cache=False).logits)
    assert not owners(model)


@pytest.mark.parametrize("place", ["self_attn", "mlp.gate"])
def test_a_hook_may_replay_another_model(place: str) -> None:
    """Also where the backward pass runs layers again."""
    model, plain = made("qwen3_moe")
    other = replayable(made("mixtral")[0])
    batch, second = routed("qwen3_moe", batch_of()), routed("mixtral", batch_of(seed=4))
    model.train()
    checkpoint(model, True)
    ready = replayable(model)
    want = response_log_probs(other, second, **ROUTED).values()
    seen_within = []

    def hook(*_: Any) -> None:
        with torch.no_grad():
            seen_within.append(response_log_probs(other, second, **ROUTED).values())

    model.model.layers[1].get_submodule(place).register_forward_hook(hook)
    check(ready, plain, batch, alone("qwen3_moe", plain, batch), self_check=False, **ROUTED)
    assert len(seen_within) == 2
    assert all(torch.equal(one, want) for one in seen_within)


# -------------------------------------------------------------------- errors


def raises(match: str, batch: TensorDict, name: str = "qwen3_moe", model: Any = None) -> None:
    ready = replayable(made(name)[0] if model is None else model)
    before = batch.clone()
    with pytest.raises(ReplayError, match=re.escape(match)):
        response_log_probs(ready, batch, **ROUTED)
    assert all(torch.equal(batch[key], before[key]) for key in batch.keys())  # noqa: SIM118
    assert response_log_probs(ready, batch.exclude("routed_experts")).values().isfinite().all()


def changed(place: tuple[Any, ...], to: Any, dtype: torch.dtype = torch.int32) -> TensorDict:
    batch = routed("qwen3_moe", batch_of())
    batch["routed_experts"][place] = torch.as_tensor(to, dtype=torch.int32)
    batch["routed_experts"] = batch["routed_experts"].to(dtype)
    return batch


def test_ids_that_are_no_experts() -> None:
    two = (1, 2, 1)  # a row, a token of its prompt, a layer
    raises("experts [4, 1, 4] for a token in layer 1, and 1 more such", changed(two, [4, 1, 4]))
    raises("experts [0, 0, 0] for a token in layer 1", changed(two, [0, 0, 0]))
    raises("experts [-1, 1, 4] for a token", changed(two, [-1, 1, 4]))
    raises("ids from -2 to 7; expected experts from 0", changed(two, [-2, 1, 4]))
    raises("ids from 0 to 40000; expected experts from 0", changed(two, [40_000, 1, 4]))
    raises("has the expert 8; expected ids below 8", changed(two, [8, 1, 4]))
    raises('field "routed_experts" is torch.float32', changed(two, [4, 1, 2], torch.float32))


def test_other_layers_and_fields() -> None:
    batch = batch_of()
    raises('the batch has no field "routed_experts"', batch)
    raises("has 5 layers; expected those of Qwen3MoeForCausalLM: 2", routed("qwen3_moe", batch_of(), 5))
    raises("0 calls of topk chose experts, of ['3 of (47, 8)']", routed("mixtral", batch_of()))
    batch["routed_experts"] = batch["attention_mask"]
    raises("packed; expected [T, layers, k]", batch)
    raises("no part choose experts by torch.topk", routed("qwen3_moe", batch_of()), model=qwen3())


def test_a_router_that_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "told", dict)
    raises(
        "0 routers of Qwen3MoeForCausalLM took the experts of the batch; expected 2", routed("qwen3_moe", batch_of())
    )


def test_the_self_check_sees_other_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the next token."""
    before = PackedInputs.of.__func__

    def shifted(cls: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = before(cls, *args, **kwargs)
        inputs.routed_experts.ids.copy_(inputs.routed_experts.ids.roll(1, 0))
        return inputs

    monkeypatch.setattr(PackedInputs, "of", classmethod(shifted))
    batch = routed("qwen3_moe", batch_of())
    response_log_probs(replayable(made("qwen3_moe")[0]), batch, **ROUTED)  # packed and alone agree
    monkeypatch.setattr(PackedInputs, "collected", lambda self, own, tokens: own.detach()[torch.from_numpy(tokens) - 1])
    with pytest.raises(ReplayError, match="off by"):
        response_log_probs(replayable(made("qwen3_moe")[0]), batch, **ROUTED)
