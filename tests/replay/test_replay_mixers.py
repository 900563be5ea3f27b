"""Replay of models with layers that carry state from token to token, against each row alone in the same model with its
own layers; which way their mixers run; and everything that must raise instead of giving other numbers."""

from __future__ import annotations

import copy
import inspect
import itertools
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from needs import needs
from torch import Tensor

import maskpack as mp
from maskpack.errors import ReplayError
from maskpack.replay import ReplayOptions, response_log_probs, response_values

tf = needs("transformers")
import work_replay
from head_models import maker
from ranks import run_ranks, values
from rows_alone import (
    LIMIT,
    ROWS,
    alone,
    batch_of,
    check,
    checkpoint,
    close_gradients,
    gradients,
    off,
    owners,
    truth_of,
)
from tiny_models import TINY, llama
from tree_rows import ROWS as TREES
from tree_rows import check_of as check_tree

from maskpack.adapters.transformers import mixers
from maskpack.adapters.transformers import model as adapter

replayable = adapter.replayable

KINDS: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"]}
DELTA = {
    "head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED_EXPERT = EXPERTS | {"shared_expert_intermediate_size": 16}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
LATENT = {
    "num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
NEMOTRON = {
    "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "head_dim": 8,
    "ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 8,
    "n_routed_experts": 4, "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16,
}  # fmt: skip
ZAMBA = {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"], "mamba_d_state": 8}
JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}


def pair(make: Callable[..., Any], dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any]:
    """Two copies of a model whose products are large enough that log-probs differ. Convolutions stay as they are made:
    rounding would grow."""
    torch.manual_seed(1)
    model = make(**options).to(dtype).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(5 if weight.dim() == 2 and "A_log" not in name else 1)
    return model, copy.deepcopy(model)


MODELS = {
    make.__name__: make
    for make in (
        maker("Qwen3Next", **DELTA, **KINDS, **SHARED_EXPERT),
        maker("Qwen3_5", "Qwen3_5TextConfig", **DELTA, **KINDS),
        maker("Qwen3_5Moe", "Qwen3_5MoeTextConfig", **DELTA, **KINDS, **SHARED_EXPERT),
        maker("OlmoHybrid", **DELTA | {"linear_num_value_heads": 2}, **KINDS),
        maker("Bamba", **MAMBA, attn_layer_indices=[1]),
        maker("FalconH1", **MAMBA, mamba_d_ssm=64),
        maker("NemotronH", **NEMOTRON),
        maker("GraniteMoeHybrid", **MAMBA, **KINDS, num_local_experts=4, shared_intermediate_size=16),
        maker("Zamba2", **ZAMBA, n_mamba_heads=4, chunk_size=8, use_mem_rope=True),
        maker("Zamba", **ZAMBA, n_mamba_heads=2, mamba_dt_rank=4),
        maker("Jamba", **JAMBA, num_experts=4, mamba_d_state=8),
        maker("Mamba2", num_heads=4, head_dim=16, state_size=8, n_groups=2, chunk_size=8, initializer_range=0.02),
        maker("Lfm2", layer_types=["conv", "full_attention"], block_multiple_of=8),
        maker("Lfm2Moe", layer_types=["conv", "full_attention"], num_dense_layers=1, **EXPERTS),
        maker("Lfm3", layer_types=["conv", "full_attention"], head_dim=8),
        maker("MiniMax", **KINDS, block_size=4, num_local_experts=4),
        maker("KimiLinear", **KINDS, **LATENT, linear_head_dim=8, linear_num_heads=4),
        maker("BailingHybrid", **KINDS, **LATENT, head_dim=8, n_group=1, topk_group=1, num_mtp_layers=0),
        maker("Zaya", **EXPERTS | {"num_experts_per_tok": 1}, head_dim=8, router_hidden_size=8),
    )
}
all_models = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
FEW = ("Qwen3_5", "FalconH1", "Mamba2", "Lfm2")
few_models = pytest.mark.parametrize("make", [MODELS[name] for name in FEW], ids=FEW)
qwen35, lfm2 = MODELS["Qwen3_5"], MODELS["Lfm2"]
ROWS_APART: dict[str, Any] = {"options": ReplayOptions()}
TAIL: dict[str, Any] = {"options": ReplayOptions(multiple_of=16)}
SHARE: dict[str, Any] = {"options": ReplayOptions(share_prefixes=True, min_shared=1)}


# -------------------------------------------------------------------- right numbers


@all_models
def test_log_probs_and_gradients_are_those_of_each_row_alone(make: Any) -> None:
    model, plain = pair(make)
    ready = replayable(model)
    _, truth = check(ready, plain, batch_of(), self_check=True)
    assert truth.min().item() < -3
    assert all(way.startswith("rows: ") for way in ready.mixers.values())


@all_models
def test_rows_that_share_prefixes(make: Any) -> None:
    model, plain = pair(make)
    ready = replayable(model)
    for name in ("groups", "a deep trie"):
        check_tree(ready, plain, TREES[name], options=ReplayOptions(share_prefixes=True, min_shared=1, multiple_of=8))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # the self-check's
@pytest.mark.parametrize("name", [*FEW, "GraniteMoeHybrid", "NemotronH", "Zamba2", "MiniMax", "Zaya"])
def test_gradient_checkpointing_in_train_mode(name: str) -> None:
    """The backward pass runs layers again, and their mixers are told the rows again: also where layers are within
    others, as those of Zamba2 are, or do not pass them on, as those of Zaya."""
    model, plain = pair(MODELS[name])
    checkpoint(model, False)
    model.train()
    check(replayable(model), plain, batch_of(), self_check=True)


@few_models
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_shared_prefixes(make: Any, reentrant: bool) -> None:
    model, plain = pair(make)
    checkpoint(model, reentrant)
    model.enable_input_require_grads()
    model.train()
    check_tree(replayable(model), plain, TREES["groups"])


@few_models
def test_plans_tails_and_entropy(make: Any) -> None:
    model, plain = pair(make)
    ready = replayable(model)
    batch, tail = batch_of(seed=1), ReplayOptions(multiple_of=64)
    _, truth = check(ready, plain, batch, temperature=0.6, entropy=True, self_check=True, options=tail)
    plan = mp.planning.plan_micro_batches(batch["attention_mask"].sum(1).numpy(), 16).with_count(len(ROWS) + 1)
    for options in ({}, SHARE):
        assert off(response_log_probs(ready, batch, temperature=0.6, plan=plan, **options), truth) <= LIMIT


@few_models
@pytest.mark.parametrize(
    "rows", [[(1, 1)], [(1, 0), (1, 1), (0, 0), (1, 0)], [(6, 9)], [(2, 0), (3, 0)], [(0, 0), (0, 0)]]
)
def test_small_batches(make: Any, rows: Any) -> None:
    model, plain = pair(make)
    batch = batch_of(rows)
    for options in ({}, SHARE):
        seen = response_log_probs(replayable(model), batch, **options)
        assert off(seen, truth_of(plain, batch)[0]) <= LIMIT
        seen.values().sum().backward()


@pytest.mark.parametrize("name", ["Qwen3_5", "Bamba", "MiniMax"])
def test_rows_of_several_chunks(name: str) -> None:
    """The scan of a gated delta net has chunks of 64 tokens."""
    model, plain = pair(MODELS[name])
    batch = batch_of([(3, 4), (40, 60), (70, 20), (60, 4), (1, 30)], 70, 60)
    check(replayable(model), plain, batch, self_check=True)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("Zaya", ["hybrid_sliding", "hybrid"]),
        ("Lfm3", ["conv", "sliding_attention"]),
        ("MiniMax", ["linear_attention", "full_attention"]),
    ],
)
def test_windows_of_attention_beside_mixers(name: str, kinds: list[str]) -> None:
    """Rows are longer than the window, in layers with a mixer too."""
    model, plain = pair(MODELS[name], sliding_window=4, layer_types=kinds)
    wide, _ = pair(MODELS[name], layer_types=[kind.replace("hybrid_sliding", "hybrid") for kind in kinds])
    for options in ({}, SHARE):
        batch = batch_of()
        seen, _ = check(replayable(model), plain, batch, self_check=True, **options)
        assert off(seen, truth_of(wide, batch)[0]) > 100 * LIMIT


