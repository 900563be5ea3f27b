"""Trainers of TRL, padded as TRL has them and packed, with the same seeds: what they sample, log, save and warn of."""

from __future__ import annotations

import copy
import functools
import math
import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from needs import needs

needs("trl")
needs("accelerate")

sys.path.append(str(Path(__file__).parents[2] / "examples"))

import transformers as tf
import trl_grpo
import trl_work as work
from ranks import run_ranks, values
from rows_alone import truth_of
from tensordict import TensorDict
from tiny_models import qwen25_vl
from trl import GRPOTrainer, RLOOTrainer, SFTTrainer

from maskpack.adapters.transformers.passes import NAME
from maskpack.adapters.trl import packed
from maskpack.adapters.trl import packed_trainer as adapter
from maskpack.errors import LayoutError, MaskpackWarning, ReplayError
from maskpack.ops import attention
from maskpack.replay import MismatchLimit

CLOSE = 1e-5
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
REUSED = {"steps_per_generation": 4, "num_iterations": 2, "beta": 0.04}  # old and reference log-probs
METHOD = "_get_per_token_logps_and_entropies"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of models, made once each."""
    made = {}

    def folder(kind="Qwen3", **sizes):
        key = (kind, *sorted(sizes.items()))
        if key not in made:
            made[key] = work.saved(tmp_path_factory.mktemp("model"), kind, **sizes)
        return made[key]

    return folder


@pytest.fixture(autouse=True)
def no_fallback(request):
    """Tests fail if anything goes to TRL's own path, unless they are marked as doing so."""
    with warnings.catch_warnings():
        if "falls_back" not in request.fixturenames:
            warnings.simplefilter("error", MaskpackWarning)
        yield


@pytest.fixture
def falls_back():
    """Marks a test of a fallback."""


def assert_same_runs(padded, ours, close=CLOSE):
    assert padded.rewards.shown == ours.rewards.shown
    steps = list(zip(work.history(padded), work.history(ours), strict=True))
    assert len(steps) > 1
    for theirs, own in steps:
        assert theirs.keys() == own.keys()
        for name, value in theirs.items():
            assert own[name] == pytest.approx(value, rel=close, abs=close), name
    assert any(step.get("loss") for step, _ in steps)


def both(kind, tmp_path, model, self_check=None, **options):
    runs = [
        work.trained(one, tmp_path / str(n), model, **options)
        for n, one in enumerate((kind, packed(kind, min_shared=2, self_check=self_check)))
    ]
    assert any("maskpack/computed_fraction" in step for step in runs[1].state.log_history)
    return runs


def padded_rows(prompts=(3, 5, 5, 1, 5), completions=(4, 6, 0, 2, 3), seed=0):
    """input_ids, attention_mask [B, P + C] and C, as TRL pads them; the prompt of the third row is that of the second,
    and so are that of the fifth and its first response token."""
    source = torch.Generator().manual_seed(seed)
    width, longest = max(prompts), max(completions)
    mask = torch.zeros(len(prompts), width + longest, dtype=torch.long)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        mask[row, width - prompt : width + completion] = 1
    ids = torch.randint(3, 32, mask.shape, generator=source)
    ids[2, :width] = ids[1, :width]
    ids[4:5, : width + 1] = ids[1, : width + 1]
    return ids * mask, mask, longest


# -------------------------------------------------------------------- the same run


def test_twenty_steps_are_those_of_trl(tmp_path, models):
    padded, ours = both(GRPOTrainer, tmp_path, models(), max_steps=20, **REUSED)
    assert padded.args.gradient_checkpointing
    assert len(padded.rewards.shown) == 5
    assert any(step.get("kl", 0) > 1e-3 for step in work.history(padded))
    assert_same_runs(padded, ours)
    for (name, theirs), (_, own) in zip(padded.model.named_parameters(), ours.model.named_parameters(), strict=True):
        torch.testing.assert_close(own, theirs, rtol=0, atol=1e-4, msg=name)
    fractions = [step["maskpack/computed_fraction"] for step in ours.state.log_history if "loss" in step]
    assert all(0 < fraction < 1 for fraction in fractions)


