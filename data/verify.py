"""Read a whole prepared directory and check it: python -m data.verify DIR

Checks every file against its checksum, every record against its own, every document's length against the index and
every token id against the vocabulary. Names all faults. Exit status: 0 sound, 1 a bug, 2 damaged.
"""

import os
import sys
from collections.abc import Iterator, Sequence

import numpy as np
from array_record.python import array_record_module
from etils import epath
from tqdm import tqdm

from app.config_flags import command_parser
from data import manifest as prepared
from data.manifest import DataError, Manifest, ShardEntry, SourceEntry
from data.reader import decode_record

_RECORDS_AT_ONCE = 256


def faults(directory: os.PathLike[str] | str) -> Iterator[str]:
    """A line for every fault found, in the order of the manifest."""
    directory = epath.Path(directory)
    try:
        manifest = prepared.load(directory)
    except DataError as error:
        yield str(error)
        return
    for source in manifest.sources:
        try:
            index = prepared.load_index(directory, source)
        except DataError as error:
            yield str(error)
            continue
        yield from _index_faults(source, index, manifest.record_tokens)
        documents = 0
        for shard in tqdm(source.shards, desc=source.name, unit="shard", disable=None):
            lengths = index["length"][documents : documents + shard.documents].astype(np.int64)
            documents += shard.documents
            yield from _shard_faults(directory, shard, lengths, manifest)


def _index_faults(source: SourceEntry, index: np.ndarray, record_tokens: int) -> Iterator[str]:
    lengths = index["length"].astype(np.int64)
    records = -(-lengths // record_tokens)
    found = (len(index), int(lengths.sum()), int(records.sum()))
    if found != (source.documents, source.tokens, source.records):
        yield (
            f"{source.index.path} counts {found} documents, tokens and records, the manifest "
            f"{(source.documents, source.tokens, source.records)}"
        )
    if not np.array_equal(index["record"], np.cumsum(records) - records):
        yield f"{source.index.path}: its record numbers do not follow from its lengths"


def _shard_faults(directory: epath.Path, shard: ShardEntry, lengths: np.ndarray, manifest: Manifest) -> Iterator[str]:
    """lengths: of the shard's documents, int64."""
    path = directory / shard.path
    if prepared.sha256(path) != shard.sha256:
        yield f"{path}: its checksum is not the manifest's"
    records = -(-lengths // manifest.record_tokens)
    expected = np.full(int(records.sum()), manifest.record_tokens, np.int64)
    expected[np.cumsum(records) - 1] = lengths - (records - 1) * manifest.record_tokens
    reader = array_record_module.ArrayRecordReader(os.fspath(path), "readahead_buffer_size:0")
    try:
        if reader.num_records() != len(expected):
            yield f"{path} has {reader.num_records()} records, the index asks for {len(expected)}"
            return
        for start in range(0, len(expected), _RECORDS_AT_ONCE):
            for number in range(start, min(start + _RECORDS_AT_ONCE, len(expected))):
                try:
                    tokens = decode_record(reader.read([number])[0], shard.path, number, np.dtype(manifest.token_dtype))
                except (RuntimeError, ValueError) as error:
                    yield f"{path}, record {number}: {error}"
                    continue
                if len(tokens) != expected[number]:
                    yield f"{path}, record {number} has {len(tokens)} tokens, the index asks for {expected[number]}"
                elif tokens.max() >= manifest.tokenizer.vocab_size:
                    yield (
                        f"{path}, record {number} has token id {tokens.max()}, the vocabulary is "
                        f"{manifest.tokenizer.vocab_size}"
                    )
    finally:
        reader.close()


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser("data.verify", __doc__)
    parser.add_argument("directory")
    arguments = parser.parse_args(argv)
    count = 0
    for fault in faults(arguments.directory):
        print(fault)
        count += 1
    if count:
        print(f"{arguments.directory} is damaged: {count} faults")
        return 2
    tokens = sum(source.tokens for source in prepared.load(arguments.directory).sources)
    print(f"{arguments.directory} is sound: {tokens:,} tokens read")
    return 0


if __name__ == "__main__":
    sys.exit(main())
