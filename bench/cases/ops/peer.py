"""Time until the rows of a batch that lies padded on one GPU are on another GPU of the same host, over NCCL.

    GPU 0   padded tensors ----------------------------------> padded tensors                GPU 1
            jagged values and offsets -----------------------> nested tensors
            padded tensors --encode--> body -----------------> body --decode--> nested or padded tensors
                                       head ------(gloo)-----> head

One process has one GPU. Both are synchronised and wait for each other before each run, and each is synchronised after
each stage. A run takes from the start on GPU 0 until both are done. Clocks are those of the host, which all its
processes share. Receivers of tensors know their shapes beforehand; the receiver of a packed batch knows nothing.

compress leaves the body in pinned memory, so that it is copied to GPU 0 again to be sent: part of the time to send. The
host of GPU 1 reads the small arrays of the body, which is copied to it: part of the time to decode. The batch is the
same each time, so that the forms of its fields fit.
"""

from __future__ import annotations

import gc
import pickle
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from bench.cases.ops.batches import joined, parts_of, require_batch
from bench.harness.measure import progress
from bench.harness.passes import synchronize
from bench.harness.processes import Link, Pair, on_both
from bench.harness.report import Row, ratios
from bench.rivals import nesting
from bench.workloads import PAD_ID
from maskpack import compress, decompress
from maskpack.packed.cuda.decode import mirrored

_PARTS = 8  # the large batch is so many small ones, one after the other
_SENDER, _RECEIVER = 0, 1
_CHECKS = 3  # the first batch is encoded on the host, the next on the device, then by its plan
_PADDED, _JAGGED = "padded tensors", "jagged values and offsets"
_PACKED = {"nested": "packed, to nested", "padded": "packed, to padded"}


class Way(NamedTuple):
    """How rows cross: two stages on each GPU, of which the second takes what the first returns.

    Attributes:
        sender: makes what is sent; sends it.
        receiver: receives it; makes a batch of it.
        layout: that of the batch, padded or nested.
        stages: the names of the first stage of the sender, of what crosses, and of the second one of the receiver; none
            where they are not shown.
    """

    sender: tuple[Callable[[], Any], Callable[[Any], None]]
    receiver: tuple[Callable[[], Any], Callable[[Any], TensorDict]]
    layout: Literal["padded", "nested"]
    stages: Sequence[str] = ()


class Marks(NamedTuple):
    """Seconds when a run began on one GPU, when its first stage ended there, and when its second did."""

    begin: float
    middle: float
    end: float


def rows(count: int, rounds: int, widths: tuple[int, int], backend: Link) -> list[Row]:
    """The figures for `count` rows, and for eight times as many; none without two GPUs. Raises
    torch.multiprocessing.ProcessRaisedException, which shows NotExact, if a bit is lost."""
    if backend == "nccl" and torch.cuda.device_count() < 2:
        progress("ops peer: skipped, because this machine has fewer than two GPUs")
        return []
    return on_both(backend, _measured, rounds, count, widths)


def _measured(pair: Pair, rounds: int, count: int, widths: tuple[int, int]) -> list[Row]:
    parts = parts_of(count, *widths)
    return [row for batch in (parts[0], joined(parts)) for row in _Peer(pair, batch).rows(rounds)]


