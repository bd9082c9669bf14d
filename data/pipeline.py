"""From a stream to global jax arrays, reading ahead. Each process reads only the tokens that its devices hold."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import grain
import jax
import numpy as np
from absl import flags

from app.cluster import layout
from app.cluster.mesh import sequence_order
from data.manifest import DataError
from data.stream import Stream, open_stream

__all__ = ["DataError", "Stream", "batches", "open_stream"]

Index = tuple[slice, ...]

_ENDLESS = 1 << 50  # steps; grain wants a length


class Block(NamedTuple):
    """Rows [rows[0], rows[1]) and tokens [columns[0], columns[1]) of the global batch."""

    rows: tuple[int, int]
    columns: tuple[int, int]


def batches(
    stream: Stream,
    sharding: jax.sharding.NamedSharding,
    *,
    start_step: int,
    stop_step: int | None = None,
    workers: int = 0,
    prefetch: int = 2,
) -> Iterator[dict[str, jax.Array]]:
    """The batches of steps start_step, start_step + 1, ... as global arrays [B, T] laid out by `sharding`.

    stop_step None: the end of the split (training has none). workers: reading processes, 0: a thread of this one.
    prefetch: batches held ready (by each worker).
    Raises ValueError if `sharding` does not lay rows out as app.cluster.layout says, DataError if a record is damaged.
    """
    shape = (stream.options.global_batch, stream.options.seq_len)
    held = held_blocks(sharding, shape)
    stop = stop_step if stop_step is not None else stream.num_steps if stream.num_steps is not None else _ENDLESS
    load = HostLoader(stream, merged(held.values()), num_ranks=sequences(sharding).shape[-1])
    iterator = iter(read_ahead(load, start_step, stop, workers, prefetch))
    try:
        for fields in iterator:
            yield {name: _global_array(parts, load.blocks, held, shape, sharding) for name, parts in fields.items()}
    finally:
        iterator.close()


def read_ahead(load: "HostLoader", start: int, stop: int, workers: int, prefetch: int) -> grain.IterDataset:
    """The host's part of every step's batch, in order."""
    steps = grain.MapDataset.range(start, stop).map(load)
    if workers:
        if not flags.FLAGS.is_parsed():  # grain's worker processes read absl flags of its own
            flags.FLAGS.mark_as_parsed()
        return steps.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)).mp_prefetch(
            grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=max(1, prefetch))
        )
    return steps.to_iter_dataset(grain.ReadOptions(num_threads=min(1, prefetch), prefetch_buffer_size=prefetch))


@dataclasses.dataclass(frozen=True)
class HostLoader:
    """Step number -> each field of the blocks that this process holds. num_ranks: sequence ranks of the whole run."""

    stream: Stream
    blocks: tuple[Block, ...]
    num_ranks: int

    def __call__(self, step: int) -> dict[str, list[np.ndarray]]:
        made = [self.stream.block(step, *block) for block in self.blocks]
        for block, fields in zip(self.blocks, made, strict=True):
            layout.check_stream_index(
                fields["stream_index"],
                num_ranks=self.num_ranks,
                seq_len=self.stream.options.seq_len,
                setting=f"data.documents={self.stream.options.documents!r}",
                start=block.columns[0],
            )
        return {name: [fields[name] for fields in made] for name in made[0]}


def sequences(sharding: jax.sharding.NamedSharding) -> np.ndarray:
    """The sharding's devices, [..., P]: the last dim runs along a sequence."""
    assert isinstance(sharding.mesh, jax.sharding.Mesh)  # batches are laid on devices
    return sequence_order(sharding.mesh)


def held_blocks(sharding: jax.sharding.NamedSharding, shape: tuple[int, int]) -> dict[jax.Device, Block]:
    """What each of this process's devices holds of a global batch of `shape`.

    Raises ValueError if a device would not hold the tokens that its place in the sequence asks for.
    """
    everywhere = _blocks(sharding.devices_indices_map(shape), shape)
    order = sequences(sharding)
    for place in np.ndindex(order.shape):
        wanted = layout.token_range(place[-1], order.shape[-1], shape[1])
        found = everywhere[order[place]].columns
        if found != wanted:
            raise ValueError(
                f"batch sharding {sharding.spec}: {order[place]}, rank {place[-1]} of {order.shape[-1]} in "
                f"the sequence, would hold tokens {found} of {shape[1]}, the layout is {wanted}: shard the "
                "time dim over the sequence axes in their order"
            )
    return _blocks(sharding.addressable_devices_indices_map(shape), shape)


def _blocks(indices: Mapping[jax.Device, Index | None], shape: tuple[int, int]) -> dict[jax.Device, Block]:
    found = {}
    for device, index in indices.items():
        assert index is not None  # a device of the mesh holds a part of the batch
        rows, columns = (part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        found[device] = Block(rows, columns)
    return found


def merged(blocks: Iterable[Block]) -> tuple[Block, ...]:
    """The distinct blocks, neighbours along the sequence joined into one (their common look-ahead is read once)."""
    joined: list[Block] = []
    for block in sorted(set(blocks)):
        if joined and joined[-1].rows == block.rows and joined[-1].columns[1] == block.columns[0]:
            joined[-1] = Block(block.rows, (joined[-1].columns[0], block.columns[1]))
        else:
            joined.append(block)
    return tuple(joined)


def _global_array(
    parts: list[np.ndarray],
    read: tuple[Block, ...],
    held: dict[jax.Device, Block],
    shape: tuple[int, int],
    sharding: jax.sharding.NamedSharding,
) -> jax.Array:
    """One field as a global array; `parts` are its values in the blocks `read`."""
    cut = []
    for block in held.values():
        whole, part = next(
            (whole, part)
            for whole, part in zip(read, parts, strict=True)
            if whole.rows == block.rows and whole.columns[0] <= block.columns[0] < whole.columns[1]
        )
        cut.append(part[:, block.columns[0] - whole.columns[0] : block.columns[1] - whole.columns[0]])
    return jax.make_array_from_single_device_arrays(shape, sharding, jax.device_put(cut, list(held)))
