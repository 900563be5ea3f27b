"""Same bits in every packing: what a pass is given so that bits do not depend on it, and the probe that refuses the rest.

    tokens of the batch            T
    a a a b b c c c c              9    products of few tokens run other kernels, which add in another order
    a a a b b c c c c . . . . .   14    a tail makes T at least `least`, and a multiple

The probe replays rows of random ids, together in several orders and sizes, and alone, and compares bits. It does so at
the first call of each path, before the batch. If some differ, both passes run again with hooks, and the innermost part
whose outputs differ for equal inputs is refused by name. It takes rows of its own, so that all ranks of a sharded model
run the same passes. Later, at each new T, products are compared with those of fewer tokens (`Products`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from maskpack.adapters.transformers.refusals import may_refuse
from maskpack.replay.inputs import PackedInputs
from maskpack.replay.options import ReplayOptions

_LENGTHS = (1, 2, 17, 130, 700)
"""Tokens of the rows of the probe: within a block of attention, at its end, over many."""
_TRUNKS = (16, 40, 90)
"""Where rows of the probe part from each other, at several levels, if prefixes are shared."""
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
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        tokens = _TILE * processors / math.ceil(narrowest / _TILE)
        return cls(min(_MOST, max(1024, 1 << round(math.log2(tokens)))), _TILE)

    def total(self, tokens: int) -> int:
        return -(-max(tokens, self.least) // self.multiple) * self.multiple


# -------------------------------------------------------------------- the probe


class Difference(NamedTuple):
    """The first packing with other bits: `seen` of `count` numbers of row `row`, in `passed` instead of `alone`."""

    seen: int
    count: int
    row: int
    alone: PackedInputs
    passed: PackedInputs
    in_head: bool


Run = Callable[[PackedInputs], tuple[Tensor, Tensor | None]]
"""Gives the hidden states [T, H] of inputs, and the log-probs of their scored tokens."""


def probe_rows(vocabulary: int, longest: int, without: Sequence[int], shares: bool) -> list[list[int]]:
    """Ids of the rows of the probe. With `shares`, they part from each other at several places."""
    source = np.random.default_rng(0)
    ids = np.setdiff1d(np.arange(vocabulary), np.array(without, np.int64))
    longest = min(longest, _LENGTHS[-1])
    rows = [source.choice(ids, min(count, longest)) for count in _LENGTHS]
    if shares:
        trunk = source.choice(ids, longest)
        for at in (*_TRUNKS, *_TRUNKS):
            at = min(at, longest // 2)
            rows += [np.concatenate([trunk[:at], source.choice(ids, min(at + 13, longest - at))])]
        rows += [np.concatenate([rows[-1][:-5], source.choice(ids, 3)])]
    return [row.tolist() for row in rows]


def probe(run: Run, rows: list[list[int]], least: int, shares: bool, device: torch.device) -> Difference | None:
    """The first difference of a packing of the rows from each row alone; None if all bits are the same."""
    truth = [_given([row], False, device) for row in rows]
    states = [run(inputs) for inputs in truth]
    forward, backward = list(range(len(rows))), list(range(len(rows)))[::-1]
    times = 1 + least // max(sum(map(len, rows)), 1)
    packings = [forward, backward, forward * times + backward, forward[::2], forward[1::2]]
    for numbers in packings:
        inputs = _given([rows[number] for number in numbers], shares, device)
        found = _compared(run(inputs), inputs, numbers, states, truth)
        if found is not None:
            return found
    return None


def _given(rows: list[list[int]], shares: bool, device: torch.device) -> PackedInputs:
    """All but the first token of a row are its response."""
    width = max(map(len, rows))
    ids, mask = (torch.zeros(len(rows), width, dtype=torch.int64) for _ in range(2))
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row)
        mask[number, : len(row)] = 1
    fields = {"input_ids": ids, "attention_mask": mask, "responses": ids[:, 1:], "response_mask": mask[:, 1:]}
    options = ReplayOptions(share_prefixes=shares, min_shared=4)
    return PackedInputs.of(TensorDict(fields, [len(rows)]), device=device, options=options)


def _tokens_of(inputs: PackedInputs, place: int) -> Tensor:
    """The tokens of the row at a place, among the T."""
    if inputs.tree is None:
        begin, end = inputs.bounds[place : place + 2].tolist()
        tokens = np.arange(begin, end)
    else:
        begin, end = inputs.tree.row_offsets[place : place + 2].tolist()
        tokens = inputs.tree.of_row_token[begin:end]
    return torch.from_numpy(tokens).to(inputs.input_ids.device)


def _compared(
    seen: tuple[Tensor, Tensor | None],
    inputs: PackedInputs,
    numbers: list[int],
    states: list[tuple[Tensor, Tensor | None]],
    truth: list[PackedInputs],
) -> Difference | None:
    ends = np.cumsum([0, *(len(truth[number].targets) for number in numbers)]).tolist()
    for place, number in enumerate(numbers):
        alone, log_probs = states[number]
        count = truth[number].num_tokens
        differing = _differing(seen[0].index_select(0, _tokens_of(inputs, place)), alone[:count])
        if differing:
            return Difference(differing, alone[:count].numel(), number, truth[number], inputs, False)
        if seen[1] is not None and log_probs is not None:
            of_rows = seen[1] if inputs.copies is None else seen[1].index_select(0, inputs.copies)
            differing = _differing(of_rows[ends[place] : ends[place + 1]], log_probs)
            if differing:
                return Difference(differing, log_probs.numel(), number, truth[number], inputs, True)
    return None


def _differing(seen: Tensor, truth: Tensor) -> int:
    return int((_bits(seen) != _bits(truth)).sum())


def _bits(x: Tensor) -> Tensor:
    """The bits of floats as integers: NaN equals NaN, and 0 is not -0."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.detach().contiguous().view(sizes[x.element_size()]) if x.is_floating_point() else x.detach()


