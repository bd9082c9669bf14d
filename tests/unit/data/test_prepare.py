import json
import os

import numpy as np
import pytest

from data import manifest as prepared_files
from data import prepare, sources
from data.manifest import DataError
from data.stream import Stream
from tests.unit.data.conftest import options


def write_texts(folder, texts):
    folder.mkdir(exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number:03d}.txt").write_text(text)
    return f"{folder}/*.txt"


def contents(directory):
    """Every file of a prepared directory, by name."""
    return {
        os.path.relpath(os.path.join(folder, file), directory): open(os.path.join(folder, file), "rb").read()
        for folder, _, files in os.walk(directory)
        for file in files
    }


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(prepare, "SHARD_BYTES", 30)


def test_the_result_is_a_function_of_the_inputs(tmp_path, small_shards):
    texts = write_texts(tmp_path / "in", ["some text " * (number % 4 + 1) for number in range(12)])
    made = [prepare.prepare(texts, tmp_path / name) for name in ("one", "two")]
    assert made[0] == made[1] and len(made[0].sources[0].shards) > 3
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_worker_processes_make_the_same(tmp_path):
    texts = write_texts(tmp_path / "in", [f"text {number} " * 9 for number in range(5)])
    lines = tmp_path / "in" / "a.jsonl"
    lines.write_text("".join(json.dumps({"text": f"line {number}"}) + "\n" for number in range(5)))
    inputs = [f"a={texts}", f"b={lines}"]
    alone = prepare.prepare(inputs, tmp_path / "alone")
    assert prepare.prepare(inputs, tmp_path / "workers", workers=2) == alone
    assert contents(tmp_path / "alone") == contents(tmp_path / "workers")


def test_a_killed_preparation_goes_on(tmp_path, monkeypatch, small_shards):
    """Whatever it was doing: what is finished is not made again, the result is the same to the byte."""
    texts = write_texts(tmp_path / "in", ["some text " * (number % 4 + 1) for number in range(12)])
    prepare.prepare(texts, tmp_path / "straight")
    made = []
    finished = prepared_files.write_atomic

    def dying(path, data):
        if path.suffix == ".json" and len(made) == 3:
            raise KeyboardInterrupt
        made.append(path.name)
        finished(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(prepared_files, "write_atomic", dying)
        with pytest.raises(KeyboardInterrupt):
            prepare.prepare(texts, tmp_path / "killed")
    assert not prepare.is_prepared(tmp_path / "killed")
    with pytest.raises(DataError, match="an unfinished preparation is there"):
        prepared_files.load(tmp_path / "killed")

    again = []
    make_shard = prepare.make_shard
    monkeypatch.setattr(
        prepare, "make_shard", lambda task, **options: (again.append(task), make_shard(task, **options))
    )
    prepare.prepare(texts, tmp_path / "killed")
    assert len(again) == len(prepared_files.load(tmp_path / "killed").sources[0].shards) - 2
    assert contents(tmp_path / "killed") == contents(tmp_path / "straight")


def test_an_unfinished_preparation_of_other_inputs_or_options_is_refused(tmp_path, monkeypatch):
    texts = write_texts(tmp_path / "in", ["a", "b"])
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "finish", lambda *_: None)
        prepare.prepare(texts, tmp_path / "out")
    with pytest.raises(DataError, match="unfinished preparation of other inputs"):
        prepare.prepare(texts, tmp_path / "out", min_tokens=2)
    (tmp_path / "in" / "000.txt").write_text("changed")
    with pytest.raises(DataError, match="unfinished preparation of other inputs"):
        prepare.prepare(texts, tmp_path / "out")


def test_an_output_in_use_is_refused(tmp_path):
    texts = write_texts(tmp_path / "in", ["a"])
    prepare.prepare(texts, tmp_path / "out")
    with pytest.raises(DataError, match="is prepared already"):
        prepare.prepare(texts, tmp_path / "out")
    with pytest.raises(DataError, match="is not empty and holds no preparation"):
        prepare.prepare(texts, tmp_path / "in")


