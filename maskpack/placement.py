"""Where rows lie in the object store: what is put, once; what is cut, so that a node gets only its rows.

    a packed batch here            put, the rows of a site as one object
    a reference, on the site       as it is: its ranks read their rows out of shared memory
    a reference, on another node   cut there, where only some of its rows are wanted; then Ray moves the cut

What was put is remembered until other rows of the batch are put, or the batch dies.
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
_PATIENCE = 60.0
"""Seconds for actors to say where they are; who does not is taken to be on the driver's node, until asked again."""

_ray: Any = ray


@ray.remote(num_cpus=0)
def _cut(packed: PackedBatch, rows: IntArray) -> PackedBatch:
    return packed.select(rows)


def _node(actor: Any = None) -> str:
    """The node that this runs on."""
    return ray.get_runtime_context().get_node_id()


def _answer(reference: Any) -> str | None:
    """The node that an actor says it is on; None where it is dead, as its call will tell."""
    try:
        node: str = _ray.get(reference)
    except _ray.exceptions.RayError:
        return None
    return node


class Placement:
    """The object store as the ranks of a group see it; `ranks` are the actors of each."""

    def __init__(self, ranks: Sequence[Sequence[Any]]) -> None:
        self._ranks = ranks
        self._known: list[Site] | None = None
        self._put: WeakKeyDictionary[PackedBatch, dict[Site | None, tuple[bytes, Source]]] = WeakKeyDictionary()

    def sites(self) -> list[Site]:
        """The site of each rank. The first time this waits until the actors are up, and have time to answer."""
        if self._known is not None:
            return self._known
        if sum(bool(node["Alive"]) for node in _ray.nodes()) == 1:
            self._known = [Site()] * len(self._ranks)
            return self._known
        asked = [[actor.__ray_call__.remote(_node) for actor in actors] for actors in self._ranks]
        refs = [ref for rank in asked for ref in rank]
        answered = set(_ray.wait(refs, num_returns=len(refs), timeout=_PATIENCE)[0])
        nodes = {ref: _answer(ref) for ref in refs if ref in answered}
        sites = [Site(nodes.get(ref) or _node() for ref in rank) for rank in asked]
        if len(nodes) == len(refs) and None not in nodes.values():
            self._known = sites
        return sites

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
            return self._put_once(source, rows, None if whole else site, again)
        nodes = _nodes_of(source.held) if site and not whole else []
        if not nodes or site.issubset(nodes):  # on the site already, or so small that it travels with the call
            return source, 0
        task = cast("Any", _cut).options(scheduling_strategy=NodeAffinitySchedulingStrategy(nodes[0], soft=True))
        outline = source.outline.select(rows)
        return Source(task.remote(source.held, rows), outline), outline.nbytes

    def _put_once(self, source: Source, rows: IntArray, site: Site | None, again: bool) -> tuple[Source, int]:
        """The batch whole (`site` None), or the rows of a site. Of each, what was put last is remembered."""
        packed: PackedBatch = source.held
        if again:
            self._put.pop(packed, None)
        known = self._put.setdefault(packed, {})
        key = rows.tobytes()
        if site in known and known[site][0] == key:
            return known[site][1], 0
        outline = source.outline if site is None else source.outline.select(rows)
        known[site] = key, Source(ray.put(packed if site is None else packed.select(rows)), outline)
        return known[site][1], outline.nbytes


def _nodes_of(reference: Any) -> list[str]:
    """Where an object lies; nowhere if it is small, or gone."""
    found: dict[Any, Any] = _ray.experimental.get_object_locations([reference])
    return found[reference]["node_ids"]
