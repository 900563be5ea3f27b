"""Placement of rows in the object store, so that each node receives the rows of its ranks once.

    a packed batch in this process   put: the rows of one site are one object; small ones travel in each message
    a reference, on the site         used as it is: the ranks read their rows from shared memory
    a reference, on another node     cut on that node if only some rows are needed; Ray transfers the cut
    many references, shuffled        each node cuts for all sites, each site joins what it needs

    node 0   results of ranks 0 1 2 ...                -- cut -->   rows for node 1, rows for node 2, ...
    node 1   results of its own ranks, those rows      -- join -->  one object, of which its ranks read their rows

A put object is remembered until other rows of its batch are put, the batch is freed, or the budget of the group is
full."""

from __future__ import annotations

import logging
import math
import pickle
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import RLock
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from maskpack.core.index import IntArray
from maskpack.layout.row_layout import RowLayout
from maskpack.packed.batch import PackedBatch
from maskpack.packed.rows import Segments
from maskpack.views.column_group import BatchMeta, ColumnGroup, Cut, Source
from maskpack.views.view import BatchView

Site = frozenset[str]
"""The nodes of the actors of a rank; empty in a cluster of one node."""
SHARE = 4
"""The remembered objects of a group take at most 1 / SHARE of the object store on the node of the driver, or the size
of the batch used last."""

_FEW = 8
"""Shuffled rows are joined if they lie in more objects than this: each rank would be told of all of them."""

INLINED = 1 << 15
"""The largest number of bytes of rows that each rank gets in its message (and as many of the schema and Python
objects): to read an object of the store takes 0.7 ms."""
_REMEMBERED = 1.0
"""Seconds for which the nodes of the cluster are remembered, in calls in which nothing failed."""
_PATIENCE = 60.0
"""Seconds that a node has to answer after an actor on it has died. Ray takes a while to notice that a node is gone."""

_log = logging.getLogger(__name__)
_ray: Any = ray


@ray.remote(num_cpus=0)
def _cut(packed: PackedBatch, rows: IntArray | Cut) -> PackedBatch:
    return rows.of(packed) if isinstance(rows, Cut) else packed.take(rows)


@ray.remote(num_cpus=0)
def _join(group: ColumnGroup, sizes: Sequence[int], *packed: PackedBatch) -> Any:
    """The rows of a group, whose parts are numbers of batches, in consecutive batches of these sizes."""
    ends = np.cumsum(sizes).tolist()
    out = [
        group.take(slice(end - size, end)).assembled(packed.__getitem__) for size, end in zip(sizes, ends, strict=True)
    ]
    return out if len(out) > 1 else out[0]


@ray.remote(num_cpus=0, max_retries=0)
def _answer() -> None:
    """Returns None, from a node that is alive."""


def this_node() -> str:
    """The id of the node of this process."""
    return ray.get_runtime_context().get_node_id()


def nodes_alive() -> dict[str, float]:
    """The size in bytes of the object store of each node that is alive, by node id."""
    nodes = [node for node in _ray.nodes() if node["Alive"]]
    return {node["NodeID"]: node["Resources"].get("object_store_memory", 0.0) for node in nodes}


@dataclass
class _Put:
    """An object that was put for a site: the rows, as the bytes of their numbers; the reference; the meta."""

    rows: bytes
    reference: Any
    meta: BatchMeta


