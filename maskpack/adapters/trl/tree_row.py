"""TreeRow: the rows of TRL's AsyncGRPOTrainer, which hold a prefix that several samples share once, by PrefixTree.

    samples   a b c d e    segments  a | b c d e | b c f     A segment ends one token before samples differ, so that
              a b c f                                        each token has one label, the next of its samples.

TRL asks a row whether a sample fits, adds it, and packs the row. The samples are kept sorted as bytes: the one that has
most tokens in common with a new sample is a neighbour of its place among them.
"""

from __future__ import annotations

import inspect
import sys
import types
import warnings
from bisect import bisect_left
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from maskpack.core.arguments import said
from maskpack.core.index import IntArray, cumulated, ranges
from maskpack.errors import MaskpackWarning, ReplayError
from maskpack.layout.prefix_tree import PrefixTree
from maskpack.replay.log_probs import packing_is_on

IGNORED = -100
"""The label of tokens that are not trained."""
_MODULE, _PLANNERS, _ROW = (
    "trl.experimental.async_grpo.async_grpo_trainer",
    ("TokenBudgetBatcher", "FixedCountBatcher"),
    "TreeRow",
)
"""The module of AsyncGRPOTrainer; its planners, which divide samples among rows; and the name of rows there."""


class TreeRow:
    """TRL's TreeRow: samples of which a prefix that several of them share is there once.

    Attributes:
        samples: the dicts that were added: `input_ids`, `completion_mask` and `old_log_probs`, each [tokens];
            `advantage`; `group_id`.
        groups: the group ids of the samples.
        trained: the number of tokens of all completion masks.
        load: the cost of attention: the sum of the depths of all tokens of the tree, from 1.
    """

    def __init__(self) -> None:
        self.samples: list[dict[str, Any]] = []
        self.groups: set[Any] = set()
        self.trained = 0
        self.load = 0
        self._sorted: list[bytes] = []
        self._added: list[IntArray] = []  # the tokens of each sample that the ones before it do not have

    @property
    def tokens(self) -> IntArray:
        """int64 [tokens of the tree]: in the order in which they were added."""
        return np.concatenate(self._added or [np.empty(0, np.int64)])

    def fits(self, sample: dict[str, Any], budget: int) -> bool:
        """Whether the row has at most `budget` tokens and `budget` trained tokens with the sample."""
        ids = _ids(sample)
        tokens = sum(map(len, self._added)) + ids.size - self._shared(ids)
        return tokens <= budget and self.trained + int(sample["completion_mask"].sum()) <= budget

    def add(self, sample: dict[str, Any]) -> None:
        """Adds a sample."""
        ids = _ids(sample)
        shared = self._shared(ids)
        key = ids.tobytes()
        self._sorted.insert(bisect_left(self._sorted, key), key)
        self._added.append(ids[shared:])
        self.samples.append(sample)
        self.groups.add(sample["group_id"])
        self.trained += int(sample["completion_mask"].sum())
        self.load += (ids.size * (ids.size + 1) - shared * (shared + 1)) // 2

    def _shared(self, ids: IntArray) -> int:
        """The number of tokens of a new sample that the row has: all of a sample that it has, and else one less than
        are equal, because the next token of the last of them is another."""
        key = ids.tobytes()
        place = bisect_left(self._sorted, key)
        most = 0
        for near in self._sorted[max(place - 1, 0) : place + 1]:
            if near == key:
                return ids.size
            other: IntArray = np.frombuffer(near, np.int64)
            count = min(ids.size, other.size)
            differ = ids[:count] != other[:count]
            most = max(most, int(differ.argmax()) if differ.any() else count)
        return max(most - 1, 0)

    def pack(self) -> dict[str, Tensor]:
        """The tensors of TRL's TreeRow, bit for bit, for N tokens, S segments, K keys of all segments and M trained
        tokens.

        Returns:
            `input_ids`, `position_ids`, `shift_labels` int64 [N]; `tree_kv_index` int64 [K]; `tree_cu_seqlens_q`,
            `tree_cu_seqlens_k` int32 [S + 1]; `tree_max_seqlens` int64 [2]; `token_index`, `segment_id` int64 [M];
            `old_log_probs`, `advantages` float32 [M].
        """
        rows = [_ids(sample) for sample in self.samples]
        following = [np.append(ids[1:], np.full(min(ids.size, 1), -1)) for ids in rows]  # none is -1
        ids = np.concatenate(rows)
        bounds = cumulated(np.array([row.size for row in rows], np.int64))
        tree = PrefixTree.from_ids(ids, bounds, np.concatenate(following), min_shared=1)
        nodes = tree.nodes
        above: list[int] = []  # the path to a node
        paths: list[int] = []
        for node, level in enumerate(nodes.levels.tolist()):
            above[level:] = [node]
            paths += above
        seen = nodes.depths + nodes.counts
        labels = np.full(tree.num_tokens, IGNORED, np.int64)
        terms: list[tuple[Any, ...]] = []
        for number, (sample, own) in enumerate(zip(self.samples, rows, strict=True)):
            trained = 1 + np.flatnonzero(np.asarray(sample["completion_mask"])[1 : own.size])
            before = tree.of_row_token[bounds[number] + trained - 1]
            labels[before] = own[trained]
            log_probs = np.asarray(sample["old_log_probs"])[trained]
            terms.append((before, log_probs, np.full(trained.size, sample["advantage"]), np.full(trained.size, number)))
        token_index, log_probs, advantages, segment_id = map(np.concatenate, zip(*terms, strict=True))
        arrays = {
            "input_ids": ids[tree.source],
            "position_ids": tree.depth,
            "shift_labels": labels,
            "tree_kv_index": ranges(nodes.starts[paths], nodes.counts[paths]),
            "tree_cu_seqlens_q": np.append(nodes.starts, tree.num_tokens).astype(np.int32),
            "tree_cu_seqlens_k": cumulated(seen).astype(np.int32),
            "tree_max_seqlens": np.array([nodes.counts.max(), seen.max()]),
            "token_index": token_index,
            "old_log_probs": log_probs.astype(np.float32),
            "advantages": advantages.astype(np.float32),
            "segment_id": segment_id,
        }
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _ids(sample: dict[str, Any]) -> IntArray:
    return np.ascontiguousarray(sample["input_ids"], np.int64)


