"""Where documents come from: files by pattern, cut into parts that workers read on their own.

An input is `[NAME=]PATTERN[,PATTERN...]`: the documents of source NAME (default "main"). A pattern is one of

    stdlib              the Python standard library's own .py files, one document each
    tfds:NAME/SPLIT     a TensorFlow dataset in a random-access format
    a path or glob      local or gs://, `**` allowed; the suffix says how it is read:
                        .jsonl .ndjson .json  one object a line, the text (or token ids) in the field `text_field`
                        .parquet              one row a document, the column `text_field`
                        .npy                  integers: each row of a 2-D array, or a 1-D array (whole, or cut after
                                              each end-of-document id)
                        anything else         a text file is one document
                        text and JSON files may be compressed (.gz)
"""

import dataclasses
import functools
import glob
import gzip
import json
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from etils import epath

from data.manifest import PARTIAL, DataError
from data.tokenizers import Document

DEFAULT_SOURCE = "main"
PART_BYTES = 64 << 20  # large files are cut into parts of about this size
_SUFFIX_KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".npy": "array"}
# In the standard library's folder but not of it, or not written to be read.
_STDLIB_SKIP = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclasses.dataclass(frozen=True)
class ReadOptions:
    """text_field: JSON field, Parquet column or TFDS feature. end_of_document: the id that cuts 1-D arrays."""

    text_field: str = "text"
    end_of_document: int | None = None
    tfds_directory: str | None = None


@dataclasses.dataclass(frozen=True)
class Part:
    """What one worker reads at a time of one file.

    start, stop: bytes (jsonl: the lines that begin there), row groups (parquet), rows (array), examples (tfds).
    size: about how many bytes of input, for progress and for balance.
    """

    kind: str
    path: str
    start: int
    stop: int
    size: int


# Called with the place ("file:line") and the reason for every document that cannot be used.
Reject = Callable[[str, str], None]
# The place of a document, made when it is needed: finding a line's number takes a read of what is before it.
Place = Callable[[], str]


def parse(inputs: str | Sequence[str]) -> dict[str, list[str]]:
    """Source name -> patterns. Inputs that name the same source, or none, are put together."""
    found: dict[str, list[str]] = {}
    for text in [inputs] if isinstance(inputs, str) else inputs:
        named = re.fullmatch(r"([A-Za-z0-9_-]+)=(.*)", text)
        name, patterns = (named[1], named[2]) if named else (DEFAULT_SOURCE, text)
        if not patterns.strip(","):
            raise DataError(f"input {text!r} has no pattern; expected [NAME=]PATTERN[,PATTERN...]")
        if name == PARTIAL:
            raise DataError(f"input {text!r}: a source cannot be called {PARTIAL!r}; choose another name")
        found.setdefault(name, []).extend(pattern for pattern in patterns.split(",") if pattern)
    if not found:
        raise DataError("no input; expected [NAME=]PATTERN[,PATTERN...]")
    return found


def parts(patterns: Sequence[str], options: ReadOptions) -> list[Part]:
    """Every part of the inputs that the patterns name, each file once, in sorted order of their names."""
    files: set[str] = set()
    found: list[Part] = []
    for pattern in sorted(set(patterns)):
        if pattern == "stdlib":
            found.extend(_file_parts("text", path) for path in stdlib_files())
        elif pattern.startswith("tfds:"):
            found.extend(_tfds_parts(pattern, options))
        else:
            files.update(expand(pattern))
    for path in sorted(files):
        kind = _SUFFIX_KINDS.get(os.path.splitext(path.lower().removesuffix(".gz"))[1], "text")
        found.extend(_CUT[kind](path) if kind in _CUT else [_file_parts(kind, path)])
    return found


def expand(pattern: str) -> list[str]:
    """The files a path or glob names, sorted. Raises DataError if there is none."""
    if pattern.startswith("gs://"):
        wild = re.search(r"[^/]*[*?\[].*", pattern)
        root = epath.Path(pattern[: wild.start()] if wild else pattern)
        found = root.glob(wild[0]) if wild else [root]
        paths = [str(path) for path in found if path.exists() and not path.is_dir()]
    else:
        paths = [path for path in glob.glob(os.path.expanduser(pattern), recursive=True) if os.path.isfile(path)]
    if not paths:
        hint = (
            f"; it is a folder: name its files, as in {pattern.rstrip('/')}/**/*.txt" if os.path.isdir(pattern) else ""
        )
        raise DataError(f"input pattern {pattern!r} matches no file{hint}")
    return sorted(paths)


def stdlib_files() -> list[str]:
    """The standard library's source files that are not empty, tests left out, sorted by their path inside it."""
    root = Path(sysconfig.get_path("stdlib"))
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - _STDLIB_SKIP)
        names.extend(Path(folder, file).relative_to(root).as_posix() for file in files if file.endswith(".py"))
    paths = [str(root / name) for name in sorted(names) if (root / name).stat().st_size]
    if not paths:
        raise DataError(
            f"source 'stdlib': {root} holds no .py files; this Python came without its sources, name other text files"
        )
    return paths