def test_a_checkpoint_of_packed_rows_goes_on_padded(tmp_path, models):
    options = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4, **REUSED}
    ours = work.trained(packed(GRPOTrainer, min_shared=2), tmp_path / "ours", models(), **options)
    theirs = work.trained(GRPOTrainer, tmp_path / "on", models(), tmp_path / "ours" / "checkpoint-4", **options)
    steps = [one for one in work.history(ours) if "loss" in one][-4:]
    resumed = [one for one in work.history(theirs) if "loss" in one][-4:]
    assert len(steps) == 4
    assert [one["loss"] for one in resumed] == pytest.approx([one["loss"] for one in steps], abs=CLOSE)


LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(RLOOTrainer, {"beta": 0.05, "steps_per_generation": 4, "num_iterations": 2}, id="rloo"),
        pytest.param(GRPOTrainer, {"entropy_coef": 0.05}, id="entropy bonus"),
        pytest.param(GRPOTrainer, {"temperature": 0.6, "loss_type": "grpo"}, id="temperature"),
        pytest.param(GRPOTrainer, {"gradient_checkpointing": False}, id="no checkpointing"),
        pytest.param(GRPOTrainer, EVALUATED, id="evaluation"),
    ],
)  # fmt: skip
def test_options_of_trl(tmp_path, models, kind, options):
    runs = both(kind, tmp_path, models(), max_steps=4, **options)
    assert_same_runs(*runs)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_in_float32(tmp_path, models, tied):
    options = {"cast_lm_head_to_fp32": True, "max_steps": 3, **REUSED}
    folder = models(tie_word_embeddings=tied)
    assert_same_runs(*both(GRPOTrainer, tmp_path, folder, **options))
    own = work.trained(
        packed(GRPOTrainer, self_check=True), tmp_path / "half", work.loaded(folder).bfloat16(), **options
    )
    assert own.model.lm_head(torch.ones(1, 32, dtype=torch.bfloat16)).dtype == torch.float32
    ids, mask, width = padded_rows()
    with torch.no_grad():
        ours, theirs = (getattr(kind, METHOD)(own, own.model, ids, mask, width)[0] for kind in (type(own), GRPOTrainer))
    assert ours.dtype == theirs.dtype == torch.float32
    assert (ours - theirs).abs().max() < 0.25  # states are rounded to bfloat16


@pytest.mark.parametrize("family", ["gpt2", "state"])
def test_other_models(tmp_path, models, family):
    """GPT-2 learns positions, which it numbers by column; what layers remember ends with a row."""
    if family == "gpt2":
        folder = models("GPT2", n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    else:
        folder = work.saved(tmp_path / "m", "Lfm2", layer_types=["conv", "full_attention"], block_multiple_of=8)
    options = {"learning_rate": 1e-4} if family == "gpt2" else {}
    assert_same_runs(*both(GRPOTrainer, tmp_path, folder, max_steps=3, **REUSED | options))


def test_text_alone_of_a_model_with_images(tmp_path):
    """Its three position ids are then the columns, too."""
    torch.manual_seed(0)
    run = work.trainer(packed(GRPOTrainer), tmp_path, qwen25_vl())
    ids, mask, width = padded_rows()
    ours, _, _ = run._get_per_token_logps_and_entropies(run.model, ids, mask, width)
    run._release()
    theirs, _, _ = getattr(GRPOTrainer, METHOD)(run, run.model, ids, mask, width)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=CLOSE)


def test_lora(tmp_path, models):
    peft = needs("peft")
    runs = both(GRPOTrainer, tmp_path, models(), max_steps=4, peft=peft.LoraConfig(**LORA), **REUSED)
    assert runs[1].ref_model is None  # the model without its adapter
    assert_same_runs(*runs)


def test_an_adapter_that_is_trained_again(tmp_path, models):
    """The reference is then a copy of the adapter, "ref"."""
    peft = needs("peft")
    torch.manual_seed(0)
    model = peft.get_peft_model(work.loaded(models()), peft.LoraConfig(**LORA))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight += 0.1 * torch.randn_like(weight) if "lora_B" in name else 0
    runs = [
        work.trained(kind, tmp_path / str(n), copy.deepcopy(model), max_steps=3, **REUSED)
        for n, kind in enumerate((GRPOTrainer, packed(GRPOTrainer)))
    ]
    assert "ref" in runs[1].model.peft_config
    assert_same_runs(*runs)