# -------------------------------------------------------------------- the trainer


def is_async(trainer_class: Any) -> bool:
    """Whether a class is AsyncGRPOTrainer or a subclass."""
    classes = inspect.getmro(trainer_class) if isinstance(trainer_class, type) else ()
    return any(kind.__module__ == _MODULE for kind in classes)


def with_tree_rows(trainer_class: Any, call: str) -> Any:
    """A subclass of AsyncGRPOTrainer whose planners make these rows. Raises ReplayError if TRL's rows are others."""
    name = trainer_class.__name__
    if issubclass(trainer_class, _TreeTrainer):
        raise ReplayError(f"{call}: {name} is packed already; expected a trainer of TRL. Call packed once.")
    module = sys.modules[_MODULE]
    theirs = getattr(module, "TreeRow", None)
    planners = [vars(module).get(planner) for planner in _PLANNERS]
    known = all(planner and _ROW in _names(planner.__iter__.__code__) for planner in planners)
    if theirs is None or not known or not _alike(theirs):
        raise ReplayError(
            f"{call}: {name} has other planners or packs other rows than in TRL 1.16; expected {', '.join(_PLANNERS)} "
            f"that make rows of {_ROW}. Use TRL 1.16, or a maskpack that knows this version."
        )
    about = {"__doc__": trainer_class.__doc__, "__module__": __package__, "__qualname__": f"{call}({name})"}
    return cast("Any", type)(name, (_TreeTrainer, trainer_class), about)


class _TreeTrainer:
    """What `packed` puts before AsyncGRPOTrainer."""

    accelerator: Any

    def get_train_dataloader(self) -> Any:
        loader = cast("Any", super()).get_train_dataloader()
        planner = loader.dataset
        if not packing_is_on("packed") or not self.accelerator.is_main_process:  # other ranks have no planner
            return loader
        if type(planner).__module__ == _MODULE and type(planner).__name__ in _PLANNERS:
            planner.__class__ = _planner(type(planner))
        else:
            seen = f"the planner is {said(planner)}. Leave get_train_dataloader to TRL."
            warnings.warn(
                f"{type(self).__qualname__}: TRL's own rows are packed: {seen}", MaskpackWarning, stacklevel=2
            )
        return loader


def _planner(kind: Any) -> Any:
    """A subclass of a planner that makes these rows: its own code, in which `TreeRow` is another class."""
    own = kind.__iter__
    names = own.__globals__ | {_ROW: TreeRow}
    iterate = types.FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    return type(kind.__name__, (kind,), {"__iter__": iterate, "__module__": kind.__module__})


def _names(code: types.CodeType) -> set[str]:
    """The global names in a function and in those within it: comprehensions are such before Python 3.12."""
    inner = (one for one in code.co_consts if isinstance(one, types.CodeType))
    return {*code.co_names}.union(*map(_names, inner))


def _alike(theirs: Any) -> bool:
    """Whether rows of TRL hold some samples in the same tensors."""
    rows = theirs(), TreeRow()
    for ids in ([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 4], [6]):
        size = len(ids)
        mask, log_probs = np.arange(size) % 2, np.linspace(-1, 0, size, dtype=np.float32)
        for row in rows:
            row.add(
                {
                    "input_ids": np.array(ids),
                    "completion_mask": mask,
                    "old_log_probs": log_probs,
                    "advantage": 0.5,
                    "group_id": 0,
                }
            )
    one, other = (row.pack() for row in rows)
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )
