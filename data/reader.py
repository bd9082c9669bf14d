"""Token ids of any piece of any document of a prepared directory, each record checked when it is read."""

import bisect
import itertools
import os
import threading
import zlib
from collections.abc import Sequence

import numpy as np
from array_record.python.array_record_data_source import ArrayRecordDataSource
from etils import epath

from data.manifest import DataError, Manifest
from data.slices import Spans

CHECKSUM_BYTES = 4


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
    """Reads pieces of documents. indexes: per source, INDEX_DTYPE [documents]. Shards are opened when first needed.

    bytes_read counts the records' bytes; safe to use from several threads.
    """

    def __init__(self, directory: os.PathLike[str] | str, manifest: Manifest, indexes: Sequence[np.ndarray]) -> None:
        self._directory, self._indexes = epath.Path(directory), indexes
        self._dtype, self._record_tokens = np.dtype(manifest.token_dtype), manifest.record_tokens
        self._shards = [shard for source in manifest.sources for shard in source.shards]
        self._records = ArrayRecordDataSource([
            f"{self._directory / shard.path}[0:{shard.records}]" for shard in self._shards])
        # Records are numbered over all sources, in the manifest's order.
        self._first_of_source = [0, *itertools.accumulate(source.records for source in manifest.sources)]
        self._first_of_shard = [0, *itertools.accumulate(shard.records for shard in self._shards)]
        self._lock = threading.Lock()
        self.bytes_read = 0

    def read(self, spans: Spans) -> np.ndarray:
        """The tokens of the pieces one after the other, int32. Reads each record that they touch once.

        Raises DataError naming the shard of a record that cannot be read or whose checksum is wrong.
        """
        skip, number, touched = self._touched(spans)
        records, which = np.unique(touched, return_inverse=True)
        contents = self._decoded(records)

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
        found: dict[str, list[int]] = {}
        for record in np.unique(self._touched(spans)[2]).tolist():
            shard, number = self._place(record)
            found.setdefault(shard, []).append(number)
        return found

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

    def _decoded(self, records: np.ndarray) -> list[np.ndarray]:
        if not len(records):
            return []
        try:
            contents = self._records.__getitems__(records.tolist())
        except Exception as error:  # the library raises bare RuntimeError and ValueError that do not name the file
            raise DataError(f"{self._culprit(records)} cannot be read: {error}; run python -m data.verify") from error
        with self._lock:
            self.bytes_read += sum(map(len, contents))
        decoded = []
        for record, content in zip(records.tolist(), contents, strict=True):
            shard, number = self._place(record)
            try:
                decoded.append(decode_record(content, shard, number, self._dtype))
            except ValueError as error:
                raise DataError(f"{self._directory / shard}, record {number}: {error}; run python -m data.verify"
                                ) from None
        return decoded

    def _place(self, record: int) -> tuple[str, int]:
        """(shard, number within it) of a record."""
        shard = bisect.bisect_right(self._first_of_shard, record) - 1
        return self._shards[shard].path, record - self._first_of_shard[shard]

    def _culprit(self, records: np.ndarray) -> str:
        """The place of the first record that fails when read alone."""
        for record in records.tolist():
            try:
                self._records[record]
            except Exception:  # as in _decoded
                shard, number = self._place(record)
                return f"{self._directory / shard}, record {number}"
        return f"{self._directory} (once; not again)"
