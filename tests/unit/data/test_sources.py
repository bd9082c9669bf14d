import gzip
import json
import sysconfig
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data import sources
from data.manifest import DataError


def refuse(place, reason):
    raise ValueError(f"{place}: {reason}")


DEFAULT = sources.ReadOptions()


def read(patterns, options=DEFAULT, reject=refuse):
    return [
        document
        for part in sources.parts(patterns, options)
        for _, document in sources.documents(part, options, reject)
    ]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# ---- patterns --------------------------------------------------------------------------------------------------------


def test_a_list_a_comma_list_and_a_glob_name_the_same_sorted_files(tmp_path):
    for name in ("b.txt", "a.txt", "c.txt"):
        (tmp_path / name).write_text(name)
    ways = [
        sources.parse(f"{tmp_path}/*.txt"),
        sources.parse(f"{tmp_path}/c.txt,{tmp_path}/a.txt,{tmp_path}/b.txt"),
        sources.parse([f"{tmp_path}/[bc].txt", f"{tmp_path}/a.txt", f"{tmp_path}/b*"]),
    ]
    for found in ways:
        assert read(found["main"]) == [b"a.txt", b"b.txt", b"c.txt"]


def test_sources_are_named_before_the_equals_sign():
    assert sources.parse(["web=a,b", "code=c", "d", "web=e"]) == {"web": ["a", "b", "e"], "code": ["c"], "main": ["d"]}


def test_a_source_cannot_have_the_name_of_what_is_unfinished():
    with pytest.raises(DataError, match="cannot be called 'partial'"):
        sources.parse("partial=a.txt")


@pytest.mark.parametrize("inputs", ["", "web=", ",", []])
def test_an_input_without_pattern_is_refused(inputs):
    with pytest.raises(DataError, match=r"expected \[NAME=\]PATTERN"):
        sources.parse(inputs)


def test_a_pattern_without_match_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(DataError, match=r"'.*/\*\.jsonl' matches no file"):
        sources.parts([f"{tmp_path}/a.txt", f"{tmp_path}/*.jsonl"], sources.ReadOptions())
    with pytest.raises(DataError, match="it is a folder"):
        sources.parts([str(tmp_path)], sources.ReadOptions())


def test_folders_are_searched_with_two_stars(tmp_path):
    (tmp_path / "x" / "y").mkdir(parents=True)
    (tmp_path / "x" / "y" / "a.txt").write_text("deep")
    assert read([f"{tmp_path}/**/*.txt"]) == [b"deep"]


# ---- the standard library --------------------------------------------------------------------------------------------


def test_stdlib_is_its_own_sources_without_tests():
    files = sources.stdlib_files()
    assert files == sources.stdlib_files() and len(files) > 300
    inside = [Path(file).relative_to(sysconfig.get_path("stdlib")) for file in files]
    assert Path("os.py") in inside and Path("json/decoder.py") in inside
    assert inside == sorted(inside, key=Path.as_posix)
    assert not {"test", "tests", "site-packages", "idle_test"} & {part for path in inside for part in path.parts}


# ---- text and JSON lines ---------------------------------------------------------------------------------------------


def test_an_empty_text_file_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ValueError, match=r"a\.txt: the file is empty"):
        read([f"{tmp_path}/a.txt"])


lines = st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12), min_size=1, max_size=12)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines, st.integers(1, 40), st.booleans())
def test_parts_of_a_jsonl_file_have_each_line_once(tmp_path, monkeypatch, texts, part_bytes, newline_at_end):
    path = tmp_path / "a.jsonl"
    write_lines(path, [{"text": text} for text in texts])
    if not newline_at_end:
        path.write_bytes(path.read_bytes().rstrip(b"\n"))
    monkeypatch.setattr(sources, "PART_BYTES", part_bytes)
    assert read([str(path)]) == texts


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "Expecting property name"),
        ('{"body": "x"}', r"no field 'text' \(--text_field\): it has body"),
        ("[1]", "no field 'text'.*it is no object"),
        ('{"text": 5}', "its text is int, expected a string"),
        ('{"text": ""}', "its text is empty"),
        ('{"text": [1, 2.5]}', "its list has dtype float64"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path, monkeypatch, line, reason):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "one"}}\n\n{{"text": "three"}}\n{line}\n{{"text": "five"}}\n')
    monkeypatch.setattr(sources, "PART_BYTES", 20)
    with pytest.raises(ValueError, match=rf"a\.jsonl:4: .*{reason}"):
        read([str(path)])
    bad = []
    assert read([str(path)], reject=lambda place, reason: bad.append(place)) == ["one", "three", "five"]
    assert bad == [f"{path}:4"]


def test_compressed_files(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "one"}\n{"text": 2}\n{"text": "three"}'))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"whole"))
    bad = []
    assert read([f"{tmp_path}/*"], reject=lambda place, reason: bad.append(place)) == ["one", "three", b"whole"]
    assert bad == [f"{tmp_path}/a.jsonl.gz:2"]


def test_an_empty_jsonl_file_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"a\.jsonl: the file is empty"):
        read([f"{tmp_path}/a.jsonl"])


