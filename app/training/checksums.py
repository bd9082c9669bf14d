"""A manifest of checksums over every file of a checkpoint, made before it is committed and checked before it is read.

orbax notices a file that is missing or cut short, but not a changed bit inside an array. Every process hashes a share
of the files, so that the time does not grow with the model. A checkpoint appears under its final name only with its
manifest in it.
"""

import concurrent.futures
import hashlib
import json
from collections.abc import Callable, Iterable

from etils import epath

from app.cluster import peers

NAME = "checksums.json"
# orbax writes these two while it commits, after the manifest: no array depends on them.
_NOT_COVERED = (NAME, "_CHECKPOINT_METADATA", "commit_success.txt")
_READ_BYTES = 1 << 24
_THREADS = 4  # files at a time; a file system answers several faster than one


def seal(directory: epath.Path, key: str) -> None:
    """Write the manifest of a directory whose files are complete. Process 0; the others are in `help_to_seal`.

    key: the same on all processes, another one for every directory.
    """
    peers.publish(f"seal {key}", str(directory))
    sums = dict(_hash_all(directory, _share(_list_files(directory))))
    for process in range(1, peers.count()):
        sums |= json.loads(peers.receive(f"sums {key} of {process}"))
    _write(directory, sums)


def seal_alone(directory: epath.Path) -> None:
    """`seal` for files that only this process has."""
    _write(directory, dict(_hash_all(directory, _list_files(directory))))


def _write(directory: epath.Path, sums: dict[str, tuple[int, str]]) -> None:
    files = dict(sorted(sums.items()))
    scratch = directory / f"{NAME}.tmp"
    scratch.write_text(json.dumps({"sha256": files, "manifest": _digest_of(files)}, indent=0))
    scratch.rename(directory / NAME)


def help_to_seal(key: str) -> None:
    """Every process but 0: wait for `seal` with the same key, then hash this process's share."""
    directory = epath.Path(peers.receive(f"seal {key}"))
    sums = dict(_hash_all(directory, _share(_list_files(directory))))
    peers.publish(f"sums {key} of {peers.index()}", json.dumps(sums))


def find_damage(directory: epath.Path) -> str | None:
    """What is wrong with the files of a committed checkpoint, None if all are as written. Every process must ask."""
    found = peers.exchange(own_damage(directory, share=_share) or "")
    return next((problem for problem in found if problem), None)


def own_damage(directory: epath.Path, *, share: Callable[[dict[str, int]], Iterable[str]] = list) -> str | None:
    """Like `find_damage`, without the other processes; share: which of the files (path -> bytes) to hash."""
    manifest = directory / NAME
    if not manifest.exists():
        return f"{manifest} is missing, so the files cannot be checked"
    try:
        content = json.loads(manifest.read_text())
        files = content["sha256"]
        if content["manifest"] != _digest_of(files):
            return f"{manifest} is damaged"
    except (ValueError, KeyError, TypeError):  # not json, or json of another form: a changed byte does both
        return f"{manifest} is damaged"
    there = _list_files(directory)
    if missing := sorted(set(files) - set(there)):
        return f"{directory / missing[0]} is missing ({len(missing)} of {len(files)} files)"
    if changed := [name for name, size in there.items() if name in files and size != files[name][0]]:
        return f"{directory / changed[0]} has {there[changed[0]]} bytes, not {files[changed[0]][0]} as written"
    for name, (_, digest) in _hash_all(directory, share({name: size for name, (size, _) in files.items()})):
        if digest != files[name][1]:
            return f"{directory / name} is not as it was written (its checksum differs)"
    return None


def _list_files(directory: epath.Path) -> dict[str, int]:
    """Path below `directory` -> bytes, of all files that a manifest covers."""
    found = {}
    for path in directory.iterdir():
        if path.is_dir():
            found |= {f"{path.name}/{name}": size for name, size in _list_files(path).items()}
        elif path.name not in _NOT_COVERED and path.name != f"{NAME}.tmp":
            found[path.name] = path.stat().length
    return found


def _share(files: dict[str, int]) -> list[str]:
    """The files that this process hashes: large ones are dealt out first."""
    ordered = sorted(files, key=lambda name: (-files[name], name))
    return ordered[peers.index() :: peers.count()]


def _hash_all(directory: epath.Path, names: Iterable[str]) -> Iterable[tuple[str, tuple[int, str]]]:
    """(name, (bytes, sha256)) of each file."""
    names = list(names)
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        return list(zip(names, pool.map(lambda name: _hash(directory / name), names), strict=True))


def _hash(path: epath.Path) -> tuple[int, str]:
    size, digest = 0, hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            size += len(block)
            digest.update(block)
    return size, digest.hexdigest()


def _digest_of(files: dict) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
