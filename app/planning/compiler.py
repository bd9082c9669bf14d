"""The real train step compiled for a TPU topology by libtpu, on a machine without a TPU, in a process of its own.

libtpu ends the process for some programs it cannot compile; a child turns that into a message and gives the memory
back. What comes out (program text, memory, seconds) is kept on disk under the config, topology, sources and versions.

    python -m app.planning.compiler REQUEST.json FOLDER    (started by `compile_step`)
"""

import dataclasses
import functools
import gzip
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import app
from app.cluster.hardware import Topology, parse_topology
from app.config import Config, from_config_dict

if TYPE_CHECKING:
    from jax.sharding import Mesh

# libtpu as a compiler only: no TPU is looked for, and several processes may have it.
LIBTPU = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


class CompilerError(RuntimeError):
    """libtpu is missing, or could not compile a program: its last words."""


class DoesNotFit(CompilerError):
    """The program needs more memory than the chip has."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """memory: bytes of HBM a device by kind (app.training.step.memory); seconds, peak resident bytes: of compiling."""

    text: str
    memory: dict[str, int]
    seconds: float
    resident_bytes: int


def compile_step(config: Config, topology: Topology, slices: int, timeout: float | None = None) -> Compiled:
    """The train step of `config` (mesh resolved) on `slices` slices of `topology`.

    Raises DoesNotFit or CompilerError with libtpu's words; CompilerError if libtpu is not installed.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise CompilerError("libtpu is not installed: install the extra 'tpu' (uv pip install -e '.[tpu]')")
    wanted = {"config": config.to_dict(), "topology": str(topology), "slices": slices}
    key = hashlib.sha256(json.dumps([wanted, versions(), _sources()], sort_keys=True).encode()).hexdigest()[:32]
    kept = cache_directory() / "steps" / key
    if not (kept / "facts.json").exists():
        with tempfile.TemporaryDirectory(prefix="plan-") as folder:
            question = Path(folder, "request.json")
            question.write_text(json.dumps(wanted))
            command = [sys.executable, "-m", "app.planning.compiler", str(question), folder]
            try:
                found = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=timeout)
            except subprocess.TimeoutExpired as error:
                raise CompilerError(f"still compiling after {timeout:.0f} s") from error
            if found.returncode:
                raise _failure(found.stderr)
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(folder, kept, dirs_exist_ok=True)
    facts = json.loads((kept / "facts.json").read_text())
    return Compiled(gzip.decompress((kept / "program.hlo.gz").read_bytes()).decode(), **facts)


def _failure(words: str) -> CompilerError:
    if "RESOURCE_EXHAUSTED" in words:
        found = re.search(r"([\d.]+[KMGT])\)? (?:of|exceeds available HBM) \(?([\d.]+[KMGT])", words)
        size = f"it needs {found[1]} of {found[2]}" if found else last_words(words)
        return DoesNotFit(f"the step does not fit into a device's HBM: {size}")
    return CompilerError(f"the step could not be compiled: {last_words(words)}")


def last_words(text: str) -> str:
    """The line of a process's errors that says why it ended: libtpu's check, or the exception."""
    fatal = re.search(r"^F\d{4} .*?\] (.*)$", text, re.MULTILINE)
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(("E1", "W1", "I1", "    @"))]
    return (f"libtpu stopped: {fatal[1]}" if fatal else lines[-1] if lines else "no message")[:600]


def devices(topology: Topology, slices: int = 1) -> list:
    """Abstract devices of `slices` slices, as libtpu describes them."""
    from jax.experimental import topologies

    os.environ.update(LIBTPU)  # read when libtpu is loaded
    options = dict(topology.generation.libtpu_options) | ({"num_slices": slices} if slices > 1 else {})
    return topologies.get_topology_desc(platform="tpu", topology_name=str(topology), **options).devices


def mesh_of(config: Config, topology: Topology, slices: int) -> "Mesh":
    """The program's mesh on the abstract devices of `slices` slices."""
    from app.cluster.mesh import build_mesh

    return build_mesh(config.mesh, devices(topology, slices))


def environment() -> dict[str, str]:
    """Of processes that compile."""
    return os.environ | LIBTPU | {"JAX_PLATFORMS": "cpu"}


@functools.cache
def versions() -> tuple[str, ...]:
    return tuple(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "libtpu"))


def cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "longscan-plan"


@functools.cache
def _sources() -> str:
    """Hash of the sources that the step is made of (not of the planner's own)."""
    root = Path(app.__path__[0])
    files = sorted(path for path in root.rglob("*.py") if "planning" not in path.parts and path.name != "plan.py")
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def _main(arguments: Sequence[str]) -> None:
    from app.training.step import Program, memory

    wanted = json.loads(Path(arguments[0]).read_text())
    folder = Path(arguments[1])
    config, topology = from_config_dict(wanted["config"]), parse_topology(wanted["topology"])
    started = time.perf_counter()
    program = Program(config, mesh_of(config, topology, wanted["slices"]))
    compiled = program.train_step.lower(program.state, program.batch).compile()
    seconds = time.perf_counter() - started
    facts = {
        "memory": memory(compiled),
        "seconds": seconds,
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    (folder / "program.hlo.gz").write_bytes(gzip.compress((compiled.as_text() or "").encode(), 3))
    (folder / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    _main(sys.argv[1:])