def test_sections_of_positions() -> None:
    """The text model of Qwen3.5 takes one section, three, or four."""
    model, plain = pair(qwen35)
    ready = replayable(model)
    for ids in ("edge", "mrope3", "mrope4"):
        batch = batch_of(ids=ids)
        assert off(response_log_probs(ready, batch, self_check=True), truth_of(plain, batch)[0]) <= LIMIT


def test_values_of_a_recurrent_gemma() -> None:
    """Its mixer takes positions, which say where a row begins, and its attention a window of 4 tokens."""
    torch.manual_seed(0)
    config = tf.RecurrentGemmaConfig(**TINY, block_types=["recurrent", "attention"], attention_window_size=4)
    causal = tf.RecurrentGemmaForCausalLM(copy.deepcopy(config)).eval()  # it caps its logits
    model = tf.RecurrentGemmaModel(config).eval()
    plain = copy.deepcopy(model)
    head = torch.nn.Linear(32, 1)

    def own(**given: Any) -> Any:
        return SimpleNamespace(logits=head(plain(**given).last_hidden_state))

    batch = batch_of()
    for options in (TAIL, SHARE):
        seen = response_values(replayable(model), batch, head, self_check=True, **options)
        truth = torch.cat([value[nth - 1] for value, _, responses in alone(own, batch) for nth in responses])
        assert off(seen, truth) <= LIMIT
        close_gradients(gradients(model, seen.values()), gradients(plain, truth))
    plain = copy.deepcopy(causal)
    seen = response_log_probs(replayable(causal), batch, self_check=True)
    assert off(seen, truth_of(plain, batch)[0]) <= LIMIT


