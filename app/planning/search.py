"""Meshes, remat policies and accumulations that a number of chips allows, most promising first. No jax here."""

import dataclasses
from collections.abc import Iterator

from app.cluster.hardware import Topology
from app.config import Config, ConfigError
from app.config_check import validate

REMAT = ("exchanges", "full")
TENSOR = (1, 2, 4)
ACCUMULATION = (1, 2, 4, 8)


def candidates(config: Config, topology: Topology, slices: int) -> list[Config]:
    """Every valid variation of `config` on these chips. The config's own mesh.expert and mesh.dcn are kept.

    Order: what makes a step slower comes later. Fewer sequence ranks cost less communication, tensor parallelism costs
    two sums of the activations a layer, remat "full" repeats the sequence's exchanges, accumulation repeats the gathers
    of the weights.
    """
    found = sorted(_variations(config, topology.devices * slices), key=_slower)
    return [one for one in found if _is_valid(one, topology, slices)]


def _variations(config: Config, devices: int) -> Iterator[Config]:
    rest = devices // config.mesh.expert
    for tensor in TENSOR:
        for context in (size for size in range(1, rest // tensor + 1) if rest % (tensor * size) == 0):
            fsdp = rest // (tensor * context)
            mesh = dataclasses.replace(config.mesh, data=1, fsdp=fsdp, context=context, tensor=tensor)
            for remat in REMAT:
                for accumulation in ACCUMULATION:
                    yield dataclasses.replace(config, mesh=mesh, remat=remat, accumulation=accumulation)


def _slower(config: Config) -> tuple[int, ...]:
    return config.mesh.tensor, config.accumulation, REMAT.index(config.remat), config.mesh.context


def _is_valid(config: Config, topology: Topology, slices: int) -> bool:
    try:
        validate(config, topology.devices * slices, topology.devices)
    except ConfigError:
        return False
    return True
