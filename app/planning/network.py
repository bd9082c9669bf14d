"""How long a collective keeps the network busy: bytes over link rates on the physical topology (numpy only).

Assumptions, none of them measured. A transfer runs at the rates of app.cluster.hardware plus HOP_SECONDS a hop.
Point-to-point messages take dimension-ordered shortest paths; the link with the most messages decides. Gathers and
reductions use every link of the box that a group spans, both ways round a ring and one way on a line; where groups
interleave along a side they share its links. Those of the SparseCores go round one-way rings through all members, as
many as the program says (two, half of a plane's links). Between slices a group moves its data with all its chips.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from app.cluster.hardware import Generation
from app.planning.hlo import Exchange

HOP_SECONDS = 1e-6


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One collective on the network: seconds, mesh axes, "ici" or "dcn", longest path, messages on the fullest link."""

    seconds: float
    axes: tuple[str, ...]
    network: str
    hops: int
    contention: float


class Network:
    """The places of a program's device numbers: positions in the flat device order of `mesh`."""

    def __init__(self, mesh: Mesh, generation: Generation):
        devices: Sequence[jax.Device] = mesh.devices.ravel().tolist()
        self.generation = generation
        self.axes = mesh.axis_names
        self._index = np.stack(np.unravel_index(np.arange(len(devices)), mesh.devices.shape), axis=1)
        self._place = np.array([device.coords[: generation.dims] for device in devices])
        self._slice = np.array([getattr(device, "slice_index", 0) for device in devices])
        for one in np.unique(self._slice):
            self._place[self._slice == one] -= self._place[self._slice == one].min(axis=0)
        self._sides = tuple(int(side) for side in self._place.max(axis=0) + 1)
        self._wrap = generation.wrap(self._sides)

    @property
    def size(self) -> int:
        return len(self._slice)

    def transfer(self, exchange: Exchange) -> Transfer:
        x = exchange
        where = self._paths(x.pairs) if x.pairs else self._group(x.kind, x.groups, x.rings)
        axes, network, hops, contention = where
        rate = self.generation.ici_bytes_per_second if network == "ici" else self.generation.dcn_bytes_per_second
        return Transfer(exchange.bytes * contention / rate + hops * HOP_SECONDS, axes, network, hops, contention)

    @functools.cache  # noqa: B019 (lives as long as the plan)
    def _paths(self, pairs: tuple[tuple[int, int], ...]) -> tuple[tuple[str, ...], str, int, float]:
        """Of messages (source, target): axes along which they run, network, longest path, most messages on a link."""
        sources, targets = np.array(pairs).T
        axes = self._varying(self._index[sources] != self._index[targets])
        if (self._slice[sources] != self._slice[targets]).any():
            return axes, "dcn", 1, 1.0
        links: Counter[tuple] = Counter()
        longest = 0
        for source, target in pairs:
            path = list(self._path(self._place[source], self._place[target]))
            links.update(path)
            longest = max(longest, len(path))
        return axes, "ici", longest, float(max(links.values(), default=0))

    def _path(self, here: np.ndarray, there: np.ndarray):
        """Links (place, dim, direction), one dim after the other, the short way round."""
        place = [int(x) for x in here]
        for dim, side in enumerate(self._sides):
            apart = int(there[dim]) - place[dim]
            if self._wrap[dim]:
                apart = (apart + side // 2) % side - side // 2
                if 2 * abs(apart) == side and place[dim] % 2:  # both ways are equal: take turns
                    apart = -apart
            for _ in range(abs(apart)):
                direction = 1 if apart > 0 else -1
                yield (*place, dim, direction)
                place[dim] = (place[dim] + direction) % side

    @functools.cache  # noqa: B019
    def _group(
        self, kind: str, groups: tuple[tuple[int, ...], ...], rings: int
    ) -> tuple[tuple[str, ...], str, int, float]:
        """Of a collective inside groups: axes, network, longest way, bytes on the fullest link (1: a buffer's)."""
        members = np.array(groups[0])
        axes = self._varying(self._index[members] != self._index[members[0]])
        slices = len(np.unique(self._slice[members]))
        inside = members[self._slice[members] == self._slice[members[0]]]
        if len(members) == 1:
            return axes, "ici", 0, 0.0
        places = self._place[inside]
        extents = [np.unique(places[:, dim]) for dim in range(places.shape[1])]
        hops = sum(self._span(dim, extent) for dim, extent in enumerate(extents))
        share = (len(inside) - 1) / len(inside)
        if kind in ("all-to-all", "ragged-all-to-all"):
            # Of a ring of n, n/8 of a rank's buffer passes a link each way; of a line twice that in the middle.
            load = max(len(x) / (8 if self._is_ring(dim, x) else 4) * self._interleaved(x)
                       for dim, x in enumerate(extents))  # fmt: skip
        else:
            box = math.prod(len(extent) for extent in extents) == len(inside)
            links = sum(self._links(dim, extent) for dim, extent in enumerate(extents)) if box else 1.0
            if rings:
                links, hops = min(links, rings), len(inside) - 1
            load = share / max(links, 1e-9) if len(inside) > 1 else 0.0
            load *= 2 if kind == "all-reduce" else 1
        if slices == 1:
            return axes, "ici", hops, load
        rates = self.generation.dcn_bytes_per_second / self.generation.ici_bytes_per_second
        between = (slices - 1) / slices / len(inside) * (2 if kind == "all-reduce" else 1)
        return axes, "dcn", hops + 1, between + load * rates

    def _varying(self, differs: np.ndarray) -> tuple[str, ...]:
        return tuple(axis for axis, some in zip(self.axes, differs.any(axis=0), strict=True) if some)

    def _is_ring(self, dim: int, places: np.ndarray) -> bool:
        return self._wrap[dim] and len(places) == self._sides[dim] > 2

    def _links(self, dim: int, places: np.ndarray) -> float:
        if len(places) == 1:
            return 0.0
        return (2 if self._is_ring(dim, places) else 1) / self._interleaved(places)

    def _interleaved(self, places: np.ndarray) -> int:
        """Groups that share the links of a side: the distance between a group's neighbours on it."""
        return int(np.diff(places).min()) if len(places) > 1 else 1

    def _span(self, dim: int, places: np.ndarray) -> int:
        return len(places) // 2 if self._is_ring(dim, places) else int(places[-1] - places[0])
