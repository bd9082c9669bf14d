"""Turn documents into token shards: python -m data.prepare --output=DIR --input=[NAME=]PATTERN[,PATTERN...] ...

    python -m data.prepare --output=runs/corpus --input='web=crawl/*.jsonl' --input='code=src/**/*.py' \\
        --tokenizer=qwen/tokenizer.json --workers=8

Inputs: see data.sources; tokenizers: data.tokenizers; what is written: data.manifest. The result is a function of the
inputs and options, whatever the number of workers. Killed and run again with the same inputs and options, it goes on
where it was. Exit status: 0 prepared, 1 a bug, 2 an input or option that cannot be used.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import hashlib
import io
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python import array_record_module
from etils import epath
from tqdm import tqdm

from app.config_flags import command_parser
from data import manifest as prepared
from data import sources, tokenizers
from data.manifest import PARTIAL, DataError, FileEntry, Manifest, ShardEntry, SourceEntry, TokenizerEntry
from data.reader import encode_record
from data.tokenizers import Document

RECORD_TOKENS = 8192  # also how much a process may read beyond its tokens at either end of a piece of a document
SHARD_BYTES = 128 << 20  # of input: what a killed worker loses
TOKENIZER_FILE = "tokenizer.json"
MAX_DOCUMENT = (1 << 32) - 1  # the index stores lengths in 32 bits
_REJECTED_SHOWN = 20

is_prepared = prepared.is_prepared


@dataclasses.dataclass(frozen=True)
class Options:
    """How documents become shards; equal options and inputs give equal shards.

    tokenizer, end_of_document: data.tokenizers.load. min_tokens, max_tokens: documents outside, the end of document
    counted, are left out. skip_errors: count and report documents that cannot be used instead of stopping.
    """

    tokenizer: str = "bytes"
    end_of_document: str | None = None
    text_field: str = "text"
    tfds_directory: str | None = None
    min_tokens: int = 1
    max_tokens: int = MAX_DOCUMENT
    skip_errors: bool = False

    def read_options(self) -> sources.ReadOptions:
        end = _tokenizer(self.tokenizer, self.end_of_document).end_of_document
        return sources.ReadOptions(self.text_field, end, self.tfds_directory)


@dataclasses.dataclass(frozen=True)
class Task:
    """The making of one shard. number: the shard's, within its source."""

    source: str
    number: int
    parts: tuple[sources.Part, ...]

    @property
    def shard(self) -> str:
        return f"{self.source}/{self.number:05d}.arrayrecord"

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    def done(self, directory: epath.Path) -> epath.Path:
        """The file that says this shard is finished, with its numbers."""
        return directory / PARTIAL / f"{self.source}-{self.number:05d}.json"

    def index(self, directory: epath.Path) -> epath.Path:
        return directory / PARTIAL / f"{self.source}-{self.number:05d}.npy"


def prepare(
    inputs: str | Sequence[str], directory: os.PathLike[str] | str, *, workers: int = 0, **options: Any
) -> Manifest:
    """Prepare `inputs` into `directory`; returns its manifest.

    inputs: one or more `[NAME=]PATTERN[,PATTERN...]` (data.sources). workers: processes beside this one, 0: none.
    options: fields of Options.
    Raises DataError for inputs or options that cannot be used, and if the directory is prepared already.
    """
    made = Options(**options)
    directory = epath.Path(directory)
    if not 1 <= made.min_tokens <= made.max_tokens <= MAX_DOCUMENT:
        raise DataError(
            f"min_tokens={made.min_tokens} and max_tokens={made.max_tokens}: expected 1 <= min <= max <= {MAX_DOCUMENT}"
        )
    if is_prepared(directory):
        raise DataError(f"{directory} is prepared already; remove it or choose another output")
    tokenizer = _tokenizer(made.tokenizer, made.end_of_document)
    tasks = plan(sources.parse(inputs), made.read_options())
    begin(directory, tasks, made, tokenizer.fingerprint)
    run(tasks, directory, made, workers)
    return finish(tasks, directory, made, tokenizer)


