"""Parameters on disk, block by block: an orbax item written from a stream, and one read in slices.

Orbax itself takes and gives whole arrays; the stack of all layers of a large model is more than a host should hold.
"""

import collections
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from orbax.checkpoint import type_handlers
from orbax.checkpoint._src.futures import future
from orbax.checkpoint._src.serialization import ocdbt_utils, tensorstore_utils

from app.hf.table import Region

# (parameter, where in it, values); together every element exactly once.
Pieces = Iterator[tuple[str, Region, np.ndarray]]
_IN_FLIGHT = 2  # writes that are not finished; each holds a block


@dataclasses.dataclass(frozen=True)
class Streamed:
    """A parameter that is nowhere in memory: a leaf for orbax where an array would stand.

    chunk: the shape of what is stored, and can be read, as one piece.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]


class _StreamHandler(type_handlers.NumpyHandler):
    """Writes all Streamed leaves of one save from `pieces`; they are read back as arrays."""

    def __init__(self, pieces: Pieces):
        super().__init__()
        self._pieces = pieces

    async def serialize(
        self,
        values: Sequence[Any],
        infos: Sequence[type_handlers.ParamInfo],
        args: Sequence[type_handlers.SaveArgs] | None = None,
    ) -> Sequence[future.Future]:
        return [future.CommitFutureAwaitingContractedSignals(self._write(values, infos), name="streamed")]

    async def _write(self, values: Sequence[Streamed], infos: Sequence[type_handlers.ParamInfo]) -> None:
        stores: dict[str, ts.TensorStore] = {}
        for value, info in zip(values, infos, strict=True):
            await info.await_path_creation()
            spec = tensorstore_utils.build_array_write_spec(
                info,
                global_shape=value.shape,
                local_shape=value.chunk,
                dtype=value.dtype,
                use_ocdbt=True,
                process_index=ocdbt_utils.get_process_index_for_subdir(use_ocdbt=True),
            )
            stores[info.name] = await ts.open(ts.Spec(spec.json), create=True, context=info.ts_context)
        unfinished: collections.deque[Any] = collections.deque()
        for name, region, values_there in self._pieces:
            store = stores[name]
            array = np.ascontiguousarray(values_there.astype(store.dtype.numpy_dtype, copy=False))
            unfinished.append(store[region].write(array))
            if len(unfinished) > _IN_FLIGHT:
                await unfinished.popleft()
        for written in unfinished:
            await written


def write(path: Path, params: Mapping[str, Streamed], pieces: Pieces, facts: Mapping[str, Any]) -> None:
    """Write the weights directory `path` (it must not exist): the items params, from `pieces`, and facts (json).

    Raises what `pieces` raises; then there is no `path`.
    """
    registry = type_handlers.create_type_handler_registry(
        (Streamed, _StreamHandler(pieces)),
        (jax.Array, type_handlers.ArrayHandler()),  # of no use here; orbax warns where it is not
    )
    handlers = {
        "params": ocp.PyTreeCheckpointHandler(type_handler_registry=registry, use_compression=False),
        "facts": ocp.JsonCheckpointHandler(),
    }
    arguments = ocp.args.Composite(params=ocp.args.PyTreeSave(dict(params)), facts=ocp.args.JsonSave(dict(facts)))
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler(**handlers)) as checkpointer:
        checkpointer.save(path.absolute(), args=arguments)


def is_weights(path: Path) -> bool:
    """Whether `path` is a weights directory."""
    return (path / "params").is_dir()


def facts(path: Path) -> dict[str, Any]:
    """The facts of a weights directory or of a run's checkpoint."""
    return json.loads((path / "facts" / "metadata").read_text())


class Slices:
    """Reads regions of the arrays of an orbax item.

    prefix: what their names have in front. keep: bytes of decoded chunks that are kept for the next region (a run's
    checkpoint has all layers of a shard in one chunk).
    """

    def __init__(self, item: Path, prefix: str = "", keep: int = 0):
        self._item, self._prefix = item.absolute(), prefix
        self._stores: dict[str, ts.TensorStore] = {}
        self._context = ts.Context({"cache_pool": {"total_bytes_limit": keep}})

    def read(self, param: str, region: Region) -> np.ndarray:
        return self._store(param)[region].read().result()

    def _store(self, param: str) -> ts.TensorStore:
        if param not in self._stores:
            kvstore = {"driver": "ocdbt", "base": f"file://{self._item}/", "path": f"{self._prefix}{param}/"}
            spec = {"driver": "auto", "kvstore": kvstore}
            self._stores[param] = ts.open(spec, open=True, read=True, context=self._context).result()
        return self._stores[param]
