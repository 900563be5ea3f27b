"""WorkerGroup: calls methods of Ray actors with packed rows, one object for each node, and returns results in row
order.

    driver                       object store                      ranks
    compress --put once-->       rows of ranks 0 1 2 3    ------>  each reads its slice, decodes, runs the method
    lengths, segments            returned rows            <------  compress
      BatchView                                                    or rows go from rank to rank

Within the core, only this package imports Ray.
"""

from __future__ import annotations

import inspect
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast, overload

import numpy as np
import ray
import torch
from tensordict import TensorDict, TensorDictBase, is_tensorclass
from tensordict import is_non_tensor as is_non_tensor  # type: ignore[reportUnknownVariableType]

from maskpack.core.arguments import said, whole
from maskpack.dispatch.call import Call, answers, deadline, left, seconds
from maskpack.dispatch.division import Balance, divided, of_plan, planned_lengths, shares
from maskpack.dispatch.endpoints import endpoint
from maskpack.dispatch.failures import storing
from maskpack.dispatch.ranks import Broadcast, Ranks, Request, Results
from maskpack.dispatch.timeline import PREFIX, CallTimes, Span, Timeline
from maskpack.errors import LayoutError, MaskpackError, PlanError, RegistryError
from maskpack.fields.options import Options, Registry
from maskpack.fields.rl_fields import RL_FIELDS
from maskpack.nesting.axes import has_masks
from maskpack.packed.batch import PackedBatch, Target, check_devices, compress
from maskpack.packed.file.codec import check_codec
from maskpack.planning.ranks import RankPlans, plan_ranks
from maskpack.views.view import BatchView

__all__ = ["Broadcast", "Call", "WorkerGroup", "endpoint"]

Batch = TensorDictBase | PackedBatch | BatchView
_SMALL = (bool, int, float, str, type(None), ray.ObjectRef, BatchView, Broadcast)
"""Types that are passed as they are; everything else is put into the object store once for all ranks."""

_log = logging.getLogger(__name__)