def test_autocast_is_as_close_as_bfloat16_is(tmp_path, models):
    """TRL's default: float32 weights, bfloat16 products. Both are compared with float32."""
    exact, theirs, own = (
        work.trainer(kind, tmp_path / str(n), models(), bf16=half)
        for n, (kind, half) in enumerate([(GRPOTrainer, False), (GRPOTrainer, True), (packed(GRPOTrainer), True)])
    )
    ids, mask, width = padded_rows((3, 5, 5, 1, 9, 4), (4, 6, 0, 2, 8, 8))
    with torch.no_grad():
        truth, other, ours = (
            getattr(run, METHOD)(run.model, ids, mask, width, compute_entropy=True) for run in (exact, theirs, own)
        )
    for true, seen, mine in zip(truth[:2], other[:2], ours[:2], strict=True):
        assert mine.dtype == seen.dtype == torch.float32
        assert (seen - true).abs().max() > 1e-4  # bfloat16 it is
        assert (mine - true).abs().mean() <= 1.5 * (seen - true).abs().mean()


# -------------------------------------------------------------------- tokens of tools, log-probs of the sampler


SEQUENCES = {"importance_sampling_level": "sequence", "loss_type": "grpo"}
QUANTILE = {"top_entropy_quantile": 0.5, "mask_truncated_completions": True, "entropy_coef": 0.02}


@pytest.mark.parametrize("options", [REUSED, REUSED | SEQUENCES, REUSED | QUANTILE], ids=["old", "sequence", "entropy"])
def test_tokens_of_tools_are_not_scored(tmp_path, models, monkeypatch, options):
    """The run is TRL's, but the output layer does not run on them."""
    counts = []
    answer = adapter._Inside.answer
    monkeypatch.setattr(adapter._Inside, "answer", lambda self, ask: counts.append(ask.inputs) or answer(self, ask))
    padded, ours = both(work.Tooled, tmp_path, models(), max_steps=4, self_check=True, **options)
    assert_same_runs(padded, ours)
    assert any(inputs.scored is not None for inputs in counts)
    holes = [((out["tool_mask"] == 0) & (out["completion_mask"] == 1)) for out in ours.outs]
    assert sum(int(one.sum()) for one in holes) > 10
    for out, hole in zip(ours.outs, holes, strict=True):
        for name in ("old_per_token_logps", "ref_per_token_logps"):
            assert not out[name][hole].any()
    assert any(out["old_per_token_logps"][hole].any() for out, hole in zip(padded.outs, holes, strict=True))


def test_a_mask_of_tools_that_changes_is_refused(tmp_path, models):
    class Other(work.Tooled):
        def _generate_and_score_completions(self, inputs):
            out = super()._generate_and_score_completions(inputs)
            return out | {"tool_mask": torch.ones_like(out["tool_mask"])}

    with pytest.raises(ReplayError, match="generated another mask of tool tokens than it returned"):
        work.trained(packed(Other), tmp_path, models(), max_steps=1)


def test_the_mismatch_with_the_sampler_is_logged(tmp_path, models):
    run = work.trained(packed(work.Sampled, min_shared=2), tmp_path, models(), max_steps=8, **REUSED)
    logged = [step for step in run.state.log_history if "maskpack/rollout_mismatch/k3" in step]
    assert len(logged) == len(run.outs) > 1
    for step, out in zip(logged, run.outs, strict=True):
        on = (out["completion_mask"] * out["tool_mask"]).bool()
        gap = (out["old_per_token_logps"] - out["sampling_per_token_logps"])[on].double().numpy()
        wanted = {
            "tokens": gap.size, "non_finite": 0, "k1": -gap.mean(), "k3": (np.exp(gap) - 1 - gap).mean(),
            "abs_max": np.abs(gap).max(), "ratio_mean": np.exp(gap).mean(),
        }  # fmt: skip
        for name, value in wanted.items():
            assert step[f"maskpack/rollout_mismatch/{name}"] == pytest.approx(float(value), rel=1e-5), name
        assert "maskpack/rollout_mismatch/abs_mean_from_2" in step
    runs = both(work.Tooled, tmp_path / "without", models(), max_steps=2, **REUSED)
    assert not any("mismatch" in name for step in runs[1].state.log_history for name in step)
    with pytest.raises(ReplayError, match=r"compare: the log-probs of the trainer are not those of the rollout: k3 is"):
        work.trained(packed(work.Sampled, mismatch_limit=MismatchLimit(k3=1e-3)), tmp_path / "3", models(), **REUSED)


