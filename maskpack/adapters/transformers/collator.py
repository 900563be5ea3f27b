"""PackedCollator: packs samples for transformers and TRL, with the bounds of the rows for attention.

    samples        p p r r | p r          lists, arrays or tensors of each sample, p prompt, r response tokens
    input_ids      p p r r | p r | 0      [1, T]; a tail, which is a row of its own, rounds T up
    position_ids   0 1 2 3 | 0 1 | 0      start at 0 in every row
    labels         x x r r | x r | x      x is -100: masked, in the tail, or the first token of a row, which no output
    scores cu_seq_lens_q  0         4     6   7

It imports no framework; its results are keyword arguments of models of transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from maskpack.core.arguments import flag, said, whole
from maskpack.core.index import cumulated, ranges
from maskpack.errors import LayoutError, PlanError
from maskpack.planning.plan import MicroBatchPlan, plan_micro_batches

IGNORED = -100
"""The label of a token that is not in the loss."""

_CALL = "PackedCollator"
_MASKS = ("completion_mask", "assistant_masks")
_CHANGES = (
    *("position_ids", "token_type_ids", "mm_token_type_ids"),
    *("pixel_values", "pixel_values_videos", "input_features", "image_grid_thw", "video_grid_thw", "images"),
)
"""Fields that cannot be left out, because a model would compute other values without them."""
_BOUNDS = ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k")
_GIVEN = (
    *("input_ids", "labels", "position_ids", "attention_mask", "seq_lengths", *_MASKS),
    *(*_BOUNDS, "max_length_q", "max_length_k"),
)


@dataclass(frozen=True)
class _Sample:
    """One sample: its tokens [n] and labels [n], extras [n], and the lengths of the rows in it, which add up to n."""

    ids: Tensor
    labels: Tensor
    extras: tuple[Tensor, ...]
    lengths: tuple[int, ...]

    @property
    def loss_tokens(self) -> int:
        return int((self.labels != IGNORED).sum())


@dataclass(frozen=True)
class PackedCollator:
    """A data collator that packs samples one after the other, without padding.

    The attention of the model must read the row bounds from `cu_seq_lens_q`: after `adapters.transformers.replayable`,
    or with the flash attention of transformers.

    A sample is a mapping with `input_ids` [n], and optionally `labels` [n], the masks `completion_mask` and
    `assistant_masks` [n], and `seq_lengths`, the lengths of several rows that the dataset joined; the numbers of an
    `attention_mask` [n] without zeros tell rows apart, too. All samples must have the same fields of this list. Without
    labels, the ids are the labels. A token gets the label -100 if its label is -100, if a mask is 0, or if it is the
    first of a row. Other fields are left out, except those that change what a model computes, which raise.

    Attributes:
        multiple_of: T is rounded up to a multiple by a tail. Samples without tokens become a tail alone.
        seq_idx: whether to add `seq_idx`, for layers with short convolutions. Packed attention refuses it, like every
            unknown tensor.
        extras: further fields of the samples with one number for each token; 0 in the tail. Pop them from the inputs
            before the model.
    """

    multiple_of: int = 1
    seq_idx: bool = False
    extras: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        whole(self.multiple_of, "multiple_of", 1, _CALL, (1 << 31) - 1)
        names: Any = self.extras
        several = isinstance(names, Iterable) and not isinstance(names, str)
        if not several or not all(isinstance(name, str) for name in cast("Iterable[Any]", names)):
            raise LayoutError(f'{_CALL}: extras is {said(names)}; expected names of fields. Write ("advantages",).')
        flag(self.seq_idx, "seq_idx", _CALL)
        object.__setattr__(self, "extras", tuple(self.extras))
        taken = [name for name in self.extras if name in _GIVEN]
        if taken:
            raise LayoutError(
                f"{_CALL}: extras has {taken[0]!r}, which the inputs have already; expected other fields. Leave it out."
            )

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Packs samples into the inputs of a model.

        Returns:
            `input_ids`, `position_ids` and `labels` int64 [1, T]; `cu_seq_lens_q` and `cu_seq_lens_k` int32
            [rows + 1], rows without tokens left out; `max_length_q` and `max_length_k`, whole numbers; with `seq_idx`,
            int32 [1, T], the number of the row; and the extras [1, T]. All on the CPU.

        Raises:
            LayoutError: samples without `input_ids`, with fields of other lengths or dtypes, with padding in them, or
                with different fields.
        """
        return self._packed(self._read(samples))

    def micro_batches(
        self, samples: Sequence[Mapping[str, Any]], token_budget: int, **options: Any
    ) -> tuple[MicroBatchPlan, list[dict[str, Any]]]:
        """Packs samples into micro-batches of at most `token_budget` tokens, including tails.

        Args:
            token_budget: the largest T of a micro-batch, except for a sample that alone is longer.
            options: further arguments of `plan_micro_batches`, such as its options.

        Returns:
            The plan, whose rows are the samples and whose loss tokens are their labels, and the inputs of each of
            `plan.micro_batches`.

        Raises:
            LayoutError: as the call.
            PlanError: as `plan_micro_batches`, or a budget below `multiple_of`.
        """
        known = isinstance(token_budget, int | np.integer) and not isinstance(token_budget, bool)
        if not known or token_budget < self.multiple_of:
            raise PlanError(
                f"{_CALL}.micro_batches: token_budget is {token_budget!r} and multiple_of {self.multiple_of}; expected "
                "a whole number of tokens, at least one multiple. Raise it."
            )
        if "loss_tokens" in options:
            raise PlanError(
                f"{_CALL}.micro_batches: loss_tokens are given; expected them to be counted from the labels. Leave "
                "them out."
            )
        read = self._read(samples)
        plan = plan_micro_batches(
            [sample.ids.numel() for sample in read],
            token_budget - token_budget % self.multiple_of,
            loss_tokens=[sample.loss_tokens for sample in read],
            **options,
        )
        return plan, [self._packed([read[row] for row in rows]) for rows in plan.micro_batches]

    # ---------------------------------------------------------------- samples

    def _read(self, samples: Sequence[Mapping[str, Any]]) -> list[_Sample]:
        known = ("input_ids", "labels", "seq_lengths", "attention_mask", *_MASKS, *self.extras)
        if not isinstance(samples, Iterable) or isinstance(samples, str | bytes | Mapping):
            raise LayoutError(f"{_CALL}: samples are {said(samples)}; expected a list of dicts. Pass one: [sample].")
        first: list[str] | None = None
        read: list[_Sample] = []
        for number, sample in enumerate(samples):
            if not isinstance(sample, Mapping):
                raise LayoutError(
                    f"{_CALL}: sample {number} is {said(sample)}; expected a dict with input_ids. Pass a list of dicts."
                )
            odd = [name for name in _CHANGES if name in sample and name not in self.extras]
            if odd:
                raise LayoutError(
                    f'{_CALL}: sample {number} has a field "{odd[0]}"; expected text only. Drop the field if the '
                    "model does not need it, or name it in extras if it has one number for each token."
                )
            odd = [name for name in _BOUNDS if name in sample]
            if odd:
                raise LayoutError(
                    f'{_CALL}: sample {number} has a field "{odd[0]}", which tells rows apart; expected their lengths. '
                    'Give "seq_lengths" in its place, or drop the field if the sample is one row.'
                )
            own = [name for name in known if name in sample]
            first = own if first is None else first
            missing = [name for name in ("input_ids", *self.extras) if name not in sample]
            if missing:
                raise LayoutError(
                    f'{_CALL}: sample {number} has no field "{missing[0]}"; expected it beside '
                    f"{sorted(sample)}. Add it; with remove_unused_columns=False, a Trainer keeps columns that it does "
                    "not know."
                )
            if own != first:
                raise LayoutError(
                    f"{_CALL}: sample {number} has the fields {own}, sample 0 {first}; expected the same. Give all "
                    "samples the same labels and masks."
                )
            read.append(self._sample(number, sample))
        for place, name in enumerate(self.extras):
            dtypes = {sample.extras[place].dtype for sample in read if sample.extras[place].numel()}
            if len(dtypes) > 1:
                raise LayoutError(
                    f'{_CALL}: field "{name}" is {", ".join(sorted(map(str, dtypes)))} in different samples; expected '
                    "one dtype. Use one dtype in the dataset: [0.0, 0.0] is not [0, 0]."
                )
        return read

    def _sample(self, number: int, sample: Mapping[str, Any]) -> _Sample:
        ids = _line(number, sample, "input_ids", None, True)
        tokens = ids.numel()
        mask = torch.ones(tokens, device="cpu")
        if "attention_mask" in sample:
            mask = _line(number, sample, "attention_mask", tokens)
        if not bool((mask != 0).all()):
            raise LayoutError(
                f"{_CALL}: sample {number} has zeros in its attention_mask; expected valid tokens only. Tokenize "
                "without padding."
            )
        lengths = tuple(cast("list[int]", mask.unique_consecutive(return_counts=True)[1].tolist()))
        if "seq_lengths" in sample:
            documents, joined = lengths, _line(number, sample, "seq_lengths", None, True)
            lengths = tuple(cast("list[int]", joined.tolist()))
            if sum(lengths) != tokens or min(lengths, default=0) < 0:
                raise LayoutError(
                    f"{_CALL}: sample {number} has seq_lengths {list(lengths)} and {tokens} tokens; expected lengths "
                    "that add up to its tokens. Fix the dataset."
                )
            if not {*accumulate(documents)} <= {*accumulate(lengths)}:
                raise LayoutError(
                    f"{_CALL}: sample {number} has seq_lengths {list(lengths)}, and the numbers of its attention_mask "
                    f"change after {list(documents)} tokens; expected rows that end there, too. Fix the dataset."
                )
        labels = (_line(number, sample, "labels", tokens, True) if "labels" in sample else ids).clone()
        for name in _MASKS:
            if name in sample:
                labels[_line(number, sample, name, tokens) == 0] = IGNORED
        starts = cumulated(np.array([length for length in lengths if length], np.int64))[:-1]
        labels[torch.from_numpy(starts)] = IGNORED
        return _Sample(ids, labels, tuple(_line(number, sample, name, tokens) for name in self.extras), lengths)

    # ---------------------------------------------------------------- inputs

    def _packed(self, samples: Sequence[_Sample]) -> dict[str, Any]:
        lengths = np.array([length for sample in samples for length in sample.lengths if length], np.int64)
        total = int(lengths.sum())
        tail = -total % self.multiple_of or (0 if total else self.multiple_of)
        if tail:
            lengths = np.append(lengths, tail)
        bounds = cumulated(lengths)
        out: dict[str, Any] = {
            "input_ids": _joined((sample.ids for sample in samples), tail, 0, torch.int64),
            "position_ids": torch.from_numpy(ranges(np.zeros_like(lengths), lengths))[None],
            "labels": _joined((sample.labels for sample in samples), tail, IGNORED, torch.int64),
        }
        out["cu_seq_lens_q"] = out["cu_seq_lens_k"] = torch.from_numpy(bounds.astype(np.int32))
        out["max_length_q"] = out["max_length_k"] = int(lengths.max())
        if self.seq_idx:
            numbers = torch.arange(lengths.size, dtype=torch.int32, device="cpu")
            out["seq_idx"] = numbers.repeat_interleave(torch.from_numpy(lengths))[None]
        for place, name in enumerate(self.extras):
            out[name] = _joined((sample.extras[place] for sample in samples), tail, 0, None)
        return out


