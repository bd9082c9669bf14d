from pathlib import Path

import numpy as np
import pytest
import tokenizers as hf
from hypothesis import given
from hypothesis import strategies as st

from data import tokenizers
from data.manifest import DataError

END = "<|endoftext|>"


@pytest.fixture(scope="module")
def json_path(tmp_path_factory):
    """A byte-level BPE like the published one, trained on a few words."""
    made = hf.Tokenizer(hf.models.BPE())
    made.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = hf.decoders.ByteLevel()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[END, "<|im_end|>"],
        show_progress=False,
        initial_alphabet=hf.pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator(["the tokenizer of the test", "the end of the text"], trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return str(path)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_round_trip(text):
    tokenizer = tokenizers.load("bytes")
    assert tokenizer.encode(text).tolist() == list(text.encode())
    assert tokenizer.encode(text.encode()).tolist() == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text).tolist()) == text
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (257, 256)


def test_tokenizer_json(json_path):
    tokenizer = tokenizers.load(json_path)
    text = "the end of the tokenizer, ä."
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids.tolist()) == text
    assert ids.max() < tokenizer.vocab_size
    assert len(ids) < len(text.encode())
    assert tokenizer.end_of_document == hf.Tokenizer.from_file(json_path).token_to_id(END)
    assert tokenizers.load(json_path, "<|im_end|>").end_of_document != tokenizer.end_of_document
    assert tokenizers.load(json_path, "").end_of_document is None


def test_a_document_cannot_end_itself(json_path):
    tokenizer = tokenizers.load(json_path)
    ids = tokenizer.encode(f"the {END} text")
    assert tokenizer.end_of_document not in ids
    assert tokenizer.decode(ids.tolist()) == f"the {END} text"


def test_ids_are_checked_against_the_vocabulary():
    tokenizer = tokenizers.load("ids:10", "9")
    assert tokenizer.encode(np.array([0, 9], np.uint16)).tolist() == [0, 9]
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (10, 9)
    with pytest.raises(ValueError, match="token id 10 at token 1 is outside the vocabulary of 10"):
        tokenizer.encode(np.array([3, 10]))
    with pytest.raises(ValueError, match="token id -1 at token 0"):
        tokenizer.encode(np.array([-1]))


def test_text_and_ids_are_not_confused(json_path):
    for spec in ("bytes", json_path):
        with pytest.raises(ValueError, match="token ids where text was expected"):
            tokenizers.load(spec).encode(np.array([1]))
    with pytest.raises(ValueError, match="text where token ids were expected"):
        tokenizers.load("ids:5").encode("text")


def test_text_that_is_not_unicode_is_refused(json_path):
    with pytest.raises(ValueError, match="surrogates not allowed"):
        tokenizers.load("bytes").encode("\ud800")
    with pytest.raises(ValueError, match="utf-8"):
        tokenizers.load(json_path).encode(b"\xff\xfe")


def test_fingerprints_tell_tokenizers_apart(json_path, tmp_path):
    other = tmp_path / "tokenizer.json"
    other.write_text(Path(json_path).read_text().replace('"ignore_merges": false', '"ignore_merges": true'))
    found = [
        tokenizers.load(*spec).fingerprint
        for spec in (
            ("bytes",),
            ("bytes", ""),
            ("ids:257",),
            ("ids:258",),
            ("ids:258", "3"),
            (json_path,),
            (json_path, ""),
            (str(other),),
        )
    ]
    assert len(set(found)) == len(found)
    assert tokenizers.load(json_path).fingerprint == tokenizers.load(json_path, END).fingerprint


@pytest.mark.parametrize(
    ("spec", "end", "message"),
    [
        ("byte", None, "tokenizer='byte': expected 'bytes'"),
        ("bytes", "x", "leave it out, or give ''"),
        ("ids:", None, "expected ids:N"),
        ("ids:0", None, "expected ids:N"),
        ("ids:5", "5", "expected an id below 5"),
        ("nowhere/tokenizer.json", None, "cannot be loaded"),
    ],
)
def test_bad_names_are_refused(spec, end, message):
    with pytest.raises(DataError, match=message):
        tokenizers.load(spec, end)


def test_an_end_of_document_that_is_no_token_is_refused(json_path):
    with pytest.raises(DataError, match=r"end_of_document='<\|eos\|>' is not a token"):
        tokenizers.load(json_path, "<|eos|>")