class WorkerGroup:
    """Ray actors as DP ranks of one or more actors each. A call divides the rows of a batch among the ranks.

    Args:
        actors: actor handles whose methods are decorated with `@endpoint`.
        dp_ranks: the DP rank of each actor: 0, 1, ... Actors with the same rank (tensor, pipeline or sequence parallel
            peers) get the same rows. By default each actor is a rank of its own.
        collect: for each actor whether its result is collected: exactly one actor of each rank, by default the first.
        registry, pad_token_id, codec: options of `compress`, on the driver and on the ranks.
        strict_mask_nesting: option of `compress` on the driver. Ranks pack a field that no mask covers padded, with a
            warning; with "both" they raise, too.
        verify: option of `compress` on the driver. Ranks always verify their results.

    A group can be passed to tasks and actors, which then call the same actors; `close` there kills none. A group is a
    context manager that closes itself.

    Attributes:
        metrics: a flat dict of the last `call` or `put` that returned.
    """

    def __init__(
        self,
        actors: Sequence[Any],
        *,
        dp_ranks: Sequence[int] | None = None,
        collect: Sequence[bool] | None = None,
        registry: Registry = RL_FIELDS,
        pad_token_id: int | None = None,
        strict_mask_nesting: bool | Literal["both"] = False,
        verify: bool = True,
        codec: str | None = None,
    ) -> None:
        if not isinstance(actors, Iterable) or isinstance(actors, str | bytes | Mapping):
            raise MaskpackError(f"WorkerGroup: actors are {said(actors)}; expected a list of actor handles. Pass one.")
        check_codec(codec, "WorkerGroup")
        strict = strict_mask_nesting is True or strict_mask_nesting == "both"
        if not strict and strict_mask_nesting is not False:
            raise RegistryError(
                f'WorkerGroup: strict_mask_nesting is {said(strict_mask_nesting)}; expected True, False or "both". '
                "Pass one of these."
            )
        Options.of("WorkerGroup", registry, pad_token_id, strict, verify)
        packing: dict[str, Any] = {
            "pad_token_id": pad_token_id,
            "strict_mask_nesting": strict_mask_nesting == "both",
            "codec": codec,
        }
        if registry is not RL_FIELDS:  # the default, which is then not pickled
            packing["registry"] = registry
        self._ranks = Ranks(list(actors), dp_ranks, collect, packing)
        self._launched: tuple[Any, ...] = ()
        self._options: dict[str, Any] = {
            "registry": registry,
            "pad_token_id": pad_token_id,
            "strict_mask_nesting": strict,
            "verify": verify,
            "codec": codec,
        }
        self.metrics: dict[str, float] = {}

    @classmethod
    def launch(
        cls,
        worker: type,
        ranks: int,
        /,
        *args: Any,
        peers: int = 1,
        num_cpus: int | None = None,
        actor_options: Mapping[str, Any] | None = None,
        worker_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> WorkerGroup:
        """Starts actors of the plain class `worker` and returns their group.

        Args:
            ranks, peers: the number of DP ranks, and of actors for each rank.
            args, worker_kwargs: the arguments of the constructor.
            num_cpus: of a local Ray, which is started unless Ray is initialised or RAY_ADDRESS names a cluster; by
                default one for each actor.
            actor_options: options of Ray (num_gpus, runtime_env, ...).
            options: options of WorkerGroup.

        If the class has no `__repr__`, its actors get one with their rank, which Ray writes in front of their output.
        `ready` waits for the constructors.
        """
        if not isinstance(worker, type):
            raise MaskpackError(
                f"WorkerGroup.launch: worker is {said(worker)}; expected a plain class. Pass the class."
            )
        whole(ranks, "ranks", 1, "WorkerGroup.launch")
        whole(peers, "peers", 1, "WorkerGroup.launch")
        try:
            inspect.signature(cls).bind([], dp_ranks=None, **options)
        except TypeError as error:
            raise MaskpackError(
                f"WorkerGroup.launch: {error}; expected options of launch or of WorkerGroup. Pass keyword arguments of "
                "the worker as worker_kwargs={...}, and those of Ray as actor_options={...}."
            ) from error
        for name, value in (("actor_options", actor_options), ("worker_kwargs", worker_kwargs)):
            if value is not None and not isinstance(value, Mapping):
                raise MaskpackError(
                    f"WorkerGroup.launch: {name} is {said(value)}; expected a dict of keyword arguments. Pass one."
                )
        if not ray.is_initialized():
            if os.environ.get("RAY_ADDRESS"):
                ray.init()
            else:
                cpus = num_cpus or ranks * peers
                ray.init(address="local", num_cpus=cpus, include_dashboard=False, log_to_driver=False)
        dp_ranks = [actor // peers for actor in range(ranks * peers)]
        actors: list[Any] = []
        for rank in dp_ranks:
            remote = cast("Any", ray.remote)(_named(worker, rank))
            if actor_options:
                remote = remote.options(**actor_options)
            actors.append(remote.remote(*args, **(worker_kwargs or {})))
        group = cls(actors, dp_ranks=dp_ranks, **options)
        group._launched = group.actors
        return group

    @property
    def actors(self) -> tuple[Any, ...]:
        """The handles, in the order given."""
        return self._ranks.actors

    @property
    def num_ranks(self) -> int:
        """The number of DP ranks."""
        return len(self._ranks)

    @property
    def timeline(self) -> Timeline:
        """The stages of the last calls, as a table."""
        return self._ranks.timeline

    # ---------------------------------------------------------------- start and end

    def __repr__(self) -> str:
        kinds = sorted({str(actor).removeprefix("Actor(").partition(",")[0] for actor in self.actors})
        return f"WorkerGroup({self.num_ranks} ranks, {len(self.actors)} actors of {', '.join(kinds)})"

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_launched": (), "metrics": {}}

    def close(self) -> None:
        """Kills the actors that `launch` started, and no others; a fork kills none. Calls fail as soon as Ray has ended
        them."""
        for actor in () if self._ranks.is_fork() else self._launched:
            ray.kill(actor)
        self._launched = ()

    def ready(self, timeout: float | None = None) -> None:
        """Waits until the actors are constructed.

        Raises:
            WorkerError: a constructor failed (the error has its traceback), or an actor did not answer in `timeout`
                seconds.
        """
        until = deadline(timeout, "WorkerGroup.ready")
        asked = {self.actors[actor].__ray_ready__.remote(): (rank, actor) for rank, actor in self._ranks.places()}
        remedy = "Look at the constructor, or at the resources that the actors ask for and the cluster has: ray status."
        answers(asked, "__init__", until, 60.0, remedy)

    def replace(self, rank: int, *actors: Any) -> None:
        """Replaces the actors of a rank by as many others. The next call puts all objects again."""
        whole(rank, "rank", 0, "WorkerGroup.replace", self.num_ranks - 1)
        expected = len(self._ranks.members[rank])
        if len(actors) != expected:
            raise MaskpackError(
                f"WorkerGroup.replace: got {len(actors)} actors for rank {rank}; expected {expected}, as many as "
                "the rank has. Pass their handles."
            )
        self._ranks.replace(rank, actors)

    def run(
        self,
        method: str,
        /,
        *args: Any,
        rank: int | None = None,
        timeout: float | None = None,
        grace: float = 60.0,
        **kwargs: Any,
    ) -> list[Any]:
        """Runs a method without a batch on every actor, or on the actors of one `rank`.

        The method needs no decorator. Every actor gets all arguments; large ones are put into the object store once.

        Args:
            timeout: seconds for the whole call, also for actors that Ray restarts.
            grace: seconds that the others have to answer once one has failed.

        Returns:
            A list of the results, in the order of `actors`.

        Raises:
            WorkerError: actors failed, died or were late.
            LayoutError: an actor has no such method; then none is called.
        """
        until = deadline(timeout, "WorkerGroup.run")
        seconds(grace, "grace", "WorkerGroup.run")
        if rank is not None:
            whole(rank, "rank", 0, "WorkerGroup.run", self.num_ranks - 1)
        places = self._ranks.places(rank)
        self._ranks.prepare(method, [actor for _, actor in places], "a method of the actors.", until)
        asked: dict[Any, tuple[int, int]] = {}
        with storing():
            given = [_passed(value) for value in args]
            named = {key: _passed(value) for key, value in kwargs.items()}
            for place in places:
                try:
                    asked[getattr(self.actors[place[1]], method).remote(*given, **named)] = place
                except TypeError as error:
                    raise LayoutError(
                        f'WorkerGroup.run: method "{method}" cannot be called so: {error}; expected arguments that it '
                        "takes. Give these after its name."
                    ) from error
        return list(answers(asked, method, until, grace, "Run it again if it may run twice.").values())

    # ---------------------------------------------------------------- calls

    @overload
    def call(
        self, method: str, batch: Batch, /, *args: Any, format: Target = "padded", **options: Any
    ) -> TensorDict | Any: ...
    @overload
    def call(
        self, method: str, batch: Batch, /, *args: Any, format: Literal["view"], **options: Any
    ) -> BatchView | Any: ...
    def call(
        self,
        method: str,
        batch: Batch,
        /,
        *args: Any,
        format: Results = "padded",
        device: torch.device | str | None = None,
        balance: Balance = "rows",
        plan: RankPlans | None = None,
        timeout: float | None = None,
        grace: float = 60.0,
        **kwargs: Any,
    ) -> Any:
        """Runs `method` on every rank with its rows of `batch`, and waits for the results.

        Args:
            method: the name of an actor method decorated with `@endpoint`.
            batch: padded, nested, packed, or a view.
            args, kwargs: further arguments of the method. Batches among them must have as many rows and are divided
                like `batch`. A `Broadcast` and all other arguments go whole to every rank; large ones are put into the
                object store once.
            format: "padded" or "nested" for a TensorDict; "view" leaves returned rows in the object store and gives a
                BatchView.
            device: the device of a TensorDict result; by default the host, whatever the device was on the rank. Not
                with "view": pass it to `materialize`.
            balance: consecutive parts, with "rows" of equal size up to one row, or with "tokens" of equal sums as far
                as rows allow; or the row numbers of each rank. With fewer rows than ranks, some ranks are called with
                none.
            plan: the result of `plan`, which replaces `balance` and gives each rank the MicroBatchPlan of its rows.
            timeout: seconds for the whole call: encoding, actors that Ray restarts, and the ranks.
            grace: seconds that the other ranks have to answer once one has failed.

        Returns:
            A TensorDict (or BatchView) in row order if the ranks returned TensorDicts. If they returned tuples that
            begin with a TensorDict, a tuple of the joined rows and, for each further item, a list with one entry for
            each rank. None if all returned None; otherwise a list with the result of each rank.

        Raises:
            WorkerError: ranks failed, died or were late. It names them and their rows, and `error.call.retry()` sends
                these rows again.
            LayoutError: batches have different numbers of rows, or `balance` is not a partition of the rows.
        """
        until = deadline(timeout, "WorkerGroup")
        sent = self.submit(
            method, batch, *args, format=format, device=device, balance=balance, plan=plan, timeout=timeout,
            grace=grace, **kwargs,
        )  # fmt: skip
        result = sent.result(left(until))
        self.metrics = sent.metrics
        return result

    def submit(
        self,
        method: str,
        batch: Batch,
        /,
        *args: Any,
        format: Results = "padded",
        device: torch.device | str | None = None,
        balance: Balance = "rows",
        plan: RankPlans | None = None,
        timeout: float | None = None,
        grace: float = 60.0,
        **kwargs: Any,
    ) -> Call:
        """`call` without waiting for results: returns a Call once the rows are encoded and sent. `timeout` is the
        number of seconds that it may wait for actors that Ray restarts, at most a minute."""
        until = deadline(timeout, "WorkerGroup")
        self._need_batch(batch, "WorkerGroup")
        seconds(grace, "grace", "WorkerGroup")
        if format not in ("padded", "nested", "view"):
            raise LayoutError(
                f'WorkerGroup: format is {said(format)}; expected "padded", "nested" or "view". Choose one.'
            )
        if device is not None and format == "view":
            raise LayoutError(
                f'WorkerGroup: device is "{device}" with format="view", whose rows stay where they are; expected none. '
                "Pass it to materialize."
            )
        if device is not None:
            check_devices([device], "WorkerGroup")  # raises before the ranks run
        if any(isinstance(value, RankPlans) for value in (*args, *kwargs.values())):
            raise PlanError(
                f'WorkerGroup: a plan among the arguments of "{method}"; expected it by name. Pass plan=plan.'
            )
        begun = time.perf_counter()
        with storing():
            view: BatchView = self._argument(batch)
            given = [view, *(self._argument(value, view) for value in args)]
            named = {key: self._argument(value, view) for key, value in kwargs.items()}
        for value in (*given, *named.values()):
            if isinstance(value, BatchView) and value.num_rows != view.num_rows:
                raise LayoutError(
                    f"WorkerGroup: a batch of {value.num_rows} rows beside one of {view.num_rows}; expected as many. "
                    "Wrap what every rank should get whole: Broadcast(batch)."
                )
        request = Request(method, tuple(given), named, format, device, grace, plan)
        ranks = self.num_ranks
        rows = divided(view, balance, ranks) if plan is None else of_plan(plan, view, balance, ranks)
        encoded = time.perf_counter()
        parts, nbytes, put = self._ranks.send(request, dict(enumerate(rows)), until=until)
        metrics = shares(view, rows) | ({} if plan is None else plan.metrics())
        metrics[f"{PREFIX}bytes_sent"] = float(nbytes)
        _log.debug('"%s": %d rows to %d ranks, %d bytes put', method, view.num_rows, ranks, nbytes)
        return Call(self._ranks, request, parts, metrics, (Span(None, "prepare", begun, encoded - begun), put))

    def put(
        self,
        batch: Batch,
        *,
        onto: BatchView | None = None,
        balance: Balance = "rows",
    ) -> BatchView:
        """Encodes a batch, puts it into the object store, and returns a view of it. Calls with the view do not send the
        rows again. The store releases them with the last view.

        Args:
            batch: padded, nested or packed; or a view with rows in this process.
            onto: a view of the same rows. The fields of `batch` are put under its layouts, and the returned view has
                the fields of both; those of `batch` replace fields with the same name.
            balance: how later calls will divide the rows, because each node is sent its own rows.
        """
        begun = time.perf_counter()
        self._need_batch(batch, "WorkerGroup.put")
        if onto is not None and not isinstance(onto, BatchView):
            raise LayoutError(f"WorkerGroup.put: onto is {said(onto)}; expected a BatchView. Pass what put returned.")
        if onto is not None and isinstance(batch, TensorDictBase):
            batch = compress(batch, **self._options, like=onto.layouts_alone())
        view = self._argument(batch)
        if onto is not None:
            onto.with_fields(view)  # raises before anything is put
        encoded = time.perf_counter()
        sites = self._ranks.by_site(dict(enumerate(divided(view, balance, self.num_ranks))))
        with storing():
            settled, sent = self._ranks.store.spread(view, [(site, index) for site, _, index in sites])
        back = np.argsort(np.concatenate([index for _, _, index in sites]), kind="stable")
        there = BatchView.cat(settled).take(back)
        there = there.known_as((view if onto is None else onto).origins())
        stages = ("prepare", begun, encoded - begun), ("put", encoded, time.perf_counter() - encoded)
        metrics = {"bytes_sent": float(sent), "bytes_padded": float(view.padded_nbytes)}
        metrics |= {f"{stage}_seconds": took for stage, _, took in stages}
        self.metrics = {PREFIX + name: value for name, value in metrics.items()}
        self._ranks.timeline.add(CallTimes("put", tuple(Span(None, *stage) for stage in stages)))
        return there if onto is None else onto.with_fields(there)

    def plan(
        self,
        batch: Batch,
        token_budget: float,
        *,
        lengths: Any = None,
        **options: Any,
    ) -> RankPlans:
        """`plan_ranks` for the ranks of the group, from lengths alone. Pass the result to `call(plan=)`, and its rows
        to `put(balance=plan.rows)`, so that rows are put on the nodes where they will run.

        Args:
            batch: packed, or a view; with `lengths` also a TensorDict.
            token_budget: the largest number of valid tokens of a micro-batch.
            lengths: integers [B], the valid tokens of each row, prompt plus response; by default those of the sequence
                layout, or the sum of the prompt and the response layout.
            options: further arguments of `plan_ranks`: tree, groups, loss_tokens and options.

        Raises:
            PlanError: as `plan_ranks`; or the layouts of the batch do not determine the lengths; or `lengths` has
                another number of rows.
        """
        self._need_batch(batch, "WorkerGroup.plan")
        if lengths is None:
            if isinstance(batch, TensorDictBase):
                raise LayoutError(
                    "WorkerGroup.plan: got a TensorDict and no lengths; expected a PackedBatch or a BatchView, whose "
                    "lengths are known. Put the batch first, rows = group.put(batch), or pass lengths=."
                )
            return plan_ranks(planned_lengths(self._argument(batch)), self.num_ranks, token_budget, **options)
        plan = replace(plan_ranks(lengths, self.num_ranks, token_budget, **options), check_lengths=False)
        if plan.lengths.size != len(batch):
            raise PlanError(
                f"WorkerGroup.plan: lengths of {plan.lengths.size} rows for a batch of {len(batch)}; expected one for "
                "each row. Pass the lengths of this batch."
            )
        return plan

    def pack(self, batch: TensorDictBase, beside: BatchView | None = None) -> PackedBatch:
        """`compress` with the options of the group. A batch without a mask is packed under the layouts of `beside` if
        that has as many rows."""
        like = None
        if beside is not None and batch.batch_size[:1] == (beside.num_rows,):
            like = None if has_masks(batch, self._options["registry"]) else beside.layouts_alone()
        return compress(batch, **self._options, like=like)

    def _need_batch(self, batch: Any, call: str) -> None:
        self._ranks.need_process()
        if not isinstance(batch, TensorDictBase | PackedBatch | BatchView):
            raise LayoutError(
                f"{call}: the batch is {said(batch)}; expected a TensorDict, a PackedBatch or a BatchView. Give the "
                "batch first, other arguments after it."
            )

    def _argument(self, value: Any, beside: BatchView | None = None) -> Any:
        """An argument of a Request: a batch becomes a view, a large object a reference. `beside` is the batch of the
        call."""
        if isinstance(value, TensorDictBase):
            return BatchView.of(self.pack(value, beside))
        if isinstance(value, PackedBatch):
            return BatchView.of(value)
        if _is_tensorclass(value):
            raise LayoutError(
                f"WorkerGroup: an argument is the tensorclass {type(value).__name__}, whose rows would not be divided; "
                "expected a TensorDict. Put it into one, or give it whole to every rank: Broadcast(value)."
            )
        if isinstance(value, Broadcast):
            whole = _is_tensorclass(value.value)
            inner = ray.put(value.value) if whole else self._argument(value.value)
            return Broadcast(inner) if isinstance(inner, BatchView) else inner
        return _passed(value)


def _passed(value: Any) -> Any:
    """An argument that is not divided: a reference if it may be large."""
    return cast("Any", value) if isinstance(value, _SMALL) else ray.put(value)


def _named(worker: type, rank: int) -> type:
    """The class, with a `__repr__` of its rank if it has none. Ray writes it in front of the output of the actor."""
    if worker.__repr__ is not object.__repr__:
        return worker
    name = f"{worker.__name__} rank {rank}"

    def said_rank(self: object) -> str:
        return name

    members: dict[str, Any] = {"__repr__": said_rank, "__module__": worker.__module__, "__doc__": worker.__doc__}
    return type(worker)(worker.__name__, (worker,), members)


def _is_tensorclass(value: Any) -> bool:
    return is_tensorclass(value) and not is_non_tensor(value)