# -------------------------------------------------------------------- one call


def naive(model, ids, mask, width, temperature):
    """Log-probs and entropies [B, C], a row and a token at a time, with the columns as positions."""
    columns = torch.arange(ids.shape[1]).expand(ids.shape)
    fields = {"input_ids": ids, "responses": ids[:, -width:], "attention_mask": mask, "position_ids": columns}
    both = truth_of(model, TensorDict(fields, batch_size=[len(ids)]), temperature)
    there = mask[:, -width:].bool()
    return [torch.zeros(there.shape, dtype=values.dtype).masked_scatter(there, values) for values in both]


def in_float64(model):
    """Its norms, too, which compute in float32 whatever the weights are."""
    model.double()
    for part in model.modules():
        if "Norm" in type(part).__name__:
            part.forward = functools.partial(
                torch.nn.functional.rms_norm, normalized_shape=part.weight.shape, weight=part.weight, eps=1e-6
            )


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("share", [True, False])
def test_values_and_gradients_in_float64(tmp_path, models, share, tools):
    """Of all tokens, or of those that no tool wrote, whose mask TRL gives as a tensor or as lists."""
    own = packed(GRPOTrainer, share_prefixes=share, min_shared=1, self_check=False)
    run, plain = work.trainer(own, tmp_path, models(), temperature=0.7), work.loaded(models())
    for model in (run.model, plain):
        in_float64(model)
    ids, mask, width = padded_rows()
    scored = torch.rand(ids.shape[0], width, generator=torch.Generator().manual_seed(1)) < 0.5 + 0.5 * (not tools)
    expected = [x * scored for x in naive(plain, ids, mask, width, 0.7)]
    slopes = torch.randn(2, *scored.shape, dtype=torch.float64)
    truth = torch.autograd.grad(
        sum((x * by).sum() for x, by in zip(expected, slopes, strict=True)), [*plain.parameters()]
    )
    for given in [scored.long(), [row.long().tolist() for row in scored]] if tools else [None]:
        run._tools = given
        *seen, aux = run._get_per_token_logps_and_entropies(run.model, ids, mask, width, compute_entropy=True)
        assert aux is None
        for one, true in zip(seen, expected, strict=True):
            torch.testing.assert_close(one, true, rtol=1e-10, atol=1e-10)
            assert torch.equal(one == 0, (mask[:, -width:] * scored) == 0)
        run.model.zero_grad()
        sum((x * by).sum() for x, by in zip(seen, slopes, strict=True)).backward()
        for (name, weight), true in zip(run.model.named_parameters(), truth, strict=True):
            torch.testing.assert_close(weight.grad, true, rtol=1e-8, atol=1e-9, msg=name)


def test_a_batch_without_completions_still_reaches_all_weights(tmp_path, models):
    """DDP waits for the gradient of every weight."""
    run = work.trainer(packed(GRPOTrainer), tmp_path, models())
    ids, mask, width = padded_rows(completions=(1, 4, 2, 2, 1))
    mask[:, -width:] = 0
    log_probs, entropies, _ = run._get_per_token_logps_and_entropies(run.model, ids, mask, width, compute_entropy=True)
    assert not log_probs.any()
    assert log_probs.shape == (5, width)
    (log_probs.sum() + entropies.sum()).backward()
    assert all(weight.grad is not None and not weight.grad.any() for weight in run.model.parameters())


