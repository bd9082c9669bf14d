"""Memory and time of importing and exporting Qwen3.5-2B in bfloat16 (3.8 GB): python -m tests.benchmark.hf_import DIR

The checkpoint is made of random numbers. It takes 12 GB in DIR, which are removed. Each command runs in a process of
its own; what it needs is the largest resident set less that of the same process before it began.
"""

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

from app.config import from_config_dict
from app.hf.config import published_config
from app.hf.published import Published, Stored, write_index, write_shards
from app.hf.table import plan
from configs import qwen3_5_2b

SHARDS = 2
BLOCK = 1 << 24  # elements
COMMAND = """
import resource, sys, time
import jax
from app import hf
from app.cluster import runtime
from app.hf.__main__ import main
runtime.use_cpu_devices(1)
jax.devices()
before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
status = main(sys.argv[1:])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(f"{sys.argv[1]}: {time.perf_counter() - start:.1f} s, {(peak - before) / 1e6:.3f} GB above {before / 1e6:.3f} GB")
sys.exit(status)
"""


def make(directory: Path) -> None:
    """The checkpoint, a block at a time."""
    config = from_config_dict(qwen3_5_2b.get_config()).model
    entries = plan(config, False, [])
    tensors = {
        entry.name: Stored(
            f"model-{n * SHARDS // len(entries) + 1:05d}-of-{SHARDS:05d}.safetensors",
            "BF16",
            entry.shape,
            0,
            2 * math.prod(entry.shape),
        )
        for n, entry in enumerate(entries)
    }
    rng = np.random.default_rng(0)

    def blocks(size: int) -> Iterator[np.ndarray]:
        for start in range(0, size, BLOCK):
            yield rng.standard_normal(min(BLOCK, size - start), np.float32).astype(ml_dtypes.bfloat16)

    directory.mkdir(parents=True)
    write_shards(directory, tensors, ((name, blocks(stored.nbytes // 2)) for name, stored in tensors.items()))
    write_index(directory, tensors)
    (directory / "config.json").write_text(json.dumps(published_config(config, "bfloat16")))


def same(source: Published, exported: Published) -> int:
    """The number of tensors, all of whose bytes are equal."""
    for name, stored in source.tensors.items():
        step = max(1, BLOCK // math.prod(stored.shape[1:]))
        for start in range(0, stored.shape[0], step):
            rows = slice(start, start + step)
            assert source.read(name, rows).tobytes() == exported.read(name, rows).tobytes(), name
    return len(source.tensors)


def main(root: Path) -> None:
    root = root / "hf_import"
    try:
        make(root / "source")
        for command in (
            ["import", "--checkpoint", root / "source", "--out", root / "weights", "--mesh", "fsdp=4,tensor=2"],
            ["export", "--workdir", root / "weights", "--out", root / "exported"],
        ):
            subprocess.run([sys.executable, "-c", COMMAND, *map(str, command)], check=True)
        count = same(Published(root / "source"), Published(root / "exported"))
        print(f"{count} tensors come back bit for bit")
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