def plan(patterns: dict[str, list[str]], options: sources.ReadOptions) -> list[Task]:
    """The shards to make: each source's parts in order, gathered up to SHARD_BYTES of input."""
    tasks = []
    for name, wanted in sorted(patterns.items()):
        gathered: list[list[sources.Part]] = []
        size = 0
        for part in sources.parts(wanted, options):
            if not gathered or size + part.size > SHARD_BYTES:
                gathered.append([])
                size = 0
            gathered[-1].append(part)
            size += part.size
        tasks.extend(Task(name, number, tuple(parts)) for number, parts in enumerate(gathered))
    return tasks


def begin(directory: epath.Path, tasks: list[Task], options: Options, tokenizer: str) -> None:
    """Make the folders, or check that an unfinished preparation there is of the same inputs and options."""
    digest = hashlib.sha256(repr((options, tokenizer, RECORD_TOKENS, prepared.FORMAT)).encode())
    for task in tasks:
        digest.update(repr(task).encode())
    for path in sorted({part.path for task in tasks for part in task.parts if part.kind != "tfds"}):
        status = epath.Path(path).stat()
        digest.update(repr((path, status.length, status.mtime)).encode())
    plan_file = directory / PARTIAL / "plan"
    if not plan_file.exists():
        if directory.exists() and any(directory.iterdir()):
            raise DataError(f"{directory} is not empty and holds no preparation; choose another output")
        for folder in (PARTIAL, *{task.source for task in tasks}):
            (directory / folder).mkdir(parents=True, exist_ok=True)
        prepared.write_atomic(plan_file, digest.hexdigest())
    elif plan_file.read_text() != digest.hexdigest():
        raise DataError(
            f"{directory} holds an unfinished preparation of other inputs (or changed files) or options; "
            "remove it or choose another output"
        )


def run(tasks: list[Task], directory: epath.Path, options: Options, workers: int) -> None:
    """Make every shard that is not there yet."""
    waiting = [task for task in tasks if not task.done(directory).exists()]
    make = functools.partial(make_shard, directory=directory, options=options)
    total, left = (sum(task.size for task in some) for some in (tasks, waiting))
    with tqdm(total=total, initial=total - left, unit="B", unit_scale=True, desc="prepare", disable=None) as bar:
        if not workers or len(waiting) == 1:
            for task in waiting:
                make(task)
                bar.update(task.size)
            return
        # spawn: this process may have threads (jax), which do not survive a fork.
        with concurrent.futures.ProcessPoolExecutor(
            min(workers, len(waiting) or 1), multiprocessing.get_context("spawn")
        ) as pool:
            running = {pool.submit(make, task): task for task in waiting}
            try:
                for future in concurrent.futures.as_completed(running):
                    future.result()
                    bar.update(running[future].size)
            except BrokenProcessPool as error:
                raise DataError(
                    "a worker process was killed, perhaps for want of memory; run the same command again "
                    "with fewer --workers to go on"
                ) from error
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise


def make_shard(task: Task, *, directory: epath.Path, options: Options) -> None:
    """Write one shard, its part of the index and, last, its numbers. Raises DataError."""
    skipped: Counter[str] = Counter()
    examples: list[str] = []

    def reject(place: str, reason: str) -> None:
        if not options.skip_errors:
            raise DataError(f"{place}: {reason} (--on_error=skip leaves such documents out)")
        skipped["unusable"] += 1
        if len(examples) < _REJECTED_SHOWN:
            examples.append(f"{place}: {reason}")

    tokenizer = _tokenizer(options.tokenizer, options.end_of_document)
    with tempfile.TemporaryDirectory(dir=_scratch(directory)) as scratch:
        shard = Path(scratch, "shard")
        writer = array_record_module.ArrayRecordWriter(str(shard), "group_size:1,zstd:1")
        index = io.BytesIO()  # 16 bytes a document of one shard
        records = tokens = documents = 0
        for place, document in _all_documents(task.parts, options.read_options(), reject):
            try:
                ids = _encode(tokenizer, document)
            except ValueError as error:
                reject(place(), str(error))
                continue
            if not options.min_tokens <= len(ids) <= options.max_tokens:
                skipped["shorter" if len(ids) < options.min_tokens else "longer"] += 1
                continue
            index.write(np.array((len(ids), _hash(document), records), prepared.INDEX_DTYPE).tobytes())
            for start in range(0, len(ids), RECORD_TOKENS):
                writer.write(encode_record(ids[start : start + RECORD_TOKENS], task.shard, records))
                records += 1
            documents, tokens = documents + 1, tokens + len(ids)
        writer.close()
        _publish(shard, directory / task.shard)
    task.index(directory).write_bytes(index.getvalue())
    numbers = {"documents": documents, "records": records, "tokens": tokens, "skipped": skipped, "examples": examples}
    prepared.write_atomic(task.done(directory), json.dumps(numbers))


def _all_documents(
    parts: Iterable[sources.Part], options: sources.ReadOptions, reject: sources.Reject
) -> Iterator[tuple[sources.Place, Document]]:
    for part in parts:
        yield from sources.documents(part, options, reject)


def _encode(tokenizer: tokenizers.Tokenizer, document: Document) -> np.ndarray:
    ids = tokenizer.encode(document)
    if tokenizer.end_of_document is not None:
        ids = np.append(ids, tokenizer.end_of_document)
    return ids.astype(token_dtype(tokenizer.vocab_size))


def token_dtype(vocab_size: int) -> str:
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def _hash(document: Document) -> int:
    """32 uniform bits of the content, so that copies of a document are all held out or all not, under any tokenizer."""
    content = document.encode() if isinstance(document, str) else document
    if isinstance(content, np.ndarray):
        content = content.astype("<i8").tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=4).digest(), "little")


@functools.lru_cache(1)
def _tokenizer(spec: str, end_of_document: str | None) -> tokenizers.Tokenizer:
    return tokenizers.load(spec, end_of_document)


def _scratch(directory: epath.Path) -> str | None:
    """Where shards are written before they are moved: the same file system if it is local."""
    return os.fspath(directory / PARTIAL) if os.path.isdir(directory) else None


def _publish(file: Path, target: epath.Path) -> None:
    if os.path.isdir(target.parent):
        os.replace(file, target)
        return
    with file.open("rb") as read, target.open("wb") as written:  # an object store: whole or not at all
        shutil.copyfileobj(read, written)


def finish(tasks: list[Task], directory: epath.Path, options: Options, tokenizer: tokenizers.Tokenizer) -> Manifest:
    """Join the shards' indexes, then write the manifest: from here on the directory is prepared."""
    spec, end_of_document = options.tokenizer, options.end_of_document
    if spec.endswith(".json"):
        (directory / TOKENIZER_FILE).write_bytes(epath.Path(spec).read_bytes())
        spec = TOKENIZER_FILE
    names = sorted({task.source for task in tasks})
    found = tuple(_source_entry(name, [task for task in tasks if task.source == name], directory) for name in names)
    manifest = Manifest(
        TokenizerEntry(spec, end_of_document, tokenizer.vocab_size, tokenizer.fingerprint),
        token_dtype(tokenizer.vocab_size),
        RECORD_TOKENS,
        found,
    )
    prepared.write_atomic(directory / prepared.MANIFEST, manifest.to_json())
    (directory / PARTIAL).rmtree()
    return manifest