@few_models
def test_a_released_model_is_as_before(make: Any) -> None:
    model, plain = pair(make)
    names = dict(model.named_modules()).keys()
    ready = replayable(model)
    assert owners(model)
    batch = batch_of()
    first = response_log_probs(ready, batch)
    assert ready.release() is model
    assert not owners(model)
    assert dict(model.named_modules()).keys() == names
    ids, mask = batch["input_ids"], batch["attention_mask"]
    own = [x(input_ids=ids, attention_mask=mask, use_cache=False).logits for x in (model, plain)]
    assert torch.equal(*own)
    made = [x.generate(ids[:1, :6], max_new_tokens=3, do_sample=False) for x in (model, plain)]
    assert torch.equal(*made)
    assert torch.equal(response_log_probs(ready, batch).values(), first.values())
    assert owners(model)


@few_models
def test_without_packing_the_numbers_are_the_same(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = pair(make)
    ready = replayable(model)
    monkeypatch.setenv("MASKPACK_PACKED_REPLAY", "0")
    batch = batch_of(side="right")
    assert off(response_log_probs(ready, batch), truth_of(plain, batch)[0]) <= LIMIT
    assert not owners(model)


def test_copies_have_mixers_of_their_own() -> None:
    model, plain = pair(qwen35)
    batch = batch_of()
    ready = replayable(model)
    truth, _ = truth_of(plain, batch)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.1)
    ready.release()
    assert not owners(model)
    assert owners(other)
    assert off(response_log_probs(ready, batch), truth) <= LIMIT
    copied = replayable(other)
    with torch.no_grad():
        for weight in plain.parameters():
            weight.mul_(1.1)
    assert off(response_log_probs(copied, batch, self_check=True), truth_of(plain, batch)[0]) <= LIMIT
    copied.release()
    assert not owners(other)


@few_models
def test_autocast_and_other_dtypes_pass_the_self_check(make: Any) -> None:
    model, plain = pair(make)
    batch = batch_of()
    with torch.autocast("cpu", torch.bfloat16):
        seen = response_log_probs(replayable(model), batch, self_check=True, **SHARE)
        assert off(seen, truth_of(plain, batch)[0]) <= 0.25
    seen.values().sum().backward()
    more = {"residual_in_fp32": False} if make.__name__ == "Mamba2" else {}
    for dtype in (torch.bfloat16, torch.float64):
        other, _ = pair(make, dtype, **more)
        response_log_probs(replayable(other), batch, self_check=True)


