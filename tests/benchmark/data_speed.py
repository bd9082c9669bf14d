"""Figures of the input pipeline: python -m tests.benchmark.data_speed DIR   (about a minute; DIR is made and kept)

Opening and seeking in a corpus of a million documents; bytes that one of eight processes reads of a 1,048,576-token
slice; loader throughput on such slices against plain grain over the same files, and the process's memory.
"""

import itertools
import resource
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import grain
import numpy as np

from app.cluster import layout
from data import manifest, pipeline, prepare
from data.stream import Stream, StreamOptions

TOKENS = 1 << 20
RANKS = 8
DOCUMENTS = 1_000_000
FAR_STEP = 10_000_000
SECONDS = 10.0


def options(directory: Path, tokenizer: str = "bytes") -> StreamOptions:
    return StreamOptions(
        directory=str(directory),
        tokenizer=tokenizer,
        documents="separate",
        weights="",
        whole_documents=False,
        holdout=0.02,
        seq_len=TOKENS,
        global_batch=1,
        seed=0,
        split="train",
    )


def prepared(folder: Path) -> tuple[Path, Path]:
    """(the standard library's sources, a million documents of 2 to 99 tokens), prepared on the first call."""
    text, many = folder / "stdlib", folder / "million"
    if not prepare.is_prepared(text):
        prepare.prepare("stdlib", text)
    if not prepare.is_prepared(many):
        rng = np.random.default_rng(0)
        lengths = rng.integers(2, 100, DOCUMENTS)
        tokens = rng.integers(1, 50_000, lengths.sum(), dtype=np.uint16)
        tokens[np.cumsum(lengths) - 1] = 0
        folder.mkdir(exist_ok=True)
        np.save(folder / "million.npy", tokens)
        prepare.prepare(f"{folder}/million.npy", many, tokenizer="ids:50000", end_of_document="0")
    return text, many


def report_seek(directory: Path) -> None:
    part = layout.token_range(3, RANKS, TOKENS)
    for step in range(FAR_STEP, FAR_STEP + 3):
        times = [time.perf_counter()]
        stream = Stream(options(directory, "ids:50000"))
        times.append(time.perf_counter())
        stream.rows(step, 0, 1)
        times.append(time.perf_counter())
        stream.block(step, (0, 1), part)
        times.append(time.perf_counter())
        opening, seeking, reading = np.diff(times)
        print(
            f"{stream.manifest.sources[0].documents:,} documents: open {opening:.3f} s, seek to step {step:,} "
            f"{seeking * 1e3:.1f} ms, then an eighth of its slice {reading * 1e3:.0f} ms"
        )


def report_bytes(directory: Path) -> None:
    stream = Stream(options(directory))
    size = np.dtype(stream.manifest.token_dtype).itemsize
    record = stream.manifest.record_tokens * size
    worst = 0
    for step, rank in itertools.product(range(10), range(RANKS)):
        before = stream.reader.bytes_read
        stream.block(step, (0, 1), layout.token_range(rank, RANKS, TOKENS))
        worst = max(worst, stream.reader.bytes_read - before)
    part = TOKENS // RANKS * size
    print(
        f"one of {RANKS} processes reads at most {worst:,} bytes of a slice of {TOKENS * size:,}: its part "
        f"{part:,} and {(worst - part) / record:.2f} records of {record:,}"
    )


def rate(tokens: Iterable[int]) -> float:
    """Tokens a second over SECONDS, the first element (start-up) not counted."""
    walk = iter(tokens)
    next(walk)
    started, seen = time.perf_counter(), 0
    while time.perf_counter() - started < SECONDS:
        seen += next(walk)
    return seen / (time.perf_counter() - started)


def report_throughput(directory: Path) -> None:
    stream = Stream(options(directory))
    entry = manifest.load(directory)
    paths = [f"{directory / shard.path}[0:{shard.records}]" for source in entry.sources for shard in source.shards]
    dtype = np.dtype(entry.token_dtype)
    for workers in (0, 2):
        records = grain.MapDataset.source(grain.sources.ArrayRecordDataSource(paths)).repeat()
        plain = records.map(lambda record: np.frombuffer(record[:-4], dtype).astype(np.int32)).to_iter_dataset()
        if workers:
            plain = plain.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
        load = pipeline.HostLoader(stream, (pipeline.Block((0, 1), (0, TOKENS)),), 1)
        ours = rate(fields["tokens"][0].size for fields in pipeline.read_ahead(load, 0, 1 << 40, workers, 2))
        theirs = rate(len(tokens) for tokens in plain)
        here, children = (
            resource.getrusage(who).ru_maxrss / 1e6 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        )
        print(
            f"{workers} workers: {ours / 1e6:.1f} million tokens/s, plain grain {theirs / 1e6:.1f}: ratio "
            f"{ours / theirs:.2f}; memory {here:.2f} GB, the largest worker {children:.2f} GB"
        )


def main() -> None:
    folder = Path(sys.argv[1])
    text, many = prepared(folder)
    report_bytes(text)
    report_seek(many)
    report_throughput(text)


if __name__ == "__main__":
    main()