class _Peer:
    """One of the two GPUs. Both have the batch: one to send it, one to compare what it receives.

    Args:
        pair: its rank is _SENDER or _RECEIVER.
        batch: padded, on the host.
    """

    def __init__(self, pair: Pair, batch: TensorDict) -> None:
        self._pair, self._rank, self._device, self._host = pair, pair.rank, pair.device, pair.host
        self._batch = TensorDict({name: x.to(pair.device) for name, x in batch.items()}, batch_size=batch.batch_size)
        masks = nesting.masks_of(self._batch)
        self._values = [x[masks[nesting.axis_of(name)]] for name, x in self._batch.items()]
        self._values += [torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)) for mask in masks.values()]

    def rows(self, rounds: int) -> list[Row]:
        """The rows of the report, on both."""
        case, ways = f"ops peer, {self._batch.batch_size[0]} rows", self._ways()
        if self._rank == _SENDER:
            progress(case)
        for name, way in ways.items():
            for _ in range(_CHECKS):
                batch, _ = self._run(way)
                if self._rank == _RECEIVER:
                    require_batch(f"{case}, {name}", batch, self._batch, way.layout)
                del batch
        marks: list[Any] = [None, None]
        dist.all_gather_object(marks, self._interleaved(ways, rounds), group=self._host)
        return [*self._sizes(case), *_figures(case, ways, *marks)]

    def _ways(self) -> dict[str, Way]:
        padded, jagged = list(self._batch.values()), self._values
        ways = {
            _PADDED: Way(((lambda: padded), self._send), ((lambda: self._receive(padded)), self._as_padded), "padded"),
            _JAGGED: Way(((lambda: jagged), self._send), ((lambda: self._receive(jagged)), self._as_nested), "nested"),
        }
        for layout, name in _PACKED.items():
            receiver = self._receive_packed, partial(self._decode, layout)
            ways[name] = Way((self._encode, self._send_packed), receiver, layout, ("encode", "send", "decode"))
        return ways

    def _sizes(self, case: str) -> list[Row]:
        head, body = self._encode()
        sizes = {
            _PADDED: sum(x.nbytes for x in self._batch.values()),
            _JAGGED: sum(x.nbytes for x in self._values),
            "packed": body.nbytes,
            "packed, head on the host": len(head),
        }
        return [Row(case, f"{name}, crossing", size, "bytes") for name, size in sizes.items()]

    # ---------------------------------------------------------------- time

    def _interleaved(self, ways: Mapping[str, Way], rounds: int) -> dict[str, list[Marks]]:
        """The marks of all rounds, as `measure.interleaved` takes turns. One round before the first does not count."""
        names, marks = list(ways), {name: list[Marks]() for name in ways}
        gc.disable()
        for turn in range(rounds + 1):
            gc.collect()
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                marks[name].append(self._run(ways[name])[1])
        gc.enable()
        return {name: taken[1:] for name, taken in marks.items()}

    def _run(self, way: Way) -> tuple[Any, Marks]:
        """What the second stage returns, and the marks."""
        first, second = way[self._rank]
        self._pair.wait()
        begin = time.perf_counter()
        between = first()
        synchronize(self._device)
        middle = time.perf_counter()
        result = second(between)
        synchronize(self._device)
        return result, Marks(begin, middle, time.perf_counter())

    # ---------------------------------------------------------------- tensors

    def _send(self, tensors: Sequence[Tensor]) -> None:
        _wait([dist.P2POp(dist.isend, x, _RECEIVER, tag=tag) for tag, x in enumerate(tensors)])

    def _receive(self, like: Sequence[Tensor]) -> list[Tensor]:
        tensors = [torch.empty_like(x) for x in like]
        _wait([dist.P2POp(dist.irecv, x, _SENDER, tag=tag) for tag, x in enumerate(tensors)])
        return tensors

    def _as_padded(self, tensors: Sequence[Tensor]) -> TensorDict:
        return TensorDict(dict(zip(self._batch.keys(), tensors, strict=True)), batch_size=self._batch.batch_size)

    def _as_nested(self, tensors: Sequence[Tensor]) -> TensorDict:
        names = list(self._batch.keys())
        offsets = dict(zip(nesting.AXES, tensors[len(names) :], strict=True))
        fields = {
            name: torch.nested.nested_tensor_from_jagged(x, offsets[nesting.axis_of(name)])
            for name, x in zip(names, tensors, strict=False)
        }
        return TensorDict(fields, batch_size=self._batch.batch_size)

    # ---------------------------------------------------------------- packed

    def _encode(self) -> tuple[bytes, Tensor]:
        """The head, and the body on the host."""
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(compress(self._batch, pad_token_id=PAD_ID), 5, buffer_callback=buffers.append)
        (body,) = buffers
        return head, torch.frombuffer(body, dtype=torch.uint8)

    def _send_packed(self, packed: tuple[bytes, Tensor]) -> None:
        head, body = packed
        on_device = body.to(self._device, non_blocking=True)
        dist.send(torch.tensor([len(head), body.nbytes]), _RECEIVER, group=self._host)
        dist.send(torch.frombuffer(bytearray(head), dtype=torch.uint8), _RECEIVER, group=self._host)
        self._send([on_device])

    def _receive_packed(self) -> tuple[Tensor, Tensor]:
        """The head on the host, and the body on the device."""
        sizes = torch.empty(2, dtype=torch.int64)
        dist.recv(sizes, _SENDER, group=self._host)
        nbytes_of_head, nbytes = sizes.tolist()
        head = torch.empty(nbytes_of_head, dtype=torch.uint8)
        dist.recv(head, _SENDER, group=self._host)
        return head, *self._receive([torch.empty(nbytes, dtype=torch.uint8, device=self._device)])

    def _decode(self, layout: Any, packed: tuple[Tensor, Tensor]) -> TensorDict:
        head, body = packed
        received = pickle.loads(head.numpy(), buffers=[mirrored(body)])
        return decompress(received, format=layout, device=self._device)


def _wait(operations: list[Any]) -> None:
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _figures(
    case: str, ways: Mapping[str, Way], sender: Mapping[str, list[Marks]], receiver: Mapping[str, list[Marks]]
) -> list[Row]:
    """Medians of runs and of their stages, and what the others take as multiples of packed batches."""
    report: list[Row] = []
    wall: dict[str, float] = {}
    for name, way in ways.items():
        pairs = list(zip(sender[name], receiver[name], strict=True))
        wall[name] = _median_ms(max(here.end, there.end) - here.begin for here, there in pairs)
        report.append(Row(case, f"{name}, wall", wall[name], "ms"))
        stages = (
            _median_ms(here.middle - here.begin for here, _ in pairs),
            _median_ms(there.middle - here.middle for here, there in pairs),
            _median_ms(there.end - there.middle for _, there in pairs),
        )
        report += [Row(case, f"{name}, {stage}", ms, "ms") for stage, ms in zip(way.stages, stages, strict=False)]
    pairs = [(_PADDED, own, None) for own in _PACKED.values()]
    return report + ratios(case, wall, [*pairs, (_JAGGED, _PACKED["nested"], None)])


def _median_ms(seconds: Any) -> float:
    return 1e3 * statistics.median(seconds)
