"""Dispatch over Ray actors: rows go out packed, one object a rank, and results come back packed, in row order.

    driver  compress -> chunk -> ray.put (one a rank)         cat <- decompress  driver
                                    |                          |
    rank    @endpoint: decompress -> method(TensorDict) -> compress like the input

Ray is imported here and nowhere else in the core.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, cast, overload

import ray
import torch
from tensordict import TensorDict, TensorDictBase

from maskpack.errors import LayoutError, MaskpackError
from maskpack.options import Registry
from maskpack.packed import PackedBatch, Target, compress, decompress
from maskpack.registry import RL_FIELDS

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True)
class Parcel:
    """What a rank is sent: its rows, and how to pack what it returns."""

    rows: PackedBatch
    registry: Registry
    pad_token_id: int | None


@overload
def endpoint(method: Callable[_P, _R], /) -> Callable[_P, _R]: ...
@overload
def endpoint(
    *, layout: Target = "padded", device: torch.device | str | None = None
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]: ...
def endpoint(
    method: Callable[..., Any] | None = None, /, *, layout: Target = "padded", device: torch.device | str | None = None
) -> Any:
    """Makes an actor method `method(self, batch, ...)` take packed rows and return packed rows.

    The method sees a TensorDict in `layout` on `device` (by default that of the driver). A TensorDict that it returns,
    padded or nested, must have the rows of its batch, and goes back packed under the batch's layouts; anything else
    goes back as it is. Called with a TensorDict, the method runs as if it were not decorated.
    """
    if method is None:
        return functools.partial(endpoint, layout=layout, device=device)

    @functools.wraps(method)
    def served(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(batch, Parcel):
            return method(self, batch, *args, **kwargs)
        rows = batch.rows
        seen = decompress(rows, layout=layout, device=device)
        like = seen.clone(recurse=False) if layout == "nested" else rows  # the method may take entries out of its batch
        result = method(self, seen, *args, **kwargs)
        if not isinstance(result, TensorDictBase):
            return result
        returned = result.batch_size[0] if result.batch_dims else None
        if returned != rows.num_rows:
            raise LayoutError(
                f"{method.__name__}: returned a TensorDict of {returned} rows for a batch of {rows.num_rows}; expected "
                "as many. Return one entry for each row, or a plain dict of metrics."
            )
        return compress(result, registry=batch.registry, pad_token_id=batch.pad_token_id, like=like)

    return served


class WorkerGroup:
    """Ray actors that each take their share of the rows: the data-parallel ranks, in order.

    Args:
        actors: actor handles whose methods carry `@endpoint`.
        registry, pad_token_id, strict_mask_nesting: for `compress`, here and on the ranks' way back.
    """

    def __init__(
        self,
        actors: Sequence[Any],
        *,
        registry: Registry = RL_FIELDS,
        pad_token_id: int | None = None,
        strict_mask_nesting: bool = False,
    ) -> None:
        if not actors:
            raise MaskpackError("WorkerGroup: no actors; expected at least one. Pass a list of actor handles.")
        self.actors = tuple(actors)
        self._registry = registry
        self._pad_token_id = pad_token_id
        self._strict = strict_mask_nesting

    @classmethod
    def launch(
        cls, worker: type, ranks: int, /, *args: Any, num_cpus: int | None = None, **options: Any
    ) -> WorkerGroup:
        """`ranks` new actors of the plain class `worker`, built with `args`.

        Where Ray is not initialised, this joins the cluster of RAY_ADDRESS, or starts a local Ray of `num_cpus`
        (default: one for each rank). `options` go to the WorkerGroup.
        """
        if not ray.is_initialized():
            if os.environ.get("RAY_ADDRESS"):
                ray.init()
            else:
                ray.init(address="local", num_cpus=num_cpus or ranks, include_dashboard=False, log_to_driver=False)
        remote = cast("Any", ray.remote)(worker)
        return cls([remote.remote(*args) for _ in range(ranks)], **options)

    def call(
        self,
        method: str,
        batch: TensorDictBase | PackedBatch,
        /,
        *args: Any,
        layout: Target = "padded",
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs `method` on every rank with its rows of `batch`, and the same further arguments.

        Rows are split in order into parts that differ by one row at most; with fewer rows than ranks, the last ranks
        get none. Returns a TensorDict in row order, in `layout`, where the ranks returned TensorDicts; None where all
        returned None; else the list of the ranks' results. An exception in a rank is raised here, by Ray.
        """
        packed = batch if isinstance(batch, PackedBatch) else self.pack(batch)
        parts = packed.chunk(len(self.actors))
        refs = [ray.put(Parcel(part, self._registry, self._pad_token_id)) for part in parts]
        pending = [
            getattr(actor, method).remote(ref, *args, **kwargs) for actor, ref in zip(self.actors, refs, strict=True)
        ]
        return _gathered(ray.get(pending, timeout=timeout), layout)

    def pack(self, batch: TensorDictBase) -> PackedBatch:
        """`compress` with the group's registry, pad token id and strictness."""
        return compress(
            batch,
            registry=self._registry,
            pad_token_id=self._pad_token_id,
            strict_mask_nesting=self._strict,
        )


def _gathered(results: list[Any], layout: Target) -> TensorDict | list[Any] | None:
    if any(isinstance(result, Parcel) for result in results):
        raise MaskpackError(
            "WorkerGroup.call: a rank returned the packed rows that it was sent; expected a method that decodes them. "
            "Decorate the method with @endpoint."
        )
    if all(isinstance(result, PackedBatch) for result in results):
        return decompress(PackedBatch.cat(results), layout=layout)
    if all(result is None for result in results):
        return None
    return [decompress(result, layout=layout) if isinstance(result, PackedBatch) else result for result in results]
