"""A prepared directory as training batches: any token range of any row of any step, wherever it is asked for."""

import dataclasses
import os
from collections.abc import Mapping
from fractions import Fraction
from typing import Literal

import numpy as np

from app.config import DataConfig
from data import manifest as prepared
from data import packing, slices, tokenizers
from data.manifest import DataError
from data.reader import TokenReader

Split = Literal["train", "heldout"]
HASH_RANGE = 1 << 32


@dataclasses.dataclass(frozen=True)
class StreamOptions:
    """What a stream is made of; workers make their own from it. Shapes: rows of seq_len tokens, global_batch a step."""

    directory: str
    tokenizer: str
    documents: str
    weights: str
    whole_documents: bool
    holdout: float
    seq_len: int
    global_batch: int
    seed: int
    split: Split


class Stream:
    """Batches by step number. Step s, row b is slice s * global_batch + b: its seq_len tokens and one of look-ahead.

    The training split has no end (epoch follows epoch); the held-out split holds every held-out token once, in corpus
    order, its last rows padded. total: tokens in the split, None where it has no end.
    Raises DataError if the directory is damaged or was prepared with another tokenizer.
    """

    def __init__(self, options: StreamOptions) -> None:
        self.options = options
        self.manifest = prepared.load(options.directory)
        check_tokenizer(self.manifest, options)
        if options.documents not in ("separate", "joined"):
            raise DataError(f"data.documents={options.documents!r}: expected 'separate' or 'joined'")
        indexes = [prepared.load_index(options.directory, source) for source in self.manifest.sources]
        self.reader = TokenReader(options.directory, self.manifest, indexes)
        order = make_order(self.manifest, indexes, options)
        packed = options.whole_documents and options.split == "train"
        make_slices = packing.WholeDocumentSlices if packed else slices.ContiguousSlices
        self._slices = make_slices(order, options.seq_len)
        self.total = order.total
        self.vocab_size = self.manifest.tokenizer.vocab_size
        self.fingerprint = self.manifest.fingerprint

    def __reduce__(self):
        # A worker process opens the files itself: mapped indexes must not travel through a pipe.
        return Stream, (self.options,)

    @property
    def num_steps(self) -> int | None:
        """Batches in the split; None for training, which has no end."""
        if self.total is None:
            return None
        return -(-self.total // (self.options.seq_len * self.options.global_batch))

    def rows(self, step: int, first: int, stop: int) -> list[slices.Spans]:
        """What rows [first, stop) are made of: for each the pieces of its seq_len tokens and of the look-ahead one."""
        before = step * self.options.global_batch
        return self._slices.slices(before + first, before + stop)

    def block(self, step: int, rows: tuple[int, int], columns: tuple[int, int]) -> dict[str, np.ndarray]:
        """The fields of rows [rows[0], rows[1]) and tokens [columns[0], columns[1]) of a step's batch.

        Reads the records of these tokens and of one of look-ahead a row, each once, and nothing else. Every field is
        [rows, tokens], int32 but loss_mask, bool: tokens, targets, segment_ids, positions, stream_index, loss_mask.
        Where there is no target (padding, the last token of the held-out part) it is 0 and does not count.
        """
        start, stop = columns
        made = self.rows(step, *rows)
        parts = [spans.clip(start, stop + 1) for spans in made]
        read = self.reader.read(slices.Spans(*(np.concatenate(field) for field in zip(*parts, strict=True))))
        seen = np.zeros((len(made), stop + 1 - start), np.int32)
        ends = np.cumsum([part.count.sum() for part in parts])
        for row, tokens in zip(seen, np.split(read, ends[:-1]), strict=True):
            row[: len(tokens)] = tokens
        separate = self.options.documents == "separate"
        placed = [slices.place(spans, start, stop, separate=separate) for spans in made]
        fields = {name: np.stack([getattr(row, name) for row in placed]) for name in slices.Placement._fields}
        return {"tokens": seen[:, :-1], "targets": seen[:, 1:]} | fields


def open_stream(
    data: DataConfig,
    directory: os.PathLike[str] | str,
    *,
    seq_len: int,
    global_batch: int,
    seed: int,
    split: Split = "train",
) -> Stream:
    """The stream of a prepared directory under the config's `data` section. Raises DataError."""
    return Stream(
        StreamOptions(
            directory=os.fspath(directory),
            tokenizer=data.tokenizer,
            documents=data.documents,
            weights=data.weights,
            whole_documents=data.whole_documents,
            holdout=data.holdout,
            seq_len=seq_len,
            global_batch=global_batch,
            seed=seed,
            split=split,
        )
    )


def check_tokenizer(manifest: prepared.Manifest, options: StreamOptions) -> None:
    """Refuse data that was prepared with another tokenizer than the config's."""
    entry = manifest.tokenizer
    wanted = tokenizers.load(options.tokenizer, entry.end_of_document)
    if wanted.fingerprint != entry.fingerprint:
        raise DataError(
            f"{options.directory} was prepared with tokenizer {entry.spec!r} (fingerprint "
            f"{entry.fingerprint}), data.tokenizer={options.tokenizer!r} has {wanted.fingerprint}: name the "
            "same tokenizer or prepare the data again"
        )


def make_order(manifest: prepared.Manifest, indexes: list[np.ndarray], options: StreamOptions) -> slices.Order:
    """The order of the split's documents. Raises DataError if it has none."""
    border = round(Fraction(options.holdout) * HASH_RANGE)
    hashes = (border, HASH_RANGE) if options.split == "train" else (0, border)
    selections = [slices.Selection(index["length"], index["hash"], *hashes) for index in indexes]
    tokens = {source.name: chosen.tokens for source, chosen in zip(manifest.sources, selections, strict=True)}
    if not sum(tokens.values()):
        total = sum(len(index) for index in indexes)
        raise DataError(
            f"data.holdout={options.holdout} leaves none of the {total} documents of {options.directory} in the "
            f"{options.split} part; change it or prepare more documents"
        )
    if options.split == "heldout":
        return slices.CorpusOrder(selections)
    shares = token_shares(options.weights, tokens)
    chosen = [number for number, source in enumerate(manifest.sources) if shares.get(source.name)]
    return slices.MixedOrder(
        [slices.SourceOrder(selections[number], number, options.seed) for number in chosen],
        [shares[manifest.sources[number].name] for number in chosen],
    )


def token_shares(weights: str, tokens: Mapping[str, int]) -> dict[str, float]:
    """Each source's share of the training tokens; they add up to 1.

    weights: "NAME=WEIGHT,...", every source named; "": as many as it has, so that all epochs end together.
    tokens: what each source has. Raises DataError.
    """
    if not weights:
        given = {name: float(count) for name, count in tokens.items()}
    else:
        given = {}
        for item in weights.split(","):
            name, _, number = item.partition("=")
            try:
                given[name] = float(number)
            except ValueError:
                raise DataError(f"data.weights={weights!r}: {item!r} is not NAME=WEIGHT") from None
        if set(given) != set(tokens) or len(given) != weights.count("="):
            raise DataError(f"data.weights={weights!r} must name each source once; the data has {', '.join(tokens)}")
        for name, weight in given.items():
            if not 0 <= weight < float("inf"):
                raise DataError(f"data.weights={weights!r}: the weight of {name} must be 0 or more")
            if weight and not tokens[name]:
                raise DataError(f"data.weights={weights!r}: source {name} has no training tokens; give it weight 0")
    total = sum(given.values())
    if not total:
        raise DataError(f"data.weights={weights!r}: at least one weight must be above 0")
    return {name: weight / total for name, weight in given.items()}
