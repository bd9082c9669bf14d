"""What to run on the nodes first: python -m launch.preflight --config=FILE --workdir=DIR [--topology=v5p:8x8x4]

Under a minute, with the devices, the mesh and the directories of the run itself: devices, mesh, a collective along each
axis with its rate, writing to the workdir, reading the data. Prints a line a check. Exit status: 0 all passed, 2 one
failed (its name and a remedy are on the last line), runtime.EXIT_WATCHDOG a check hung, on every host that waits.
"""

import contextlib
import faulthandler
import functools
import os
import sys
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

from app.cluster import runtime
from app.cluster.hardware import find_generation, parse_topology
from app.config import Config, ConfigError
from app.config_flags import RUN_FLAGS, Flag, load_config

HANG_SECONDS = {"devices": 1200.0}  # slices of a large pool start minutes apart; other checks: 60
MEBIBYTE = 2**20
FLAGS = (*RUN_FLAGS, Flag("topology", str, "one slice, as v5p:8x8x4: what the devices must be", default=""))


class CheckError(Exception):
    """A failed check: what was found, and a remedy."""


def main(argv: Sequence[str] | None = None) -> int:
    name = "config"
    try:
        config, flags = load_config(sys.argv[1:] if argv is None else argv, FLAGS)
        found: dict[str, Any] = {}
        for name, check in CHECKS.items():
            with _limit(name):
                for line in check(config, flags, found):
                    print(f"preflight {name}: {line}", flush=True)
    except (CheckError, ConfigError, OSError) as error:
        print(f"preflight {name} FAILED: {error}", file=sys.stderr, flush=True)
        return runtime.EXIT_CONFIG
    print("preflight passed")
    return 0


@contextlib.contextmanager
def _limit(name: str) -> Generator[None]:
    """End the process if a check takes too long: a collective that waits for a lost host cannot be interrupted."""
    seconds = HANG_SECONDS.get(name, 60.0)

    def give_up() -> None:
        print(f"preflight {name} FAILED: not done after {seconds:.0f} s; another host is missing or stuck", flush=True)
        faulthandler.dump_traceback()
        os._exit(runtime.EXIT_WATCHDOG)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def devices(config: Config, flags: Any, found: dict[str, Any]) -> Iterator[str]:
    """Number, kind and slices of the devices against config and --topology. found: "devices"."""
    said = os.environ.get("MEGASCALE_NUM_SLICES")
    slices = config.mesh.dcn.num_slices
    if said is not None and int(said) != slices:
        raise CheckError(f"MEGASCALE_NUM_SLICES={said}, but mesh.dcn.* makes {slices} slices: launch as many")
    runtime.initialise(config.mesh, config.controller, flags)
    import jax

    all_devices = jax.devices()
    found["devices"] = all_devices
    yield (
        f"{len(all_devices)} x {all_devices[0].device_kind}, {jax.process_count()} processes, this is process "
        f"{jax.process_index()} with {jax.local_device_count()}"
    )
    if flags.topology:
        topology = parse_topology(flags.topology)
        generation = find_generation(all_devices[0].device_kind)
        if generation != topology.generation or len(all_devices) != topology.devices * slices:
            raise CheckError(
                f"--topology={topology} and {slices} slices are {topology.devices * slices} devices of "
                f"{topology.generation.device_kinds[0]}; found {len(all_devices)} of {all_devices[0].device_kind}"
            )


def mesh(config: Config, flags: Any, found: dict[str, Any]) -> Iterator[str]:
    """The mesh that training will use, and the order of its sequence. found: "mesh"."""
    from app.cluster import mesh as meshes

    slice_of = meshes.device_slice
    if config.mesh.cpu_devices:
        slice_of = meshes.equal_slices(found["devices"], config.mesh.dcn.num_slices)
    made = meshes.build_mesh(config.mesh, found["devices"], slice_of=slice_of)
    meshes.check_sequence_order(made, slice_of=slice_of)
    found["mesh"] = made
    yield ", ".join(f"{axis} {size}" for axis, size in made.shape.items())
    if (report := meshes.sequence_neighbours_report(made, slice_of=slice_of)) is not None:
        yield str(report)


def collectives(config: Config, flags: Any, found: dict[str, Any], mebibytes: int = 64) -> Iterator[str]:
    """Along each axis of more than one rank: every rank's block gathered by all, checked and timed.

    The rate is what a rank receives, (ranks - 1) x its block, over the seconds of the fastest of three.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    shape: Mapping[str, int] = found["mesh"].shape
    for axis in (axis for axis, size in shape.items() if size > 1):
        count = max(1, mebibytes * MEBIBYTE // 4 // shape[axis])  # float32 numbers a rank; together `mebibytes`
        split = PartitionSpec(axis)

        @functools.partial(jax.shard_map, mesh=found["mesh"], in_specs=split, out_specs=split, check_vma=False)
        def gather(block, axis=axis):
            whole = jax.lax.all_gather(block, axis, tiled=True)
            return jnp.sum(whole.reshape(-1, block.shape[0])[:, 0], keepdims=True)

        def fill(ranks=shape[axis], count=count):
            return jnp.repeat(jnp.arange(ranks, dtype=jnp.float32), count)

        blocks, compiled = jax.jit(fill, out_shardings=NamedSharding(found["mesh"], split))(), jax.jit(gather)
        sums = compiled(blocks)
        expected = shape[axis] * (shape[axis] - 1) / 2
        wrong = [part.device for part in sums.addressable_shards if not bool(jnp.all(part.data == expected))]
        if wrong:
            raise CheckError(f"axis {axis}: wrong sums on {wrong}: a device or link is broken; exclude its host")
        seconds = min(_seconds(compiled, blocks) for _ in range(3))
        rate = (shape[axis] - 1) * count * 4 / seconds
        yield f"axis {axis}, {shape[axis]} ranks: {rate / 1e9:.2f} GB/s a device"


def _seconds(function: Any, *arguments: Any) -> float:
    started = time.perf_counter()
    function(*arguments).block_until_ready()
    return time.perf_counter() - started


def workdir(config: Config, flags: Any, found: dict[str, Any]) -> Iterator[str]:
    """Every process writes, reads and removes a file of its own."""
    import jax
    from etils import epath

    directory = epath.Path(flags.workdir)
    probe = directory / f".preflight-{jax.process_index()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe.write_text("written")
        if probe.read_text() != "written":
            raise CheckError(f"{probe} does not hold what was written to it")
        probe.unlink()
    except OSError as error:
        raise CheckError(f"cannot write to {directory}: {error}; give the job's service account access") from error
    yield f"{directory} can be written"


def data(config: Config, flags: Any, found: dict[str, Any]) -> Iterator[str]:
    """The prepared directory is whole, and this process can read its shards."""
    from data import manifest

    directory = config.data.path or f"{flags.workdir}/data"
    if config.data.source and not manifest.is_prepared(directory):
        yield f"{directory} is not prepared; training will make it of {config.data.source!r}"
        return
    try:
        opened = manifest.load(directory)
    except manifest.DataError as error:
        raise CheckError(str(error)) from error
    for source in opened.sources:
        for shard in (source.shards[0], source.shards[-1]):
            with open(os.path.join(directory, shard.path), "rb") as file:
                file.read(MEBIBYTE)
    yield f"{directory}: {sum(source.tokens for source in opened.sources):,} tokens"


CHECKS = {"devices": devices, "mesh": mesh, "collectives": collectives, "workdir": workdir, "data": data}

if __name__ == "__main__":
    sys.exit(main())