def documents(part: Part, options: ReadOptions, reject: Reject) -> Iterator[tuple[Place, Document]]:
    """(place, document) of every usable document of a part, in order; the others go to `reject`.

    Raises DataError if the whole part cannot be used, whatever `reject` does: a wrong column or feature name.
    """
    return _READ[part.kind](part, options, reject)


def _open(path: str) -> IO[bytes] | gzip.GzipFile:
    file = epath.Path(path).open("rb")
    return gzip.open(file) if path.endswith(".gz") else file


def _size(path: str) -> int:
    return epath.Path(path).stat().length


def _file_parts(kind: str, path: str) -> Part:
    size = _size(path)
    return Part(kind, path, 0, size, size)


# ---- text ------------------------------------------------------------------------------------------------------------


def _read_text(part: Part, options: ReadOptions, reject: Reject) -> Iterator[tuple[Place, Document]]:
    with _open(part.path) as file:
        text = file.read()
    if text:
        yield lambda: part.path, text
    else:
        reject(part.path, "the file is empty")


# ---- JSON lines ------------------------------------------------------------------------------------------------------


def _cut_lines(path: str) -> list[Part]:
    size = _size(path)
    if path.endswith(".gz"):  # cannot be entered in the middle
        return [Part("jsonl", path, 0, sys.maxsize, size)]
    starts = range(0, max(size, 1), PART_BYTES)
    return [
        Part("jsonl", path, start, min(start + PART_BYTES, size), min(PART_BYTES, size - start)) for start in starts
    ]


def _read_lines(part: Part, options: ReadOptions, reject: Reject) -> Iterator[tuple[Place, Document]]:
    with _open(part.path) as file:
        if part.start:
            file.seek(part.start - 1)
            file.readline()  # the line that began before this part is the previous part's
        elif not file.read(1):
            reject(part.path, "the file is empty")
        else:
            file.seek(0)
        while (begin := file.tell()) < part.stop and (line := file.readline()):
            if not line.strip():
                continue
            place = functools.partial(_line, part.path, begin)
            try:
                yield place, _field(line, options.text_field)
            except ValueError as error:
                reject(place(), str(error))


def _field(line: bytes, name: str) -> Document:
    row = json.loads(line)
    if not isinstance(row, dict) or name not in row:
        has = f"it has {', '.join(sorted(row)) or 'none'}" if isinstance(row, dict) else "it is no object"
        raise ValueError(f"the line has no field {name!r} (--text_field): {has}")
    return as_document(row[name])


def as_document(value: object) -> Document:
    """A field's value as a document. Raises ValueError for anything but a text or a list of integers, or if empty."""
    if isinstance(value, list):
        value = np.asarray(value)
    if not isinstance(value, (str, bytes, np.ndarray)):
        raise ValueError(f"its text is {type(value).__name__}, expected a string or a list of token ids")
    if len(value) == 0:
        raise ValueError("its text is empty")
    if isinstance(value, np.ndarray) and (value.ndim != 1 or not np.issubdtype(value.dtype, np.integer)):
        raise ValueError(f"its list has dtype {value.dtype} and shape {value.shape}, expected integers in one row")
    return value


def _line(path: str, position: int) -> str:
    """ "PATH:N" of the line that begins at a byte."""
    with _open(path) as file:
        number = 1
        while position:
            block = file.read(min(position, 1 << 20))
            position -= len(block)
            number += block.count(b"\n")
    return f"{path}:{number}"


# ---- Parquet ---------------------------------------------------------------------------------------------------------