def _joined(parts: Iterable[Tensor], tail: int, filler: int, dtype: torch.dtype | None) -> Tensor:
    """Joins parts [n] and the tail into [1, T]. Empty parts do not determine the dtype."""
    lines = [line for line in parts if line.numel()]
    dtype = dtype or (lines[0].dtype if lines else torch.float32)
    return torch.cat([*lines, torch.full((tail,), filler, dtype=dtype, device="cpu")])[None]


def _line(number: int, sample: Mapping[str, Any], name: str, tokens: int | None, integers: bool = False) -> Tensor:
    """A field of a sample as a tensor [n] on the CPU; with `integers`, an int64 one."""
    given = sample[name]
    try:
        line = given.detach().cpu() if isinstance(given, Tensor) else torch.tensor(given, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise LayoutError(
            f'{_CALL}: sample {number} has a field "{name}" that is not a list of numbers ({error}); expected one for '
            "each token. Fix the dataset."
        ) from error
    if line.layout != torch.strided or line.dim() != 1 or (tokens is not None and line.numel() != tokens):
        expected = "one number for each token" if tokens is None else f"({tokens},), as its input_ids"
        seen = f"of shape {tuple(line.shape)}"
    else:
        expected, seen = "integers", f"of {line.dtype}"
        odd = line.is_floating_point() or line.is_complex() or line.dtype == torch.bool
        if not integers or not odd or not line.numel():
            return line.long() if integers else line
    raise LayoutError(f'{_CALL}: sample {number} has a field "{name}" {seen}; expected {expected}. Fix the dataset.')
