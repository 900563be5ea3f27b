"""Packed batches in the dispatch of verl: a dispatch mode for `@register`, and a decorator for the method under it.

    group.method(data)  -- dispatch_fn: pack, cut, put once for each DP rank -->  RankRows     @packed_endpoint: unpack,
                        <-- collect_fn: unpack, then the rule of verl -----------  PackedProto  run the method, pack

verl decides which rank gets which rows, which ranks are collected from, and how results are joined.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import InitVar, dataclass
from typing import Any, NoReturn, cast

import ray
import torch
from tensordict import TensorDictBase

from maskpack.adapters.verl.metrics import CallMetrics, is_first, nbytes_of, note_mismatch, note_report
from maskpack.adapters.verl.protocol import VERL_FIELDS, DataProto, PackedProto, compress, decompress, one_strict
from maskpack.core.arguments import flag
from maskpack.core.index import even_sizes
from maskpack.core.memory import Pool
from maskpack.errors import LayoutError, MaskpackError, RegistryError
from maskpack.fields.options import Options, Registry, not_strict
from maskpack.packed.batch import Target
from maskpack.replay.mismatch import MismatchLimit

_decorator: Any = importlib.import_module("verl.single_controller.base.decorator")
_protocol: Any = importlib.import_module("verl.protocol")

_MEMORY = Pool()
"""Memory of the padded tensors that methods see; most of them are freed when the call ends."""
_CONFIG = "_maskpack_config"


@dataclass(frozen=True)
class MaskNestingConfig:
    """The options of packed dispatch for a worker group of verl: whether and how batches are packed.

    Attributes:
        use_mask_nesting: False runs the dispatch of verl.
        strict_mask_nesting: raise if a field stays padded on its way to the workers. Results are verified, too, but a
            field of a result that no mask covers stays padded.
        strict: the name of `strict_mask_nesting` in the mask-nesting proposal, in calls only. Give one of them.
        registry: None stands for VERL_FIELDS.
        pad_token_id, verify, codec: options of `compress`.
        report: log `maskpack.report` of the packed argument and of the packed result, with level INFO, after the first
            call of each method in this process, and add their totals to `take_metrics`.
        mismatch_limit: how far `old_log_probs` may be from `rollout_log_probs` in a batch that has both, before it is
            sent.
    """

    use_mask_nesting: bool = False
    strict_mask_nesting: bool = cast("bool", None)
    pad_token_id: int | None = None
    registry: Registry | None = None
    verify: bool = True
    codec: str | None = None
    report: bool = False
    mismatch_limit: MismatchLimit | None = None
    strict: InitVar[bool | None] = None

    def __post_init__(self, strict: bool | None) -> None:
        both = one_strict("MaskNestingConfig", self.strict_mask_nesting, strict)
        object.__setattr__(self, "strict_mask_nesting", both)
        for name in ("use_mask_nesting", "strict_mask_nesting", "report"):
            flag(getattr(self, name), name, "MaskNestingConfig", RegistryError)
        if self.strict_mask_nesting and not self.use_mask_nesting:
            raise RegistryError(
                "MaskNestingConfig: strict_mask_nesting without use_mask_nesting; expected both, or the first off. Set "
                "use_mask_nesting to true."
            )
        Options.of("MaskNestingConfig", self._fields(), self.pad_token_id, verify=self.verify)

    @classmethod
    def of(cls, config: Any, **more: Any) -> MaskNestingConfig:
        """Reads the two switches from a node of an OmegaConf or Hydra configuration, a dict, or a configuration
        dataclass of verl. A missing or null key is False. `more` are the other attributes."""
        if not callable(getattr(config, "get", None)):
            raise RegistryError(
                f"MaskNestingConfig.of: got a {type(config).__name__}; expected a node of a configuration. Pass the "
                "one that use_mask_nesting is in, config.trainer for example."
            )
        given = {name: config.get(name, None) for name in ("use_mask_nesting", "strict_mask_nesting")}
        return cls(**{name: value for name, value in given.items() if value is not None}, **more)

    def _fields(self) -> Registry:
        return VERL_FIELDS if self.registry is None else self.registry

    def _compress(self, data: Any, **more: Any) -> PackedProto:
        options: dict[str, Any] = {"pad_token_id": self.pad_token_id, "codec": self.codec}
        return compress(data, registry=self._fields(), **options, **more)

    def pack(self, data: Any) -> PackedProto:
        """Packs an argument of a worker method."""
        return self._compress(data, strict_mask_nesting=self.strict_mask_nesting, verify=self.verify)

    def pack_result(self, data: Any, like: PackedProto) -> PackedProto:
        """Packs a result under the layouts of `like`, or without them if a field has another width. A field that no
        mask covers stays padded, also under `pytest --maskpack-strict`."""
        with not_strict():
            try:
                return self._compress(data, like=like)
            except LayoutError:
                return self._compress(data)


def configure(group: Any, config: MaskNestingConfig) -> Any:
    """Sets the MaskNestingConfig of a worker group, and returns the group.

    Configure the groups whose methods are called, which are the groups that `spawn` returned."""
    if not isinstance(config, MaskNestingConfig):
        raise RegistryError(
            f"configure: config is a {type(config).__name__}; expected a MaskNestingConfig. Use MaskNestingConfig.of."
        )
    setattr(group, _CONFIG, config)
    return group


# -------------------------------------------------------------------- messages


class RankRows:
    """The rows of one DP rank, for a method under `@packed_endpoint`. In any other method, every use of it raises.

    Attributes:
        _packed, _config: the rows, and how results are packed.
        _mesh: the name of the mesh whose collect rule selects the ranks that return results; None if all do.
    """

    def __init__(self, packed: PackedProto, config: MaskNestingConfig, mesh: str | None) -> None:
        self._packed, self._config, self._mesh = packed, config, mesh

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise MaskpackError(
            f"mask_nesting_dispatch: a worker method was given packed rows, {self._packed!r}, and used them as a "
            "batch; expected a method that decodes them. Put @packed_endpoint between @register and the method."
        )

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = __len__ = __bool__ = __call__ = _refuse
    __eq__ = __ne__ = _refuse
    __hash__ = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        self._refuse()


# -------------------------------------------------------------------- driver


def mask_nesting_dispatch(
    mesh_name: str | None = None, config: MaskNestingConfig | None = None
) -> dict[str, Callable[..., Any]]:
    """Returns a dispatch mode for `@register(dispatch_mode=...)` of verl that sends packed rows.

    Args:
        mesh_name: the rows are divided among the DP ranks of this mesh, as `make_nd_compute_dataproto_dispatch_fn`
            does. Workers with the same DP rank (tensor and pipeline parallel peers) share one object in the store. None
            divides a DataProto among all workers, as DP_COMPUTE_PROTO does, with auto padding.
        config: by default the one that `configure` set for the group; without one, packing is on.

    Raises:
        LayoutError: in calls, for an argument that is not a batch and for rows that verl would not divide; and the
            errors of `compress`.
    """
    if mesh_name is not None and not isinstance(mesh_name, str):
        raise LayoutError(
            f"mask_nesting_dispatch: mesh_name is {mesh_name!r}; expected a name, or None for one rank a worker. Pass "
            "the name that the workers register, such as actor."
        )
    if mesh_name is None:
        return {"dispatch_fn": functools.partial(_to_all, config), "collect_fn": _from_all}
    return {
        "dispatch_fn": functools.partial(_to_mesh, mesh_name, config),
        "collect_fn": functools.partial(collect_lazy_compute_data_proto, mesh_name),
    }


def _to_mesh(mesh_name: str, config: MaskNestingConfig | None, group: Any, *args: Any, **kwargs: Any) -> Any:
    call = _begin(config := _config_of(group, config))
    if not config.use_mask_nesting:
        return _decorator.dispatch_lazy_compute_data_proto(mesh_name, group, *args, **kwargs)
    if mesh_name not in group._dispatch_info:
        group._dispatch_info[mesh_name] = group._query_dispatch_info(mesh_name)
    dp_ranks: list[int] = group._dispatch_info[mesh_name]

    def sent(value: Any) -> list[Any]:
        parts = _parts(value, max(dp_ranks) + 1, call, mesh_name)
        held = [ray.put(part) for part in parts]
        call.metrics.lap("put")
        return [held[rank] for rank in dp_ranks]

    return tuple(map(sent, args)), {name: sent(value) for name, value in kwargs.items()}


def _to_all(config: MaskNestingConfig | None, group: Any, *args: Any, **kwargs: Any) -> Any:
    call = _begin(config := _config_of(group, config))
    if not config.use_mask_nesting:
        return _decorator.dispatch_dp_compute_data_proto(group, *args, **kwargs)
    ranks, added = group.world_size, dict[str, int]()

    def sent(value: Any) -> Sequence[Any]:
        if not isinstance(value, DataProto):
            if isinstance(value, _protocol.DataProtoFuture):
                return value.chunk(chunks=ranks)
            raise _no_batch(value, "a DataProto or a DataProtoFuture")
        if not value.is_padding_enabled():
            return _parts(value, ranks, call, None)
        missing = -len(value) % ranks
        if added.setdefault("rows", len(value)) != len(value):
            raise LayoutError(
                f"mask_nesting_dispatch: a padded batch of {len(value)} rows beside one of {added['rows']}; expected "
                "the same number. Give both arguments the same rows."
            )
        rows = [*range(len(value)), *[len(value) - 1] * missing]  # the last row again, as verl pads
        added["padding"] = missing
        return _cut(call.pack(value).take(rows), [len(rows) // ranks] * ranks, call, None)

    positional, named = [sent(value) for value in args], {name: sent(value) for name, value in kwargs.items()}
    call.metrics.lap("put")
    return positional, named | ({_protocol._padding_size_key: added["padding"]} if added else {})


@dataclass(eq=False)
class _Call:
    """A call between dispatch and collect, which verl runs one after the other.

    Attributes:
        argument: the packed batch for a report; None for no report.
    """

    metrics: CallMetrics
    config: MaskNestingConfig
    argument: PackedProto | None = None

    def pack(self, value: Any) -> PackedProto:
        packed = self.config.pack(value)
        self.metrics.lap("prepare")
        note_mismatch(value, self.config.mismatch_limit)
        self.metrics.resume()
        self.metrics.add("bytes_raw", nbytes_of(value))
        if self.config.report and self.argument is None:
            self.argument = packed
        return packed

    def report(self, result: Any) -> None:
        if self.argument is not None and is_first(self.metrics.method):
            back = self.config.pack_result(result, self.argument) if _has_rows(result) else None
            note_report(self.metrics.method, self.argument, back)


_under_way: ContextVar[_Call | None] = ContextVar("under_way", default=None)


def _begin(config: MaskNestingConfig) -> _Call:
    """The call whose dispatch function calls this. verl gives the name of the method to no function of a dispatch mode,
    but the frame that calls the dispatch function has it."""
    frame: Any = inspect.currentframe()
    method = frame.f_back.f_back.f_locals.get("method_name", "call")
    call = _Call(CallMetrics(method if config.use_mask_nesting else ""), config)
    _under_way.set(call)
    return call


def _config_of(group: Any, config: MaskNestingConfig | None) -> MaskNestingConfig:
    return config or getattr(group, _CONFIG, None) or MaskNestingConfig(use_mask_nesting=True)


def _parts(value: Any, ranks: int, call: _Call, mesh: str | None) -> Sequence[Any]:
    """The parts of an argument: RankRowss for a batch, and the chunks of verl for anything else that it can divide."""
    if not isinstance(value, DataProto | TensorDictBase | PackedProto):
        if hasattr(_protocol, "BatchData"):  # which knows what verl divides, since 0.7.1
            divides = _protocol.BatchData(value).is_chunkable()
        else:
            divides = isinstance(value, _protocol.DataProtoFuture | _decorator.BatchMeta)
        if not divides:
            raise _no_batch(value, "a DataProto, a TensorDict, a PackedProto, or what else verl cuts")
        return _chunks(value, ranks)
    sizes = _sizes(value, ranks)
    return _cut(value if isinstance(value, PackedProto) else call.pack(value), sizes, call, mesh)


def _chunks(value: Any, ranks: int) -> Sequence[Any]:
    """The chunks of verl."""
    (chunks,), _ = _decorator._split_args_kwargs_data_proto(ranks, value)
    return chunks


def _cut(packed: PackedProto, sizes: Sequence[int], call: _Call, mesh: str | None) -> list[RankRows]:
    ends = [sum(sizes[: rank + 1]) for rank in range(len(sizes))]
    parts = [packed.take(slice(end - size, end)) for end, size in zip(ends, sizes, strict=True)]
    call.metrics.add("bytes_sent", sum(part.nbytes for part in parts))
    return [RankRows(part, call.config, mesh) for part in parts]


def _sizes(value: Any, ranks: int) -> list[int]:
    """The number of rows of each rank, as in verl: equal, except for a DataProto with auto padding."""
    rows = value.batch_size[0] if isinstance(value, TensorDictBase) and value.batch_dims else len(value)
    if rows % ranks == 0:
        return [rows // ranks] * ranks
    if isinstance(value, DataProto) and value.is_padding_enabled():
        if value.batch is None:
            return list(even_sizes(rows, ranks, "mask_nesting_dispatch"))
        share = -(-rows // ranks)
        if -(-rows // share) == ranks:
            return [share] * (ranks - 1) + [rows - share * (ranks - 1)]
    raise LayoutError(
        f"mask_nesting_dispatch: {rows} rows for {ranks} ranks; expected rows that verl divides, a multiple of the "
        "ranks. Pad the batch (pad_dataproto_to_divisor), or drop rows."
    )


def _no_batch(value: Any, expected: str) -> LayoutError:
    return LayoutError(
        f"mask_nesting_dispatch: an argument is a {type(value).__name__}; expected {expected}. Put it into meta_info, "
        "or into the batch as NonTensorData."
    )


# verl's bridge to TransferQueue finds the collect rule by the name of this function and its first argument.
def collect_lazy_compute_data_proto(mesh_name: str, group: Any, output: Sequence[Any]) -> Any:
    """Unpacks the results of the ranks that the mesh collects from, and joins them as verl does. Results that are not
    there yet become a PackedFuture."""
    return _collected(functools.partial(_decorator.collect_lazy_compute_data_proto, mesh_name, group), output)


def _from_all(group: Any, output: Sequence[Any]) -> Any:
    return _collected(functools.partial(_decorator.collect_dp_compute_data_proto, group), output)


def _collected(join: Callable[[list[Any]], Any], output: Sequence[Any]) -> Any:
    call = _under_way.get()
    _under_way.set(None)
    metrics = CallMetrics() if call is None else call.metrics
    metrics.lap("wait")
    joined = join(_opened(output, metrics))
    if isinstance(joined, _protocol.DataProtoFuture):
        joined = PackedFuture(joined.collect_fn, joined.futures, joined.dispatch_fn)
        joined.metrics = metrics
    else:
        metrics.lap("gather")
    metrics.settle()
    if call is not None:
        call.report(joined)
    return joined


def _opened(output: Sequence[Any], metrics: CallMetrics) -> list[Any]:
    metrics.add("bytes_returned", sum(result.nbytes for result in output if isinstance(result, PackedProto)))
    opened = [decompress(result) if isinstance(result, PackedProto) else result for result in output]
    metrics.lap("decompress")
    return opened


class PackedFuture(_protocol.DataProtoFuture):
    """A DataProtoFuture of packed results: `get` waits for them, unpacks and joins them."""

    metrics: Any = None

    def get(self) -> Any:
        metrics = self.metrics or CallMetrics()
        metrics.resume()
        results: list[Any] = ray.get(self.futures)
        metrics.lap("wait")
        output = _opened(results, metrics)
        for result in output:
            if not isinstance(result, DataProto | TensorDictBase):
                raise LayoutError(
                    f"PackedFuture.get: a worker returned a {type(result).__name__}; expected a DataProto or a "
                    "TensorDict. Return one from the method, or register it with blocking=True."
                )
        joined = _decorator._concat_data_proto_or_future(output)
        metrics.lap("gather")
        metrics.settle()
        return joined if self.dispatch_fn is None else self.dispatch_fn(joined)

    def chunk(self, chunks: int) -> list[PackedFuture]:
        return [
            PackedFuture(self.collect_fn, self.futures, functools.partial(_share, rank=rank, ranks=chunks))
            for rank in range(chunks)
        ]


def _share(joined: Any, rank: int, ranks: int) -> Any:
    return _chunks(joined, ranks)[rank]


# -------------------------------------------------------------------- worker


def packed_endpoint(
    method: Callable[..., Any] | None = None,
    *,
    format: Target | None = None,
    device: torch.device | str | None = None,
) -> Any:
    """Decorates a worker method of verl, plain or async, so that it receives packed batches and its result is packed.

    The method itself receives the DataProto or TensorDict of the driver. Place the decorator below `@register`:

        @register(dispatch_mode=mask_nesting_dispatch("actor"))
        @packed_endpoint
        def update_actor(self, data): ...

    Args:
        format, device: options of `decompress`.

    Batches that arrive unpacked (the switch is off, a direct call, a future) are passed on, and so are their results. A
    rank that its mesh does not collect from returns None.
    """
    if method is None:
        return functools.partial(packed_endpoint, format=format, device=device)
    if hasattr(method, _decorator.MAGIC_ATTR):
        raise MaskpackError(
            f"packed_endpoint: {method.__name__} is registered already; expected the bare method. Put @register above "
            "@packed_endpoint."
        )
    if format not in (None, "padded", "nested"):
        raise LayoutError(f'packed_endpoint: format is {format!r}; expected "padded" or "nested". Choose one.')

    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def served_async(self: Any, *args: Any, **kwargs: Any) -> Any:
            given, named, calls = _given(args, kwargs, format, device)
            return _reply(self, await method(self, *given, **named), calls)

        return served_async

    @functools.wraps(method)
    def served(self: Any, *args: Any, **kwargs: Any) -> Any:
        given, named, calls = _given(args, kwargs, format, device)
        return _reply(self, method(self, *given, **named), calls)

    return served


def _given(
    args: Sequence[Any], kwargs: Mapping[str, Any], format: Target | None, device: torch.device | str | None
) -> tuple[list[Any], dict[str, Any], list[RankRows]]:
    """The arguments with decoded batches, and the RankRowss among them."""
    calls = [value for value in (*args, *kwargs.values()) if isinstance(value, RankRows)]

    def one(value: Any) -> Any:
        if not isinstance(value, RankRows):
            return value
        with _MEMORY.used():
            return decompress(value._packed, format=format, device=device)  # type: ignore[reportPrivateUsage]

    return [one(value) for value in args], {name: one(value) for name, value in kwargs.items()}, calls


def _reply(worker: Any, result: Any, calls: Sequence[RankRows]) -> Any:
    if not calls:
        return result
    first = cast("Any", calls[0])
    if first._mesh is not None and not worker.query_collect_info(first._mesh):
        return None
    return first._config.pack_result(result, first._packed) if _has_rows(result) else result


def _has_rows(result: Any) -> bool:
    if isinstance(result, TensorDictBase):
        return result.batch_dims > 0
    return isinstance(result, DataProto) and len(result) > 0
