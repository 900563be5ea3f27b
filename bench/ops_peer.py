"""Time until the rows of a batch that lies padded on one GPU are on another GPU of the same host, over NCCL.

    GPU 0   padded tensors ----------------------------------> padded tensors                GPU 1
            jagged values and offsets -----------------------> nested tensors
            padded tensors --nest--> values and offsets -----> nested tensors
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
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from bench import baselines
from bench.measure import progress
from bench.ops_decode import joined, require_batch
from bench.pair import Link, join
from bench.report import Row
from bench.workloads import PAD_ID, make_batch
from maskpack import compress, decompress, nest_batch_by_mask
from maskpack.packed.cuda.decode import mirrored

_PARTS = 8  # the large batch is so many small ones, one after the other
_SENDER, _RECEIVER = 0, 1
_CHECKS = 3  # the first batch is encoded on the host, the next on the device, then by its plan
_PADDED, _JAGGED, _NESTED = "padded tensors", "jagged values and offsets", "nest, then jagged values and offsets"
_PACKED = {"nested": "packed, to nested", "padded": "packed, to padded"}


class Sizes(NamedTuple):
    """Rows of the small batch, and the widths of the fields."""

    rows: int
    prompt_width: int
    response_width: int


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


def rows(count: int, rounds: int, prompt_width: int, response_width: int) -> list[Row]:
    """The figures for `count` rows, and for eight times as many; none without two GPUs. Raises
    torch.multiprocessing.ProcessRaisedException, which shows NotExact, if a bit is lost."""
    if torch.cuda.device_count() < 2:
        progress("ops peer: skipped, because this machine has fewer than two GPUs")
        return []
    return measured("nccl", rounds, Sizes(count, prompt_width, response_width))


def measured(backend: Link, rounds: int, sizes: Sizes) -> list[Row]:
    """`rows` of two processes: with NCCL on two GPUs, with gloo on the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (folder, backend, rounds, sizes), nprocs=2)
        return pickle.loads(Path(folder, "rows").read_bytes())


def _rank(rank: int, folder: str, backend: str, rounds: int, sizes: Sizes) -> None:
    device, host = join(rank, folder, backend)
    widths = {"prompt_width": sizes.prompt_width, "response_width": sizes.response_width}
    parts = [make_batch("reference", sizes.rows, **widths, seed=seed) for seed in range(_PARTS)]
    report = [row for batch in (parts[0], joined(parts)) for row in _Peer(rank, device, host, batch).rows(rounds)]
    if rank == _SENDER:
        Path(folder, "rows").write_bytes(pickle.dumps(report))
    dist.destroy_process_group()


class _Peer:
    """One of the two GPUs. Both have the batch: one to send it, one to compare what it receives.

    Args:
        rank: _SENDER or _RECEIVER.
        host: a group of both on the host.
        batch: padded, on the host.
    """

    def __init__(self, rank: int, device: torch.device, host: Any, batch: TensorDict) -> None:
        self._rank, self._device, self._host = rank, device, host
        self._batch = TensorDict({name: x.to(device) for name, x in batch.items()}, batch_size=batch.batch_size)
        masks = baselines.masks_of(self._batch)
        self._values = [x[masks[baselines.axis_of(name)]] for name, x in self._batch.items()]
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
        tensors = (lambda: self._receive(jagged)), self._as_nested
        ways = {
            _PADDED: Way(((lambda: padded), self._send), ((lambda: self._receive(padded)), self._as_padded), "padded"),
            _JAGGED: Way(((lambda: jagged), self._send), tensors, "nested"),
            _NESTED: Way((self._nest, self._send), tensors, "nested", ("nest", "send")),
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
        self._synchronize()
        dist.barrier(group=self._host)
        begin = time.perf_counter()
        between = first()
        self._synchronize()
        middle = time.perf_counter()
        result = second(between)
        self._synchronize()
        return result, Marks(begin, middle, time.perf_counter())

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    # ---------------------------------------------------------------- tensors

    def _nest(self) -> list[Tensor]:
        nested = nest_batch_by_mask(self._batch, pad_token_id=PAD_ID)
        fields = {name: nested[name] for name in list(self._batch.keys())}
        offsets = {baselines.axis_of(name): field.offsets() for name, field in fields.items()}
        return [field.values() for field in fields.values()] + [offsets[axis] for axis in baselines.AXES]

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
        offsets = dict(zip(baselines.AXES, tensors[len(names) :], strict=True))
        fields = {
            name: torch.nested.nested_tensor_from_jagged(x, offsets[baselines.axis_of(name)])
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
    ratios = [(_PADDED, _PACKED["padded"]), *((other, _PACKED["nested"]) for other in (_PADDED, _JAGGED, _NESTED))]
    return report + [Row(case, f"{other} / {own}", wall[other] / wall[own], "x") for other, own in ratios]


def _median_ms(seconds: Any) -> float:
    return 1e3 * statistics.median(seconds)