def _cut_row_groups(path: str) -> list[Part]:
    import pyarrow.parquet  # here and below: readers of one format do not cost the others their import

    try:
        with (
            epath.Path(path).open("rb") as file,
            pyarrow.parquet.ParquetFile(file, page_checksum_verification=True) as table,
        ):
            metadata = table.metadata
            sizes = [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error
    return [Part("parquet", path, group, group + 1, size) for group, size in enumerate(sizes)]


def _read_row_groups(part: Part, options: ReadOptions, reject: Reject) -> Iterator[tuple[Place, Document]]:
    import pyarrow.parquet

    with (
        epath.Path(part.path).open("rb") as file,
        pyarrow.parquet.ParquetFile(file, page_checksum_verification=True) as table,
    ):
        if options.text_field not in table.schema_arrow.names:
            raise DataError(
                f"{part.path} has no column {options.text_field!r} (--text_field); it has "
                f"{', '.join(table.schema_arrow.names)}"
            )
        row = sum(table.metadata.row_group(group).num_rows for group in range(part.start))
        try:
            for batch in table.iter_batches(
                64, row_groups=[*range(part.start, part.stop)], columns=[options.text_field]
            ):
                for value in batch.column(0).to_pylist():
                    place = functools.partial("{}, row {}".format, part.path, row)
                    row += 1
                    try:
                        yield place, as_document(value)
                    except ValueError as error:
                        reject(place(), str(error))
        except (pyarrow.ArrowException, OSError) as error:
            reject(
                f"{part.path}, row {row} and the rest of its row group",
                f"column {options.text_field!r} cannot be read: {error}",
            )


# ---- arrays of token ids ---------------------------------------------------------------------------------------------


def _cut_rows(path: str) -> list[Part]:
    array = _open_array(path)
    if array.ndim == 1:
        return [Part("array", path, 0, 1, array.nbytes)]
    row = array.shape[1] * array.itemsize
    step = max(1, PART_BYTES // max(1, row))
    return [
        Part("array", path, start, min(start + step, len(array)), row * min(step, len(array) - start))
        for start in range(0, len(array), step)
    ]


def _open_array(path: str) -> np.ndarray:
    try:
        if os.path.exists(path):
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            with epath.Path(path).open("rb") as file:
                array = np.load(file, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"{path} cannot be read as a .npy array: {error}") from error
    if array.ndim not in (1, 2) or not np.issubdtype(array.dtype, np.integer):
        raise DataError(f"{path} has dtype {array.dtype} and {array.ndim} dimensions; expected integers in 1 or 2")
    return array


def _read_rows(part: Part, options: ReadOptions, reject: Reject) -> Iterator[tuple[Place, Document]]:
    array = _open_array(part.path)
    if array.ndim == 2:
        rows = (
            (functools.partial("{}, row {}".format, part.path, row), array[row]) for row in range(part.start, part.stop)
        )
    else:
        rows = _cut_at(array, options.end_of_document, part.path)
    for place, row in rows:
        if len(row):
            yield place, row
        else:
            reject(place(), "the document is empty")


def _cut_at(array: np.ndarray, end_of_document: int | None, path: str) -> Iterator[tuple[Place, np.ndarray]]:
    """The documents of one long array, their end-of-document ids left out; found block by block."""
    begin, block = 0, 1 << 22
    if end_of_document is not None:
        for low in range(0, len(array), block):
            for end in low + np.flatnonzero(array[low : low + block] == end_of_document):
                yield functools.partial("{}, token {}".format, path, begin), array[begin:end]
                begin = int(end) + 1
    if begin < len(array) or not len(array):
        yield functools.partial("{}, token {}".format, path, begin), array[begin:]


# ---- TensorFlow datasets ---------------------------------------------------------------------------------------------


def _tfds_source(pattern: str, options: ReadOptions) -> Any:
    import tensorflow_datasets as tfds

    name, _, split = pattern.removeprefix("tfds:").rpartition("/")
    if not name:
        raise DataError(f"input {pattern!r}: expected tfds:NAME/SPLIT, as in tfds:wikipedia/20230601.en/train")
    try:
        return tfds.data_source(name, split=split, data_dir=options.tfds_directory, download=False)
    except Exception as error:  # tfds raises many kinds, none of them its own
        raise DataError(
            f"input {pattern!r} cannot be opened in {options.tfds_directory or 'the default folder'} "
            f"(--tfds_directory): {str(error).strip().splitlines()[0]}"
        ) from error


def _tfds_parts(pattern: str, options: ReadOptions) -> list[Part]:
    source = _tfds_source(pattern, options)
    count = len(source)
    if not count:
        raise DataError(f"input {pattern!r} has no examples")
    info = source.dataset_info
    size = max(1, info.dataset_size // sum(split.num_examples for split in info.splits.values()))
    step = max(1, PART_BYTES // size)
    return [
        Part("tfds", pattern, start, min(start + step, count), size * min(step, count - start))
        for start in range(0, count, step)
    ]


def _read_examples(part: Part, options: ReadOptions, reject: Reject) -> Iterator[tuple[Place, Document]]:
    source = _tfds_source(part.path, options)
    for example in range(part.start, part.stop):
        place = functools.partial("{}, example {}".format, part.path, example)
        fields = source[example]
        if not isinstance(fields, dict) or options.text_field not in fields:
            raise DataError(
                f"{place()} has no feature {options.text_field!r} (--text_field); it has {', '.join(sorted(fields))}"
            )
        try:
            yield place, as_document(fields[options.text_field])
        except ValueError as error:
            reject(place(), str(error))


_CUT = {"jsonl": _cut_lines, "parquet": _cut_row_groups, "array": _cut_rows}
_READ = {
    "text": _read_text,
    "jsonl": _read_lines,
    "parquet": _read_row_groups,
    "array": _read_rows,
    "tfds": _read_examples,
}
