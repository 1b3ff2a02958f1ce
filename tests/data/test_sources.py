"""Every source: its documents, its fingerprint and its errors."""

import builtins
import json
import platform
import shutil
from pathlib import Path

import pytest

from meanbank.data import sources
from meanbank.data.readers import Document
from meanbank.data.sources import StdlibSource, anchored_spec, open_source


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


def write_rows(path: Path, **columns: list) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pip install 'meanbank[data]'")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(columns), path)


def test_a_data_set_is_read_as_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    datasets = pytest.importorskip("datasets", reason="pip install 'meanbank[data]'")
    monkeypatch.setattr(datasets, "load_dataset", None)  # nothing is loaded whole
    folder = tmp_path / "set"
    folder.mkdir()
    write_rows(folder / "train-00000.parquet", text=["a", "", None], label=[0, 1, 2])
    write_rows(folder / "train-00001.parquet", text=["d"], label=[3])
    write_rows(folder / "test-00000.parquet", text=["t"], label=[0])
    source = open_source(f"hf:{folder}")
    assert list(source.documents()) == [Document("train:0", "a"), Document("train:3", "d")]
    assert list(open_source(f"hf:{folder}:test").documents()) == [Document("test:0", "t")]
    assert source.describe()["source"] == f"hf:{folder}:train"
    assert source.fingerprint() == open_source(f"hf:{folder}").fingerprint()
    assert source.fingerprint() != open_source(f"hf:{folder}:test").fingerprint()
    write_rows(folder / "train-00001.parquet", text=["other"], label=[3])
    assert source.fingerprint() != open_source(f"hf:{folder}").fingerprint()
    with pytest.raises(ValueError, match=r"cannot load the data set .*nothing"):
        open_source(f"hf:{folder}:nothing")


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_data_set_without_text_names_its_columns(tmp_path: Path, kind: str):
    pytest.importorskip("datasets", reason="pip install 'meanbank[data]'")
    if kind == "parquet":
        write_rows(tmp_path / "a.parquet", label=[1])
    else:
        (tmp_path / "a.jsonl").write_text('{"label": 1}\n')
    with pytest.raises(ValueError, match="no column 'text', only label"):
        list(open_source(f"hf:{tmp_path}").documents())


class FakeBuilder:
    """A data set of the hub whose text breaks off after the first row."""

    hash = "0123"

    def as_streaming_dataset(self, split: str) -> "FakeBuilder":
        return self

    column_names = None

    def __iter__(self):
        yield {"text": "a"}
        raise OSError("connection\nlost")


def test_a_data_set_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch):
    datasets = pytest.importorskip("datasets", reason="pip install 'meanbank[data]'")

    def fail(name: str):
        raise ConnectionError("no\nnetwork")

    monkeypatch.setattr(datasets, "load_dataset_builder", fail)
    with pytest.raises(ValueError, match="cannot load the data set 'x', split 'train': no network"):
        open_source("hf:x")
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda name: FakeBuilder())
    reached = open_source("hf:x")
    documents = reached.documents()
    assert next(documents) == Document("train:0", "a")
    with pytest.raises(ValueError, match=r"cannot be read after row 1, .*: connection lost"):
        next(documents)
    monkeypatch.setattr(datasets, "load_dataset_builder", fail)
    known = open_source("hf:x")  # as it was
    assert known.fingerprint() == reached.fingerprint()
    assert known.describe() == reached.describe()
    with pytest.raises(ValueError, match="cannot be reached"):
        next(known.documents())


def test_large_files_are_read_once_for_their_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "a.txt"
    file.write_text("some text")
    small = open_source(f"files:{file}").fingerprint()
    monkeypatch.setattr(sources, "LARGE_FILE", 1)
    assert open_source(f"files:{file}").fingerprint() == small
    read = sources._read_digest
    monkeypatch.setattr(sources, "_read_digest", None)
    assert open_source(f"files:{file}").fingerprint() == small
    monkeypatch.setattr(sources, "_read_digest", read)
    file.write_text("other text")
    assert open_source(f"files:{file}").fingerprint() != small


def test_sources_are_named_from_a_folder_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "local").mkdir()
    monkeypatch.setenv("HOME", "/srv/somebody")
    for spec, anchored in (
        ("stdlib", "stdlib"),
        ("files:a/*.txt", f"files:{tmp_path}/a/*.txt"),
        ("files:/b/*.txt", "files:/b/*.txt"),
        ("files:~/*.txt", "files:/srv/somebody/*.txt"),
        ("hf:owner/name:test", "hf:owner/name:test"),
        ("hf:local:test", f"hf:{tmp_path}/local:test"),
    ):
        assert anchored_spec(spec, tmp_path) == anchored


def test_files_in_a_folder_whose_name_looks_like_a_pattern(tmp_path: Path):
    folder = tmp_path / "a[1] *"
    (folder / "texts").mkdir(parents=True)
    (folder / "texts" / "one.txt").write_text("one")
    spec = anchored_spec("files:texts/*.txt", folder)
    source = open_source(spec)
    assert [document.text for document in source.documents()] == ["one"]
    (tmp_path / "plain" / "texts").mkdir(parents=True)
    (tmp_path / "plain" / "texts" / "one.txt").write_text("one")
    plain = open_source(anchored_spec("files:texts/*.txt", tmp_path / "plain"))
    assert source.fingerprint() == plain.fingerprint()  # names begin below the pattern's folder


TEXTS = {  # what a column may hold, and what becomes of it
    "bytes": ([b"h\xc3\xa4llo\n", None], ["h\u00e4llo\n"]),
    "other bytes": ([b"\xff"], "not UTF-8 text"),
    "lists": ([["a", "b"]], "no text under 'text', but list"),
    "numbers": ([1.5], "no text under 'text', but float"),
}


@pytest.mark.parametrize("kind", ["files", "hf"])
@pytest.mark.parametrize("column", TEXTS)
def test_columns_of_text_that_is_none(tmp_path: Path, kind: str, column: str):
    rows, wanted = TEXTS[column]
    if kind == "hf":
        pytest.importorskip("datasets", reason="pip install 'meanbank[data]'")
    (tmp_path / "set").mkdir()
    write_rows(tmp_path / "set" / "train-0.parquet", text=rows)
    place = f"files:{tmp_path}/set/*.parquet" if kind == "files" else f"hf:{tmp_path}/set"
    if isinstance(wanted, list):
        assert [document.text for document in open_source(place).documents()] == wanted
        return
    with pytest.raises(ValueError, match=wanted) as caught:
        list(open_source(place).documents())
    assert "\n" not in str(caught.value)
