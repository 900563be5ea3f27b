"""response_outputs: log-probs, entropies and values of one forward pass, against each row alone, and against the two
passes of response_log_probs and response_values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from needs import needs
from tensordict import TensorDict
from test_replay import CASES, FORMS, Sums, all_forms, batch_of
from test_scored_tokens import SPLIT, rows_of, split
from torch import Tensor

from maskpack.errors import PlanError, ReplayError
from maskpack.planning import plan_micro_batches
from maskpack.replay import ReplayOptions, response_log_probs, response_outputs, response_values
from maskpack.replay.log_probs import ResponseOutputs

HEADS = {"value": lambda hidden: hidden[:, :1] * 2, "cost": lambda hidden: hidden.square().sum(-1)}


class Counted(Sums):
    """A model that counts its passes and self-checks."""

    def __init__(self) -> None:
        super().__init__()
        self.passes, self.checks = 0, []

    def hidden(self, inputs: Any) -> Tensor:
        self.passes += 1
        return super().hidden(inputs)

    def self_check(self, inputs: Any, hidden: Tensor, again: bool) -> None:
        self.checks.append((tuple(hidden.shape), again))


class Headless:
    """A model without an output layer."""

    def __init__(self, model: Counted) -> None:
        self.device, self.hidden, self.dense_hidden = model.device, model.hidden, model.dense_hidden
        self.self_check = model.self_check


def parts_of(seen: ResponseOutputs) -> list[Tensor]:
    assert seen.log_probs is not None
    assert seen.entropy is not None
    assert list(seen.heads) == list(HEADS)
    return [seen.log_probs, seen.entropy, *seen.heads.values()]


def same(seen: ResponseOutputs, batch: Any, model: Any, limit: float = 0, **more: Any) -> None:
    """As three passes give; bit for bit, unless there is a limit."""
    wanted = [*response_log_probs(model, batch, entropy=True, **more)]
    wanted += [response_values(model, batch, head, **more) for head in HEADS.values()]
    for part, truth in zip(parts_of(seen), wanted, strict=True):
        assert torch.equal(part.offsets(), truth.offsets())
        assert part.dtype == truth.dtype
        assert bool(((part.values() - truth.values()).abs() <= limit).all())


@all_forms
@pytest.mark.parametrize("case", CASES)
def test_one_pass_gives_what_several_give(form: Any, case: str) -> None:
    model, more = Counted(), {"options": ReplayOptions(no_prompt="skip", multiple_of=4)}
    batch = form(batch_of(*CASES[case]))
    seen = response_outputs(model, batch, entropy=True, heads=HEADS, temperature=1.0, **more)
    assert model.passes == 1
    assert [again for _, again in model.checks] == [False]
    same(seen, batch, model, **more)
    response_outputs(model, batch, heads=HEADS, self_check=True, **more)
    assert model.checks[-1][1] is True
    count = len(model.checks)
    response_outputs(model, batch, heads=HEADS, self_check=False, **more)
    assert len(model.checks) == count


def test_plans_restore_the_order_of_rows() -> None:
    model, batch = Counted(), FORMS["nested"](batch_of(*CASES["both"]))
    plan = plan_micro_batches(batch["input_ids"].offsets().diff(), 12)
    assert len(plan.micro_batches) > 1
    seen = response_outputs(model, batch, entropy=True, heads=HEADS, plan=plan)
    assert model.passes == len(plan.micro_batches)
    same(seen, batch, model, 1e-12)
    assert not seen.heads["value"].requires_grad


def test_a_plan_of_no_rows() -> None:
    """Gives what there is of no rows, without gradients; and is not for other batches."""
    batch, plan = batch_of(*CASES["both"]), plan_micro_batches([], 8)
    out = response_outputs(Sums(), batch[:0], plan=plan, entropy=True, heads=HEADS)
    assert all(part.shape[0] == part.values().numel() == 0 for part in parts_of(out))
    assert not any(part.requires_grad for part in parts_of(out))
    with pytest.raises(PlanError):
        response_outputs(Sums(), batch, plan=plan)


def test_only_what_is_asked_for() -> None:
    model, batch = Counted(), batch_of(*CASES["both"])
    seen = response_outputs(Headless(model), batch, log_probs=False, heads=HEADS)
    assert seen.log_probs is None
    assert seen.entropy is None
    assert torch.equal(seen.heads["cost"].values(), response_values(model, batch, HEADS["cost"]).values())
    seen = response_outputs(model, batch, temperature=0.5)
    assert seen.entropy is None
    assert seen.heads == {}
    assert seen.log_probs is not None
    assert torch.equal(seen.log_probs.values(), response_log_probs(model, batch, temperature=0.5).values())


def test_heads_run_on_scored_tokens_alone() -> None:
    """Others are 0 in every part."""
    batch, sizes = split(rows_of(torch.Generator().manual_seed(7), 9), 7), []

    def head(hidden: Tensor) -> Tensor:
        sizes.append(hidden.shape[0])
        return hidden.sum(-1) + 100

    options = ReplayOptions(scored=("response_mask",), no_prompt="skip", registry=SPLIT)
    seen = response_outputs(Sums(), batch, entropy=True, heads={"value": head}, options=options)
    on = batch["response_mask"][batch["attention_mask"][:, -7:].bool()].bool()
    assert sizes == [int(on.sum())]
    for part in (seen.log_probs, seen.entropy, seen.heads["value"]):
        assert part is not None
        assert bool((part.values()[on] != 0).all())
        assert not part.values()[~on].any()


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({"log_probs": False}, "neither log_probs nor heads are asked for; expected one of them"),
    "entropy alone": ({"log_probs": False, "entropy": True, "heads": HEADS}, "entropy without log_probs"),
    "a bare head": ({"heads": HEADS["cost"]}, "heads are a function; expected callables by their names"),
    "no callable": ({"heads": {"value": 3}}, "heads['value'] is 3; expected a callable"),
    "two outputs": (
        {"heads": {"value": lambda hidden: hidden[:, :2]}},
        "heads['value'] made (20, 2) of hidden states (20, 4); expected (20,) or (20, 1)",
    ),
    "no tensor": ({"heads": {"value": lambda hidden: 1.0}}, "heads['value'] made 1.0; expected a tensor"),
    "no flag for log-probs": ({"log_probs": "yes"}, "log_probs is 'yes'; expected True or False"),
    "no flag": ({"entropy": "yes"}, "entropy is 'yes'; expected True or False"),
    "no plan": ({"plan": 3, "heads": HEADS}, "plan is 3; expected a MicroBatchPlan"),
}


@pytest.mark.parametrize(("more", "message"), BAD.values(), ids=BAD)
def test_calls_that_do_not_fit_are_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ReplayError) as caught:
        response_outputs(Sums(), batch_of(*CASES["both"]), **more)
    assert str(caught.value).startswith("response_outputs: ")
    assert message in str(caught.value)


# -------------------------------------------------------------------- models of transformers, in float64


def alone(model: Any, head: Any, batch: TensorDict) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Of each row alone with response tokens: log-probs, entropies and values."""
    base = getattr(model, "model", None) or model.transformer
    mask, width = batch["attention_mask"].bool(), batch["responses"].shape[1]
    for ids, real, places in zip(batch["input_ids"], mask, batch["position_ids"], strict=True):
        count = int(real[-width:].sum())
        if not count:
            continue
        tokens = ids[real][None]
        states = base(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), position_ids=places[real][None], use_cache=False
        ).last_hidden_state[0, -count - 1 : -1]
        scores = model.lm_head(states).log_softmax(-1)
        yield (
            torch.stack([scores[nth, token] for nth, token in enumerate(tokens[0, -count:])]),
            -(scores.exp() * scores).sum(-1),
            head(states)[:, 0],
        )