class Placement:
    """The objects that a group has put into the object store. Threads that share the group may use it.

    The node of a rank is known from its last reply. A rank that has not replied yet gets an object of its own, as if it
    were alone on a node.
    """

    def __init__(self, ranks: int) -> None:
        self._sites: list[Site | None] = [None] * ranks
        self._alone = True
        self._nodes: tuple[float, Mapping[str, float]] = -math.inf, {}
        self._pickled: WeakKeyDictionary[PackedBatch, bytes] = WeakKeyDictionary()
        """The bytes of batches that travel in messages; empty if they are too large."""
        self._put: WeakKeyDictionary[PackedBatch, dict[Site | None, _Put]] = WeakKeyDictionary()
        """In the order of use; the batch used last is the last."""
        self._lock = RLock()
        """Held to read and write the attributes, never while Ray puts or releases an object."""

    def ran_on(self, rank: int, nodes: Sequence[str]) -> None:
        """Records the nodes of the actors of a rank."""
        with self._lock:
            old, self._sites[rank] = self._site(rank), Site(nodes)
            moved = self._put.values() if old != self._sites[rank] else ()
            dropped = [known.pop(old, None) for known in moved]
        del dropped  # Ray releases the objects here, outside the lock

    def _site(self, rank: int) -> Site:
        return self._sites[rank] or Site([f"of rank {rank}"])

    def sites(self) -> list[Site]:
        """The site of each rank, as far as it is known. Does not call the actors."""
        if self._alone and len(self.nodes()) > 1:
            self._alone = False
        with self._lock:
            if self._alone:
                return [Site()] * len(self._sites)
            return [self._site(rank) for rank in range(len(self._sites))]

    def nodes(self, answered: Collection[str] = ()) -> Mapping[str, float]:
        """`nodes_alive` of the last second, or anew if nodes that have `answered` are not among them."""
        now, (when, nodes) = time.monotonic(), self._nodes
        if now > when + _REMEMBERED or not nodes.keys() >= set(answered):
            nodes = nodes_alive()
            self._nodes = now, nodes
        return nodes

    def nodes_alive(self, died: Collection[int]) -> set[str]:
        """The nodes that are alive. It waits until the nodes of ranks with dead actors have answered, or Ray knows that
        they are gone."""
        with self._lock:
            sites = list(self._sites)
        known = [node for site in sites for node in site or ()]
        suspects = {node for rank in died for node in (sites[rank] or known)}
        suspects = suspects & nodes_alive().keys() - {this_node()}
        task = cast("Any", _answer)
        asked: dict[Any, str] = {
            task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(): node
            for node in suspects
        }
        ready: list[Any] = []
        if asked:
            ready = _ray.wait(list(asked), num_returns=len(asked), timeout=_PATIENCE)[0]
        return set(nodes_alive()) - suspects | {asked[ref] for ref in ready if _answered(ref)}

    def ranks_off(self, nodes: Collection[str]) -> set[int]:
        """The ranks that are on other nodes than these."""
        with self._lock:
            return {rank for rank, site in enumerate(self._sites) if site is not None and not site.issubset(nodes)}

    def settled(self, view: BatchView, site: Site, again: bool = False) -> tuple[BatchView, int]:
        """The same view over objects in the store that hold the rows of `site`, and the number of encoded bytes that
        were put or cut for it. `again` puts objects anew that may have been lost."""
        sent = 0
        groups: list[ColumnGroup] = []
        for group in view.groups:
            if len(group.parts) == 1 and group.rows.count.tolist() == [group.parts[0].meta.num_rows]:  # in their order
                part, nbytes = self._part(group.parts[0], None, site, again)
                groups.append(replace(group, parts=(part,)))
                sent += nbytes
                continue
            number, row = group.rows.by_row()
            sources: list[Source] = []
            for place, source in enumerate(group.parts):
                own = number == place
                needed, row_in_part = np.unique(row[own], return_inverse=True)
                part, nbytes = self._part(source, needed, site, again)
                sources.append(part)
                sent += nbytes
                if part.meta.num_rows != source.meta.num_rows:
                    row[own] = row_in_part
            groups.append(replace(group, parts=tuple(sources), rows=Segments.of_rows(number, row)))
        return replace(view, groups=tuple(groups)), sent

    def spread(
        self, view: BatchView, sites: Sequence[tuple[Site, IntArray]], again: bool = False
    ) -> tuple[list[BatchView], int]:
        """`settled` for each of several sites with its rows of the view. Shuffled rows are joined first."""
        rows = np.concatenate([index for _, index in sites])
        own = view if np.array_equal(rows, np.arange(view.num_rows)) else view.take(rows)
        sizes, nbytes = [index.size for _, index in sites], 0
        groups = list(own.groups)
        for at, group in enumerate(groups):
            if _scattered(group):
                layouts = {name: layout.take(rows) for name, layout in view.layouts_of(view.groups[at]).items()}
                place = np.repeat(np.arange(len(sites)), sizes)
                groups[at], more = _joined(group, layouts, place, [site for site, _ in sites])
                nbytes += more
        own = replace(own, groups=tuple(groups))
        out: list[BatchView] = []
        for (site, _), part in zip(sites, own.split(sizes) if len(sites) > 1 else [own], strict=True):
            there, more = self.settled(part, site, again)
            out.append(there)
            nbytes += more
        return out, nbytes

    def pickled(self, packed: PackedBatch) -> bytes:
        """The bytes of a batch that travels in messages; empty if it is larger, or has Python objects whose references
        or classes Ray must see."""
        with self._lock:
            known = self._pickled.get(packed)
        if known is None:
            nodes = (packed.schema.root, *(form.node for form in packed.schema.forms))
            plain = all(node is None or node.kind is None for node in nodes)
            plain = plain and all(held.is_plain for held in packed.objects.values())
            small = plain and packed.rows.whole is not None and packed.nbytes <= INLINED
            known = pickle.dumps(packed, 5) if small else b""
            known = known if len(known) <= INLINED + packed.nbytes else b""
            with self._lock:
                self._pickled[packed] = known
        return known

    def _part(self, source: Source, rows: IntArray | None, site: Site, again: bool) -> tuple[Source, int]:
        """A source with at least the needed rows (None: all), in the store or small, and the number of bytes that are
        new there."""
        whole = rows is None or rows.size == source.meta.num_rows
        if isinstance(source.held, PackedBatch):
            fresh = again or source.held not in self._pickled
            if self.pickled(source.held):
                return source, source.meta.nbytes if fresh else 0
            return self._put_once(source, None if whole else rows, site, again)
        nodes = nodes_of(source.held) if source.cut is not None or (site and not whole) else []
        if source.cut is None and (not nodes or site.issubset(nodes)):  # on the site, or so small that Ray inlines it
            return source, 0
        task = cast("Any", _cut)
        if nodes:
            task = task.options(**_on(nodes[0]))
        needed = np.arange(source.meta.num_rows) if rows is None else rows
        meta = source.meta.take(needed)
        wanted = needed if source.cut is None else source.cut._replace(spans=source.cut.spans.take(needed))
        return Source(task.remote(source.held, wanted), meta), meta.nbytes

    def _put_once(self, source: Source, rows: IntArray | None, site: Site, again: bool) -> tuple[Source, int]:
        """Puts the whole batch (`rows` None) or the rows of a site, unless the last put for it had the same rows."""
        packed: PackedBatch = source.held
        place, key = (None, b"") if rows is None else (site, rows.tobytes())
        with self._lock:
            known = self._put.pop(packed, {})
            self._put[packed] = known
            last = known.get(place)
        if last is not None and last.rows == key and not again:
            return Source(last.reference, last.meta), 0
        meta = source.meta if rows is None else source.meta.take(rows)
        fresh = _Put(key, ray.put(packed if rows is None else packed.take(rows)), meta)
        room = self.nodes().get(this_node(), 0.0) / SHARE
        with self._lock:
            dropped: list[Any] = [known.get(place)]
            known[place] = fresh
            dropped += self._over(room)
        del last, dropped  # Ray releases the objects here, outside the lock
        return Source(fresh.reference, meta), meta.nbytes

    def _over(self, room: float) -> list[Any]:
        """Removes and returns the batches used longest ago, until the rest fits into `room` bytes or one batch is
        left."""
        sizes = {batch: sum(put.meta.nbytes for put in known.values()) for batch, known in self._put.items()}
        total, out = sum(sizes.values()), list[Any]()
        for batch in list(sizes)[:-1]:
            if total <= room:
                break
            total -= sizes[batch]
            _log.debug("forgets a put batch of %d bytes; later calls with it put it again", sizes[batch])
            out.append(self._put.pop(batch, None))
        return out


