"""The one table of TPU generations: what a chip has, how chips form hosts and slices, what Google Cloud calls them.

Used by the mesh builder, app.plan and launch.render; no jax here. Sources of the figures:
[docs]    docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}: peak, HBM rate, ICI and DCN rates, topologies, machines
[book]    jax-ml.github.io/scaling-book/tpus (2025): one-way rate of an ICI link, which sides of a slice are rings
[libtpu]  libtpu 0.0.50.1: HBM that a program may use (its error for an oversized compilation), device kinds
[pool]    GKE node pools: machine types, `cloud.google.com/gke-tpu-accelerator` labels
"""

import dataclasses
import difflib
import itertools
import math
import re
from collections.abc import Mapping

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Generation:
    """One TPU generation. "Device" is what jax calls one: a chip, except on tpu7x, which shows two a chip."""

    name: str
    device_kinds: tuple[str, ...]  # jax.Device.device_kind
    devices_per_chip: int
    peak_bf16_flops: float  # FLOP/s per device
    flops_per_cycle: int  # bf16, of a device's matrix units: the power of two above libtpu's estimates
    hbm_bytes: int  # per device, what a program may use
    hbm_bytes_per_second: float  # per device
    ici_bytes_per_second: float  # one link, one way
    dcn_bytes_per_second: float  # per chip
    machine_types: Mapping[int, str]  # chips of the virtual machine -> GKE machine type
    gke_accelerator: str
    accelerator_prefix: str  # of the accelerator type, "v5p-512"
    accelerator_units_per_chip: int  # what that number counts: TensorCores or chips
    small_topologies: tuple[tuple[int, ...], ...]  # those that are not whole cubes; all of them for a 2D generation
    max_chips: int  # of one slice
    libtpu_options: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of get_topology_desc
    compiler_options: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of the steps

    @property
    def cycles_per_second(self) -> float:
        """The clock at which the matrix units reach the peak: 1.75 GHz on v5p and v6e."""
        return self.peak_bf16_flops / self.flops_per_cycle

    @property
    def dims(self) -> int:
        """2 (torus of 16 x 16) or 3 (cubes of 4 x 4 x 4 joined by optical switches)."""
        return len(self.small_topologies[0])

    def wrap(self, shape: tuple[int, ...]) -> tuple[bool, ...]:
        """Which sides of a slice are rings [book]: sides of 16 in 2D; all sides once a 3D slice is made of cubes."""
        if self.dims == 2:
            return tuple(side == 16 for side in shape)
        return (all(side % 4 == 0 for side in shape),) * 3

    def topologies(self) -> list[tuple[int, ...]]:
        """Every valid slice shape, sides as Google Cloud writes them, smallest first."""
        cubes = []
        if self.dims == 3:
            most = self.max_chips // 64
            for a, b in itertools.combinations_with_replacement(range(1, math.isqrt(most) + 1), 2):
                cubes += [(4 * a, 4 * b, 4 * c) for c in range(b, most // (a * b) + 1)]
        return sorted({*self.small_topologies, *cubes}, key=lambda shape: (math.prod(shape), shape[::-1]))


_SMALL_3D = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
# The SparseCores gather weights and sum gradients beside the TensorCores' work; tpu7x does so by itself, v4, v5e never.
_ON_SPARSE_CORES = {
    f"xla_tpu_enable_sparse_core_collective_offload_{kind}": "true" for kind in ("all_gather", "reduce_scatter")
}
_ALL_2D = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))

