"""The device mesh: axes data, fsdp, context, expert, tensor, laid on the physical network.

Along the sequence axes (context major, expert minor) the ranks' order is the order of the tokens, and neighbours in the
sequence are neighbours in the network: within a slice they walk a Hamiltonian cycle of chips (app.cluster.placement).
`mesh.<axis>` counts an axis' ranks over all slices, `mesh.dcn.<axis>` the slices it spans: it is laid out slices major,
and leaves its slice only where `mesh.dcn` says so.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from app.cluster.hardware import find_generation
from app.cluster.placement import Grid, place
from app.config import ConfigError, MeshConfig, resolve_mesh

# The mesh's own order, major first. Context comes before expert: jax refuses a ppermute over a tuple of axes in another
# order than the mesh's.
AXES = ("data", "fsdp", "context", "expert", "tensor")
SEQUENCE_AXES = ("context", "expert")

SliceOf = Callable[[jax.Device], int]


def device_slice(device: jax.Device) -> int:
    """The slice (ICI domain) of a device; 0 where the platform has no slices, as on CPUs and single-slice TPUs."""
    return getattr(device, "slice_index", 0)


def equal_slices(devices: Sequence[jax.Device], num_slices: int) -> SliceOf:
    """A `slice_of` for devices that carry no slice index: `num_slices` equal runs of devices in id order.

    For trying a multi-slice configuration on CPU devices. Raises ConfigError if they do not divide.
    """
    if len(devices) % num_slices:
        raise ConfigError(f"{len(devices)} devices do not divide into {num_slices} slices (the product of mesh.dcn.*)")
    ids = sorted(device.id for device in devices)
    slices = {device_id: index * num_slices // len(ids) for index, device_id in enumerate(ids)}
    return lambda device: slices[device.id]


def build_mesh(mesh: MeshConfig, devices: Sequence[jax.Device], *, slice_of: SliceOf = device_slice) -> Mesh:
    """The mesh over all `devices`, axis names AXES.

    mesh: sizes per axis, at most one -1 (resolved here). Deterministic, so every process builds the same mesh.
    Raises ConfigError (a ValueError), with the numbers, if the sizes do not fit the devices, the slices and the devices
    of a slice; ValueError if the devices of a TPU slice are not a whole box of chips.
    """
    mesh = resolve_mesh(mesh, len(devices))
    slices = _group_by_slice(devices, slice_of)
    _check_slices(mesh, slices)
    ici = {axis: mesh.per_slice[axis] for axis in AXES}
    dcn = {axis: mesh.dcn.sizes[axis] for axis in AXES}

    blocks = np.stack([_place_slice(members, ici) for members in slices.values()])
    split = blocks.reshape(*dcn.values(), *ici.values())  # every axis twice: slices, then ranks of a slice
    paired = split.transpose([index + half for index in range(len(AXES)) for half in (0, len(AXES))])
    return Mesh(paired.reshape([dcn[axis] * ici[axis] for axis in AXES]), AXES)


def line_length(mesh: Mesh) -> int:
    """Chips of the straight lines that `context` or `fsdp` is made of, if it fills a 3D slice of whole cubes; else 1.

    Ranks k n .. k n + n - 1 are then a line of n chips, gone up for even k and down for odd k (app.cluster.cycle).
    """
    ranks = max(mesh.devices[0, :, 0, 0, 0], mesh.devices[0, 0, :, 0, 0], key=len)
    slice_size = sum(device_slice(device) == device_slice(ranks[0]) for device in mesh.devices.flat)
    if len(ranks) < 64 or len(ranks) != slice_size or not hasattr(ranks[0], "coords"):
        return 1
    places = np.array([device.coords for device in ranks])
    for length in sorted(set(np.ptp(places, axis=0) + 1)):
        extents = np.ptp(places.reshape(-1, length, 3), axis=1) if len(ranks) % length == 0 else places
        if length > 1 and (np.sort(extents, axis=1) == [0, 0, length - 1]).all():
            return int(length)
    return 1


def sequence_order(mesh: Mesh) -> np.ndarray:
    """Devices [data, fsdp, tensor, P] of `mesh`, the last dim in sequence order (context major, expert minor)."""
    devices = np.moveaxis(mesh.devices, AXES.index("tensor"), 2)
    return devices.reshape(*devices.shape[:3], -1)


@dataclasses.dataclass(frozen=True)
class NeighbourReport:
    """Network distance between consecutive ranks of the sequence, the worst over all sequences of a mesh.

    Hops are ICI links; steps from slice to slice go over DCN and are counted apart. The closing step leads from the
    last rank back to the first, as a ring does.
    """

    ranks: int
    max_hops: int
    mean_hops: float  # over the steps inside slices, closing step included
    far_pairs: int  # consecutive pairs more than one hop apart, closing step not included
    closing_hops: int  # 0 if the closing step goes over DCN
    dcn_steps: int  # closing step included

    @property
    def is_cycle(self) -> bool:
        """Every step, the closing one too, is one link inside a slice."""
        return self.max_hops <= 1 and not self.dcn_steps

    def __str__(self) -> str:
        shape = "a cycle of neighbours" if self.is_cycle else "not a cycle of neighbours"
        return (
            f"{self.ranks} sequence ranks, {shape}: at most {self.max_hops} hops, {self.mean_hops:.2f} on average, "
            f"{self.far_pairs} pairs more than one hop apart, {self.closing_hops} hops from last to first, "
            f"{self.dcn_steps} steps over DCN"
        )


def sequence_neighbours_report(mesh: Mesh, *, slice_of: SliceOf = device_slice) -> NeighbourReport | None:
    """How far apart consecutive sequence ranks are, or None where devices have no place in a network (CPU)."""
    located = _hops_to_next(mesh, slice_of)
    if located is None:
        return None
    hops, over_dcn = located
    inside = ~over_dcn
    return NeighbourReport(
        ranks=hops.shape[1],
        max_hops=int(hops.max()),
        mean_hops=float(hops.sum() / max(inside.sum(), 1)),
        far_pairs=int((hops[:, :-1] > 1).sum(axis=1).max()),
        closing_hops=int(hops[:, -1].max()),
        dcn_steps=int(over_dcn.sum(axis=1).max()),
    )


def check_sequence_order(mesh: Mesh, *, slice_of: SliceOf = device_slice) -> None:
    """Refuse a mesh whose rank order is not an order that a sequence can run along.

    Guards against a hand-made or default mesh: the ranks of a sequence must visit each slice in one run, walk from
    neighbour to neighbour on a TPU, and follow the device ids elsewhere (so that a process holds one run of tokens).
    Raises ValueError naming the first pair of ranks and the setting.
    """
    if mesh.axis_names != AXES:
        raise ValueError(f"mesh has axes {mesh.axis_names}, expected {AXES}: make it with app.cluster.mesh.build_mesh")
    remedy = "rank order must be sequence order: make the mesh with app.cluster.mesh.build_mesh"
    order = sequence_order(mesh)
    for row in order.reshape(-1, order.shape[-1]):
        runs = [key for key, _ in itertools.groupby(slice_of(device) for device in row)]
        if len(runs) != len(set(runs)):
            raise ValueError(
                f"mesh.context: the sequence visits slices in the order {runs}, each must be one run; {remedy}"
            )
    located = _hops_to_next(mesh, slice_of)
    if located is None:
        ids = np.vectorize(lambda device: device.id, otypes=[np.int64])(order)
        _refuse_first(ids[..., 1:] < ids[..., :-1], order, "device ids fall", remedy)
    else:
        _refuse_first(located[0][:, :-1] > 1, order, "more than one hop apart", remedy)


def _refuse_first(bad: np.ndarray, order: np.ndarray, what: str, remedy: str) -> None:
    """Raise for the first consecutive pair [..., P - 1] that is marked bad."""
    if bad.any():
        size = order.shape[-1]
        row, rank = (int(place) for place in np.argwhere(bad.reshape(-1, size - 1))[0])
        here, there = order.reshape(-1, size)[row, rank : rank + 2]
        raise ValueError(
            f"mesh.context, mesh.expert: sequence ranks {rank} and {rank + 1} are {here} and {there}, {what}; {remedy}"
        )


def _group_by_slice(devices: Sequence[jax.Device], slice_of: SliceOf) -> dict[int, list[jax.Device]]:
    """Slice -> its devices in id order, slices in ascending order."""
    slices: dict[int, list[jax.Device]] = {}
    for device in sorted(devices, key=lambda device: (slice_of(device), device.id)):
        slices.setdefault(slice_of(device), []).append(device)
    return slices


def _check_slices(mesh: MeshConfig, slices: Mapping[int, list[jax.Device]]) -> None:
    """The slices that mesh.dcn asks for against those that exist, and the devices of each."""
    found = {index: len(members) for index, members in slices.items()}
    total = sum(found.values())
    if mesh.dcn.num_slices != len(found):
        raise ConfigError(
            f"{_factors('mesh.dcn', mesh.dcn.sizes)} makes {mesh.dcn.num_slices} slices, but the {total} devices form "
            f"{len(found)} (devices per slice: {found}): make the product of mesh.dcn.* {len(found)}, for example "
            f"with mesh.dcn.data={len(found)} and mesh.data a multiple of it"
        )
    per_slice = math.prod(mesh.per_slice.values())
    if set(found.values()) != {per_slice}:
        raise ConfigError(
            f"{_factors('mesh', mesh.sizes)} over {mesh.dcn.num_slices} slices makes {per_slice} devices per slice, "
            f"but the devices per slice are {found}: use slices of equal size"
        )


def _factors(prefix: str, sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{prefix}.{axis}={sizes[axis]}" for axis in AXES)


def _place_slice(devices: Sequence[jax.Device], ici: Mapping[str, int]) -> np.ndarray:
    """The devices of one slice as an array in AXES order; in the order given (by id) where there are no coords."""
    shape = [ici[axis] for axis in AXES]
    located = _locate(devices)
    if located is None:
        return np.array(devices, dtype=object).reshape(shape)
    grid, coordinates = located
    ranks = place(
        grid, sequence=ici["context"] * ici["expert"], tensor=ici["tensor"], fsdp=ici["fsdp"], data=ici["data"]
    )
    boxed = np.empty(grid.shape, dtype=object)
    boxed[tuple(coordinates.T)] = devices
    return boxed[tuple(np.moveaxis(ranks, -1, 0))].reshape(shape)


def _locate(devices: Sequence[jax.Device]) -> tuple[Grid, np.ndarray] | None:
    """The grid that one slice's devices fill and the coordinates [devices, dims] of each; None without coords.

    The last dim is the device on its chip. Raises ValueError for an unknown TPU or devices that do not fill a box.
    """
    if not hasattr(devices[0], "coords"):
        return None
    kind = devices[0].device_kind
    generation = find_generation(kind)
    if generation is None:
        raise ValueError(f"devices of kind {kind!r} are not in the table of app.cluster.hardware")
    places = np.array([(*device.coords, device.core_on_chip) for device in devices])
    places -= places.min(axis=0)
    sides = tuple(int(side) for side in places.max(axis=0) + 1)
    if len(np.unique(places, axis=0)) != len(devices) or math.prod(sides) != len(devices):
        raise ValueError(
            f"{len(devices)} devices of one slice do not fill a box of chips "
            f"({'x'.join(map(str, sides[:-1]))}, {sides[-1]} devices a chip): give build_mesh whole slices"
        )
    flat = len(sides) - 1 - generation.dims  # 2D generations give a third coordinate that is always zero
    wrap = (*generation.wrap(sides[: generation.dims]), *(False,) * flat, False)
    return Grid(sides, wrap, (*(1,) * (len(sides) - 1), 0)), places


def _hops_to_next(mesh: Mesh, slice_of: SliceOf) -> tuple[np.ndarray, np.ndarray] | None:
    """(hops, over_dcn), both [sequences, P]: from each rank to the next, the last one back to the first.

    Steps over DCN have no hops. None where devices have no coords. Raises ValueError for slices of unequal shapes.
    """
    located: dict[jax.Device, np.ndarray] = {}
    grid: Grid | None = None
    for members in _group_by_slice(mesh.devices.ravel().tolist(), slice_of).values():
        found = _locate(members)
        if found is None:
            return None
        if grid is not None and found[0] != grid:
            raise ValueError(f"slices have different shapes, {grid.shape} and {found[0].shape}: use equal slices")
        grid, coordinates = found
        located |= dict(zip(members, coordinates, strict=True))
    assert grid is not None
    order = sequence_order(mesh)
    order = order.reshape(-1, order.shape[-1])
    places = np.array([[located[device] for device in row] for row in order])
    slices = np.array([[slice_of(device) for device in row] for row in order])
    over_dcn = slices != np.roll(slices, -1, axis=1)
    return np.where(over_dcn, 0, grid.hops(places, np.roll(places, -1, axis=1))), over_dcn
