"""Small prepared directories of known documents."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from data import prepare
from data.stream import StreamOptions

VOCABULARY = 1000
Corpus = Mapping[str, Sequence[Sequence[int]]]  # source -> documents -> token ids
Prepare = Callable[..., Path]


def options(directory: Path, **changes: object) -> StreamOptions:
    made = StreamOptions(
        directory=str(directory),
        tokenizer=f"ids:{VOCABULARY}",
        documents="separate",
        weights="",
        whole_documents=False,
        holdout=0.0,
        seq_len=8,
        global_batch=2,
        seed=3,
        split="train",
    )
    return dataclasses.replace(made, **changes)


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepare:
    """prepared(corpus, record_tokens=4, files=1): a new directory that holds exactly these documents.

    files: how many files each source is cut into (uneven), one shard each.
    """

    def make(corpus: Corpus, record_tokens: int = 4, files: int = 1) -> Path:
        folder = tmp_path / f"corpus{len(list(tmp_path.iterdir()))}"
        monkeypatch.setattr(prepare, "RECORD_TOKENS", record_tokens)
        monkeypatch.setattr(prepare, "SHARD_BYTES", 1)  # every file a shard of its own
        inputs = []
        for name, documents in corpus.items():
            (folder / "in" / name).mkdir(parents=True)
            borders = [len(documents) * file * file // (files * files) for file in range(files + 1)]
            for file, (start, stop) in enumerate(itertools.pairwise(borders)):
                lines = [json.dumps({"text": list(document)}) for document in documents[start:stop]]
                if lines:
                    (folder / "in" / name / f"{file}.jsonl").write_text("".join(line + "\n" for line in lines))
            inputs.append(f"{name}={folder}/in/{name}/*.jsonl")
        prepare.prepare(inputs, folder / "out", tokenizer=f"ids:{VOCABULARY}")
        return folder / "out"

    return make
