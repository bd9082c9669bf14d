"""One process of a run that only reads: prints, as JSON, a digest of every block of every field that it holds.

Arguments: the coordinator's address, the number of processes, this one's, then JSON: the stream's options, mesh sizes
(data, fsdp, context, expert, tensor), first and last step.
"""

import hashlib
import json
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from app.cluster import sharding
from app.cluster.mesh import AXES
from data import pipeline
from data.stream import Stream, StreamOptions


def main(coordinator: str, processes: str, process: str, work: str) -> None:
    if int(processes) > 1:
        jax.distributed.initialize(coordinator, int(processes), int(process))
    options, sizes, start, stop = json.loads(work)
    stream = Stream(StreamOptions(**options))
    spec = NamedSharding(Mesh(np.array(jax.devices()).reshape(sizes), AXES), sharding.BATCH_SPEC)
    held = []
    for step, batch in enumerate(pipeline.batches(stream, spec, start_step=start, stop_step=stop), start):
        for name, field in batch.items():
            for shard in field.addressable_shards:
                bounds = [part.indices(size)[:2] for part, size in zip(shard.index, field.shape, strict=True)]
                held.append([step, name, *bounds, digest(np.asarray(shard.data))])
    print(json.dumps({"bytes_read": stream.reader.bytes_read, "held": held}))


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


if __name__ == "__main__":
    main(*sys.argv[1:])