@pytest.mark.parametrize(("name", "share"), [("qwen3", False), ("qwen3", True), ("gpt2", False)])
def test_a_policy_with_a_value_head_and_its_gradients(name: str, share: bool) -> None:
    """One pass through the layers, whose gradients are the sum of those of the two losses, each row alone."""
    needs("transformers")
    import rows_alone
    from tree_rows import batch_of, close, groups, pair

    model, plain = pair(rows_alone.MODELS[name], torch.float64)
    source = torch.Generator().manual_seed(1)
    weight = torch.randn(1, model.config.hidden_size, generator=source, dtype=torch.float64)
    heads = [torch.nn.Linear(weight.shape[1], 1, dtype=torch.float64) for _ in range(2)]
    for head in heads:
        head.load_state_dict({"weight": weight, "bias": torch.tensor([0.25], dtype=torch.float64)})
    batch = batch_of(groups([3, 2, 1, 4]))
    replay = rows_alone.replayable(model)
    ran: list[object] = []
    layer = (getattr(model, "model", None) or model.transformer).get_submodule("layers.0" if name == "qwen3" else "h.0")
    options = ReplayOptions(share_prefixes=share, min_shared=1)
    first = response_outputs(replay, batch, entropy=True, heads={"value": heads[0]}, self_check=True, options=options)
    with torch.no_grad():
        hook = layer.register_forward_hook(lambda *_: ran.append(None))
        response_outputs(replay, batch, entropy=True, heads={"value": heads[0]}, self_check=False, options=options)
        hook.remove()
    assert len(ran) == 1
    truth = [torch.cat(parts) for parts in zip(*alone(plain, heads[1], batch), strict=True)]
    assert first.log_probs is not None
    assert first.entropy is not None
    seen = [part.values() for part in (first.log_probs, first.entropy, first.heads["value"])]
    for part, wanted in zip(seen, truth, strict=True):
        assert part.dtype == torch.float64
        assert rows_alone.off(part, wanted) <= 1e-10

    def of_losses(parts: list[Tensor], owner: Any, head: Any) -> list[list[Tensor]]:
        """Gradients of the policy's loss and of the critic's, of the weights of the model and of the head."""
        weights = [*owner.parameters(), *head.parameters()]
        scale = torch.linspace(0.3, 1.3, parts[0].numel(), dtype=torch.float64)
        losses = [(parts[0] * scale).sum() - 0.1 * parts[1].sum(), (parts[2] - scale).square().sum()]
        return [
            [torch.zeros_like(w) if g is None else g for w, g in zip(weights, grads, strict=True)]
            for grads in (torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True) for loss in losses)
        ]

    policy, critic = of_losses(truth, plain, heads[1])
    wanted = [a + b for a, b in zip(policy, critic, strict=True)]
    assert all(float(one[0].norm()) > 0 for one in (policy, critic))  # of the embedding: both reach the layers
    scale = torch.linspace(0.3, 1.3, seen[0].numel(), dtype=torch.float64)
    both = (seen[0] * scale).sum() - 0.1 * seen[1].sum() + (seen[2] - scale).square().sum()
    got = torch.autograd.grad(both, [*model.parameters(), *heads[0].parameters()])
    close(list(got), wanted, 1e-10)


def test_padded_replay_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(*CASES["both"])
    packed = response_outputs(Sums(), batch, entropy=True, heads=HEADS)
    monkeypatch.setenv("MASKPACK_PACKED_REPLAY", "0")
    padded = response_outputs(Sums(), batch, entropy=True, heads=HEADS)
    for one, other in zip(parts_of(packed), parts_of(padded), strict=True):
        assert one.offsets().tolist() == other.offsets().tolist()
        assert float((one.values() - other.values()).detach().abs().max()) <= 1e-12
