"""What differs when one process drives the devices of all hosts: controller="single", through the Pathways proxy.

The rest of the program is the same. `jax.devices()` are all devices, process 0 of 1 feeds every one of them through
`data.pipeline`, and the compiled step is what the proxy is asked for, not its operations. Here: the connection, the
format of checkpoints that workers write themselves, and going on after a lost slice (`elastic.*`).

pathwaysutils (the extra "pathways") is imported where it is needed: a run with a process per host has no use for it.
"""

import dataclasses
import os
from collections.abc import Callable, Sequence

import jax

from app.config import Config, ConfigError, resolve_mesh

PLATFORM = "proxy"
PERSISTENCE = "ENABLE_PATHWAYS_PERSISTENCE"  # "1": each worker writes and reads its own parts of a checkpoint
START_SECONDS = 1800.0  # for all slices to be there, at the start and after a loss


def check_platform(controller: str, platforms: str | None) -> None:
    """Refuse a controller that does not fit jax's platforms (JAX_PLATFORMS), before anything asks for a device.

    Raises ConfigError: jax.distributed would wait for ever under the proxy, and the other way round each of the hosts
    would train alone.
    """
    proxy = PLATFORM in (platforms or "").split(",")
    if controller == "single" and not proxy:
        raise ConfigError(
            f"controller='single' with JAX_PLATFORMS={platforms or ''!r}: one process drives all devices only through "
            "the Pathways proxy; launch with --target=gke-pathways (JAX_PLATFORMS=proxy), or use controller='multi'"
        )
    if controller != "single" and proxy:
        raise ConfigError(
            f"controller={controller!r} with JAX_PLATFORMS={platforms!r}: the proxy shows one process all devices; use "
            "--config.controller=single, or unset JAX_PLATFORMS"
        )


def initialise() -> None:
    """Make jax use the proxy that JAX_BACKEND_TARGET names. Before anything asks jax for a device.

    Raises ConfigError if the platform is another one or pathwaysutils is not installed.
    """
    check_platform("single", jax.config.jax_platforms)
    if not os.environ.get("JAX_BACKEND_TARGET"):
        raise ConfigError("controller='single' needs JAX_BACKEND_TARGET=grpc://HOST:PORT, the address of the proxy")
    if os.environ.get(PERSISTENCE, "0") not in ("0", "1"):
        raise ConfigError(f"{PERSISTENCE}={os.environ[PERSISTENCE]!r}: must be 0 or 1")
    try:
        import pathwaysutils
    except ImportError as error:
        raise ConfigError("controller='single' needs pathwaysutils: install the extra 'pathways'") from error
    pathwaysutils.initialize()


def workers_write() -> bool:
    """Whether orbax's arrays go from the workers' memory to storage directly. Their format has no OCDBT."""
    return PLATFORM in (jax.config.jax_platforms or "").split(",") and os.environ.get(PERSISTENCE) == "1"


Train = Callable[[Config, Sequence[jax.Device]], int]


def train_elastic(train: Train, config: Config) -> int:
    """`train` on all slices, and again on those that are left each time one is lost; returns its exit status.

    train: starts from the newest checkpoint every time, and keeps no reference to an array when it is left.
    Raises the JaxRuntimeError of the loss after elastic.max_losses of them, TimeoutError if fewer slices than
    elastic.min_slices are there after START_SECONDS, and what `train` raises for another reason.
    """
    from pathwaysutils.elastic import elastic, manager

    config = dataclasses.replace(config, mesh=resolve_mesh(config.mesh, len(jax.devices())))
    slices = manager.Manager()  # of jax.devices(), which goes on to list those of a lost slice
    elastic.wait_for_slices(slice_to_devices=slices.slice_to_devices, timeout=START_SECONDS)  # of all: slow is not lost

    def attempt() -> int:
        active = sorted(slices.active_slice_indices)
        smaller = with_slices(config, len(active))
        used = active[: smaller.mesh.dcn.num_slices]
        print(f"slices {used} of {slices.total_slice_count}: mesh.data={smaller.mesh.data}, "
              f"accumulation={smaller.accumulation}")  # fmt: skip
        return train(smaller, [device for index in used for device in slices.slice_to_devices[index]])

    again = slices.elastic_retry(
        minimum_slice_count=config.elastic.min_slices,
        timeout=START_SECONDS,
        retry_policy=manager.ElasticRetryLimit(config.elastic.max_losses + 1),
    )
    try:
        return again(attempt)()
    except manager.ElasticRuntimeError as error:
        raise error.__cause__ or error from None  # the last loss itself: what a run that is not elastic ends with


def with_slices(config: Config, slices: int) -> Config:
    """`config`, whose slices all lie along mesh.data, on as many of `slices` slices as its rows divide over.

    global_batch, and so the data and the learning rate, stay. The rows of a device grow; they are cut into more
    micro-batches, none of more rows than before, so that what fitted still fits.
    """
    mesh = config.mesh
    total = mesh.dcn.num_slices
    of_one_slice = mesh.data // total * mesh.fsdp  # ranks that hold different rows
    batch = config.global_batch
    used = next(count for count in range(min(slices, total), 0, -1) if batch % (of_one_slice * count) == 0)
    rows, most = batch // (of_one_slice * used), batch // (of_one_slice * total * config.accumulation)
    accumulation = next(parts for parts in range(1, rows + 1) if rows % parts == 0 and rows // parts <= most)
    smaller = dataclasses.replace(mesh, data=mesh.data // total * used, dcn=dataclasses.replace(mesh.dcn, data=used))
    return dataclasses.replace(config, mesh=smaller, accumulation=accumulation)