def test_sharded_layers() -> None:
    """Other rows, other groups and other counts of calls of mixers on each rank."""
    for seen in values(run_ranks(work_replay.sharded_mixers, 2)):
        assert seen["gradients"] <= 1e-5
        assert max(seen["packed"], seen["planned"], seen["padded"]) <= 5e-6
        assert "is sharded by itself (FSDPConv1d); expected its layer to be" in seen["inside"]
        assert "has layers that carry state (layer 0, linear_attn), came with context_group" in seen["context"]


# -------------------------------------------------------------------- groups of rows


def test_groups_hold_rows_down_to_half_of_their_longest() -> None:
    groups, cells = mixers._grouped(np.array([3, 8, 4, 2, 1, 7]))
    assert groups == [(3, 8), (2, 3), (1, 1)]
    #                       3           8             4                2       1   7
    assert cells.tolist() == [24, 25, 26, *range(8), 16, 17, 18, 19, 27, 28, 30, *range(8, 15)]


def test_mixers_see_groups_of_rows_and_never_the_next_row() -> None:
    model, _ = pair(lfm2)
    ready = replayable(model)
    shapes: list[Any] = []
    model.model.layers[0].conv.in_proj.register_forward_hook(lambda _part, given, _out: shapes.append(given[0].shape))
    response_log_probs(ready, batch_of(), self_check=False)
    shapes = [tuple(shape[:2]) for shape in shapes]
    assert shapes[-3:] == [(2, 15), (3, 7), (2, 2)]  # the last is of two rows, of lengths 2 and 1


# -------------------------------------------------------------------- which way


class Conv:
    """Stand-ins for the short convolution of LFM2 with kernels of its own, by how they treat bounds."""

    def __init__(self, own: Any, way: str) -> None:
        self.own, self.way, self.told = own, way, 0

    def forward(self) -> Any:
        def forward(part: Any, hidden_states: Any, past_key_values: Any = None, **more: Any) -> Any:
            cuts = more.get("cu_seq_lens_q")
            if cuts is None:
                return self.own(part, hidden_states, past_key_values, more.get("attention_mask"))
            self.told += 1
            if self.way == "raises":
                raise ValueError("no kernels")
            if isinstance(self.way, Exception):
                raise self.way
            if self.way == "ignores":
                return self.own(part, hidden_states)
            bounds = cuts.tolist()
            if self.way == "seq_idx":
                assert more["seq_idx"].dtype == torch.int32
                assert more["seq_idx"].shape == hidden_states.shape[:2]
                bounds = [0, *(1 + more["seq_idx"][0].diff().nonzero()[:, 0]).tolist(), hidden_states.shape[1]]
            if self.way == "one off":
                bounds[1:-1] = [bound + 1 for bound in bounds[1:-1]]
            rows = [
                self.own(part, hidden_states[:, begin:end]) for begin, end in itertools.pairwise(bounds)
            ]  # fmt: skip
            out = torch.cat(rows, 1)
            return out + 1e-6 * out[:, :1].detach() if self.way == "leaks" else out

        return forward


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Conv]:
    def made(way: str) -> Conv:
        kind = type(lfm2().model.layers[0].conv)
        conv = Conv(kind.forward, way)
        monkeypatch.setattr(kind, "forward", conv.forward())
        return conv

    return made


