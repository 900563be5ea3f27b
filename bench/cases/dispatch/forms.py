"""The forms in which a batch goes from a driver to a Ray actor, and the two ends that time them.

    driver: padded batch -- encode --> value -- put --> object store | actor: get --> value -- restore --> usable

A form is usable in the actor when its tensors hold the values and lie in memory that is mapped. What was decoded or
unpickled has been written already. What arrives as views of the object store is read once, and that read counts as its
restoring; a second read is never asked of it.

Ray's flag for zero-copy torch tensors (RAY_ENABLE_ZERO_COPY_TORCH_TENSORS=1). Ray reads the variable once, when
`ray._private.ray_constants` is imported, and looks at it again when a process' serialisation context is made. All that
it then does is to register one reducer for torch.Tensor in the dispatch table of Ray's pickler, which is read at every
pickling. It concerns the sender only: the object names an importable function that rebuilds the tensor, whatever the
flag of the receiver. So the flag is switched here by setting and removing that reducer, in one driver, call by call:
all forms share the process, the object store and the actor.

The jagged rival is the usual code of `rivals.nesting`. Restored to padded, it gets its bool masks for nothing: the
actor has them from the start. Reads are those of harness.floors, by two threads where there are two cores: threads of
torch would wait for each other when another process has a core.
"""

from __future__ import annotations

import gc
import hashlib
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

import maskpack
from bench.harness import floors
from bench.harness.local_ray import cores, set_zero_copy
from bench.harness.measure import NotExact, bits
from bench.rivals import nesting
from bench.workloads import PAD_ID
from maskpack.core.memory import Pool

Digest = list[tuple[str, str, str, str]]

_MEMORY = Pool()  # of what an actor decodes, as `maskpack.dispatch.endpoint` has one


@dataclass(frozen=True)
class Given:
    """What the actor has before anything is timed.

    Attributes:
        masks: bool [B, S], [B, P], [B, R] by axis, for the jagged rival.
        order: the keys of the batch, in order.
    """

    masks: dict[str, Tensor]
    order: tuple[str, ...]

    @classmethod
    def of(cls, batch: TensorDictBase) -> Given:
        return cls(nesting.masks_of(batch), tuple(batch.keys()))


@dataclass(frozen=True)
class Form:
    """One way to send a batch.

    Attributes:
        encode: padded batch -> what is put.
        restore: what the actor got -> TensorDict.
        to_padded: what was restored -> padded batch, for the check of its bits.
        nested: whether what is restored must be jagged.
        zero_copy: whether Ray's flag is on for it, so that it arrives as views of the object store.
    """

    encode: Callable[[TensorDict], Any] = lambda batch: batch
    restore: Callable[[Any, Given], Any] = lambda value, given: value
    to_padded: Callable[[Any, Given], TensorDict] = lambda value, given: value
    nested: bool = False
    zero_copy: bool = False


def _unnest_usual(value: TensorDict, given: Given) -> TensorDict:
    return nesting.unnest(value, given.masks, given.order)


def _decoded(value: maskpack.PackedBatch, layout: str) -> TensorDict:
    with _MEMORY.used():
        return maskpack.decompress(value, format=layout)


def _ours(verify: bool, layout: str) -> Form:
    nested = layout == "nested"
    return Form(
        lambda batch: maskpack.compress(batch, pad_token_id=PAD_ID, verify=verify),
        lambda value, given: _decoded(value, layout),
        lambda value, given: maskpack.unnest_batch_by_mask(value) if nested else value,
        nested=nested,
    )


PADDED, ZERO_COPY = "padded", "padded, zero-copy flag"
JAGGED, JAGGED_PADDED = "jagged", "jagged to padded"
VERIFIED, VERIFIED_PADDED = "maskpack verified, nested", "maskpack verified, padded"
TRUSTED, TRUSTED_PADDED = "maskpack trusted, nested", "maskpack trusted, padded"

FORMS: dict[str, Form] = {
    PADDED: Form(),
    ZERO_COPY: Form(zero_copy=True),
    JAGGED: Form(nesting.nest, to_padded=_unnest_usual, nested=True),
    JAGGED_PADDED: Form(nesting.nest, _unnest_usual),
    VERIFIED: _ours(True, "nested"),
    VERIFIED_PADDED: _ours(True, "padded"),
    TRUSTED: _ours(False, "nested"),
    TRUSTED_PADDED: _ours(False, "padded"),
}


def read(value: TensorDictBase) -> None:
    """Reads every byte of the tensors once; of jagged ones, their values."""
    fields = [field for field in _leaves(value) if isinstance(field, Tensor)]
    floors.read([field.values() if field.is_nested else field for field in fields], min(2, cores()))


