"""Look into a prepared directory: python -m data.inspect DIR [--slice=N] [--processes=P] ...

    python -m data.inspect DIR                                           sources, counts, histogram of document lengths
    python -m data.inspect DIR --seq_len=1048576 --slice=0               what one slice is made of
    python -m data.inspect DIR --seq_len=4096 --slice=0 --text           its text, document borders marked
    python -m data.inspect DIR --seq_len=1048576 --slice=0 --processes=8 which process reads which records, and how much

The order is the training order of (--seed, --holdout, --weights, --whole_documents); give the run's values.
Exit status: 0, 1 a bug, 2 a directory or option that cannot be used.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence

import numpy as np

from app.cluster import layout
from app.config_flags import command_parser
from data import manifest as prepared
from data import slices, tokenizers
from data.manifest import DataError, Manifest
from data.stream import Stream, StreamOptions

_BAR = 40  # characters
_SHOWN_PIECES = 20
BORDER = "<<< {name} document {document}, token {offset} >>>"


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        for line in report(arguments):
            print(line)
    except DataError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def report(arguments: argparse.Namespace) -> Iterator[str]:
    """The lines to print. Raises DataError."""
    manifest = prepared.load(arguments.directory)
    if arguments.slice is None:
        yield from _contents(arguments.directory, manifest)
        return
    stream = Stream(
        StreamOptions(
            directory=arguments.directory,
            tokenizer=_own_tokenizer(arguments.directory, manifest),
            documents="separate",
            weights=arguments.weights,
            whole_documents=arguments.whole_documents,
            holdout=arguments.holdout,
            seq_len=arguments.seq_len,
            global_batch=1,
            seed=arguments.seed,
            split=arguments.split,
        )
    )
    if stream.num_steps is not None and not 0 <= arguments.slice < stream.num_steps:
        raise DataError(f"--slice={arguments.slice}: the {arguments.split} part has slices 0..{stream.num_steps - 1}")
    spans = stream.rows(arguments.slice, 0, 1)[0].clip(0, arguments.seq_len)
    yield from _composition(spans, manifest, arguments)
    if arguments.processes:
        yield from _reads(stream, arguments)
    if arguments.text:
        yield from _text(stream, spans, manifest)


def _own_tokenizer(directory: str, manifest: Manifest) -> str:
    spec = manifest.tokenizer.spec
    return f"{directory}/{spec}" if spec.endswith(".json") else spec


def _contents(directory: str, manifest: Manifest) -> Iterator[str]:
    entry = manifest.tokenizer
    yield (
        f"{directory}: fingerprint {manifest.fingerprint}, tokenizer {entry.spec} (vocabulary {entry.vocab_size}, "
        f"fingerprint {entry.fingerprint}), {manifest.token_dtype}, records of up to {manifest.record_tokens} tokens"
    )
    total = sum(source.tokens for source in manifest.sources)
    for source in manifest.sources:
        stored = sum(shard.bytes for shard in source.shards)
        yield (
            f"source {source.name}: {source.documents:,} documents, {source.tokens:,} tokens "
            f"({source.tokens / total:.1%}), {source.records:,} records in {len(source.shards)} shards, "
            f"{stored:,} bytes"
        )
        for reason, count in source.skipped.items():
            yield f"  left out: {count:,} {reason}"
        yield from _histogram(prepared.load_index(directory, source)["length"])


def _histogram(lengths: np.ndarray) -> Iterator[str]:
    """Documents and their share of the tokens by powers of two of the length."""
    power = np.frexp(lengths.astype(np.float64))[1]  # length in [2^(power - 1), 2^power)
    documents = np.bincount(power)
    tokens = np.bincount(power, weights=lengths)
    yield f"  {'tokens':>23}  {'documents':>11}  share of the tokens"
    for step in range(int(power.min()), len(documents)):
        share = tokens[step] / tokens.sum()
        between = f"{1 << step - 1:>11,}-{(1 << step) - 1:<11,}"
        yield f"  {between}  {documents[step]:>11,}  {share:>6.1%} {'#' * round(share * _BAR)}"


def _composition(spans: slices.Spans, manifest: Manifest, arguments: argparse.Namespace) -> Iterator[str]:
    tokens = int(spans.count.sum())
    yield (
        f"slice {arguments.slice} of the {arguments.split} part: {tokens:,} tokens of {arguments.seq_len:,}, "
        f"{len(spans.count):,} pieces of documents, the longest {spans.count.max():,} tokens, "
        f"the median {int(np.median(spans.count)):,}"
    )
    for number in np.unique(spans.source):
        mine = spans.count[spans.source == number]
        yield f"  source {manifest.sources[number].name}: {len(mine):,} pieces, {mine.sum() / tokens:.1%} of the tokens"
    for piece in range(min(len(spans.count), _SHOWN_PIECES)):
        source, document, offset, count, at = (int(field[piece]) for field in spans)
        begins = "" if not offset else f" from its token {offset:,}"
        yield f"  {at:>11,}: {manifest.sources[source].name} document {document}{begins}, {count:,} tokens"
    if len(spans.count) > _SHOWN_PIECES:
        yield f"  ... and {len(spans.count) - _SHOWN_PIECES:,} more"


def _reads(stream: Stream, arguments: argparse.Namespace) -> Iterator[str]:
    """What each of P processes with equal parts of the slice reads; it is read to be counted."""
    for process in range(arguments.processes):
        try:
            start, stop = layout.token_range(process, arguments.processes, arguments.seq_len)
        except ValueError as error:
            raise DataError(f"--processes={arguments.processes}: {error}") from None
        before = stream.reader.bytes_read
        stream.block(arguments.slice, (0, 1), (start, stop))
        places = stream.reader.places(stream.rows(arguments.slice, 0, 1)[0].clip(start, stop + 1))
        where = "; ".join(f"{shard} {_runs(numbers)}" for shard, numbers in places.items())
        yield (
            f"  process {process}: tokens {start:,}-{stop - 1:,}, {sum(map(len, places.values())):,} records, "
            f"{stream.reader.bytes_read - before:,} bytes ({where})"
        )


def _runs(numbers: list[int]) -> str:
    """[3, 4, 5, 9] as "3-5, 9"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][-1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


def _text(stream: Stream, spans: slices.Spans, manifest: Manifest) -> Iterator[str]:
    tokenizer = tokenizers.load(stream.options.tokenizer, manifest.tokenizer.end_of_document)
    tokens = np.split(stream.reader.read(spans), np.cumsum(spans.count)[:-1])
    for piece, ids in enumerate(tokens):
        name = manifest.sources[spans.source[piece]].name
        yield BORDER.format(name=name, document=spans.document[piece], offset=spans.offset[piece])
        yield tokenizer.decode(ids.tolist())


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("data.inspect", __doc__)
    parser.add_argument("directory")
    parser.add_argument("--slice", type=int, help="a slice number: what it is made of")
    parser.add_argument("--seq_len", type=int, default=1 << 20, help="tokens a slice")
    parser.add_argument("--split", choices=("train", "heldout"), default="train")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--holdout", type=float, default=0.02)
    parser.add_argument("--weights", default="")
    parser.add_argument("--whole_documents", action="store_true")
    parser.add_argument("--processes", type=int, default=0, help="show what each of so many processes reads")
    parser.add_argument("--text", action="store_true", help="decode the slice")
    return parser


if __name__ == "__main__":
    sys.exit(main())
