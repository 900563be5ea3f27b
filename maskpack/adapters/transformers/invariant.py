"""Same bits in every packing: what a pass is given so that bits do not depend on it, and the probe that refuses others.

    tokens of the batch            T
    a a a b b c c c c              9    products of few tokens run other kernels, which add in another order
    a a a b b c c c c . . . . .   14    a tail makes T at least `least`, and a multiple

The probe replays rows of random ids, together in several orders and sizes, and alone, at the first call of each path.
Hooks take a digest of what each part is given and gives for each token, because a part after it may round a difference
away. The first part to end whose outputs differ for equal inputs is the innermost one, and is refused by name. The rows
are not those of the batch, so that all ranks of a sharded model run the same passes. Later, at each new T, products are
compared with those of fewer tokens (`Products`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from maskpack.adapters.transformers.refusals import may_refuse
from maskpack.core.index import IntArray, ranges
from maskpack.replay.inputs import PackedInputs
from maskpack.replay.options import ReplayOptions

_LENGTHS = (1, 2, 17, 130, 700)
"""Tokens of the rows of the probe: within a block of attention, at its end, over many."""
_BRANCHES = (16, 40, 90)
"""Where rows of the probe part from each other, at several levels, if prefixes are shared."""
HEAD = "the output layer"
_TILE = 128
"""Tokens and columns of a tile of a matrix product on a GPU; T is a multiple."""
_MOST = 8192
"""The most tokens that a pass is padded to."""


class Sizes(NamedTuple):
    """T of an invariant pass is at least `least`, and a multiple."""

    least: int
    multiple: int

    @classmethod
    def of(cls, base: nn.Module, device: torch.device) -> Sizes:
        """On a GPU, as many tokens as give each processor a tile of the narrowest product, about: with fewer, libraries
        split sums over processors. On the CPU, one to three tokens run other kernels, and in float64 the tokens after
        the last multiple of four."""
        if device.type != "cuda":
            return cls(_TILE, _TILE // 2)
        narrowest = min((part.out_features for part in base.modules() if isinstance(part, nn.Linear)), default=_TILE)
        processors: int = cast("Any", torch.cuda.get_device_properties(device)).multi_processor_count
        tokens = _TILE * processors / math.ceil(narrowest / _TILE)
        return cls(min(_MOST, max(1024, 1 << round(math.log2(tokens)))), _TILE)

    def total(self, tokens: int) -> int:
        return -(-max(tokens, self.least) // self.multiple) * self.multiple


# -------------------------------------------------------------------- the probe


class Difference(NamedTuple):
    """Other bits in a packing than alone: the part that made them, and how many of its numbers of a row differ."""

    part: str
    kind: type[nn.Module] | None
    seen: int
    numbers: int


Run = Callable[[PackedInputs], tuple[Tensor, Tensor | None]]
"""Gives the hidden states [T, H] of inputs, and the log-probs [N] of their scored tokens."""
_Key = tuple[str, int, str, int]
"""The name of a part, the number of its call, "in" or "out", and the number of the tensor."""


def probe_rows(vocabulary: int, longest: int, without: Sequence[int], shares: bool) -> list[list[int]]:
    """Ids of the rows of the probe. With `shares`, some part from each other at several places."""
    source = np.random.default_rng(0)
    ids = np.setdiff1d(np.arange(vocabulary), np.array(without, np.int64))
    rows: list[list[int]] = [source.choice(ids, min(count, longest)).tolist() for count in _LENGTHS]
    if shares:
        trunk: list[int] = source.choice(ids, min(longest, max(_BRANCHES))).tolist()
        for at in _BRANCHES * 2:
            more: list[int] = source.choice(ids, 13).tolist()
            rows.append((trunk[: min(at, longest // 2)] + more)[:longest])
        rows.append(rows[-1][:-5] + rows[0] * 5)
    return rows


class _Passed(NamedTuple):
    """A pass of the probe: digests [keys, n] of what parts were given and gave for its n tokens, bits of hidden states
    and of log-probs."""

    inputs: PackedInputs
    digests: dict[_Key, Tensor]
    hidden: Tensor
    log_probs: Tensor | None


class Probe:
    """Replays rows of random ids in several packings, and compares bits with those of each row alone."""

    def __init__(
        self, model: nn.Module, output: nn.Module | None, mixers: Iterable[nn.Module], run: Run, sizes: Sizes
    ) -> None:
        """Hooks are not set within `mixers`, which run on groups of rows; nor on the output layer, which is refused if
        it has hooks."""
        self._run, self._sizes = run, sizes
        within = {id(inner) for part in mixers for inner in list(part.modules())[1:]}
        within |= set[int]() if output is None else {id(inner) for inner in output.modules()}
        parts: list[tuple[str, nn.Module]] = list(cast("Any", model).named_modules())
        self._parts = {name: part for name, part in parts if id(part) not in within}

    def difference(self, rows: list[list[int]], shares: bool, device: torch.device) -> Difference | None:
        """The first difference; None if there is none. It makes the same number of passes in any case."""
        alone = [self._passed(_given([row], False, device)) for row in rows]
        forward = list(range(len(rows)))
        times = 1 + self._sizes.least // max(sum(map(len, rows)), 1)
        found: Difference | None = None
        for numbers in (forward, forward[::-1], forward * times + forward[::-1], forward[::2], forward[1::2]):
            passed = self._passed(_given([rows[number] for number in numbers], shares, device))
            ends = np.cumsum([0, *(alone[number].inputs.targets.shape[0] for number in numbers)]).tolist()
            for place, number in enumerate(numbers):
                found = found or self._compared(passed, place, slice(*ends[place : place + 2]), alone[number])
        return found

    def _passed(self, inputs: PackedInputs) -> _Passed:
        with self._recorded(inputs.num_tokens, self._sizes.total(inputs.input_ids.shape[1])) as digests:
            hidden, log_probs = self._run(inputs)
        if log_probs is not None and inputs.copies is not None:
            log_probs = log_probs.index_select(0, inputs.copies)
        return _Passed(inputs, digests, bits(hidden), None if log_probs is None else bits(log_probs))

    def _compared(self, passed: _Passed, place: int, scored: slice, alone: _Passed) -> Difference | None:
        tokens = _tokens_of(passed.inputs, place)
        keys = [key for key in alone.digests if key in passed.digests]
        if keys:
            seen = torch.stack([passed.digests[key] for key in keys]).index_select(1, tokens)
            truth = torch.stack([alone.digests[key] for key in keys])
            off: list[int] = cast("Any", (seen != truth).sum(1)).tolist()
            differing = {key: count for key, count in zip(keys, off, strict=True) if count}
            given = {key[:2] for key in differing if key[2] == "in"}
            for key, count in differing.items():
                if key[2] == "out" and key[:2] not in given:
                    return Difference(key[0] or "the model", type(self._parts[key[0]]), count, tokens.shape[0])
        truth = alone.hidden[: alone.inputs.num_tokens]
        count = int((passed.hidden.index_select(0, tokens) != truth).sum())
        if count:
            return Difference("a part", None, count, truth.numel())
        if passed.log_probs is not None and alone.log_probs is not None:
            count = int((passed.log_probs[scored] != alone.log_probs).sum())
            if count:
                return Difference(HEAD, None, count, alone.log_probs.numel())
        return None

    @contextmanager
    def _recorded(self, tokens: int, total: int) -> Generator[dict[_Key, Tensor]]:
        """Gives digests of the first tokens of what parts are called with meanwhile and give, in the order in which
        they end: a part within another ends before it."""
        out: dict[_Key, Tensor] = {}
        counts: dict[str, int] = {}
        given: dict[str, list[list[Tensor]]] = {}

        def begin(name: str, _part: nn.Module, args: Any, kwargs: Any) -> None:
            given.setdefault(name, []).append(list(_digests((args, kwargs), tokens, total)))

        def end(name: str, _part: nn.Module, _args: Any, made: Any) -> None:
            nth = counts[name] = counts.get(name, -1) + 1
            for which, digests in (("in", given[name].pop()), ("out", list(_digests(made, tokens, total)))):
                out.update({(name, nth, which, number): digest for number, digest in enumerate(digests)})

        handles: list[Any] = []
        try:
            for name, part in self._parts.items():
                handles.append(part.register_forward_pre_hook(partial(begin, name), with_kwargs=True))
                handles.append(part.register_forward_hook(partial(end, name)))
            yield out
        finally:
            for handle in handles:
                handle.remove()


def _given(rows: list[list[int]], shares: bool, device: torch.device) -> PackedInputs:
    """All but the first token of a row are its response."""
    width = max(map(len, rows))
    ids, mask = (torch.zeros(len(rows), width, dtype=torch.int64, device="cpu") for _ in range(2))
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row, device="cpu")
        mask[number, : len(row)] = 1
    fields = {"input_ids": ids, "attention_mask": mask, "responses": ids[:, 1:], "response_mask": mask[:, 1:]}
    options = ReplayOptions(share_prefixes=shares, min_shared=4)
    return PackedInputs.of(TensorDict(fields, [len(rows)]), device=device, options=options)


def _tokens_of(inputs: PackedInputs, place: int) -> Tensor:
    """The tokens of the row at a place, among the T."""
    tree = inputs.tree
    offsets: IntArray = inputs.bounds if tree is None else tree.row_offsets
    begin, end = int(offsets[place]), int(offsets[place + 1])
    tokens = ranges(np.array([begin]), np.array([end - begin])) if tree is None else tree.of_row_token[begin:end]
    return torch.from_numpy(tokens).to(inputs.input_ids.device)


def bits(x: Tensor) -> Tensor:
    """The bits of numbers as integers: NaN equals NaN, and 0 is not -0."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.detach().contiguous().view(kinds[x.element_size()])


