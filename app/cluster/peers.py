"""What the processes of a run tell each other beside their computations, through jax.distributed's key-value store.

It needs no device and works from any thread, also while the devices compute or hang. A process on its own talks to
itself. Every exchange is collective: all processes make the same calls in the same order.
"""

import hashlib
import importlib.metadata
import itertools
import json
import platform
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from app.config import ConfigError

PATIENCE = 1800.0  # seconds to wait for another process's word: as slow as a save to slow storage may be
PREFIX = "longscan/"
LIBRARIES = ("jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
_rounds = itertools.count()


def client() -> Any:
    """jax.distributed's client, None for a process on its own. (jax has no public name for it; orbax uses it too.)"""
    from jax._src import distributed

    return distributed.global_state.client


def count() -> int:
    """Processes of the run."""
    from jax._src import distributed

    return distributed.global_state.num_processes if client() is not None else 1


def index() -> int:
    """This process's number, from 0."""
    from jax._src import distributed

    return distributed.global_state.process_id


def publish(key: str, value: str) -> None:
    """Set `key`, once."""
    if client() is not None:
        client().key_value_set(PREFIX + key, value)


def receive(key: str) -> str:
    """The value of `key` as soon as a process publishes it; raises jax's runtime error after PATIENCE."""
    return client().blocking_key_value_get(PREFIX + key, int(PATIENCE * 1000))


def leader_decides(key: str, decide: Callable[[], bool]) -> bool:
    """What `decide` returns on process 0, on all of them. `key`: another one each time."""
    if index() == 0:
        decision = decide()
        publish(key, "yes" if decision else "no")
        return decision
    return receive(key) == "yes"


def exchange(value: str) -> list[str]:
    """Every process's value, by process."""
    if client() is None:
        return [value]
    key = f"{PREFIX}exchange/{next(_rounds)}/"
    client().key_value_set(f"{key}{index():08}", value)
    client().wait_at_barrier(key, int(PATIENCE * 1000))
    return [text for _, text in sorted(client().key_value_dir_get(key))]


def require_same(facts: Mapping[str, Any]) -> None:
    """Raise ConfigError on every process, naming the keys and both values, if one process's facts (json) differ."""
    own = json.dumps(facts, sort_keys=True)
    hashes = exchange(hashlib.sha256(own.encode()).hexdigest())
    other = next((process for process, found in enumerate(hashes) if found != hashes[0]), None)
    if other is None:
        return
    mine = json.dumps([socket.gethostname(), facts]) if index() in (0, other) else ""
    shown = exchange(mine)
    (host_a, a), (host_b, b) = json.loads(shown[0]), json.loads(shown[other])
    lines = [
        f"  {key}: {a.get(key)!r} in process 0 (host {host_a}), {b.get(key)!r} in process {other} (host {host_b})"
        for key in sorted(a.keys() | b.keys())
        if a.get(key) != b.get(key)
    ]
    raise ConfigError("\n".join(["the processes of this run do not agree; start them all alike:", *lines]))


def versions() -> dict[str, str]:
    """What computes: the interpreter, the libraries, and a hash of this project's own source files."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[2]
    for path in sorted(path for folder in ("app", "data") for path in (root / folder).rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    found = {"python": platform.python_version(), "source code": digest.hexdigest()[:16]}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # libtpu, where there is no TPU
            found[name] = "not installed"
    return found