GENERATIONS: Mapping[str, Generation] = {
    generation.name: generation
    for generation in (
        Generation(
            name="v4",
            device_kinds=("TPU v4",),
            devices_per_chip=1,  # two TensorCores work as one device (megacore)
            peak_bf16_flops=275e12,
            flops_per_cycle=2**18,
            hbm_bytes=int(30.75 * GIB),  # of 32
            hbm_bytes_per_second=1200e9,
            ici_bytes_per_second=45e9,
            dcn_bytes_per_second=6.25e9,  # 25 GB/s a host of four chips [book]
            machine_types={4: "ct4p-hightpu-4t"},
            gke_accelerator="tpu-v4-podslice",
            accelerator_prefix="v4",
            accelerator_units_per_chip=2,
            small_topologies=_SMALL_3D,
            max_chips=4096,
            libtpu_options={"chip_config_name": "megacore"},  # without it libtpu shows two devices a chip
        ),
        Generation(
            name="v5e",
            device_kinds=("TPU v5 lite", "TPU v5e"),
            devices_per_chip=1,
            peak_bf16_flops=197e12,
            flops_per_cycle=2**17,
            hbm_bytes=int(15.75 * GIB),  # of 16
            hbm_bytes_per_second=819e9,
            ici_bytes_per_second=50e9,
            dcn_bytes_per_second=3.125e9,  # 2 x 100 Gb/s for eight chips
            machine_types={1: "ct5lp-hightpu-1t", 4: "ct5lp-hightpu-4t", 8: "ct5lp-hightpu-8t"},
            gke_accelerator="tpu-v5-lite-podslice",
            accelerator_prefix="v5litepod",
            accelerator_units_per_chip=1,
            small_topologies=_ALL_2D,
            max_chips=256,
        ),
        Generation(
            name="v5p",
            device_kinds=("TPU v5", "TPU v5p"),
            devices_per_chip=1,
            peak_bf16_flops=459e12,
            flops_per_cycle=2**18,
            hbm_bytes=int(95.73 * GIB),  # of 96
            hbm_bytes_per_second=2765e9,
            ici_bytes_per_second=100e9,  # 1,200 GB/s both ways over six links
            dcn_bytes_per_second=6.25e9,
            machine_types={4: "ct5p-hightpu-4t"},
            gke_accelerator="tpu-v5p-slice",
            accelerator_prefix="v5p",
            accelerator_units_per_chip=2,
            small_topologies=_SMALL_3D,
            max_chips=6144,  # the largest job; a pod has 8,960 chips
            compiler_options=_ON_SPARSE_CORES,
        ),
        Generation(
            name="v6e",
            device_kinds=("TPU v6 lite", "TPU v6e"),
            devices_per_chip=1,
            peak_bf16_flops=918e12,
            flops_per_cycle=2**19,
            hbm_bytes=int(31.24 * GIB),  # of 32
            hbm_bytes_per_second=1638e9,
            ici_bytes_per_second=100e9,  # 800 GB/s both ways over four links
            dcn_bytes_per_second=12.5e9,
            machine_types={1: "ct6e-standard-1t", 4: "ct6e-standard-4t", 8: "ct6e-standard-8t"},
            gke_accelerator="tpu-v6e-slice",
            accelerator_prefix="v6e",
            accelerator_units_per_chip=1,
            small_topologies=_ALL_2D,
            max_chips=256,
            compiler_options=_ON_SPARSE_CORES,
        ),
        Generation(
            name="tpu7x",
            device_kinds=("TPU7x", "TPU v7x"),
            devices_per_chip=2,
            peak_bf16_flops=1153.5e12,
            flops_per_cycle=2**19,
            hbm_bytes=int(94.74 * GIB),  # of 96 (192 a chip)
            hbm_bytes_per_second=3690e9,
            ici_bytes_per_second=100e9,  # 1,200 GB/s both ways over six links
            dcn_bytes_per_second=12.5e9,
            machine_types={1: "tpu7x-standard-1t", 4: "tpu7x-standard-4t"},
            gke_accelerator="tpu7x",
            accelerator_prefix="tpu7x",
            accelerator_units_per_chip=2,
            small_topologies=((1, 1, 1), *_SMALL_3D),
            max_chips=9216,
        ),
    )
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice: generation and shape, sides in the order the user gave (libtpu keeps it in the chips' coordinates)."""

    generation: Generation
    shape: tuple[int, ...]

    def __str__(self) -> str:
        """As given to libtpu and app.plan: "v5p:8x8x4"."""
        return f"{self.generation.name}:{_sides(self.shape)}"

    @property
    def gke_topology(self) -> str:
        """As Google Cloud writes it: "4x8x8"."""
        return _sides(_canonical(self.generation, self.shape) or self.shape)

    @property
    def accelerator_type(self) -> str:
        """ "v5p-512", "v6e-256". One accelerator type may stand for several shapes."""
        return f"{self.generation.accelerator_prefix}-{self.chips * self.generation.accelerator_units_per_chip}"

    @property
    def wrap(self) -> tuple[bool, ...]:
        return self.generation.wrap(self.shape)

    @property
    def chips(self) -> int:
        return math.prod(self.shape)

    @property
    def devices(self) -> int:
        """jax devices."""
        return self.chips * self.generation.devices_per_chip

    @property
    def machine_types(self) -> dict[int, str]:
        """Machines the slice can be made of: chips of each -> machine type. A slice of several hosts uses machines of
        four chips; others exist only as single hosts."""
        types = self.generation.machine_types
        return {size: types[size] for size in types if size == self.chips or (size == 4 and self.chips % 4 == 0)}

    @property
    def chips_per_host(self) -> int:
        """Of the usual machine: four, or one for a slice of one chip."""
        return 4 if 4 in self.machine_types else self.chips

    @property
    def hosts(self) -> int:
        return self.chips // self.chips_per_host


def parse_topology(text: str) -> Topology:
    """ "v5p:8x8x4" -> Topology. The sides may come in any order.

    Raises ValueError naming `text`, what is wrong with it and the valid choices.
    """
    match = re.fullmatch(r"([a-z0-9]+):(\d+(?:x\d+)*)", text)
    name = match[1] if match else re.split("[:-]", text)[0]
    if name not in GENERATIONS:
        near = difflib.get_close_matches(name, GENERATIONS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"topology {text!r}: unknown TPU generation {name!r}; {hint}known: {', '.join(GENERATIONS)}")
    generation = GENERATIONS[name]
    if not match:
        raise ValueError(
            f"topology {text!r}: write it as {name}:{_sides(generation.small_topologies[-1])}; {_valid(generation)}"
        )
    shape = tuple(int(side) for side in match[2].split("x"))
    if _canonical(generation, shape) is None:
        chips = math.prod(shape)
        near = sorted(generation.topologies(), key=lambda other: abs(math.prod(other) - chips))[:3]
        raise ValueError(
            f"topology {text!r} ({chips} chips): {name} has no such slice; {_valid(generation)}; "
            f"the nearest in size: {', '.join(map(_sides, near))}"
        )
    return Topology(generation, shape)


def find_generation(device_kind: str) -> Generation | None:
    """The generation of a jax device by its `device_kind`, None for what is not a known TPU (a CPU, say)."""
    return next((found for found in GENERATIONS.values() if device_kind in found.device_kinds), None)


def compiler_options(device_kind: str) -> dict[str, str]:
    """What the steps are compiled with for such a device; nothing for what is not a known TPU."""
    generation = find_generation(device_kind)
    return dict(generation.compiler_options) if generation else {}


def peak_flops(device_kind: str) -> float | None:
    """Peak bf16 FLOP/s of one jax device, None where it is not known (a CPU, say)."""
    generation = find_generation(device_kind)
    return generation.peak_bf16_flops if generation else None


def _sides(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _canonical(generation: Generation, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The valid shape with the same sides in any order, None if there is none."""
    return next((valid for valid in generation.topologies() if sorted(valid) == sorted(shape)), None)


def _valid(generation: Generation) -> str:
    small = ", ".join(map(_sides, generation.small_topologies))
    if generation.dims == 2:
        return f"valid: {small}"
    return f"valid: {small}, and AxBxC with every side a multiple of 4, up to {generation.max_chips} chips"
