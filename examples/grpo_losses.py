"""Policy losses of PPO, GRPO and DAPO on nested rows, token by token.

    log_probs       a a a | b b | c c c c        jagged [B, j], of response_log_probs: they carry the gradient
    old_log_probs   a a a | b b | c c c c        fields of the nested batch, on the same offsets tensor
    advantages      A     | B   | C              a number a row [B], or a token [B, j]
    weights         u     | v   | w              of plan.loss_weights: denominators of the whole update, all ranks

                                                    clip_low  clip_high  KL in the loss  mode of loss_weights
    PPO   arXiv 1707.06347, eq. 7                     0.2       0.2      none            token-mean
    GRPO  arXiv 2402.03300, eqs. 3 and 4              0.2       0.2      + beta * k3     seq-mean-token-mean
    DAPO  arXiv 2503.14476, sections 3.1 and 3.3      0.2       0.28     none            token-mean

All arithmetic is on packed values [T]: torch has no backward for the sum of a jagged tensor over its rows, nor for the
maximum of two.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from maskpack.errors import LayoutError

Estimator = Literal["k1", "k2", "k3"]


def policy_losses(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Tensor:
    """The clipped policy loss of each token, jagged [B, j].

        ratio = exp(log_probs - old_log_probs)
        loss = max(-A * ratio, -A * clamp(ratio, 1 - clip_low, 1 + clip_high))
        dual_clip, where A < 0:  min(loss, -A * dual_clip)          (arXiv 1912.09729)

    Args:
        log_probs, old_log_probs: jagged [B, j] on one offsets tensor.
        advantages: [B], or jagged [B, j] on the same.
        dual_clip: above 1.

    Raises:
        LayoutError: jagged tensors that do not share their offsets, or advantages of another number of rows.
    """
    if advantages.is_nested:
        new, old, gain = _packed(log_probs, old_log_probs, advantages)
    else:
        (new, old), gain = _packed(log_probs, old_log_probs), _per_token(advantages, log_probs)
    ratio = (new - old).exp()
    losses = torch.maximum(-gain * ratio, -gain * ratio.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip is not None:
        losses = torch.where(gain < 0, torch.minimum(losses, -gain * dual_clip), losses)
    return _nested(losses, log_probs)


def kl_losses(log_probs: Tensor, ref_log_probs: Tensor, estimator: Estimator = "k3") -> Tensor:
    """An estimate of KL(policy, reference) for each token, jagged [B, j] (http://joschu.net/blog/kl-approx.html).

        d = log_probs - ref_log_probs
        k1 = d        k2 = d ** 2 / 2        k3 = exp(-d) - 1 + d

    Args:
        log_probs, ref_log_probs: jagged [B, j] on one offsets tensor.

    Raises:
        LayoutError: they do not share their offsets, or another estimator.
    """
    new, ref = _packed(log_probs, ref_log_probs)
    apart = new - ref
    if estimator == "k1":
        return _nested(apart, log_probs)
    if estimator == "k2":
        return _nested(apart.square() / 2, log_probs)
    if estimator == "k3":
        return _nested(torch.expm1(-apart) + apart, log_probs)
    raise LayoutError(f"kl_losses: estimator is {estimator!r}; expected k1, k2 or k3. Choose one.")


def weighted_sum(losses: Tensor, mask: Tensor, weights: Any) -> Tensor:
    """The loss of a micro-batch: `(weights * (losses * mask).sum(-1)).sum()`. Nothing else divides it.

    Args:
        losses: jagged [B, j], of tokens.
        mask: jagged [B, j] on the same offsets tensor, `response_mask`: bool, integers or weights of tokens.
        weights: [B], what `plan.loss_weights` gives for the micro-batch.

    Raises:
        LayoutError: jagged tensors that do not share their offsets, or weights of another number of rows.
    """
    packed, counted = _packed(losses, mask)
    rows = torch.as_tensor(weights, dtype=packed.dtype, device=packed.device)
    return (_per_token(rows, losses) * counted * packed).sum()


# -------------------------------------------------------------------- jagged and packed


def _packed(*fields: Any) -> list[Tensor]:
    """Values [T] of jagged tensors whose tokens lie in the same places."""
    for field in fields:
        if not field.is_nested or field.offsets() is not fields[0].offsets():
            seen = "jagged on other offsets" if field.is_nested else str(tuple(field.shape))
            raise LayoutError(
                f"grpo_losses: a field is {seen}; expected jagged [B, j] on the offsets tensor of the log-probs. Take "
                "all of them from one nested batch."
            )
    return [field.values() for field in fields]


def _per_token(rows: Tensor, like: Any) -> Tensor:
    """[B] -> [T]: the number of a row at each of its tokens."""
    if tuple(rows.shape) != (like.shape[0],):
        raise LayoutError(
            f"grpo_losses: numbers of rows are {tuple(rows.shape)}; expected ({like.shape[0]},). Give one for each row."
        )
    # output_size saves a GPU from telling the host how many there are
    return torch.repeat_interleave(rows, like.offsets().diff(), output_size=like.values().shape[0])


def _nested(values: Tensor, like: Any) -> Tensor:
    """[T] -> jagged [B, j]. Lengths are passed on: without them torch takes all tokens for the longest row."""
    shortest, longest = like._get_min_seqlen(), like._get_max_seqlen()
    return torch.nested.nested_tensor_from_jagged(values, like.offsets(), min_seqlen=shortest, max_seqlen=longest)