@pytest.mark.parametrize("way", ["cu_seq_lens_q", "seq_idx"])
@pytest.mark.parametrize("options", [ROWS_APART, TAIL, SHARE], ids=["rows", "a tail", "shared"])
def test_bounds_are_taken_where_they_work(way: str, options: Any, stand_in: Any) -> None:
    model, plain = pair(lfm2)
    conv = stand_in(way)
    ready = replayable(model)
    check_tree(ready, plain, TREES["groups"], **options)
    assert ready.mixers == {"layer 0, conv": "bounds"}
    assert conv.told == 4  # two to decide, one more for the gradients of the self-check


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("raises", "rows: ValueError: no kernels"),
        ("ignores", "rows: with bounds, outputs differ from those of each row alone"),
        ("one off", "rows: with bounds, outputs differ from those of each row alone"),
        ("leaks", "rows: with bounds, one row changes the outputs of the next"),
    ],
)
def test_rows_are_taken_where_bounds_do_not_work(way: str, said: str, stand_in: Any) -> None:
    model, plain = pair(lfm2)
    conv = stand_in(way)
    ready = replayable(model)
    before = torch.get_rng_state()
    for _ in range(2):
        seen = response_log_probs(ready, batch_of())
    assert torch.equal(torch.get_rng_state(), before)
    assert ready.mixers == {"layer 0, conv": said}
    assert 1 <= conv.told <= 2  # to decide, once
    assert off(seen, truth_of(plain, batch_of())[0]) <= LIMIT


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("all of it"), MemoryError(), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"),
              torch.AcceleratorError("CUDA error: an illegal memory access was encountered")], ids=repr,
)  # fmt: skip
def test_memory_that_ran_out_does_not_decide(error: Exception, stand_in: Any) -> None:
    conv = stand_in("cu_seq_lens_q")
    ready, conv.way = replayable(pair(lfm2)[0]), error
    with pytest.raises(type(error)) as caught:
        response_log_probs(ready, batch_of())
    assert caught.value is error
    assert ready.mixers == {"layer 0, conv": "not run yet"}
    conv.way = "cu_seq_lens_q"
    response_log_probs(ready, batch_of())
    assert ready.mixers == {"layer 0, conv": "bounds"}


def test_it_is_decided_once_for_each_dtype_and_mode(stand_in: Any) -> None:
    conv = stand_in("cu_seq_lens_q")
    ready = replayable(pair(lfm2)[0])
    batch, told = batch_of(), []
    for train in (False, True, False):
        ready.model.train(train)
        response_log_probs(ready, batch, self_check=False)
        told.append(conv.told)
    with torch.autocast("cpu", torch.bfloat16):
        response_log_probs(ready, batch, self_check=False)
    assert [*told, conv.told] == [3, 6, 7, 10]


# -------------------------------------------------------------------- refused


def refused(model: Any, said: str, batch: Any = None, **options: Any) -> None:
    with pytest.raises(ReplayError, match=re.escape(said)):
        response_log_probs(model, batch_of() if batch is None else batch, **options)


@pytest.mark.parametrize("name", ["Mamba", "FalconMamba"])
def test_a_model_that_keeps_rows_from_its_layers_is_refused(name: str) -> None:
    refused(replayable(maker(name, state_size=8)()), "the model does not pass the rows on to its layers")


