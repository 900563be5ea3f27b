"""batches: random batches of PPO, GRPO and DAPO as a hypothesis strategy.

    widths, lengths of rows, fields    drawn: hypothesis makes them small
    tokens, log-probs, ...             from a seeded generator
    prompts   . . 5 8 | 3 9 4 .   responses        attention_mask  0 0 1 1 | 1 1 1 0
                                                   response_mask           1 0 1 0

hypothesis is imported when `batches` is called: it is the extra `testing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from maskpack.core.arguments import flag, whole
from maskpack.errors import LayoutError, MaskpackError

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

_CALL = "maskpack.testing.batches"
_SCORES = ("rollout_log_probs", "old_log_probs", "ref_log_prob", "entropys", "values", "returns")
"""Fields of the response axis that hold a number of their own for each token."""
_AWKWARD = (-0.0, float("inf"), float("-inf"), float("nan"), 1e-45)


def batches(
    *,
    min_rows: int = 0,
    max_rows: int = 6,
    max_prompt: int = 4,
    max_response: int = 8,
    pad_token_id: int = 0,
    objects: bool = True,
    awkward: bool = False,
) -> SearchStrategy[TensorDict]:
    """A hypothesis strategy of padded batches of PPO, GRPO and DAPO, which RL_FIELDS covers.

    Every batch has `prompts` [B, P], padded on the left, `responses` [B, R], padded on the right, `input_ids` and
    `attention_mask` [B, P + R]; and any of `position_ids`, `response_mask` and `loss_mask` (with holes), log-probs,
    entropies, values, returns, advantages, rewards, `routed_experts`, and fields of one number a row. Rows of GRPO and
    DAPO come in groups that share a prompt and a `uid`. Examples include batches without rows, prompts or responses,
    empty rows, and rows without a token in their loss mask.

    Args:
        min_rows, max_rows: the smallest and the largest B.
        max_prompt, max_response: the largest P and R.
        pad_token_id: the token under the mask; no token of a row has this id.
        objects: whether batches may have Python objects for each row and for the batch.
        awkward: whether floats include -0.0, infinities, subnormals, and NaNs with any payload.

    Raises:
        LayoutError: an argument is invalid.
        MaskpackError: hypothesis is not installed.
    """
    low = whole(min_rows, "min_rows", 0, _CALL)
    high = whole(max_rows, "max_rows", 0, _CALL)
    if high < low:
        raise LayoutError(f"{_CALL}: max_rows is {high}; expected at least min_rows, {low}. Give a larger one.")
    widths = whole(max_prompt, "max_prompt", 0, _CALL), whole(max_response, "max_response", 0, _CALL)
    token = whole(pad_token_id, "pad_token_id", 0, _CALL)
    flag(objects, "objects", _CALL)
    flag(awkward, "awkward", _CALL)
    try:
        from hypothesis import strategies
    except ModuleNotFoundError as error:
        raise MaskpackError(
            f"{_CALL}: hypothesis is not installed; expected it. Run: pip install 'maskpack[testing]'."
        ) from error

    def drawn(draw: Any) -> TensorDict:
        rows, prompt, response = (
            draw(strategies.integers(least, most)) for least, most in ((low, high), (0, widths[0]), (0, widths[1]))
        )
        return _Maker(draw, strategies, rows, prompt, response, token, awkward).batch(objects)

    return strategies.composite(drawn)()


class _Maker:
    """Draws one batch.

    Attributes:
        rows, prompt, response: B, P and R.
        lengths: int64 [B, 2], the prompt and the response tokens of each row.
    """

    def __init__(
        self, draw: Any, strategies: Any, rows: int, prompt: int, response: int, token: int, awkward: bool
    ) -> None:
        self.draw, self.of, self.token, self.awkward = draw, strategies, token, awkward
        self.rng = np.random.default_rng(draw(strategies.integers(0, 2**32 - 1)))
        self.rows, self.prompt, self.response = rows, prompt, response
        self.grouped = draw(strategies.sampled_from(["PPO", "GRPO", "DAPO"])) != "PPO"
        size = draw(strategies.integers(1, 4)) if self.grouped else 1
        self.groups = np.arange(rows) // size
        lengths = [(draw(strategies.integers(0, prompt)), draw(strategies.integers(0, response))) for _ in range(rows)]
        self.lengths = np.array(lengths, np.int64).reshape(rows, 2)
        self.lengths[:, 0] = self.lengths[self.groups * size, 0]
        self.fields: dict[str, Any] = {}

    def wants(self) -> bool:
        return self.draw(self.of.booleans())

    def batch(self, objects: bool) -> TensorDict:
        head = np.arange(self.prompt) >= self.prompt - self.lengths[:, :1]
        tail = np.arange(self.response) < self.lengths[:, 1:]
        whole = np.concatenate([head, tail], axis=1)
        prompts = self.tokens(head)
        if self.grouped:
            first = np.unique(self.groups, return_index=True)[1]
            prompts = prompts[first][self.groups]
        responses = self.tokens(tail)
        masks = self.draw(self.of.sampled_from([np.int64, np.int64, np.bool_, np.int32]))
        self.fields = {
            "prompts": prompts,
            "responses": responses,
            "input_ids": np.concatenate([prompts, responses], axis=1),
            "attention_mask": whole.astype(masks),
        }
        if self.wants():
            self.fields["position_ids"] = np.maximum(np.cumsum(whole, axis=1) - 1, 0)
        kept = tail
        if self.wants():
            kept = tail & (self.rng.random(tail.shape) < self.draw(self.of.sampled_from([0.0, 0.7, 1.0, 1.0])))
            self.fields[self.draw(self.of.sampled_from(["response_mask", "loss_mask"]))] = kept.astype(masks)
        self.scores(tail, kept)
        if self.wants() and self.prompt + self.response:
            experts = self.rng.integers(0, 8, (*whole.shape, 2, 2)) * whole[:, :, None, None]
            self.fields["routed_experts"] = experts.astype(np.int16)
        if self.wants():
            self.fields["reward_baselines"] = self.floats((self.rows,))
        entries: dict[str, Any] = {
            name: value if isinstance(value, Tensor) else torch.from_numpy(np.ascontiguousarray(value))
            for name, value in self.fields.items()
        }
        if objects:
            entries |= self.objects()
        order = self.draw(self.of.permutations(list(entries)))
        return TensorDict({name: entries[name] for name in order}, batch_size=[self.rows])

    def tokens(self, mask: Any) -> Any:
        """int64 tokens that are not the pad token, which is elsewhere."""
        rng: Any = self.rng
        ids = rng.integers(1, 1000, mask.shape)
        return np.where(mask, ids + (ids >= self.token if self.token else 0), self.token)

    def scores(self, tail: Any, kept: Any) -> None:
        """Numbers of each response token, 0.0 under the mask."""
        dtype = self.draw(self.of.sampled_from([torch.float32, torch.float32, torch.bfloat16]))
        for name in self.draw(self.of.lists(self.of.sampled_from(_SCORES), unique=True)):
            self.fields[name] = self.under(tail, self.floats(tail.shape)).to(dtype)
        if self.wants():  # a number for each row, on every token of the loss
            row = self.floats((self.rows, 1))
            each = self.floats(tail.shape) if not self.grouped else row.expand(tail.shape)
            self.fields["advantages"] = self.under(kept, each)
        if self.wants():  # on the last token of a response
            last = np.arange(self.response) == self.lengths[:, 1:] - 1
            name = self.draw(self.of.sampled_from(["token_level_scores", "token_level_rewards", "rm_scores"]))
            self.fields[name] = self.under(last, self.floats((self.rows, 1)).expand(tail.shape))

    def under(self, mask: Any, values: Tensor) -> Tensor:
        return values.masked_fill(torch.from_numpy(np.ascontiguousarray(~mask)), 0.0)

    def floats(self, shape: tuple[int, ...]) -> Tensor:
        out = self.rng.standard_normal(shape).astype(np.float32)
        if self.awkward:
            odd = self.rng.random(shape)
            out = np.where(odd < 0.3, self.rng.choice(np.array(_AWKWARD, np.float32), shape), out)
            payload = self.rng.integers(0x7F800001, 0x80000000, shape).astype(np.uint32)
            out = np.where(odd < 0.1, payload.view(np.float32), out)
        return torch.from_numpy(out)

    def objects(self) -> dict[str, Any]:
        """Python objects for each row, and for the batch."""
        found: dict[str, Any] = {}
        each: dict[str, list[Any]] = {
            "uid": [f"prompt-{group}" for group in self.groups.tolist()],
            "raw_prompt": [[{"role": "user", "content": "x" * length}] for length in self.lengths[:, 0].tolist()],
            "extra_info": [{"index": row, "score": float(self.rng.random())} for row in range(self.rows)],
        }
        for name in self.draw(self.of.lists(self.of.sampled_from(sorted(each)), unique=True)) if self.rows else ():
            found[name] = NonTensorStack(*[NonTensorData(item) for item in each[name]])
        if self.wants():
            found["temperature"] = NonTensorData(0.7, batch_size=[self.rows])
        return found
