"""Published checkpoints as files: config.json, safetensors shards and their index, read and written in pieces.

A safetensors file is an 8-byte length, a JSON header (name -> dtype, shape, offsets), and the bytes. Reading it here
rather than through a memory map keeps the resident memory to one block, whatever the size of the file.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Carried from the source to the export as they are.
SIDE_FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
    "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json",
)  # fmt: skip
_MAX_HEADER = 100 << 20
_BLOCK = 32 << 20  # bytes
_SHOWN = 12  # names of one kind of problem


class CheckpointError(ValueError):
    """A checkpoint that cannot be read as what it says it is. The message lists every problem found."""

    def __init__(self, where: str | Path, problems: Iterable[str]):
        self.problems = list(problems)
        super().__init__("\n  - ".join([f"{where} cannot be used:", *self.problems]))


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where a published tensor lies: shard (file name), dtype as safetensors writes it, shape, bytes from start on."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def named(kind: str, names: Iterable[str]) -> list[str]:
    """One line for all `names` with the same problem, [] for none."""
    names = sorted(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"{len(names)} tensors {kind}: {', '.join(names[:_SHOWN])}{more}"] if names else []


class Published:
    """The directory of a published checkpoint, its headers read and checked; tensors are read when asked for.

    Attributes: config (config.json as it is), tensors (name -> Stored, in file order), has_index.
    Raises CheckpointError naming everything that is wrong with the directory itself.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        if any((self.directory / name).is_dir() for name in ("checkpoints", "params", "state")):
            raise CheckpointError(
                directory, ["it is a directory of Longscan's own (a run or imported weights), not published weights"]
            )
        problems: list[str] = []
        self.config = self._json("config.json", problems)
        if "auto_map" in self.config:
            problems.append("config.json has auto_map: it asks for code of its own, which is never run")
        self.has_index = (self.directory / INDEX).exists()
        weight_map = self._weight_map(problems) if self.has_index else {}
        files = sorted(set(weight_map.values())) if self.has_index else self._only_file(problems)
        self.tensors: dict[str, Stored] = {}
        for file in files:
            try:
                tensors = read_header(self.directory / file)
            except ValueError as error:
                problems.append(str(error))
                continue
            problems += [f"{key} is in {file} and in {self.tensors[key].file}" for key in tensors.keys() & self.tensors]
            self.tensors |= tensors
        if self.has_index and not problems:
            found = {key: stored.file for key, stored in self.tensors.items()}
            wrong = {key for key, file in weight_map.items() if found.get(key) != file}
            problems += named(f"are not in the shard that {INDEX} names", wrong)
            problems += named(f"of the shards are not in {INDEX}", self.tensors.keys() - weight_map.keys())
        if problems:
            raise CheckpointError(directory, problems)

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """The tensor, or `rows` of its first dim."""
        stored = self.tensors[name]
        dtype, (first, *rest) = DTYPES[stored.dtype], stored.shape
        start, stop, _ = rows.indices(first)
        row = math.prod(rest)
        with open(self.directory / stored.file, "rb") as file:
            file.seek(stored.start + start * row * dtype.itemsize)
            return np.fromfile(file, dtype, (stop - start) * row).reshape(stop - start, *rest)

    def _json(self, name: str, problems: list[str]) -> dict[str, Any]:
        try:
            content = json.loads((self.directory / name).read_text())
            if isinstance(content, dict):
                return content
            problems.append(f"{name} is no JSON object")
        except FileNotFoundError:
            problems.append(f"there is no {name}")
        except ValueError as error:
            problems.append(f"{name} is not JSON: {error}")
        return {}

    def _weight_map(self, problems: list[str]) -> dict[str, str]:
        """Tensor -> shard, as the index has it."""
        weight_map = self._json(INDEX, problems).get("weight_map")
        if isinstance(weight_map, dict) and all(
            isinstance(file, str) and Path(file).name == file for file in weight_map.values()
        ):
            return weight_map
        problems.append(f"{INDEX} has no weight_map from tensors to files beside it")
        return {}

    def _only_file(self, problems: list[str]) -> list[str]:
        """The one safetensors file of a checkpoint without an index."""
        found = sorted(path.name for path in self.directory.glob("*.safetensors"))
        if len(found) > 1:
            problems.append(f"there are {len(found)} safetensors files and no {INDEX} that says which belong to it")
        if not found:
            pickled = sorted(path.name for path in self.directory.glob("*.bin"))
            hint = f" (pickled weights are never loaded: {', '.join(pickled)})" if pickled else ""
            problems.append(f"there is no safetensors file{hint}")
        return found


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file, in the order of their bytes. Raises ValueError for one missing or damaged."""
    if not path.is_file():
        raise ValueError(f"the shard {path.name} is missing")
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, _MAX_HEADER):
            raise ValueError(f"{path.name} is no whole safetensors file (a header of {length} bytes in {size})")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            tensors = {name: _stored(path.name, 8 + length, entry) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the header of {path.name} is damaged: {error!r}") from error
    tensors = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)))
    end = 8 + length
    for name, stored in tensors.items():
        if stored.start != end:
            raise ValueError(f"the header of {path.name} is damaged: {name} starts at {stored.start}, not {end}")
        end = stored.stop
    if end != size:
        raise ValueError(f"{path.name} is damaged: its header describes {end} bytes, the file has {size}")
    return tensors


def _stored(file: str, base: int, entry: Mapping[str, Any]) -> Stored:
    (start, stop), dtype, shape = entry["data_offsets"], entry["dtype"], tuple(int(size) for size in entry["shape"])
    known = DTYPES.get(dtype)
    if not 0 <= start <= stop or (known is not None and stop - start != math.prod(shape) * known.itemsize):
        raise ValueError(f"{dtype} {list(shape)} in the bytes {start} to {stop}")
    return Stored(file, dtype, shape, base + start, base + stop)


def raw(path: Path, stored: Stored) -> Iterator[np.ndarray]:
    """The bytes of a tensor, in blocks."""
    with open(path, "rb") as file:
        file.seek(stored.start)
        for start in range(0, stored.nbytes, _BLOCK):
            yield np.fromfile(file, np.uint8, min(_BLOCK, stored.nbytes - start))


def layout(tensors: Mapping[str, Stored]) -> tuple[dict[str, Stored], dict[str, bytes]]:
    """The same tensors where they lie in newly written shards, and the head of every shard."""
    heads: dict[str, dict[str, Any]] = {}
    ends: dict[str, int] = {}
    for name, stored in tensors.items():
        head = heads.setdefault(stored.file, {"__metadata__": {"format": "pt"}})  # transformers wants it
        start = ends.get(stored.file, 0)
        ends[stored.file] = stop = start + stored.nbytes
        head[name] = {"dtype": stored.dtype, "shape": stored.shape, "data_offsets": [start, stop]}
    written = {}
    texts = {}
    for file, head in heads.items():
        text = json.dumps(head, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the data starts at a multiple of 8
        texts[file] = len(text).to_bytes(8, "little") + text
        written |= {name: _stored(file, 8 + len(text), head[name]) for name in head if name != "__metadata__"}
    return written, texts


def write_shards(
    directory: Path, tensors: Mapping[str, Stored], contents: Iterable[tuple[str, Iterable[np.ndarray]]]
) -> None:
    """Write shards that hold `tensors` (of each Stored: file, dtype, shape, size), from (name, its blocks in order).

    The tensors may come in any order, so that the reader of their contents can choose it.
    """
    placed, heads = layout(tensors)
    for file, head in heads.items():
        (directory / file).write_bytes(head)
    for name, blocks in contents:
        with open(directory / placed[name].file, "r+b") as out:
            out.seek(placed[name].start)
            for block in blocks:
                block.tofile(out)
            if out.tell() != placed[name].stop:
                raise RuntimeError(f"{name}: wrote {out.tell() - placed[name].start} of {placed[name].nbytes} bytes")


def write_index(directory: Path, tensors: Mapping[str, Stored]) -> None:
    total = sum(stored.nbytes for stored in tensors.values())
    weight_map = {name: stored.file for name, stored in sorted(tensors.items())}
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
    (directory / INDEX).write_text(text + "\n")