def test_documents_that_cannot_be_used_stop_or_are_counted(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n{"text": 7}\n{"text": "also good"}\n{"text": "\\ud800"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: its text is int.*--on_error=skip"):
        prepare.prepare(f"{tmp_path}/a.jsonl", tmp_path / "stop")
    made = prepare.prepare(f"{tmp_path}/a.jsonl", tmp_path / "skip", skip_errors=True)
    assert (made.sources[0].documents, made.sources[0].skipped) == (2, {"unusable": 2})
    assert f"skipped {tmp_path}/a.jsonl:2: its text is int" in capsys.readouterr().err


def test_a_token_outside_the_vocabulary_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": [1, 2]}\n{"text": [3, 9]}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: token id 9 at token 1 is outside the vocabulary of 9"):
        prepare.prepare(f"{tmp_path}/a.jsonl", tmp_path / "out", tokenizer="ids:9")


def test_length_filters_count_what_they_leave_out(tmp_path):
    texts = write_texts(tmp_path / "in", ["a" * length for length in (1, 4, 5, 9, 10, 11)])
    made = prepare.prepare(texts, tmp_path / "out", min_tokens=6, max_tokens=11)
    assert made.sources[0].skipped == {"longer": 1, "shorter": 2}
    lengths = prepared_files.load_index(tmp_path / "out", made.sources[0])["length"]
    assert lengths.tolist() == [6, 10, 11]  # with the end of document
    with pytest.raises(DataError, match="expected 1 <= min <= max"):
        prepare.prepare(texts, tmp_path / "other", min_tokens=5, max_tokens=4)
    with pytest.raises(DataError, match="has no usable document"):
        prepare.prepare(texts, tmp_path / "none", min_tokens=100)


def test_end_of_document_handling(tmp_path):
    texts = write_texts(tmp_path / "in", ["abc"])
    for name, end, expected in (("with", None, [97, 98, 99, 256]), ("without", "", [97, 98, 99])):
        prepare.prepare(texts, tmp_path / name, end_of_document=end)
        stream = Stream(options(tmp_path / name, tokenizer="bytes", seq_len=len(expected), global_batch=1))
        assert stream.block(0, (0, 1), (0, len(expected)))["tokens"][0].tolist() == expected


def test_arrays_are_cut_at_the_id_that_ends_documents(tmp_path):
    np.save(tmp_path / "a.npy", np.array([5, 6, 0, 7, 0]))
    made = prepare.prepare(f"{tmp_path}/a.npy", tmp_path / "out", tokenizer="ids:70000", end_of_document="0")
    assert prepared_files.load_index(tmp_path / "out", made.sources[0])["length"].tolist() == [3, 2]
    assert made.token_dtype == "<u4"


def test_a_tokenizer_file_is_kept_with_the_data(tmp_path):
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "<|endoftext|>": 2}, unk_token="b"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    made = prepare.prepare(
        write_texts(tmp_path / "in", ["a b a"]), tmp_path / "out", tokenizer=str(tmp_path / "words.json")
    )
    assert (tmp_path / "out" / made.tokenizer.spec).read_bytes() == (tmp_path / "words.json").read_bytes()
    stream = Stream(options(tmp_path / "out", tokenizer=str(tmp_path / "words.json"), seq_len=4, global_batch=1))
    assert stream.block(0, (0, 1), (0, 4))["tokens"].tolist() == [[0, 1, 0, 2]]
    assert stream.vocab_size == 3


def test_the_command(tmp_path, capsys):
    texts = write_texts(tmp_path / "in", ["a", "bb"])
    command = [f"--output={tmp_path}/out", f"--input={texts}", "--workers=0"]
    assert prepare.main(command) == 0
    assert "main: 2 documents, 5 tokens in 1 shards" in capsys.readouterr().out
    assert prepare.main(command) == 2
    assert "is prepared already" in capsys.readouterr().err


def test_stdlib_makes_the_demo_corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "stdlib_files", lambda: [json.__file__, os.__file__])
    made = prepare.prepare("stdlib", tmp_path / "out")
    assert made.sources[0].documents == 2
    assert made.sources[0].tokens == os.path.getsize(json.__file__) + os.path.getsize(os.__file__) + 2
