"""Where rows lie in the object store: what is put, once; what is cut, so that a node gets only its rows.

a packed batch here            put, the rows of a site as one object, remembered while the batch lives
a reference, on the site       as it is: its ranks read their rows out of shared memory
a reference, on another node   cut there, where only some of its rows are wanted; then Ray moves the cut
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from maskpack.packed import PackedBatch
from maskpack.rows import IntArray
from maskpack.segments import Segments
from maskpack.strands import Source, Strand
from maskpack.views import BatchView

Site = frozenset[str]
"""The nodes that the actors of a rank are on; empty in a cluster of one node."""

_ray: Any = ray


@ray.remote(num_cpus=0)
def _cut(packed: PackedBatch, rows: IntArray) -> PackedBatch:
    return packed.select(rows)


def _node() -> str:
    return ray.get_runtime_context().get_node_id()


class Placement:
    """The object store as the ranks of a group see it; `ranks` are the actors of each."""

    def __init__(self, ranks: Sequence[Sequence[Any]]) -> None:
        self._ranks = ranks
        self._known: list[Site] | None = None
        self._put: WeakKeyDictionary[PackedBatch, dict[bytes, Source]] = WeakKeyDictionary()

    def sites(self) -> list[Site]:
        """The site of each rank. The first time this waits until the actors are up."""
        if self._known is None:
            if sum(bool(node["Alive"]) for node in _ray.nodes()) == 1:
                self._known = [Site()] * len(self._ranks)
            else:
                self._known = [Site(map(self._node_of, actors)) for actors in self._ranks]
        return self._known

    def _node_of(self, actor: Any) -> str:
        """The node of an actor; that of the driver for one that is dead, whose call will tell."""
        try:
            return ray.get(actor.__ray_call__.remote(lambda _: _node()))  # type: ignore[reportUnknownLambdaType]
        except _ray.exceptions.RayActorError:
            return _node()

    def settled(self, view: BatchView, site: Site, again: bool = False) -> tuple[BatchView, int]:
        """The view over objects in the store that the nodes of `site` need whole, and the encoded bytes that were put
        or cut for it. `again` forgets what was put before."""
        sent = 0
        strands: list[Strand] = []
        for strand in view.strands:
            number, row = strand.segments.by_row()
            sources: list[Source] = []
            for place, source in enumerate(strand.sources):
                own = number == place
                needed, row_in_part = np.unique(row[own], return_inverse=True)
                part, nbytes = self._part(source, needed, site, again)
                sources.append(part)
                sent += nbytes
                if part.outline.num_rows != source.outline.num_rows:
                    row[own] = row_in_part
            strands.append(replace(strand, sources=tuple(sources), segments=Segments.of_rows(number, row)))
        return replace(view, strands=tuple(strands)), sent

    def _part(self, source: Source, rows: IntArray, site: Site, again: bool) -> tuple[Source, int]:
        """A source in the store with the rows that are needed, at least, and the bytes that are new in it."""
        whole = rows.size == source.outline.num_rows
        if isinstance(source.held, PackedBatch):
            return self._put_once(source, rows, whole, again)
        if whole or not site or self._is_on(source.held, site):
            return source, 0
        (node, *_) = self._nodes(source.held)
        task = cast("Any", _cut).options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True))
        outline = source.outline.select(rows)
        return Source(task.remote(source.held, rows), outline), outline.nbytes

    def _put_once(self, source: Source, rows: IntArray, whole: bool, again: bool) -> tuple[Source, int]:
        packed: PackedBatch = source.held
        if again:
            self._put.pop(packed, None)
        known = self._put.setdefault(packed, {})
        key = b"" if whole else rows.tobytes()
        if key in known:
            return known[key], 0
        outline = source.outline if whole else source.outline.select(rows)
        known[key] = Source(ray.put(packed if whole else packed.select(rows)), outline)
        return known[key], outline.nbytes

    def _is_on(self, reference: Any, site: Site) -> bool:
        """Whether an object is on all nodes of a site already, or so small that it travels with the call."""
        nodes = self._nodes(reference)
        return not nodes or site.issubset(nodes)

    def _nodes(self, reference: Any) -> list[str]:
        found: dict[Any, Any] = _ray.experimental.get_object_locations([reference])
        return found[reference]["node_ids"]
