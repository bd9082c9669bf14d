"""Token ids of any piece of any document of a prepared directory, each record checked when it is read."""

import concurrent.futures
import functools
import itertools
import os
import threading
import zlib
from collections.abc import Sequence

import numpy as np
from array_record.python import array_record_module
from etils import epath

from data.manifest import DataError, Manifest
from data.slices import Spans

CHECKSUM_BYTES = 4
_OPEN_SHARDS = 256
_THREADS = 32  # shards read at once: what hides the latency of an object store
_FILE_BUFFER_BYTES = 1 << 15


def encode_record(tokens: np.ndarray, shard: str, number: int) -> bytes:
    """A record: the tokens' bytes and a checksum bound to its place, so that a swapped shard is noticed.

    shard: the shard's path in the manifest; number: the record's within the shard.
    """
    payload = tokens.tobytes()
    return payload + _checksum(payload, shard, number).to_bytes(CHECKSUM_BYTES, "little")


def decode_record(record: bytes, shard: str, number: int, dtype: np.dtype) -> np.ndarray:
    """The tokens of a record. Raises ValueError if it is not the one that was written at that place."""
    payload = memoryview(record)[:-CHECKSUM_BYTES]
    if _checksum(payload, shard, number) != int.from_bytes(record[-CHECKSUM_BYTES:], "little"):
        raise ValueError("its checksum is wrong")
    return np.frombuffer(payload, dtype)


def _checksum(payload: bytes | memoryview, shard: str, number: int) -> int:
    return zlib.crc32(payload, (zlib.crc32(shard.encode()) + number) & 0xFFFFFFFF)


class TokenReader:
    """Reads pieces of documents. indexes: per source, INDEX_DTYPE [documents].

    Shards are opened when first needed; few stay open, for a large corpus has more of them than a process may have open
    files. bytes_read counts the records' bytes. Safe to use from several threads.
    """

    def __init__(self, directory: os.PathLike[str] | str, manifest: Manifest, indexes: Sequence[np.ndarray]) -> None:
        self._directory, self._indexes = epath.Path(directory), indexes
        self._dtype, self._record_tokens = np.dtype(manifest.token_dtype), manifest.record_tokens
        self._shards = [shard for source in manifest.sources for shard in source.shards]
        # Records are numbered over all sources, in the manifest's order.
        self._first_of_source = [0, *itertools.accumulate(source.records for source in manifest.sources)]
        self._first_of_shard = np.cumsum([0, *(shard.records for shard in self._shards)])
        self._open = functools.lru_cache(_OPEN_SHARDS)(self._open_shard)
        self._threads = concurrent.futures.ThreadPoolExecutor(_THREADS)
        self._lock = threading.Lock()
        self.bytes_read = 0

    def read(self, spans: Spans) -> np.ndarray:
        """The tokens of the pieces one after the other, int32. Reads each record that they touch once.

        Raises DataError naming the shard of a record that cannot be read or whose checksum is wrong.
        """
        skip, number, touched = self._touched(spans)
        records, which = np.unique(touched, return_inverse=True)
        shards, numbers = self._grouped(records)
        contents = list(itertools.chain.from_iterable(self._threads.map(self._read_shard, shards, numbers)))

        tokens = np.empty(int(spans.count.sum()), np.int32)
        written = 0
        which = iter(which.tolist())
        for begin, left, parts in zip(skip.tolist(), spans.count.tolist(), number.tolist(), strict=True):
            for _ in range(parts):
                part = contents[next(which)][begin : begin + left]
                tokens[written : written + len(part)] = part
                written += len(part)
                left -= len(part)
                begin = 0
        if written != len(tokens):
            raise DataError(f"{self._directory}: records are shorter than the index says; run python -m data.verify")
        return tokens

    def places(self, spans: Spans) -> dict[str, list[int]]:
        """The records that `read` would read: shard -> their numbers in it, in order."""
        shards, numbers = self._grouped(np.unique(self._touched(spans)[2]))
        return {self._shards[shard].path: inside for shard, inside in zip(shards, numbers, strict=True)}

    def _touched(self, spans: Spans) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(tokens of its first record before each piece, records of each piece, these records one after the other)."""
        first = np.empty(len(spans.count), np.int64)  # each piece's first record
        for source in np.unique(spans.source):
            mine = spans.source == source
            first[mine] = self._first_of_source[source] + self._indexes[source]["record"][spans.document[mine]]
        first += spans.offset // self._record_tokens
        skip = spans.offset % self._record_tokens
        number = -(-(skip + spans.count) // self._record_tokens)
        touched = np.repeat(first - (np.cumsum(number) - number), number) + np.arange(number.sum())
        return skip, number, touched

    def _grouped(self, records: np.ndarray) -> tuple[list[int], list[list[int]]]:
        """Sorted records as (shards, the numbers in each)."""
        owner = np.searchsorted(self._first_of_shard, records, side="right") - 1
        shards, starts = np.unique(owner, return_index=True)
        inside = np.split(records - self._first_of_shard[owner], starts[1:])
        return shards.tolist(), [numbers.tolist() for numbers in inside[: len(shards)]]

    def _open_shard(self, shard: int) -> array_record_module.ArrayRecordReader:
        path = os.fspath(self._directory / self._shards[shard].path)
        return array_record_module.ArrayRecordReader(
            path, "readahead_buffer_size:0", file_reader_buffer_size=_FILE_BUFFER_BYTES
        )

    def _read_shard(self, shard: int, numbers: list[int]) -> list[np.ndarray]:
        path = self._shards[shard].path
        try:
            contents = self._open(shard).read(numbers)
        except (RuntimeError, ValueError, IndexError) as error:  # the library's, which do not say where
            raise DataError(
                f"{self._directory / path}, record {self._culprit(shard, numbers)} cannot be read: {error}; "
                "run python -m data.verify"
            ) from error
        decoded = []
        for number, content in zip(numbers, contents, strict=True):
            try:
                decoded.append(decode_record(content, path, number, self._dtype))
            except ValueError as error:
                raise DataError(
                    f"{self._directory / path}, record {number} cannot be read: {error}; run python -m data.verify"
                ) from None
        with self._lock:
            self.bytes_read += sum(map(len, contents))
        return decoded

    def _culprit(self, shard: int, numbers: list[int]) -> str:
        """The first record that fails when read alone."""
        for number in numbers:
            try:
                self._open(shard).read([number])
            except (RuntimeError, ValueError, IndexError):
                return str(number)
        return f"{numbers[0]} to {numbers[-1]} (once, not again)"
