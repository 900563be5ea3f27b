"""Time until the rows of a batch that lies padded on one GPU are on another GPU of the same host, over NCCL.

    GPU 0   padded tensors ----------------------------------> padded tensors                GPU 1
            padded tensors --encode--> body -----------------> body --decode--> nested or padded tensors
                                       head ------(gloo)-----> head

One process has one GPU. Both wait for each other before each run, which takes until both are done. Receivers of tensors
know their shapes beforehand; the receiver of a packed batch knows nothing.

compress leaves the body in pinned memory, so that it is copied to GPU 0 again to be sent. The host of GPU 1 reads the
small arrays of the body, which is copied to it. The batch is the same each time, so that the forms of its fields fit.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from bench.cases.ops.batches import joined, parts_of, require_batch
from bench.harness.measure import pickled, progress
from bench.harness.passes import wall_seconds
from bench.harness.processes import Link, Pair, on_both
from bench.harness.report import Row, RowGroups, times
from bench.workloads import PAD_ID
from maskpack import compress, decompress
from maskpack.packed.cuda.decode import mirrored

_SENDER, _RECEIVER = 0, 1
_CHECKS = 3  # the first batch is encoded on the host, the next on the device, then by its plan
_PADDED, _PACKED = "padded tensors", {"packed, to nested": "nested", "packed, to padded": "padded"}


def rows(count: int, rounds: int, widths: tuple[int, int], backend: Link) -> RowGroups:
    """The figures for `count` rows, and for eight times as many; none without two GPUs. Raises
    torch.multiprocessing.ProcessRaisedException, which shows NotExact, if a bit is lost."""
    return on_both("ops peer", backend, _measured, rounds, count, widths)


def _measured(pair: Pair, rounds: int, count: int, widths: tuple[int, int]) -> RowGroups:
    parts = parts_of(count, *widths)
    for batch in (parts[0], joined(parts)):
        yield _Peer(pair, batch).rows(rounds)


class _Peer:
    """One of the two GPUs. Both have the batch: one to send it, one to compare what it receives.

    Args:
        pair: its rank is _SENDER or _RECEIVER.
        batch: padded, on the host.
    """

    def __init__(self, pair: Pair, batch: TensorDict) -> None:
        self._pair, self._device, self._host = pair, pair.device, pair.host
        self._batch = TensorDict({name: x.to(pair.device) for name, x in batch.items()}, batch_size=batch.batch_size)

    def rows(self, rounds: int) -> list[Row]:
        """The rows of the report, on both."""
        case = f"ops peer, {self._batch.batch_size[0]} rows"
        progress(case)
        ways: dict[str, Callable[[], Any]] = {_PADDED: self._padded}
        ways |= {name: partial(self._packed, layout) for name, layout in _PACKED.items()}
        for name, way in ways.items():
            for _ in range(_CHECKS):
                batch = way()
                if self._pair.rank == _RECEIVER:
                    require_batch(f"{case}, {name}", batch, self._batch, _PACKED.get(name, "padded"))
        ms = {name: 1e3 * taken for name, taken in wall_seconds(ways, rounds, self._pair.wait).items()}
        sizes = {_PADDED: sum(x.nbytes for x in self._batch.values()), "packed": self._encoded()[1].nbytes}
        return [
            *(Row(case, f"{name}, crossing", size, "bytes") for name, size in sizes.items()),
            *times(case, ms, [(_PADDED, name, None) for name in _PACKED]),
        ]

    def _padded(self) -> TensorDict | None:
        fields = list(self._batch.values())
        if self._pair.rank == _SENDER:
            return self._send(fields)
        received = self._receive(fields)
        return TensorDict(dict(zip(self._batch.keys(), received, strict=True)), batch_size=self._batch.batch_size)

    def _packed(self, layout: Any) -> TensorDict | None:
        if self._pair.rank == _SENDER:
            head, body = self._encoded()
            on_device = body.to(self._device, non_blocking=True)
            dist.send(torch.tensor([len(head), body.nbytes]), _RECEIVER, group=self._host)
            dist.send(torch.frombuffer(bytearray(head), dtype=torch.uint8), _RECEIVER, group=self._host)
            return self._send([on_device])
        sizes = torch.empty(2, dtype=torch.int64)
        dist.recv(sizes, _SENDER, group=self._host)
        nbytes_of_head, nbytes = sizes.tolist()
        head = torch.empty(nbytes_of_head, dtype=torch.uint8)
        dist.recv(head, _SENDER, group=self._host)
        (body,) = self._receive([torch.empty(nbytes, dtype=torch.uint8, device=self._device)])
        return decompress(pickle.loads(head.numpy(), buffers=[mirrored(body)]), format=layout, device=self._device)

    def _encoded(self) -> tuple[bytes, Tensor]:
        """The head, and the body on the host."""
        head, (body,) = pickled(compress(self._batch, pad_token_id=PAD_ID))
        return head, torch.frombuffer(body, dtype=torch.uint8)

    def _send(self, tensors: Sequence[Tensor]) -> None:
        _wait([dist.P2POp(dist.isend, x, _RECEIVER, tag=tag) for tag, x in enumerate(tensors)])

    def _receive(self, like: Sequence[Tensor]) -> list[Tensor]:
        tensors = [torch.empty_like(x) for x in like]
        _wait([dist.P2POp(dist.irecv, x, _SENDER, tag=tag) for tag, x in enumerate(tensors)])
        return tensors


def _wait(operations: list[Any]) -> None:
    for work in dist.batch_isend_irecv(operations):
        work.wait()
