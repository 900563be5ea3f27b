"""The worked losses on nested rows, against loops over rows and tokens that know the formulas and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import maskpack as mp

sys.path.append(str(Path(__file__).parents[2] / "examples"))

from grpo_losses import kl_losses, policy_losses, weighted_sum

PROMPT, RESPONSE = 4, 7
LENGTHS = [5, 1, 7, 0, 3, 6, 2, 4]  # of the responses
CLOSE = {"rtol": 0, "atol": 1e-12}


def rollout(seed):
    """A padded batch in float64; under holes of the loss mask tokens have numbers like all others."""
    rng = torch.Generator().manual_seed(seed)
    rows, lengths = len(LENGTHS), torch.tensor(LENGTHS)
    real = torch.arange(RESPONSE) < lengths[:, None]
    prompt = torch.arange(PROMPT) >= torch.randint(0, PROMPT, (rows, 1), generator=rng)
    holes = real.long() * (torch.rand(rows, RESPONSE, generator=rng) < 0.6)
    holes[LENGTHS.index(2)] = 0  # a row without a loss token

    def numbers(spread):
        drawn = spread * torch.randn(rows, RESPONSE, generator=rng, dtype=torch.float64)
        return drawn.where(real, 0)  # a product with the mask would leave -0.0

    return TensorDict(
        {
            "responses": torch.randint(1, 90, (rows, RESPONSE), generator=rng) * real,
            "attention_mask": torch.cat([prompt, real], 1).long(),
            "response_mask": holes,
            "old_log_probs": numbers(0.6),
            "ref_log_prob": numbers(0.6),
            "advantages": numbers(1.0),
        },
        batch_size=[rows],
    )


def nested(batch, log_probs):
    """The nested batch, with the padded log-probs [B, R] on its response layout."""
    out = mp.nest_batch_by_mask(batch, pad_token_id=0)
    real = batch["attention_mask"][:, PROMPT:].bool()
    lengths = real.sum(1)
    out["log_probs"] = torch.nested.nested_tensor_from_jagged(
        log_probs[real], out["responses"].offsets(), min_seqlen=int(lengths.min()), max_seqlen=int(lengths.max())
    )
    return out


def leaf(seed):
    rng = torch.Generator().manual_seed(seed)
    return (0.6 * torch.randn(len(LENGTHS), RESPONSE, generator=rng, dtype=torch.float64)).requires_grad_()


def padded(losses):
    assert losses.is_nested
    assert losses._get_max_seqlen() == max(LENGTHS)
    return losses.to_padded_tensor(0.0, output_size=(len(LENGTHS), RESPONSE))


# -------------------------------------------------------------------- dense references


def each_token(token):
    """[B, R] of what `token(row, place)` gives for each response token, 0 elsewhere."""
    zero = torch.zeros((), dtype=torch.float64)
    out = []
    for row, length in enumerate(LENGTHS):
        own = [token(row, place) if place < length else zero for place in range(RESPONSE)]
        out.append(torch.stack(own))
    return torch.stack(out)


def dense_policy_losses(new, old, advantage, low, high, dual):
    def token(row, place):
        ratio = torch.exp(new[row, place] - old[row, place])
        gain = float(advantage[row, place])
        bounded = ratio
        if ratio.item() < 1 - low:
            bounded = torch.tensor(1 - low, dtype=torch.float64)
        if ratio.item() > 1 + high:
            bounded = torch.tensor(1 + high, dtype=torch.float64)
        reward = ratio * gain
        if (bounded * gain).item() < reward.item():
            reward = bounded * gain
        if dual is not None and gain < 0 and reward.item() < dual * gain:
            reward = torch.tensor(dual * gain, dtype=torch.float64)
        return -reward

    return each_token(token)


def dense_kl_losses(new, ref, estimator):
    def token(row, place):
        ratio = torch.exp(ref[row, place] - new[row, place])  # of the reference to the policy
        if estimator == "k1":
            return -torch.log(ratio)
        if estimator == "k2":
            return torch.log(ratio) ** 2 / 2
        return ratio - 1 - torch.log(ratio)

    return each_token(token)


def gradient(loss, *leaves):
    return torch.autograd.grad(loss, leaves, retain_graph=True, materialize_grads=True)


# -------------------------------------------------------------------- tokens


def close_tokens(seen, truth, new):
    """Losses of tokens and the gradient of each."""
    torch.testing.assert_close(padded(seen), truth, **CLOSE)
    by = torch.rand(truth.shape, dtype=torch.float64)
    torch.testing.assert_close(gradient((padded(seen) * by).sum(), new), gradient((truth * by).sum(), new), **CLOSE)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("seed", range(3))
def test_kl_losses(seed, estimator):
    batch, new = rollout(seed), leaf(seed + 200)
    rows = nested(batch, new)
    seen = kl_losses(rows["log_probs"], rows["ref_log_prob"], estimator)
    close_tokens(seen, dense_kl_losses(new, batch["ref_log_prob"], estimator), new)


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize(("low", "high", "dual"), [(0.2, 0.2, None), (0.2, 0.28, None), (0.1, 0.4, 1.5), (0.2, 0.2, 3)])
@pytest.mark.parametrize("seed", range(3))
def test_policy_losses(seed, low, high, dual, per_row):
    batch, new = rollout(seed), leaf(seed + 100)
    rows = nested(batch, new)
    advantage = batch["advantages"]
    given = rows["advantages"]
    if per_row:
        given = torch.randn(len(LENGTHS), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        advantage = given[:, None].expand(-1, RESPONSE)
    seen = policy_losses(rows["log_probs"], rows["old_log_probs"], given, clip_low=low, clip_high=high, dual_clip=dual)
    close_tokens(seen, dense_policy_losses(new, batch["old_log_probs"], advantage, low, high, dual), new)


@pytest.mark.parametrize("weights_of_tokens", [False, True])
def test_weighted_sums(weights_of_tokens):
    """That the sums of micro-batches are the loss of all rows is for test_grpo.py and tests/planning."""
    batch, new = rollout(4), leaf(104)
    if weights_of_tokens:
        batch["response_mask"] = batch["response_mask"] * torch.rand(len(LENGTHS), RESPONSE, dtype=torch.float64)
    rows, weights = nested(batch, new), torch.rand(len(LENGTHS), dtype=torch.float64)
    truth = each_token(lambda row, place: weights[row] * batch["response_mask"][row, place] * new[row, place]).sum()
    seen = weighted_sum(rows["log_probs"], rows["response_mask"], weights)
    torch.testing.assert_close(seen, truth, **CLOSE)
    torch.testing.assert_close(gradient(seen, new), gradient(truth, new), **CLOSE)


# -------------------------------------------------------------------- other rows


@pytest.mark.parametrize(
    "wrong",
    [
        lambda rows, others: policy_losses(rows["log_probs"], others["old_log_probs"], rows["advantages"]),
        lambda rows, others: policy_losses(rows["log_probs"], rows["old_log_probs"], torch.zeros(7)),
        lambda rows, others: kl_losses(rows["log_probs"], others["ref_log_prob"]),
        lambda rows, others: kl_losses(rows["log_probs"], rows["ref_log_prob"], "k4"),
        lambda rows, others: weighted_sum(rows["log_probs"], torch.zeros(8, 7), [1.0] * 8),
        lambda rows, others: weighted_sum(rows["log_probs"], rows["response_mask"], torch.zeros(8, 1)),
    ],
)
def test_other_rows_are_refused(wrong):
    with pytest.raises(mp.errors.LayoutError):
        wrong(nested(rollout(5), leaf(105)), nested(rollout(5)[:-1], leaf(105)[:-1]))