def test_passes_without_gradients_are_few_and_small(tmp_path, models, monkeypatch):
    run = work.trainer(packed(GRPOTrainer, min_shared=1), tmp_path, models())
    asked = []
    answer = adapter._Inside.answer
    monkeypatch.setattr(
        adapter._Inside, "answer", lambda self, ask: asked.append(ask.inputs.num_tokens) or answer(self, ask)
    )
    ids, mask, width = padded_rows((3, 5, 5, 1, 20, 4, 3, 3), (4, 6, 0, 2, 8, 8, 3, 1))
    for batch_size in (1, 2, 3, 8, 100):
        asked.clear()
        with torch.no_grad():
            parts = run._get_per_token_logps_and_entropies(
                run.model, ids, mask, width, batch_size, compute_entropy=True
            )
            whole = run._get_per_token_logps_and_entropies(run.model, ids, mask, width, compute_entropy=True)
        for one, other in zip(parts[:2], whole[:2], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        *several, _ = asked
        assert len(several) <= math.ceil(8 / batch_size)
        assert max(several) <= min(batch_size, 8) * ids.shape[1]
    assert len(several) == 1
    with torch.no_grad():
        run._get_per_token_logps_and_entropies(run.model, ids, mask, width)
    assert run.model.config._attn_implementation != NAME


@pytest.mark.parametrize(
    ("wrong", "rows"),
    [
        (lambda mask: mask[1].index_fill_(0, torch.tensor([6]), 0), [1]),
        (lambda mask: mask[0, :5].zero_(), [0]),
        (lambda mask: mask[3].index_fill_(0, torch.tensor([2]), 1), [3]),
    ],
)  # fmt: skip
def test_other_padding_is_refused(tmp_path, models, wrong, rows):
    run = work.trainer(packed(GRPOTrainer), tmp_path, models())
    ids, mask, width = padded_rows()
    wrong(mask)
    with pytest.raises(ReplayError, match=re.escape(f"packed: rows {rows} have no prompt token")):
        run._get_per_token_logps_and_entropies(run.model, ids, mask, width)
    with pytest.raises(ReplayError, match="drop prompts without tokens"):
        run._get_per_token_logps_and_entropies(run.model, ids[:, -width:], mask[:, -width:], width)


# -------------------------------------------------------------------- self-check


def shifted(inputs):
    """The bounds of rows, one token late."""
    bounds = inputs.cu_seqlens.clone()
    bounds[1:-1] += 1
    object.__setattr__(inputs, "cu_seqlens", bounds)
    return inputs


def test_the_self_check_sees_a_wrong_bound(tmp_path, models, monkeypatch):
    ids, mask, width = padded_rows((3, 5, 5, 3), (4, 6, 2, 2))
    hidden = adapter.Replayable.hidden
    monkeypatch.setattr(adapter.Replayable, "hidden", lambda self, inputs: hidden(self, shifted(inputs)))
    run = work.trainer(packed(GRPOTrainer, share_prefixes=False), tmp_path, models())
    with pytest.raises(
        ReplayError,
        match=r"from packed rows of \w+ are off by [\d.]+ from its own .*; expected at most 0.0001",
    ):
        run._get_per_token_logps_and_entropies(run.model, ids, mask, width)
    assert run.model.config._attn_implementation == NAME  # a backward pass could follow
    run = work.trainer(packed(GRPOTrainer, share_prefixes=False, self_check=False), tmp_path, models())
    run._get_per_token_logps_and_entropies(run.model, ids, mask, width)


@pytest.mark.parametrize("share", [False, True])
def test_the_self_check_sees_wrong_gradients(tmp_path, models, monkeypatch, share):
    """Values that get none."""
    ids, mask, width = padded_rows((3, 5, 5, 3), (4, 6, 2, 2))
    attend = attention._RUN["rows"]
    monkeypatch.setitem(attention._RUN, "rows", lambda q, k, v, *more: attend(q, k, v.detach() + 0 * v, *more))
    run = work.trainer(packed(GRPOTrainer, share_prefixes=share, min_shared=1), tmp_path, models())
    with torch.no_grad():
        run._get_per_token_logps_and_entropies(run.model, ids, mask, width)
    with pytest.raises(ReplayError, match=r"gradients of packed attention in \w+ are off by 1 of their norm"):
        run._get_per_token_logps_and_entropies(run.model, ids, mask, width)


def test_the_self_check_sees_other_positions(tmp_path, models, monkeypatch):
    folder = models("GPT2", n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    of = adapter.PackedInputs.of
    monkeypatch.setattr(adapter.PackedInputs, "of", lambda batch, **more: of(batch.exclude("position_ids"), **more))
    run = work.trainer(packed(GRPOTrainer, share_prefixes=False), tmp_path, folder)
    with pytest.raises(ReplayError, match="log-probs or entropies from packed rows of GPT2LMHeadModel are off by"):
        run._get_per_token_logps_and_entropies(run.model, *padded_rows())


@pytest.mark.parametrize(
    ("self_check", "expected"), [(None, [1, 0, 1, 0]), (True, [1, 1, 1, 1]), (False, [0, 0, 0, 0])]
)
def test_what_is_compared(tmp_path, models, monkeypatch, self_check, expected):
    """A row, and once more the first time that rows share a prefix."""
    run = work.trainer(packed(GRPOTrainer, min_shared=1, self_check=self_check), tmp_path, models())
    compared = []
    own = GRPOTrainer.__dict__[METHOD]
    monkeypatch.setattr(
        GRPOTrainer, METHOD, lambda self, *args, **more: compared.append(len(args[1])) or own(self, *args, **more)
    )
    ids, mask, width = padded_rows(completions=(4, 6, 3, 2, 1))
    counts = []
    for rows in (2, 2, 4, 4):  # the third begins as the second
        compared.clear()
        run._get_per_token_logps_and_entropies(run.model, ids[:rows], mask[:rows], width)
        counts.append(len(compared))
        assert set(compared) <= {1}
    assert counts == expected


# -------------------------------------------------------------------- attention


def test_the_model_has_its_own_attention_outside_of_passes(tmp_path, models, monkeypatch):
    run = work.trainer(packed(GRPOTrainer), tmp_path, models(), max_steps=2, **REUSED)
    own = run.model.config._attn_implementation
    assert own != NAME
    generating, passing, after = set(), set(), set()
    generate, answer, step = run.model.generate, adapter._Inside.answer, type(run).training_step

    def answering(self, ask):
        out = answer(self, ask)
        passing.add(self.model.config._attn_implementation)
        return out

    def stepping(*args, **kwargs):
        out = step(run, *args, **kwargs)
        after.update({run.model.config._attn_implementation, run.ref_model.config._attn_implementation})
        return out

    monkeypatch.setattr(adapter._Inside, "answer", answering)
    run.model.generate = lambda *args, **kwargs: (
        generating.add(run.model.config._attn_implementation) or generate(*args, **kwargs)
    )
    run.training_step = stepping
    run.train()
    assert generating == after == {own}
    assert passing == {NAME}


def test_the_attention_is_back_after_an_error(tmp_path, models, monkeypatch):
    run = work.trainer(packed(GRPOTrainer), tmp_path, models(), max_steps=1)
    monkeypatch.setattr(torch.Tensor, "backward", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.train()
    assert run.model.config._attn_implementation != NAME


# -------------------------------------------------------------------- TRL's own path


def fallback(run, match, calls=2, training=True, **left):
    """The one warning of several calls, whose results are TRL's."""
    ids, mask, width = padded_rows()
    run.model.train(training)
    own = getattr(GRPOTrainer if isinstance(run, GRPOTrainer) else RLOOTrainer, METHOD)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(calls):
            torch.manual_seed(0)
            seen = getattr(run, METHOD)(run.model, ids, mask, width, compute_entropy=True, **left)
    torch.manual_seed(0)
    expected = own(run, run.model, ids, mask, width, compute_entropy=True, **left)
    for one, other in zip(seen, expected, strict=True):
        assert one is other is None or torch.equal(one, other)
    told = [str(one.message) for one in caught if issubclass(one.category, MaskpackWarning)]
    assert len(told) == 1, told
    assert told[0].startswith(f"packed({type(run).__name__}): TRL's own padded pass runs: ")
    assert re.search(match, told[0]), told[0]
    assert run.model.config._attn_implementation != NAME
    counted = run._metrics["train" if training else "eval"]["maskpack/computed_fraction"]
    assert counted == ([1.0] * calls if run._refused is None else [])


def test_models_that_replay_refuses(tmp_path, falls_back):
    torch.manual_seed(0)
    model = tf.BloomForCausalLM(tf.BloomConfig(vocab_size=32, hidden_size=32, n_layer=2, n_head=4))
    fallback(work.trainer(packed(GRPOTrainer), tmp_path, model), "takes no position_ids")


def test_dropout(tmp_path, models, falls_back):
    folder = models("Qwen3", attention_dropout=0.5)
    run = work.trainer(packed(RLOOTrainer), tmp_path, folder)
    fallback(run, r"has dropout .* attention_dropout=0\.$")
    with warnings.catch_warnings():
        warnings.simplefilter("error", MaskpackWarning)
        run.model.eval()
        run._get_per_token_logps_and_entropies(run.model, *padded_rows())
    assert run.model.config._attn_implementation == NAME


def test_adapters_that_packed_rows_do_not_have(tmp_path, models, falls_back):
    peft = needs("peft")
    for number, (adapters, match) in enumerate(
        [
            (peft.LoraConfig(**LORA | {"lora_dropout": 0.1}), "lora_dropout=0"),
            (peft.LoraConfig(**LORA | {"modules_to_save": ["lm_head"]}), "output layer of"),
            (peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "learns virtual tokens"),
        ]
    ):
        run = work.trainer(packed(GRPOTrainer), tmp_path / str(number), models(), peft=adapters)
        if number == 2:  # which TRL does not run either
            assert re.search(match, run._refused)
        else:
            fallback(run, match)


def test_configurations(tmp_path, models):
    run = work.trainer(packed(GRPOTrainer), tmp_path, models())
    own = {name: getattr(run.accelerator, name) for name in ("distributed_type", "mixed_precision", "state")}
    deepspeed, fsdp = (SimpleNamespace(value=kind) for kind in ("DEEPSPEED", "FSDP"))
    for change, match in (
        ({"distributed_type": deepspeed}, "kind DEEPSPEED"),
        ({"distributed_type": fsdp, "is_fsdp2": False}, "FSDP version 1"),
        ({"mixed_precision": "fp8"}, "fp8"),
        ({"parallelism_config": SimpleNamespace(cp_enabled=True)}, "cp, which"),
        ({}, None),
    ):
        run.accelerator = SimpleNamespace(**own | change)
        assert re.search(match, adapter._refused(run)) if match else adapter._refused(run) is None
    for owner, name, value, match in (
        (run.args, "torch_compile", True, "torch_compile is on"),
        (run, "aux_loss_enabled", True, "auxiliary loss"),
        (run, "_is_vlm", True, "model with images"),
        (run.model, "hf_device_map", {"model": 0, "lm_head": 1}, "device_map"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, value, raising=False)
            assert re.search(match, adapter._refused(run))


def test_the_router_s_loss(tmp_path, falls_back):
    torch.manual_seed(0)
    model = tf.MixtralForCausalLM(tf.MixtralConfig(**work.SIZES, num_local_experts=4))
    fallback(
        work.trainer(packed(GRPOTrainer), tmp_path / "loss", model, router_aux_loss_coef=0.01),
        "auxiliary loss",
        compute_aux_loss=True,
    )
    run = work.trainer(packed(GRPOTrainer), tmp_path / "none", copy.deepcopy(model), router_aux_loss_coef=0.0)
    fallback(run, "compute_aux_loss was asked for", compute_aux_loss=True)


def test_packing_can_be_switched_off(tmp_path, models, monkeypatch, falls_back):
    monkeypatch.setenv("MASKPACK_PACKED_REPLAY", "0")
    fallback(work.trainer(packed(GRPOTrainer), tmp_path, models()), "MASKPACK_PACKED_REPLAY is 0")
    monkeypatch.setenv("MASKPACK_PACKED_REPLAY", "no")
    with pytest.raises(ReplayError, match="MASKPACK_PACKED_REPLAY is 'no'"):
        work.trained(packed(GRPOTrainer), tmp_path, models(), max_steps=1)


def test_another_model(tmp_path, models, falls_back):
    run = work.trainer(packed(GRPOTrainer), tmp_path, models())
    other = work.loaded(models())
    other.forward = run.model.forward
    with pytest.warns(MaskpackWarning, match="neither model nor ref_model"):
        run._get_per_token_logps_and_entropies(other, *padded_rows())


# -------------------------------------------------------------------- packed


def test_packed_is_a_class_like_the_one_given(models, tmp_path):
    ours = packed(GRPOTrainer)
    assert issubclass(ours, GRPOTrainer)
    assert ours.__name__ == "GRPOTrainer"  # in TRL's names of metrics
    assert repr(ours) == "<class 'maskpack.adapters.trl.packed(GRPOTrainer)'>"
    assert GRPOTrainer.__dict__[METHOD].__module__.startswith("trl.")


class Own(GRPOTrainer):
    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: packed(SFTTrainer), ReplayError, "expected a class with the method"),
        (lambda: packed(packed(GRPOTrainer)), ReplayError, "GRPOTrainer is packed already"),
        (lambda: packed(Own), ReplayError, "Own has a _get_per_token_logps_and_entropies of its own, of test_trl"),
        (
            lambda: type("Late", (packed(GRPOTrainer),), {METHOD: None}),
            ReplayError,
            "Late, a subclass of a packed trainer, has a _get_per_token_logps_and_entropies of its own",
        ),
        (lambda: packed(GRPOTrainer, self_check="no"), ReplayError, "self_check is 'no'"),
        (lambda: packed(GRPOTrainer, min_shared=0), LayoutError, "min_shared is 0"),
    ],
)  # fmt: skip
def test_misuse(call, error, match):
    with pytest.raises(error, match=re.escape(match)):
        call()


def test_another_trl_is_refused_by_name(monkeypatch):
    def changed(self, model, input_ids, attention_mask, logits_to_keep, chunk=None):
        pass

    changed.__module__ = "trl.trainer.grpo_trainer"
    monkeypatch.setattr(GRPOTrainer, METHOD, changed)
    with pytest.raises(ReplayError, match=r"has other parameters than in TRL 1.16 \(batch_size, chunk, "):
        packed(GRPOTrainer)


# -------------------------------------------------------------------- the example


def test_the_example_trains_alike():
    theirs, ours = (trl_grpo.train(kind) for kind in (GRPOTrainer, packed(GRPOTrainer)))
    assert len(theirs) == trl_grpo.STEPS
    for one, other in zip(theirs, ours, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=CLOSE)
        assert one.get("reward") == other.get("reward")


# -------------------------------------------------------------------- ranks


MANY_PASSES = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "steps_per_generation": 16}
"""The ranks plan 14 and 12 of them, and would wait for each other if they did not agree."""


