"""What a prepared directory holds, as its manifest says, and the checks made before anything of it is used.

DIR/manifest.json                written last: a directory without it is not prepared
DIR/tokenizer.json               the tokenizer's definition, where it has one
DIR/SOURCE/index.npy             one INDEX_DTYPE row a document, in corpus order
DIR/SOURCE/00000.arrayrecord     token records: each up to `record_tokens` tokens of ONE document, little-endian
                                 `token_dtype`, then a checksum (data.reader)
"""

import concurrent.futures
import dataclasses
import functools
import hashlib
import io
import json
import os
from typing import Self

import numpy as np
from etils import epath

MANIFEST = "manifest.json"
PARTIAL = "partial"  # subfolder of what a killed preparation has finished
FORMAT = 1
_THREADS = 32
# length: tokens of the document. hash: of its content, uniform; it decides held-out or not. record: its first record.
INDEX_DTYPE = np.dtype([("length", "<u4"), ("hash", "<u4"), ("record", "<i8")])


class DataError(ValueError):
    """Input or prepared data that cannot be used; the message names the file or field and a remedy."""


@dataclasses.dataclass(frozen=True)
class FileEntry:
    path: str  # relative to the directory
    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class ShardEntry(FileEntry):
    documents: int
    records: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class SourceEntry:
    """skipped: documents left out, by reason (on_error=skip, the length filters)."""

    name: str
    documents: int
    records: int
    tokens: int
    skipped: dict[str, int]
    index: FileEntry
    shards: tuple[ShardEntry, ...]


@dataclasses.dataclass(frozen=True)
class TokenizerEntry:
    """spec: as given to prepare (a tokenizer.json's path is replaced by its copy's); see data.tokenizers.

    end_of_document: as given to data.tokenizers.load.
    """

    spec: str
    end_of_document: str | None
    vocab_size: int
    fingerprint: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    tokenizer: TokenizerEntry
    token_dtype: str
    record_tokens: int
    sources: tuple[SourceEntry, ...]

    @property
    def fingerprint(self) -> str:
        """Equal for two directories exactly if they hold the same tokens in the same order."""
        return hashlib.sha256(json.dumps(dataclasses.asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        fields = {"format": FORMAT, "fingerprint": self.fingerprint} | dataclasses.asdict(self)
        return json.dumps(fields, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises ValueError, KeyError or TypeError for anything but what to_json wrote."""
        fields = json.loads(text)
        if fields.pop("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        recorded = fields.pop("fingerprint")
        sources = [
            SourceEntry(
                **source
                | {
                    "index": FileEntry(**source["index"]),
                    "shards": tuple(ShardEntry(**shard) for shard in source["shards"]),
                }
            )
            for source in fields["sources"]
        ]
        made = cls(**fields | {"tokenizer": TokenizerEntry(**fields["tokenizer"]), "sources": tuple(sources)})
        if made.fingerprint != recorded:
            raise ValueError(f"its content has fingerprint {made.fingerprint}, it says {recorded}")
        return made


def is_prepared(directory: os.PathLike[str] | str) -> bool:
    return (epath.Path(directory) / MANIFEST).exists()


def load(directory: os.PathLike[str] | str) -> Manifest:
    """The manifest of a prepared directory whose files all exist with the sizes it names. Raises DataError."""
    directory = epath.Path(directory)
    path = directory / MANIFEST
    if not path.exists():
        partial = (
            " (an unfinished preparation is there: run data.prepare again)"
            if directory.exists() and (directory / PARTIAL).exists()
            else ""
        )
        raise DataError(
            f"{directory} holds no prepared data: {MANIFEST} is missing{partial}; make it with python -m data.prepare"
        )
    try:
        manifest = Manifest.from_json(path.read_text())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is damaged or of another version: {error}; prepare the data again") from error
    entries = [entry for source in manifest.sources for entry in (source.index, *source.shards)]
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:  # a remote look takes tens of milliseconds
        for _ in threads.map(functools.partial(check_size, directory), entries):
            pass
    return manifest


def check_size(directory: epath.Path, entry: FileEntry) -> None:
    path = directory / entry.path
    try:
        found = path.stat().length
    except FileNotFoundError:
        raise DataError(f"{path} is missing; restore it or prepare the data again") from None
    if found != entry.bytes:
        raise DataError(
            f"{path} has {found:,} bytes, the manifest says {entry.bytes:,}: truncated or replaced; "
            "restore it or prepare the data again"
        )


def load_index(directory: os.PathLike[str] | str, source: SourceEntry) -> np.ndarray:
    """INDEX_DTYPE [documents], checked against its checksum; mapped, not read, where the file is local."""
    path = epath.Path(directory) / source.index.path
    if os.path.exists(path):
        digest, index = sha256(path), lambda: np.load(path, mmap_mode="r")
    else:
        content = path.read_bytes()
        digest, index = hashlib.sha256(content).hexdigest(), lambda: np.load(io.BytesIO(content))
    if digest != source.index.sha256:
        raise DataError(f"{path} is damaged: its checksum is not the manifest's; restore it or prepare the data again")
    return index()


def sha256(path: epath.Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write_atomic(path: epath.Path, data: str | bytes) -> None:
    """`path` has all of `data` or does not change, whenever the process dies."""
    encoded = data.encode() if isinstance(data, str) else data
    temporary = path.parent / f".{path.name}.tmp"
    temporary.write_bytes(encoded)
    temporary.replace(path)