# -------------------------------------------------------------------- which part


def first_part(model: nn.Module, run: Run, found: Difference, sizes: Sizes) -> tuple[str, nn.Module] | None:
    """The innermost part whose outputs for a row differ between two passes though its inputs are equal, the first to
    end; None if there is none."""
    place = _place_of(found)
    recorded: list[_Calls] = []
    for inputs, row in ((found.alone, 0), (found.passed, place)):
        with _recorded(model, _tokens_of(inputs, row), sizes.total(inputs.input_ids.shape[1])) as calls:
            run(inputs)
        recorded.append(calls)
    alone, passed = recorded
    for key, (part, given, out) in passed.items():
        before = alone.get(key)
        if before is not None and _same(before[1], given) and not _same(before[2], out):
            return key[0], part
    return None


def _place_of(found: Difference) -> int:
    """The place in the packing of a row with the ids of the one alone, that differs or not: all have the same bits."""
    ids = found.alone.input_ids[0, : found.alone.num_tokens]
    rows = found.passed.bounds.size - 1 if found.passed.tree is None else found.passed.tree.num_rows
    tokens = (_tokens_of(found.passed, place) for place in range(rows))
    return next(n for n, own in enumerate(tokens) if torch.equal(found.passed.input_ids[0].index_select(0, own), ids))


_Calls = dict[tuple[str, int], tuple[nn.Module, list[Tensor], list[Tensor]]]
"""What parts of a model were called with and gave, in the order in which they ended: by the name of a part and the
number of the call, the digests [n] of tensors at n tokens."""


@contextmanager
def _recorded(model: nn.Module, tokens: Tensor, total: int) -> Generator[_Calls]:
    calls: _Calls = {}
    counts: dict[str, int] = {}
    given: dict[str, list[list[Tensor]]] = {}

    def begin(name: str) -> Callable[..., None]:
        def hook(_part: nn.Module, args: Any, kwargs: Any) -> None:
            given.setdefault(name, []).append(list(_digests((args, kwargs), tokens, total)))

        return hook

    def end(name: str) -> Callable[..., None]:
        def hook(part: nn.Module, _args: Any, out: Any) -> None:
            nth = counts[name] = counts.get(name, -1) + 1
            calls[name, nth] = part, given[name].pop(), list(_digests(out, tokens, total))

        return hook

    handles: list[Any] = []
    try:
        for name, part in model.named_modules():
            handles.append(part.register_forward_pre_hook(begin(name), with_kwargs=True))
            handles.append(part.register_forward_hook(end(name)))
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _digests(given: Any, tokens: Tensor, total: int) -> Iterator[Tensor]:
    """A number for each of the tokens, of each tensor that has a dim of all T tokens."""
    if isinstance(given, dict):
        given = list(cast("dict[str, Any]", given).values())
    if isinstance(given, list | tuple):
        for one in cast("Sequence[Any]", given):
            yield from _digests(one, tokens, total)
    elif isinstance(given, Tensor) and not given.is_nested:
        dim = _dim_of(given, total)
        if dim is not None:
            rows = _bits(given.movedim(dim, 0).index_select(0, tokens)).long().flatten(1)
            yield (rows * (2 * torch.arange(rows.shape[1], device=rows.device) + 1)).sum(1)


def _dim_of(x: Tensor, tokens: int) -> int | None:
    """The dim of tokens: [T, ...], [1, T, ...] or [n, 1, T]."""
    return next((dim for dim, size in enumerate(x.shape[:3]) if size == tokens), None)


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(*pair) for pair in zip(one, other, strict=True))


# -------------------------------------------------------------------- products at other sizes


class Products:
    """Compares products of T tokens with those of fewer tokens, the first time that a pass has T: libraries choose
    kernels by the sizes. Of each kind and shape of part it takes the first, with its own tensors."""

    def __init__(self, base: nn.Module, mixers: Iterator[nn.Module], least: int) -> None:
        self._least, self._known = least, set[Any]()
        within = {id(inner) for part in mixers for inner in part.modules()}
        kinds: dict[Any, tuple[str, nn.Module]] = {}
        parts: list[tuple[str, nn.Module]] = list(base.named_modules())
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
        if not compare or tokens <= self._least or (tokens, path) in self._known:
            yield found
            return
        handles: list[Any] = []
        try:
            handles = [part.register_forward_hook(self._hook(name, tokens, found), with_kwargs=True) for name, part in self._parts]
            yield found
        finally:
            for handle in handles:
                handle.remove()
        self._known.add((tokens, path))

    def _hook(self, name: str, tokens: int, found: list[tuple[str, Tensor]]) -> Callable[..., None]:
        def hook(part: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            if not isinstance(out, Tensor):
                return
            for begin in (0, tokens - self._least):
                cut = [_cut(x, begin, self._least, tokens) for x in args]
                more = {key: _cut(x, begin, self._least, tokens) for key, x in kwargs.items()}
                with torch.no_grad():
                    try:
                        fewer = cast("Any", type(part)).forward(part, *cut, **more)
                    except Exception as error:
                        if not may_refuse(error):
                            raise
                        return  # it is no part of tokens alone
                own = _cut(out, begin, self._least, tokens)
                if isinstance(fewer, Tensor) and fewer.shape == own.shape and own.shape != out.shape:
                    found.append((f"{name} ({type(part).__name__})", (_bits(fewer) != _bits(own)).sum()))

        return hook


def _cut(x: Any, begin: int, count: int, tokens: int) -> Any:
    if not isinstance(x, Tensor):
        return x
    dim = _dim_of(x, tokens)
    return x if dim is None else x.narrow(dim, begin, count)