def of_ranks(tmp_path, models, cases, sharded, **more):
    """The results of two ranks, by case."""
    options = {"max_steps": 3, **REUSED} | (MANY_PASSES if sharded else {}) | more
    given = str(tmp_path), models(), cases, sharded, options
    return dict(zip(cases, zip(*values(run_ranks(work.of_rank, 2, *given)), strict=True), strict=True))


def test_two_ranks_compare_their_rows_together(tmp_path, models):
    """The metrics are those of all rows, on each rank, and both stop."""
    given = str(tmp_path), models(), {"max_steps": 4, **REUSED}
    (first, own, said), (second, others, also) = values(run_ranks(work.mismatch_of_rank, 2, *given))
    assert len(first) == len(own) == 1
    assert first == second
    assert own != others
    assert first[0]["maskpack/rollout_mismatch/tokens"] == own[0] + others[0]
    assert said == also
    assert said.startswith("compare: the log-probs of the trainer are not those of the rollout: k3 is ")


def furthest(one, other):
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


@pytest.mark.parametrize(
    ("sharded", "options"),
    [(False, {}), (True, {}), (True, {"cast_lm_head_to_fp32": True})],
    ids=["ddp", "fsdp2", "fsdp2, a head in float32"],
)
def test_two_ranks(tmp_path, models, sharded, options):
    cases = ("padded", "packed") if sharded else ("padded", "packed", "bypassed")
    runs = of_ranks(tmp_path, models, cases, sharded, **options)
    for theirs, own in zip(runs["padded"], runs["packed"], strict=True):
        assert theirs[3] == own[3]
        assert (
            theirs[2]
            == own[2]
            == ({"FSDPQwen3ForCausalLM"} if sharded else {"Qwen3ForCausalLM", "DistributedDataParallel"})
        )
        assert furthest(theirs[1], own[1]) < CLOSE
        for one, other in zip(theirs[0], own[0], strict=True):
            assert one == pytest.approx(other, rel=CLOSE, abs=CLOSE)
    first, second = runs["packed"]
    assert furthest(first[1], second[1]) == 0
    before = {name: value.detach().numpy() for name, value in work.loaded(models()).named_parameters()}
    assert furthest(before, first[1]) > 1e-3
    if not sharded:  # gradients of ranks that are not averaged would be seen
        first, second = runs["bypassed"]
        assert furthest(first[1], second[1]) > 1e-4
