"""From a document to token ids: bytes, a Hugging Face `tokenizer.json`, or ids that are there already.

A tokenizer is named by a string, the same in `data.prepare --tokenizer` and in the config's `data.tokenizer`:

    bytes                 ids 0..255 are the bytes of the UTF-8 text, 256 ends a document; vocabulary 257
    PATH/tokenizer.json   Hugging Face `tokenizers`; special tokens that a document spells out stay plain text
    ids:N                 documents are already integers 0..N-1
"""

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from etils import epath

from data.manifest import DataError

Document = str | bytes | np.ndarray

BYTES_END = 256
JSON_END = "<|endoftext|>"  # what Qwen's base models were trained to see between documents


class Tokenizer(Protocol):
    """vocab_size: ids are 0..vocab_size-1. end_of_document: the id appended to every document, None for none.

    fingerprint: equal for two tokenizers exactly if they give the same ids for every document.
    """

    vocab_size: int
    end_of_document: int | None
    fingerprint: str

    def encode(self, document: Document) -> np.ndarray:
        """Token ids of one document, int64 [n], the end of document not included. Raises ValueError."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...


def load(spec: str, end_of_document: str | None = None) -> Tokenizer:
    """The tokenizer that `spec` names.

    end_of_document: what closes a document: a token's text (tokenizer.json), an id (ids:N), "" for nothing, None for
    the tokenizer's own (256; <|endoftext|>; nothing).
    Raises DataError.
    """
    if spec == "bytes":
        if end_of_document:
            raise DataError(
                f"end_of_document={end_of_document!r}: the byte tokenizer's is the id {BYTES_END}; "
                "leave it out, or give '' for none"
            )
        return ByteTokenizer(None if end_of_document == "" else BYTES_END)
    if spec.startswith("ids:"):
        return IdTokenizer(spec, end_of_document or None)
    if spec.endswith(".json"):
        return JsonTokenizer(spec, JSON_END if end_of_document is None else end_of_document)
    raise DataError(f"tokenizer={spec!r}: expected 'bytes', 'ids:VOCABULARY_SIZE' or the path of a tokenizer.json")


def _fingerprint(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


class ByteTokenizer:
    vocab_size = 257

    def __init__(self, end_of_document: int | None) -> None:
        self.end_of_document = end_of_document
        self.fingerprint = _fingerprint("bytes", end_of_document)

    def encode(self, document: Document) -> np.ndarray:
        if isinstance(document, np.ndarray):
            raise ValueError("token ids where text was expected; prepare them with --tokenizer=ids:VOCABULARY_SIZE")
        text = document.encode() if isinstance(document, str) else document
        return np.frombuffer(text, np.uint8).astype(np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="replace")


class IdTokenizer:
    def __init__(self, spec: str, end_of_document: str | None) -> None:
        size = spec.removeprefix("ids:")
        if not size.isdecimal() or not 0 < int(size) <= 2**31:
            raise DataError(f"tokenizer={spec!r}: expected ids:N with the vocabulary size N, 1..2147483648")
        self.vocab_size = int(size)
        self.end_of_document = None
        if end_of_document is not None:
            if not end_of_document.isdecimal() or int(end_of_document) >= self.vocab_size:
                raise DataError(f"end_of_document={end_of_document!r}: expected an id below {self.vocab_size}")
            self.end_of_document = int(end_of_document)
        self.fingerprint = _fingerprint("ids", self.vocab_size, self.end_of_document)

    def encode(self, document: Document) -> np.ndarray:
        if not isinstance(document, np.ndarray) or not np.issubdtype(document.dtype, np.integer):
            raise ValueError("text where token ids were expected; name a tokenizer with --tokenizer")
        wrong = (document < 0) | (document >= self.vocab_size)
        if wrong.any():
            place = int(np.argmax(wrong))
            raise ValueError(
                f"token id {document[place]} at token {place} is outside the vocabulary of {self.vocab_size}"
            )
        return document.astype(np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(token) for token in ids)


class JsonTokenizer:
    def __init__(self, path: str, end_of_document: str) -> None:
        import tokenizers  # here: the byte tokenizer works where this is not installed, and starts faster

        try:
            definition = epath.Path(path).read_bytes()
            self._tokenizer = tokenizers.Tokenizer.from_buffer(definition)
        except Exception as error:  # tokenizers raises plain Exception
            raise DataError(f"tokenizer={path!r} cannot be loaded: {error}") from error
        # A document that contains the text of a special token must not be able to end itself.
        self._tokenizer.encode_special_tokens = True
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values()) + 1
        self.end_of_document = None
        if end_of_document:
            if end_of_document not in ids:
                raise DataError(
                    f"end_of_document={end_of_document!r} is not a token of {path!r}; name one that is, or '' for none"
                )
            self.end_of_document = ids[end_of_document]
        self.fingerprint = _fingerprint("json", hashlib.sha256(definition).hexdigest(), self.end_of_document)

    def encode(self, document: Document) -> np.ndarray:
        if isinstance(document, np.ndarray):
            raise ValueError("token ids where text was expected; prepare them with --tokenizer=ids:VOCABULARY_SIZE")
        text = document.decode() if isinstance(document, bytes) else document
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)
