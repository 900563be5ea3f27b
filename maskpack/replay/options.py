"""ReplayOptions: how the rows of every batch are packed and scored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from maskpack.core.arguments import flag, said, whole
from maskpack.core.keys import need_key, need_keys
from maskpack.errors import ReplayError
from maskpack.fields.options import Registry, registry_of
from maskpack.fields.registry import Key
from maskpack.fields.rl_fields import RL_FIELDS
from maskpack.layout.prefix_tree import MIN_SHARED

NoPrompt = Literal["error", "skip"]
_CALL = "ReplayOptions"


@dataclass(frozen=True)
class ReplayOptions:
    """The options of replay that do not depend on the batch. Make them once, for plans and for replay.

    Attributes:
        input_ids: the field of the token ids.
        registry: its axes `sequence` and `response` name the masks. The response may be any tokens of the rows, as
            those of a loss mask with holes.
        scored: masks that pick the tokens to score, [B, R] or [B, S], padded or jagged, such as a loss mask with holes:
            those at which none of them is 0. The output layer or the value head runs on these alone, and log-probs and
            values of all other response tokens are 0. If the batch gives no response axis, all its tokens are the
            response, and without `scored` those that its `loss_mask` picks. One synchronisation for each mask on CUDA.
        multiple_of: T is rounded up to a multiple by a tail; with `context_group`, the shard of each rank is a
            multiple. A batch without tokens becomes a tail alone, because models do not run without tokens.
        no_prompt: the first token of a row has no output that scores it. If it is a response token, "error" raises and
            "skip" leaves it unscored: its log-prob or value is 0.
        share_prefixes: whether tokens that begin several rows of a batch, with equal position ids, such as the prompt
            of a group, are computed once. Log-probs are the same within rounding, and gradients add up. In train mode
            the model must have no dropout. Ids and positions are compared on the host; one synchronisation for each of
            the two if they are on CUDA. Rows with images or videos share only with rows that have the same.
        min_shared: as for `PrefixTree.from_ids`.
        routed_experts: whether routers of a mixture of experts take the ids of the field "routed_experts" [B, S,
            layers, k] of the sequence axis, with their own probabilities as weights: k different ids from 0 for each
            token and layer, or k times -1 where the router chooses; it always does at the last token of a row, on which
            no log-prob depends. `layers` are those of the model, or those that have a router. Tokens are shared only if
            these are equal, too. One more synchronisation on CUDA.
        keep: as for `ops.packed_log_probs`, which reduces logits in float32, a piece at a time: the memory in
            bytes that may make its backward pass faster.

    Raises:
        MaskpackError: an option is not one of these.
    """

    input_ids: Key = "input_ids"
    registry: Registry = RL_FIELDS
    scored: tuple[Key, ...] = ()
    multiple_of: int = 1
    no_prompt: NoPrompt = "error"
    share_prefixes: bool = False
    min_shared: int = MIN_SHARED
    routed_experts: bool = False
    keep: int | None = None

    def __post_init__(self) -> None:
        need_key(self.input_ids, "input_ids", _CALL, ReplayError)
        registry_of(self.registry, _CALL)
        object.__setattr__(self, "scored", need_keys(self.scored, "scored", _CALL, ReplayError))
        whole(self.multiple_of, "multiple_of", 1, _CALL, (1 << 31) - 1)
        if self.no_prompt not in ("error", "skip"):
            raise ReplayError(f'{_CALL}: no_prompt is {said(self.no_prompt)}; expected "error" or "skip". Choose one.')
        flag(self.share_prefixes, "share_prefixes", _CALL, ReplayError)
        whole(self.min_shared, "min_shared", 1, _CALL)
        flag(self.routed_experts, "routed_experts", _CALL, ReplayError)
        if self.keep is not None:
            whole(self.keep, "keep", 0, _CALL)


DEFAULT = ReplayOptions()


def need_options(options: Any, call: str) -> None:
    """Raises ReplayError for anything but ReplayOptions."""
    if not isinstance(options, ReplayOptions):
        raise ReplayError(f"{call}: options are {said(options)}; expected ReplayOptions. Pass ReplayOptions(...).")
