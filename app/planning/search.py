"""Meshes, remat policies and accumulations that a number of chips allows, most promising first. No jax here."""

import dataclasses
import itertools
from collections.abc import Iterator

from app.cluster.hardware import Topology
from app.config import Config, ConfigError
from app.config_check import validate

REMAT = ("exchanges", "full")
TENSOR = (1, 2, 4)
ACCUMULATION = (1, 2, 4, 8)
EXPERT = (1, 4)  # times the config's


def candidates(config: Config, topology: Topology, slices: int) -> list[Config]:
    """Every valid variation of `config` on these chips. mesh.dcn is kept; experts have at least the config's ranks.

    Order: what makes a step slower comes later. Fewer sequence ranks cost less communication, tensor parallelism costs
    two sums of the activations a layer, remat "full" repeats the sequence's exchanges, accumulation repeats the gathers
    of the weights. More expert ranks gather fewer weights and send tokens further: which is better shows.
    """
    found = sorted(_variations(config, topology.devices * slices), key=_slower)
    return [one for one in found if _is_valid(one, topology, slices)]


def _variations(config: Config, devices: int) -> Iterator[Config]:
    times = EXPERT if config.model.num_experts else (1,)
    for tensor, expert in itertools.product(TENSOR, (config.mesh.expert * n for n in times)):
        rest = devices // (expert * tensor)
        for context in (size for size in range(1, rest + 1) if rest % size == 0):
            sizes = {"data": 1, "fsdp": rest // context, "context": context, "expert": expert, "tensor": tensor}
            mesh = dataclasses.replace(config.mesh, **sizes)
            for remat in REMAT:
                for accumulation in ACCUMULATION:
                    yield dataclasses.replace(config, mesh=mesh, remat=remat, accumulation=accumulation)


def _slower(config: Config) -> tuple[int, ...]:
    mesh = config.mesh
    return mesh.tensor, config.accumulation, REMAT.index(config.remat), mesh.context * mesh.expert, mesh.expert


def _is_valid(config: Config, topology: Topology, slices: int) -> bool:
    try:
        validate(config, topology.devices * slices, topology.devices)
    except ConfigError:
        return False
    return True