def _digests(given: Any, tokens: int, total: int) -> Iterator[Tensor]:
    """A number for each of the first tokens, of each tensor that has a dim of all T tokens."""
    if isinstance(given, dict):
        given = list(cast("dict[str, Any]", given).values())
    if isinstance(given, list | tuple):
        for one in cast("Sequence[Any]", given):
            yield from _digests(one, tokens, total)
    elif isinstance(given, Tensor) and not given.is_nested:
        dim = _dim_of(given, total)
        if dim is not None:
            rows = bits(given.movedim(dim, 0)[:tokens].reshape(tokens, -1))
            odd = 2 * torch.arange(rows.shape[1], device=rows.device, dtype=torch.int64) + 1
            yield (rows * odd).sum(1)


def _dim_of(x: Tensor, tokens: int) -> int | None:
    """The dim of tokens: [T, ...], [1, T, ...] or [n, 1, T]."""
    return next((dim for dim, size in enumerate(x.shape[:3]) if size == tokens), None)


# -------------------------------------------------------------------- products at other sizes


class Products:
    """Compares products of T tokens with those of fewer tokens, the first time that a pass has T: libraries choose
    kernels by the sizes. Of each kind and shape of part it takes the first, with its own tensors.

    Attributes:
        known: (T, path) of which all products were the same.
    """

    def __init__(self, model: nn.Module, mixers: Iterable[nn.Module], least: int) -> None:
        """Parts of mixers are left out."""
        self._least, self.known = least, set[Any]()
        within = {id(inner) for part in mixers for inner in list(part.modules())}
        kinds: dict[Any, tuple[str, nn.Module]] = {}
        parts: list[tuple[str, nn.Module]] = list(cast("Any", model).named_modules())
        for name, part in parts:
            weights = [tuple(weight.shape) for weight in part.parameters(recurse=False)]
            wide = any(len(shape) > 1 for shape in weights) and not isinstance(part, nn.Embedding)
            if wide and id(part) not in within and not list(part.children()):
                kinds.setdefault((type(part), *weights), (name, part))
        self._parts = list(kinds.values())

    @contextmanager
    def compared(self, tokens: int, path: Any, compare: bool) -> Generator[list[tuple[str, Tensor]]]:
        """Gives the name and the number of differing outputs of each part that ran meanwhile, if T is new."""
        found: list[tuple[str, Tensor]] = []
        if not compare or tokens <= self._least or (tokens, path) in self.known:
            yield found
            return
        handles: list[Any] = []
        try:
            for name, part in self._parts:
                hook = cast("Any", partial(self._compare, name, tokens, found))
                handles.append(part.register_forward_hook(hook, with_kwargs=True))
            yield found
        finally:
            for handle in handles:
                handle.remove()

    def _compare(
        self, name: str, tokens: int, found: list[tuple[str, Tensor]], part: nn.Module, args: Any, kwargs: Any, out: Any
    ) -> None:
        if "forward" in vars(part):  # it was told of all tokens
            return
        again: Any = partial(cast("Any", type(part)).forward, part)
        for begin in (0, tokens - self._least):
            cut, more, own = (_cut(given, begin, self._least, tokens) for given in (args, kwargs, out))
            try:
                with torch.no_grad():
                    fewer = again(*cut, **more)
            except Exception as error:
                if not may_refuse(error):
                    raise
                return  # it runs on other sizes alone
            for x, y in zip(_tensors(fewer), _tensors(own), strict=True):
                if x.shape == y.shape:
                    found.append((f"{name} ({type(part).__name__})", (bits(x) != bits(y)).sum()))


def _cut(given: Any, begin: int, count: int, tokens: int) -> Any:
    """The same of some tokens."""
    if isinstance(given, dict):
        return {name: _cut(x, begin, count, tokens) for name, x in cast("dict[str, Any]", given).items()}
    if isinstance(given, tuple):
        return tuple(_cut(x, begin, count, tokens) for x in cast("tuple[Any, ...]", given))
    dim = _dim_of(given, tokens) if isinstance(given, Tensor) else None
    return given if dim is None else given.narrow(dim, begin, count)


def _tensors(out: Any) -> list[Tensor]:
    outs = cast("Sequence[Any]", out) if isinstance(out, tuple | list) else [out]
    return [x for x in outs if isinstance(x, Tensor)]
