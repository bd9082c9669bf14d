"""Compiler and runtime flags for long sequences, each with its reason. libtpu refuses to start on an unknown one.

What the steps need wherever they run, app.cluster.hardware gives the compiler itself.

Several processes get them in LIBTPU_INIT_ARGS, which is read before jax starts; under a single controller that variable
has no effect, and the XLA flags are arguments of the proxy, the megascale flags those of the workers.
"""

import dataclasses

from app.cluster.hardware import Topology


@dataclasses.dataclass(frozen=True)
class XlaFlag:
    name: str  # without dashes
    value: str
    reason: str
    generations: tuple[str, ...] = ()  # (): all
    several_slices: bool = False  # only for a run over DCN


LONG_CONTEXT = (
    XlaFlag(
        "xla_tpu_scoped_vmem_limit_kib", "98304",
        "attention kernels hold a block of keys, values and accumulators each; of 128 MiB", generations=("v6e",),
    ),
    XlaFlag(
        "xla_tpu_scoped_vmem_limit_kib", "65536",
        "as on v6e; more would starve the prefetch of weights", generations=("tpu7x",),
    ),
    XlaFlag(
        "xla_tpu_enable_data_parallel_all_reduce_opt", "true",
        "gradient sums over the data-centre network overlap the backward pass", several_slices=True,
    ),
    XlaFlag(
        "xla_tpu_data_parallel_opt_different_sized_ops", "true",
        "the same for layers of unequal size, which a hybrid model has", several_slices=True,
    ),
    XlaFlag(
        "megascale_abort_on_hangs", "true",
        "a lost slice ends the process, so that the job starts again instead of waiting for ever", several_slices=True,
    ),
)  # fmt: skip


def flags_for(topology: Topology, slices: int, extra: str = "") -> list[str]:
    """ "--name=value" of every flag that applies, then those of `extra` (space separated); a later name wins."""
    chosen = {
        flag.name: flag.value
        for flag in LONG_CONTEXT
        if (not flag.generations or topology.generation.name in flag.generations)
        and (slices > 1 or not flag.several_slices)
    }
    chosen |= dict(part.removeprefix("--").split("=", 1) for part in extra.split())
    return [f"--{name}={value}" for name, value in chosen.items()]


def split_for_pathways(flags: list[str]) -> tuple[list[str], list[str]]:
    """(of the proxy, of the workers)."""
    workers = [flag for flag in flags if flag.startswith("--megascale_")]
    return [flag for flag in flags if flag not in workers], workers