def _source_entry(name: str, tasks: list[Task], directory: epath.Path) -> SourceEntry:
    numbers = [json.loads(task.done(directory).read_text()) for task in tasks]
    shards = []
    skipped: Counter[str] = Counter()
    for task, made in zip(tasks, numbers, strict=True):
        skipped.update(made["skipped"])
        for example in made["examples"]:
            print(f"skipped {example}", file=sys.stderr)
        if made["records"]:
            path = directory / task.shard
            shards.append(
                ShardEntry(
                    task.shard,
                    path.stat().length,
                    prepared.sha256(path),
                    made["documents"],
                    made["records"],
                    made["tokens"],
                )
            )
    if not shards:
        raise DataError(f"source {name!r} has no usable document: {dict(skipped)}; change its patterns or the limits")
    index = _join_indexes(name, tasks, [made["records"] for made in numbers], directory)
    totals = {key: sum(made[key] for made in numbers) for key in ("documents", "records", "tokens")}
    return SourceEntry(name, **totals, skipped=dict(sorted(skipped.items())), index=index, shards=tuple(shards))


def _join_indexes(name: str, tasks: list[Task], records: list[int], directory: epath.Path) -> FileEntry:
    """One .npy of all documents of a source, their records numbered over its shards; a shard's rows at a time."""
    path = directory / name / "index.npy"
    rows = [task.index(directory) for task in tasks]
    count = sum(row.stat().length for row in rows) // prepared.INDEX_DTYPE.itemsize
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(
            file,
            {"descr": np.lib.format.dtype_to_descr(prepared.INDEX_DTYPE), "fortran_order": False, "shape": (count,)},
        )
        before = 0
        for row, number in zip(rows, records, strict=True):
            part = np.frombuffer(bytearray(row.read_bytes()), prepared.INDEX_DTYPE)
            part["record"] += before
            file.write(part.tobytes())
            before += number
    return FileEntry(f"{name}/index.npy", path.stat().length, prepared.sha256(path))


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    options = {
        field.name: getattr(arguments, field.name)
        for field in dataclasses.fields(Options)
        if field.name != "skip_errors"
    }
    try:
        manifest = prepare(
            arguments.input,
            arguments.output,
            workers=arguments.workers,
            skip_errors=arguments.on_error == "skip",
            **options,
        )
    except DataError as error:
        print(error, file=sys.stderr)
        return 2
    for source in manifest.sources:
        left_out = "".join(f", {count:,} {reason}" for reason, count in source.skipped.items())
        print(
            f"{source.name}: {source.documents:,} documents, {source.tokens:,} tokens in {len(source.shards)} shards"
            f"{left_out and f'; left out{left_out[1:]}'}"
        )
    print(f"prepared {arguments.output} (fingerprint {manifest.fingerprint})")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("data.prepare", __doc__)
    parser.add_argument("--output", required=True, help="the directory to prepare")
    parser.add_argument("--input", required=True, action="append", help="[NAME=]PATTERN[,PATTERN...]; may be repeated")
    parser.add_argument("--tokenizer", default=Options.tokenizer, help="bytes, ids:N or a tokenizer.json")
    parser.add_argument(
        "--end_of_document",
        help="the token (ids:N: the id) that closes a document; '' for none; "
        f"default: {tokenizers.BYTES_END} for bytes, {tokenizers.JSON_END} for tokenizer.json",
    )
    parser.add_argument("--text_field", default=Options.text_field, help="JSON field, Parquet column or TFDS feature")
    parser.add_argument("--tfds_directory", help="where TensorFlow datasets lie (data_dir)")
    parser.add_argument("--min_tokens", type=int, default=Options.min_tokens, help="leave shorter documents out")
    parser.add_argument("--max_tokens", type=int, default=Options.max_tokens, help="leave longer documents out")
    parser.add_argument(
        "--on_error",
        choices=("stop", "skip"),
        default="stop",
        help="documents that cannot be used: stop, or count, report and leave out",
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    return parser


if __name__ == "__main__":
    sys.exit(main())