def _scattered(group: ColumnGroup) -> bool:
    """Whether the rows are shuffled, and lie in many objects of the store."""
    parts, runs = len(group.parts), 1 + int(np.count_nonzero(np.diff(group.rows.source)))
    if parts <= _FEW or runs < 2 * parts:
        return False
    return not any(part.cut is not None or isinstance(part.held, PackedBatch) for part in group.parts)


def _joined(
    group: ColumnGroup, layouts: Mapping[str, RowLayout], place: IntArray, sites: Sequence[Site]
) -> tuple[ColumnGroup, int]:
    """The same rows in one object for each site, and the bytes of these objects. `layouts` are those of the rows,
    `place` [B] the number of the site of each."""
    held: list[Any] = [part.held for part in group.parts]
    found = _ray.experimental.get_object_locations(held)
    homes: list[str] = [next(iter(found[one]["node_ids"]), "") for one in held]  # "": so small that Ray inlines it
    names, home = np.unique(homes, return_inverse=True)
    number, row = group.rows.by_row()
    size = 1 + int(row.max())
    nbytes = np.array([part.meta.nbytes / max(1, part.meta.num_rows) for part in group.parts])
    # what each site needs, each row once: by site, node, object and row
    keys = ((place * names.size + home[number]) * len(held) + number) * size + row
    _, first, back = np.unique(keys, return_index=True, return_inverse=True)
    to, node, number, row = place[first], home[number[first]], number[first], row[first]
    nbytes = nbytes[number]
    near = np.array([[not site or not name or name in site for name in names.tolist()] for site in sites])[to, node]
    head, alive = group.declared(), nodes_alive()

    def made(objects: Sequence[Any], number: IntArray, row: IntArray, sizes: Sequence[int], node: str) -> list[Any]:
        own = ColumnGroup(group.paths, tuple(range(len(objects))), Segments.of_rows(number, row), head=head)
        options = _on(node) if node in alive else {}
        out = cast("Any", _join).options(num_returns=len(sizes), **options).remote(own, sizes, *objects)
        return out if len(sizes) > 1 else [out]

    # rows for other nodes, cut where they are: an object for each node and site
    pieces: dict[tuple[int, int], Any] = {}
    for at, name in enumerate(names.tolist()):
        away = np.flatnonzero(~near & (node == at))
        if away.size:
            used, numbers = np.unique(number[away], return_inverse=True)
            sites_of, counts = np.unique(to[away], return_counts=True)
            cut = made([held[one] for one in used.tolist()], numbers, row[away], counts.tolist(), name)
            pieces |= zip([(site, at) for site in sites_of.tolist()], cut, strict=True)
    runs = np.flatnonzero(np.diff(to * names.size + node, prepend=-1))
    row = np.where(near, row, np.arange(row.size) - np.repeat(runs, np.diff(runs, append=row.size)))
    number = np.where(near, number, len(held) + node)

    # on each site, these and what is there
    sources: list[Source] = []
    begins = np.searchsorted(to, np.unique(to)).tolist()
    for begin, end in zip(begins, [*begins[1:], to.size], strict=True):
        site = int(to[begin])
        used, numbers = np.unique(number[begin:end], return_inverse=True)
        objects = [held[one] if one < len(held) else pieces[site, one - len(held)] for one in used.tolist()]
        if used.size > 1 or used[0] < len(held):
            home_of = min(sites[site] & alive.keys(), default="")
            objects = made(objects, numbers, row[begin:end], [end - begin], home_of)
        taken = {name: layout.take(first[begin:end]) for name, layout in layouts.items()}
        sources.append(Source(objects[0], BatchMeta(head, taken, end - begin, round(nbytes[begin:end].sum()))))
    own = Segments.of_rows(np.searchsorted(to[begins], place), back - np.searchsorted(to, place))
    return ColumnGroup(group.paths, tuple(sources), own, head=head), sum(source.meta.nbytes for source in sources)


def _on(node: str) -> dict[str, Any]:
    """The options of a task that runs on a node, while that is alive."""
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True)}


def _answered(reference: Any) -> bool:
    try:
        _ray.get(reference, timeout=0)
    except _ray.exceptions.RayError:
        return False
    return True


def nodes_of(reference: Any) -> list[str]:
    """The nodes that hold an object; empty if it is small or lost."""
    locations: dict[Any, Any] = _ray.experimental.get_object_locations([reference])
    return locations[reference]["node_ids"]
