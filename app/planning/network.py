"""How long a collective keeps the network busy: bytes over link rates on the physical topology (numpy only).

Assumptions, none of them measured. A transfer runs at the rates of app.cluster.hardware plus HOP_SECONDS a hop.
Point-to-point messages take dimension-ordered shortest paths; the link with the most messages decides. Gathers and
reductions use every link of the box that a group spans, both ways round a ring and one way on a line; where groups
interleave along a side they share its links. Those of the SparseCores go round one-way rings through all members, as
many as the program says (two, half of a plane's links). Between slices a chip has its share of its host's rate.
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
        self._slices = len(np.unique(self._slice))
        for one in np.unique(self._slice):
            self._place[self._slice == one] -= self._place[self._slice == one].min(axis=0)
        self._sides = tuple(int(side) for side in self._place.max(axis=0) + 1)
        self._wrap = generation.wrap(self._sides)

    @property
    def size(self) -> int:
        """Devices that a program has numbers for: those of one slice."""
        return len(self._slice) // self._slices

    def transfer(self, exchange: Exchange) -> Transfer:
        x = exchange
        if x.dcn:
            return self._between_slices(x.kind, x.bytes)
        axes, hops, contention = self._paths(x.pairs) if x.pairs else self._group(x.kind, x.groups, x.rings)
        seconds = x.bytes * contention / self.generation.ici_bytes_per_second + hops * HOP_SECONDS
        return Transfer(seconds, axes, "ici", hops, contention)

    def _between_slices(self, kind: str, received: int) -> Transfer:
        share = 1.0 if kind == "collective-permute" else (self._slices - 1) / self._slices
        share *= 2 if kind == "all-reduce" else 1
        other = int(np.argmax(self._slice != self._slice[0]))
        axes = self._varying(self._index[[other]] != self._index[0])
        return Transfer(received * share / self.generation.dcn_bytes_per_second + HOP_SECONDS, axes, "dcn", 1, share)

    @functools.cache  # noqa: B019 (lives as long as the plan)
    def _paths(self, pairs: tuple[tuple[int, int], ...]) -> tuple[tuple[str, ...], int, float]:
        """Of messages (source, target): axes along which they run, longest path, most messages on a link."""
        sources, targets = np.array(pairs).T
        axes = self._varying(self._index[sources] != self._index[targets])
        links: Counter[tuple] = Counter()
        longest = 0
        for source, target in pairs:
            path = list(self._path(self._place[source], self._place[target]))
            links.update(path)
            longest = max(longest, len(path))
        return axes, longest, float(max(links.values(), default=0))

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
    ) -> tuple[tuple[str, ...], int, float]:
        """Of a collective inside groups: axes, longest way, bytes on the fullest link (1: a buffer's)."""
        members = np.array(groups[0])
        axes = self._varying(self._index[members] != self._index[members[0]])
        if len(members) == 1:
            return axes, 0, 0.0
        places = self._place[members]
        extents = [np.unique(places[:, dim]) for dim in range(places.shape[1])]
        hops = sum(self._span(dim, extent) for dim, extent in enumerate(extents))
        share = (len(members) - 1) / len(members)
        if kind in ("all-to-all", "ragged-all-to-all"):
            # Of a ring of n, n/8 of a rank's buffer passes a link each way; of a line twice that in the middle.
            load = max(len(x) / (8 if self._is_ring(dim, x) else 4) * self._interleaved(x)
                       for dim, x in enumerate(extents))  # fmt: skip
        else:
            box = math.prod(len(extent) for extent in extents) == len(members)
            links = sum(self._links(dim, extent) for dim, extent in enumerate(extents)) if box else 1.0
            if rings:
                links, hops = min(links, rings), len(members) - 1
            load = share / max(links, 1e-9)
            load *= 2 if kind == "all-reduce" else 1
        return axes, hops, load

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