def digest(batch: TensorDictBase) -> Digest:
    """Name, dtype, shape and a hash of the bits of every field of a padded batch, in key order."""
    return [(name, str(x.dtype), str(tuple(x.shape)), _hash(x)) for name, x in batch.items()]


def _hash(x: Tensor) -> str:
    return hashlib.blake2b(bits(x.contiguous()).view(-1).numpy().data).hexdigest()


def _leaves(batch: TensorDictBase) -> list[Any]:
    return list(batch.values(include_nested=True, leaves_only=True))


# -------------------------------------------------------------------- the actor


class Receiver:
    """The actor. What a call got stays until `drop`, so that freeing it is not timed, as on the driver."""

    def __init__(self, given: Given) -> None:
        gc.disable()
        warnings.simplefilter("ignore")  # that views of the object store cannot be written
        # tensors that came with the call lie in the object store
        masks = {axis: mask.clone() for axis, mask in given.masks.items()}
        self._given = Given(masks, given.order)
        self._held: list[Any] = []

    def take(self, refs: list[ray.ObjectRef], name: str) -> dict[str, float]:
        """Seconds of `get` and `restore`."""
        form = FORMS[name]
        begin = time.perf_counter()
        value = ray.get(refs[0])
        got = time.perf_counter()
        usable = form.restore(value, self._given)
        if form.zero_copy:
            read(usable)
        restored = time.perf_counter()
        self._held += [value, usable]
        return {"get": got - begin, "restore": restored - got}

    def digest(self, refs: list[ray.ObjectRef], name: str) -> Digest:
        """Of the padded batch that the form stands for. Raises NotExact where a jagged form is not jagged."""
        form = FORMS[name]
        usable = form.restore(ray.get(refs[0]), self._given)
        fields = usable.exclude("_maskpack")
        tensors = [field for field in _leaves(fields) if isinstance(field, Tensor)]
        if not all(field.is_nested == form.nested for field in tensors):
            raise NotExact(f"dispatch: {name} came to the actor with fields that are {'not ' * form.nested}jagged.")
        return digest(form.to_padded(usable, self._given))

    def threads(self) -> int:
        """Threads of torch in the actor."""
        return torch.get_num_threads()

    def drop(self) -> None:
        """Frees what the calls have got."""
        self._held.clear()
        gc.collect(0)  # with the collector off, all that is new is young


# -------------------------------------------------------------------- the driver


class Sender:
    """The driver of one padded batch and one actor."""

    def __init__(self, batch: TensorDict) -> None:
        self.batch = batch
        self._actor: Any = ray.remote(Receiver).options(num_cpus=cores()).remote(Given.of(batch))
        threads = ray.get(self._actor.threads.remote())
        if threads != torch.get_num_threads():
            raise RuntimeError(f"dispatch: torch has {threads} threads in the actor, here {torch.get_num_threads()}.")

    def send(self, name: str) -> dict[str, float]:
        """Seconds of one call: `encode`, `put`, `get`, `restore` and `end to end`, from the padded batch to the actor's
        small answer."""
        form = FORMS[name]
        set_zero_copy(form.zero_copy)
        begin = time.perf_counter()
        value = form.encode(self.batch)
        encoded = time.perf_counter()
        ref = ray.put(value)
        stored = time.perf_counter()
        there = ray.get(self._actor.take.remote([ref], name))
        end = time.perf_counter()
        set_zero_copy(False)
        ray.get(self._actor.drop.remote())
        return {"encode": encoded - begin, "put": stored - encoded, **there, "end to end": end - begin}

    def check(self, name: str, expected: Digest) -> None:
        """Raises NotExact unless the actor sees the bits of the batch."""
        seen = ray.get(self._actor.digest.remote([self._put(name)], name))
        wrong = [field[0] for field, same in zip(expected, seen, strict=False) if field != same]
        if seen != expected:
            raise NotExact(f"dispatch: {name}: the actor sees other fields, or other bits in {wrong}.")

    def stored_bytes(self, name: str) -> int:
        """Bytes of the object in the object store."""
        ref = self._put(name)
        return ray.experimental.get_object_locations([ref])[ref]["object_size"]

    def _put(self, name: str) -> ray.ObjectRef:
        form = FORMS[name]
        set_zero_copy(form.zero_copy)
        ref = ray.put(form.encode(self.batch))
        set_zero_copy(False)
        return ref

    def close(self) -> None:
        """Ends the actor."""
        ray.kill(self._actor)