def test_attention_with_biases_of_a_hybrid_is_refused() -> None:
    """And its log-probs, because it scales hidden states before the output layer."""
    if not hasattr(tf, "InklingForCausalLM"):
        pytest.skip("transformers has no Inkling")
    sizes = TINY | {"head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8}
    sizes |= {"sliding_window_size": 4, "d_rel": 4, "rel_extent": 8, "layer_types": ["hybrid_sliding", "hybrid"]}
    sizes |= {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
    model = tf.InklingForCausalLM(tf.InklingTextConfig(**sizes))
    with pytest.raises(ReplayError, match="changes hidden states before its output layer"):
        replayable(model)
    with pytest.raises(ReplayError, match="packed attention with position_bias"):
        response_values(replayable(model.model), batch_of(), torch.nn.Linear(32, 1))


def test_state_around_a_mixer_is_refused() -> None:
    """A part with a convolution of its own, around a part that takes a cache, too."""

    class Around(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, hidden_states: Tensor, past_key_values: Any = None, **given: Any) -> Tensor:
            return self.inner(hidden_states.cumsum(1), past_key_values=past_key_values, **given)

    model = lfm2()
    model.model.layers[0].conv = Around(model.model.layers[0].conv)
    with pytest.raises(
        ReplayError, match="layer 0, conv of Lfm2ForCausalLM takes a cache, and so does a part within it"
    ):
        replayable(model)


def test_layers_without_a_mixer_are_refused() -> None:
    model = llama()
    for more in ([], ["full_attention"]):
        model.config.layer_types = ["full_attention", "linear_attention", *more]
        with pytest.raises(ReplayError, match="layers of kind linear_attention, but layer 1 has no mixer; expected"):
            replayable(model)


def test_a_mixer_with_a_forward_of_its_own_is_refused() -> None:
    model = lfm2()
    model.model.layers[0].conv.forward = model.model.layers[0].conv.forward
    with pytest.raises(ReplayError, match=r"layer 0, conv of Lfm2ForCausalLM .* has a replaced forward"):
        replayable(model)


def test_a_mixer_or_an_attention_that_does_not_run_is_refused() -> None:
    model, _ = pair(lfm2)
    ready = replayable(model)
    conv = model.model.layers[0].conv
    del model.model.layers[0].conv
    object.__setattr__(model.model.layers[0], "conv", lambda hidden_states, **_: hidden_states)
    refused(ready, "ran 0 of 1 parts that carry state; expected all to run")
    object.__delattr__(model.model.layers[0], "conv")
    model.model.layers[0].conv = conv
    model.model.layers[1].self_attn = Through()
    refused(ready, "attended 0 times in 1 layers")


class Through(torch.nn.Module):
    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return hidden_states, None


@pytest.mark.parametrize("name", ["attention_mask", "cache"])
def test_masks_and_caches_are_refused(name: str) -> None:
    model, _ = pair(qwen35)
    known = inspect.signature(type(model.model.layers[0].linear_attn).forward).parameters
    name = name if name in known else "cache_params"  # before transformers 5.24
    ready = replayable(model)
    model.model.layers[0].linear_attn.register_forward_pre_hook(
        lambda _part, args, kwargs: (args, kwargs | {name: torch.ones(1, 47)}), with_kwargs=True
    )
    refused(ready, f"a layer that carries state got {name}; expected packed rows alone")


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda out: out[:, :-1], "expected outputs of as many rows and tokens"),
        (lambda out: None, "made NoneType of hidden states"),
        (lambda out: (None, out), "made NoneType of hidden states"),
    ],
)
def test_outputs_that_are_not_of_tokens_are_refused(made: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = pair(lfm2)
    kind = type(model.model.layers[0].conv)
    own = kind.forward

    def forward(self: Any, hidden_states: Any, past_key_values: Any = None) -> Any:
        return made(own(self, hidden_states))

    monkeypatch.setattr(kind, "forward", forward)
    refused(replayable(model), said)


def test_tensors_that_cannot_be_cut_into_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = pair(lfm2)
    kind = type(model.model.layers[0].conv)
    own = kind.forward

    def forward(self: Any, hidden_states: Any, past_key_values: Any = None, position_ids: Any = None) -> Any:
        return own(self, hidden_states)

    monkeypatch.setattr(kind, "forward", forward)
    ready = replayable(model)
    layer = model.model.layers[0]
    layer.register_forward_pre_hook(lambda _part, args, kwargs: (args, kwargs | {"position_ids": torch.ones(3, 7)}),
                                    with_kwargs=True)  # fmt: skip
    monkeypatch.setattr(
        layer, "forward", lambda hidden, **kwargs: layer.conv(hidden, position_ids=kwargs["position_ids"])
    )  # fmt: skip
    refused(ready, "position_ids is (3, 7); expected entries of 47 tokens")


def test_padded_rows_and_late_backward_passes_are_refused() -> None:
    """After `release`, layers that run again would carry state from row to row; before it, mixers have no rows."""
    model, _ = pair(MODELS["Mamba2"])  # no attention, which would raise
    checkpoint(model, False)
    model.train()
    ready = replayable(model)
    with pytest.raises(ReplayError, match="the layer did not receive mixer_rows"):
        model(input_ids=torch.ones(2, 4, dtype=torch.int64))
    seen = response_log_probs(ready, batch_of())
    ready.release()
    with pytest.raises(ReplayError, match=r"carries state from one row to the next; .* backward pass before release"):
        seen.values().sum().backward()


# -------------------------------------------------------------------- what the tests would see


def test_a_leak_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the self-check, in every model: mixers that run over packed rows give other numbers."""
    monkeypatch.setattr(mixers.MixerForward, "_by_rows", lambda self, part, given, rows: self._own(part, **given))
    for make in MODELS.values():
        refused(replayable(pair(make)[0]), "are off by")