def test_another_field_and_lists_of_ids(tmp_path):
    write_lines(tmp_path / "a.jsonl", [{"ids": [3, 1]}, {"ids": "text"}])
    found = read([f"{tmp_path}/a.jsonl"], sources.ReadOptions(text_field="ids"))
    assert found[0].tolist() == [3, 1] and found[1] == "text"


# ---- Parquet ---------------------------------------------------------------------------------------------------------


def test_parquet_rows_in_order_over_row_groups(tmp_path):
    texts = [f"row {row}" for row in range(10)]
    table = pyarrow.table({"text": texts, "other": list(range(10)), "ids": [[row, 7] for row in range(10)]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=4)
    assert len(sources.parts([f"{tmp_path}/a.parquet"], sources.ReadOptions())) == 3
    assert read([f"{tmp_path}/a.parquet"]) == texts
    assert read([f"{tmp_path}/a.parquet"], sources.ReadOptions(text_field="ids"))[9].tolist() == [9, 7]


def test_bad_parquet_is_named(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None, "c"]}), tmp_path / "a.parquet", row_group_size=2)
    with pytest.raises(ValueError, match=r"a\.parquet, row 1: its text is NoneType"):
        read([f"{tmp_path}/a.parquet"])
    with pytest.raises(DataError, match=r"a\.parquet has no column 'body' \(--text_field\); it has text"):
        read([f"{tmp_path}/a.parquet"], sources.ReadOptions(text_field="body"))
    (tmp_path / "b.parquet").write_text("not parquet at all")
    with pytest.raises(DataError, match=r"b\.parquet cannot be read as Parquet"):
        read([f"{tmp_path}/b.parquet"])


@pytest.mark.parametrize(("where", "checksums"), [(slice(4, 60), False), (slice(400, 401), True)])
def test_a_damaged_parquet_column_is_named(tmp_path, where, checksums):
    path = tmp_path / "a.parquet"
    texts = [f"{row} " + "x" * row for row in range(200)]
    pyarrow.parquet.write_table(
        pyarrow.table({"text": texts}), path, compression="zstd", use_dictionary=False, write_page_checksum=checksums
    )
    content = bytearray(path.read_bytes())
    content[where] = bytes(byte ^ 0xFF for byte in content[where])
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.parquet, row 0 .*column 'text' cannot be read"):
        read([str(path)])


# ---- arrays ----------------------------------------------------------------------------------------------------------


def test_arrays_of_ids(tmp_path, monkeypatch):
    np.save(tmp_path / "rows.npy", np.arange(12, dtype=np.uint16).reshape(4, 3))
    monkeypatch.setattr(sources, "PART_BYTES", 12)
    assert len(sources.parts([f"{tmp_path}/rows.npy"], sources.ReadOptions())) == 2
    assert [row.tolist() for row in read([f"{tmp_path}/rows.npy"])] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    np.save(tmp_path / "flat.npy", np.array([1, 2, 0, 3, 0, 4, 5], np.int64))
    assert [row.tolist() for row in read([f"{tmp_path}/flat.npy"])] == [[1, 2, 0, 3, 0, 4, 5]]
    cut = read([f"{tmp_path}/flat.npy"], sources.ReadOptions(end_of_document=0))
    assert [row.tolist() for row in cut] == [[1, 2], [3], [4, 5]]


def test_bad_arrays_are_named(tmp_path):
    np.save(tmp_path / "real.npy", np.zeros(3))
    with pytest.raises(DataError, match=r"real\.npy has dtype float64"):
        read([f"{tmp_path}/real.npy"])
    (tmp_path / "b.npy").write_text("no array")
    with pytest.raises(DataError, match=r"b\.npy cannot be read as a \.npy array"):
        read([f"{tmp_path}/b.npy"])
    np.save(tmp_path / "gap.npy", np.array([0, 1, 0, 0, 2]))
    bad = []
    found = read([f"{tmp_path}/gap.npy"], sources.ReadOptions(end_of_document=0), lambda *error: bad.append(error))
    assert [row.tolist() for row in found] == [[1], [2]] and len(bad) == 2


# ---- TensorFlow datasets ---------------------------------------------------------------------------------------------


def test_a_tensorflow_dataset(tmp_path):
    import tensorflow_datasets as tfds

    class Tiny(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
            return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

        def _split_generators(self, manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            yield from ((number, {"text": f"example {number}"}) for number in range(5))

    Tiny(data_dir=tmp_path, file_format="array_record").download_and_prepare()
    options = sources.ReadOptions(tfds_directory=str(tmp_path))
    assert read(["tfds:tiny/train"], options) == [f"example {number}".encode() for number in range(5)]
    assert len(read(["tfds:tiny/train[1:3]"], options)) == 2
    with pytest.raises(DataError, match=r"example 0 has no feature 'body' \(--text_field\); it has text"):
        read(["tfds:tiny/train"], sources.ReadOptions("body", None, str(tmp_path)))
    with pytest.raises(DataError, match=r"'tfds:tiny/test' cannot be opened in .* Unknown split"):
        read(["tfds:tiny/test"], options)
    with pytest.raises(DataError, match="expected tfds:NAME/SPLIT"):
        read(["tfds:tiny"], options)
