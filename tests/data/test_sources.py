"""Every source: its documents, its fingerprint and its errors."""

import builtins
import json
import platform
import shutil
from pathlib import Path

import pytest

from meanbank.data.sources import Document, StdlibSource, open_source


def test_stdlib_lists_the_interpreters_own_source():
    source = open_source("stdlib")
    description = source.describe()
    assert description["python"] == platform.python_version()
    assert description["files"] > 100
    assert description["bytes"] > 1_000_000
    first = next(iter(source.documents()))
    assert first.name.endswith(".py")


def test_stdlib_leaves_out_packages_and_counts_undecodable_files(tmp_path: Path):
    for folder in ("site-packages", "dist-packages", "json/__pycache__"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "other.py").write_text("other = 1\n")
    (tmp_path / "json" / "decoder.py").write_bytes("é = 1\r\n".encode())
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    (tmp_path / "empty.py").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("no source")
    source = StdlibSource(tmp_path)
    assert list(source.documents()) == [Document("json/decoder.py", "é = 1\r\n")]
    description = source.describe()
    assert description["files"] == 1
    assert description["bytes"] == 8
    assert description["skipped_files"] == 1


def test_stdlib_without_source_files_says_what_to_do(tmp_path: Path):
    with pytest.raises(ValueError, match="files:GLOB"):
        StdlibSource(tmp_path)


def test_files_of_every_kind_in_sorted_order(tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow", reason="pip install 'meanbank[data]'")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "b.md").write_bytes(b"# b\r\n")
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "empty.txt").write_text("")
    lines = [json.dumps({"text": "one\u2028two"}), "", json.dumps({"text": "3", "id": 3})]
    (tmp_path / "c.jsonl").write_text("\n".join(lines) + "\n")
    parquet.write_table(
        pyarrow.table({"text": ["p0", None, "p2"], "n": [0, 1, 2]}), tmp_path / "d.parquet"
    )
    source = open_source(f"files:{tmp_path}/**/*.*")
    assert list(source.documents()) == [
        Document("a.txt", "a"),
        Document("c.jsonl:1", "one\u2028two"),
        Document("c.jsonl:3", "3"),
        Document("d.parquet:0", "p0"),
        Document("d.parquet:2", "p2"),
        Document("deep/er/b.md", "# b\r\n"),
    ]
    assert source.describe()["files"] == 5


def test_one_file_without_wildcard(tmp_path: Path):
    (tmp_path / "a.txt").write_text("a")
    assert list(open_source(f"files:{tmp_path}/a.txt").documents()) == [Document("a.txt", "a")]


def test_fingerprint_follows_content_and_not_place(corpus_folder: Path, tmp_path: Path):
    def fingerprint(folder: Path) -> str:
        return open_source(f"files:{folder}/*.txt").fingerprint()

    before = fingerprint(corpus_folder)
    copy = tmp_path / "copy"
    shutil.copytree(corpus_folder, copy)
    assert fingerprint(copy) == before
    (copy / "00.txt").write_text("changed")
    assert fingerprint(copy) != before
    (corpus_folder / "00.txt").rename(corpus_folder / "zz.txt")
    assert fingerprint(corpus_folder) != before


def test_stdlib_fingerprint_follows_content(tmp_path: Path):
    (tmp_path / "a.py").write_text("a = 1\n")
    before = StdlibSource(tmp_path).fingerprint()
    assert StdlibSource(tmp_path).fingerprint() == before
    (tmp_path / "a.py").write_text("a = 2\n")
    assert StdlibSource(tmp_path).fingerprint() != before


@pytest.mark.parametrize(
    ("spec", "nearest"),
    [("stdlb", "stdlib"), ("file:*.txt", "files:GLOB"), ("recal", "recall"), ("hf", "hf:NAME")],
)
def test_unknown_source_lists_the_choices_nearest_first(spec: str, nearest: str):
    with pytest.raises(ValueError, match=f"choose from {nearest}"):
        open_source(spec)


def test_recall_has_no_documents():
    with pytest.raises(ValueError, match="no documents"):
        open_source("recall")


@pytest.mark.parametrize("name", ["missing.txt", "*.rst"])
def test_no_match_is_a_one_line_error(tmp_path: Path, name: str):
    with pytest.raises(ValueError, match="no file matches") as caught:
        open_source(f"files:{tmp_path}/{name}")
    assert "\n" not in str(caught.value)


def test_a_folder_is_answered_with_a_glob(tmp_path: Path):
    with pytest.raises(ValueError, match=r"\*\*/\*\.txt"):
        open_source(f"files:{tmp_path}")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\xff\xfe", "not UTF-8"),
        ("a.jsonl", b'{"text": "\xff"}', "not UTF-8"),
        ("a.jsonl", b'{"text": "x"}\n{"text"', "line 2 is not JSON"),
        ("a.jsonl", b'{"body": "x"}', "no string under 'text'"),
        ("a.jsonl", b"[1]", "no string under 'text'"),
        ("a.jsonl", b'{"text": "\\ud800"}', "surrogate"),
    ],
)
def test_unreadable_files_name_the_place(tmp_path: Path, name: str, content: bytes, message: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        list(open_source(f"files:{tmp_path}/*").documents())
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_parquet_files(tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow", reason="pip install 'meanbank[data]'")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    with pytest.raises(ValueError, match="cannot read"):
        list(open_source(f"files:{tmp_path}/a.parquet").documents())
    parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match="no column 'text', only body"):
        list(open_source(f"files:{tmp_path}/b.parquet").documents())


@pytest.mark.parametrize("module", ["datasets", "pyarrow"])
def test_a_missing_extra_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
):
    import_module = builtins.__import__

    def refuse(name: str, *args, **kwargs):
        if name.partition(".")[0] == module:
            raise ImportError(name)
        return import_module(name, *args, **kwargs)

    monkeypatch.setattr("importlib.import_module", refuse)
    (tmp_path / "a.parquet").write_bytes(b"")
    spec = "hf:any" if module == "datasets" else f"files:{tmp_path}/*.parquet"
    with pytest.raises(ImportError, match=r"pip install 'meanbank\[data\]'"):
        list(open_source(spec).documents())


def test_hugging_face_data_set(monkeypatch: pytest.MonkeyPatch):
    datasets = pytest.importorskip("datasets", reason="pip install 'meanbank[data]'")
    rows = datasets.Dataset.from_dict({"text": ["a", "", "c"], "label": [0, 1, 2]})
    asked = []

    def load(name: str, *, split: str):
        asked.append((name, split))
        return rows

    monkeypatch.setattr(datasets, "load_dataset", load)
    source = open_source("hf:owner/name:test")
    assert list(source.documents()) == [Document("test:0", "a"), Document("test:2", "c")]
    assert source.fingerprint() == open_source("hf:owner/name:test").fingerprint()
    assert source.fingerprint() != open_source("hf:owner/name").fingerprint()
    assert asked == [("owner/name", "test"), ("owner/name", "test"), ("owner/name", "train")]
    assert source.describe()["rows"] == 3
    rows = rows.remove_columns("text")
    with pytest.raises(ValueError, match="no column 'text', only label"):
        open_source("hf:owner/name")


def test_hugging_face_failure_is_one_line(monkeypatch: pytest.MonkeyPatch):
    datasets = pytest.importorskip("datasets", reason="pip install 'meanbank[data]'")

    def fail(name: str, *, split: str):
        raise ConnectionError("no\nnetwork")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(ValueError, match="cannot load the data set 'x', split 'train': no network"):
        open_source("hf:x")
