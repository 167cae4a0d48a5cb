"""Every reason for which an entry, a caption or a row is not used: its message, and a cure that follows its remedy.

Spec: docs/spec/stage2.md#inputs, docs/spec/stage2.md#caption-sources, docs/spec/stage2.md#metadata-files
"""

import csv
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from imagemill.domain.inputs import OLD_INPUTS, InputSettings
from imagemill.inputs import scan
from imagemill.inputs.metadata import json_document, parquet
from imagemill.inputs.survey import survey
from imagemill.store.ledger import IN_MEMORY, Ledger
from tests.helpers.product import PROJECT

NEW = InputSettings()


class Case(NamedTuple):
    """A folder with one fault.

    Attributes:
        files: path → content.
        item: the problem's item.
        reason: its reason code.
        message: part of its detail.
        remedy: part of its remedy.
        cure: does what the remedy says; returns the settings in force afterwards, if they are others.
        inputs: settings in force before.
    """

    files: Mapping[str, str | bytes]
    item: str
    reason: str
    message: str
    remedy: str
    cure: Callable[[Path], object]
    inputs: InputSettings = NEW


IMPORTS = {f"imagemill/inputs/{name}.py" for name in ("archives", "unpacking")}


def removed(path):
    return lambda folder: (folder / path).unlink()


def renamed(path, new):
    return lambda folder: os.rename(folder / path, folder / new)


def written(path, content):
    return lambda folder: put(folder, path, content)


def chosen(**settings):
    return lambda folder: InputSettings(**settings)


def put(folder, path, content):
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_bytes(content if isinstance(content, bytes) else content.encode())


def table(**columns):
    stream = io.BytesIO()
    pq.write_table(pa.table(columns), stream)
    return stream.getvalue()


IMAGE = {"a.jpg": b"x"}
ROWS = '{"file_name": "a.jpg", "text": "a"}\n'
UNREADABLE = {"captions.json": (
    ("not json", "it is not JSON", "repair it", '{"a.jpg": "a"}'),
    ("3", "it has neither captions by path nor rows with file_name and text", "see docs/how-to/captions.md", '{"a.jpg": "a"}'),
), "metadata.csv": (
    ("", "it is empty", "write a line of column names", "file_name,text\na.jpg,a\n"),
    ('file_name,text\na.jpg,"' + "x" * (1 << 20) + 'x"\n', "line 2: field larger", "write it as CSV",
     "file_name,text\na.jpg,x\n"),
    ("b,c\n1,2\n", "none of the columns", "name the column as captions.file_column", "file_name,text\na.jpg,a\n"),
    ("file_name,text\na.jpg,é\n".encode("cp1252"), "it is not text", "save it as UTF-8", "file_name,text\na.jpg,é\n"),
), "metadata.jsonl": (
    ("[]\n", "no line is a JSON object", "write one object per line", ROWS),
), "metadata.parquet": (
    (b"PAR1", "it is not Parquet", "repair it", table(file_name=["a.jpg"], text=["a"])),
)}  # fmt: skip

CASES = {
    "extension that is not read": Case(
        {"a.bmp": b"x"}, "a.bmp", "unsupported_type", "inputs.formats of this data root does not contain bmp",
        "add bmp to inputs.formats", chosen(), InputSettings(formats=("jpg",)),
    ),
    "no image": Case(
        {"a.psd": b"x"}, "a.psd", "unsupported_type", "not jpg, jpeg", "convert it", renamed("a.psd", "a.png"),
    ),
    "caption file with another extension": Case(
        {**IMAGE, "a.caption": "a"}, "a.caption", "unsupported_type", "captions.sidecars of this data root does not",
        "add caption to captions.sidecars", chosen(), OLD_INPUTS,
    ),
    "caption file in upper case in an old data root": Case(
        {**IMAGE, "a.TXT": "a"}, "a.TXT", "caption_extension", "captions are read from files that end in .txt, in lower case",
        "rename it to a.txt", renamed("a.TXT", "a.txt"), OLD_INPUTS,
    ),
    "both cases in an old data root": Case(
        {**IMAGE, "a.TXT": "a", "a.txt": "a"}, "a.TXT", "caption_extension", "in lower case", "remove it: a.txt is read",
        removed("a.TXT"), OLD_INPUTS,
    ),
    "id with a control character": Case(
        {"a\nb.jpg": b"x"}, "a\\nb.jpg", "bad_id", "the id", "rename the file", renamed("a\nb.jpg", "ab.jpg"),
    ),
    "caption of an image with such an id": Case(
        {"a\nb.txt": b"x", "ab.jpg": b"x"}, "a\\nb.txt", "bad_id", "the id", "rename the file", renamed("a\nb.txt", "ab.txt"),
    ),
    "metadata file in a folder with such a name": Case(
        {"a\nb/captions.json": b"{}"}, "a\\nb/captions.json", "bad_id", "the path", "rename the file or its folder",
        renamed("a\nb", "ab"),
    ),
    "two images with one id": Case(
        {"a.jpg": b"x", "a.png": b"x"}, "a.png", "id_collision", "the same id as a.jpg",
        "leave it out with inputs.exclude", chosen(exclude=("a.png",)),
    ),
    "caption without an image": Case(
        {"a.txt": "a"}, "a.txt", "orphan_caption", "a caption without an image", "add the image", written("a.jpg", b"x"),
    ),
    "caption of two images": Case(
        {"Ab.jpg": b"x", "aB.jpg": b"x", "ab.txt": "x"}, "ab.txt", "caption_collision", "it may be the caption of",
        "rename it to the exact name of its image", renamed("ab.txt", "aB.txt"),
    ),
    "two captions for one place": Case(
        {**IMAGE, "a.txt": "x", "A.txt": "x"}, "A.txt", "caption_collision", "a.txt is read as the caption of the same image",
        "remove it", removed("A.txt"),
    ),
    "two captions that match equally well": Case(
        {"ab.jpg": b"x", "Ab.txt": "x", "aB.txt": "x"}, "Ab.txt", "caption_collision", "so neither is read",
        "remove one of them", removed("Ab.txt"),
    ),
    "two metadata files": Case(
        {**IMAGE, "metadata.csv": "file_name,text\na.jpg,a\n", "captions.json": "{}"}, "captions.json", "two_metadata_files",
        "metadata.csv beside it may be meant as well, so neither is read", "remove one of them", removed("captions.json"),
    ),
    "metadata file while none is read": Case(
        {**IMAGE, "metadata.jsonl": ROWS}, "metadata.jsonl", "metadata_not_read", "captions.metadata of this data root is off",
        "set captions.metadata: auto", chosen(), InputSettings(metadata="off"),
    ),
    "metadata file beside the named one": Case(
        {**IMAGE, "metadata.jsonl": ROWS, "x.jsonl": ROWS}, "metadata.jsonl", "metadata_not_read",
        "captions.metadata names x.jsonl", "move it elsewhere", removed("metadata.jsonl"), InputSettings(metadata="x.jsonl"),
    ),
    "named metadata file of an unknown format": Case(
        {**IMAGE, "captions.tsv": "a"}, "captions.tsv", "bad_metadata", "its format is not known", "name a file .jsonl, .csv",
        lambda folder: (os.rename(folder / "captions.tsv", folder / "x.jsonl"), put(folder, "x.jsonl", ROWS),
                        InputSettings(metadata="x.jsonl"))[-1],
        InputSettings(metadata="captions.tsv"),
    ),
    "row that cannot be read": Case(
        {**IMAGE, "metadata.jsonl": ROWS + "x\n"}, "metadata.jsonl", "bad_row", "1 row that cannot be read (2: not JSON",
        "repair them", written("metadata.jsonl", ROWS),
    ),
    "row of another machine": Case(
        {**IMAGE, "metadata.jsonl": '{"file_name": "/x/a.jpg", "text": "a"}\n'}, "metadata.jsonl", "bad_path",
        "1 row with a path outside the folder of images (1: /x/a.jpg)", "set captions.strip_prefix", chosen(strip_prefix="/x"),
    ),
    "row without an image": Case(
        {**IMAGE, "metadata.jsonl": ROWS.replace("a.jpg", "b.jpg")}, "metadata.jsonl", "row_without_image",
        "1 row without an image (1: b.jpg)", "add the images", written("b.jpg", b"x"),
    ),
    "caption in an unknown encoding": Case(
        {**IMAGE, "a.txt": "é".encode("cp1252")}, "a", "bad_caption", "a.txt is not UTF-8",
        "name its encoding as captions.encoding", chosen(encoding="cp1252"),
    ),
    "caption with zero bytes": Case(
        {**IMAGE, "a.txt": b"a\0\0b"}, "a", "bad_caption", "zero bytes", "save the caption as UTF-8", written("a.txt", "a"),
    ),
    "folder with the name of a caption": Case(
        {**IMAGE, "a.txt/x.jpg": b"x"}, "a", "bad_caption", "a.txt is a folder", "rename or move the folder",
        lambda folder: shutil.move(folder / "a.txt", folder.parent / "moved"), InputSettings(recursive=False),
    ),
    "caption that is too long": Case(
        {**IMAGE, "a.txt": "x" * (1 << 20) + "x"}, "a", "caption_too_long", "a.txt is longer than", "write one line of text",
        written("a.txt", "a"),
    ),
    "labels": Case(
        {**IMAGE, "a.txt": "0 0.5 0.5 0.1 0.1\n"}, "a", "annotation_not_caption", "numbers as in YOLO's labels",
        "write a caption to it, or move the labels elsewhere", written("a.txt", "a"),
    ),
    "folder that is not read": Case(
        {**IMAGE, "b/c.jpg": b"x"}, "b", "sub_folder", "a folder below approved/ that contains images",
        "set inputs.recursive: true", chosen(), InputSettings(recursive=False),
    ),
    **{
        f"{name} {n}": Case({**IMAGE, name: content}, name, "bad_metadata", message, remedy, written(name, cured))
        for name, cases in UNREADABLE.items()
        for n, (content, message, remedy, cured) in enumerate(cases)
    },
}  # fmt: skip


def problems(folder, inputs):
    with Ledger(IN_MEMORY) as ledger:
        survey(folder, ledger, inputs=inputs)
        return {problem.item: problem for problem in ledger.problems()}


@pytest.mark.parametrize("name", CASES)
def test_remedy_cures_the_fault(name, tmp_path):
    case, folder = CASES[name], tmp_path / "approved"
    folder.mkdir()
    for path, content in case.files.items():
        put(folder, path, content)

    found = problems(folder, case.inputs)[case.item]
    assert found.reason == case.reason
    assert case.message in found.detail
    assert case.remedy in found.remedy

    cured = case.cure(folder)
    inputs = cured if isinstance(cured, InputSettings) else case.inputs
    assert case.item not in problems(folder, inputs)


def test_links_and_what_is_no_file(tmp_path):
    """Each is named with what to do, and its removal cures it."""
    folder = tmp_path / "approved"
    put(folder, "dog/a.jpg", b"x")
    (folder / "again").symlink_to("dog")
    (folder / "gone.jpg").symlink_to("nowhere")
    (folder / "loop.jpg").symlink_to("loop.jpg")
    os.mkfifo(folder / "pipe.jpg")
    own = tmp_path / "derived"
    own.mkdir()
    (folder / "up").symlink_to(own)
    expected = {
        "again": ("sub_folder", "a folder that is already read as dog", "remove the link to it"),
        "gone.jpg": ("not_a_file", "a broken symlink", "remove it, or restore the file"),
        "loop.jpg": ("not_a_file", "a symlink that leads back to itself", "remove it, or restore the file"),
        "pipe.jpg": ("not_a_file", "neither a file nor a link to one", "remove it, or restore the file"),
    }

    with Ledger(IN_MEMORY) as ledger:
        found = survey(folder, ledger, scan.scan_approved(folder, NEW, own=[own])).problems
    named = {p.item: (p.reason, p.detail, p.remedy) for p in found}
    up = named.pop("up")

    assert named == expected
    assert up[:2] == ("sub_folder", f"a folder that leads to {own}, which belongs to the data root")
    for name in ("again", "gone.jpg", "loop.jpg", "pipe.jpg", "up"):
        (folder / name).unlink()
    assert problems(folder, NEW) == {}


def test_large_json_document_is_refused(tmp_path, monkeypatch):
    put(tmp_path, "a.jpg", b"x")
    put(tmp_path, "captions.json", '{"a.jpg": "a"}')
    monkeypatch.setattr(json_document, "MAX_BYTES", 5)
    found = problems(tmp_path, NEW)["captions.json"]
    assert (found.reason, found.detail) == ("bad_metadata", "it is larger than 256 MiB")
    assert found.remedy == "write it as JSON Lines, one object per line"


def test_missing_library_is_named_with_the_extra(tmp_path, monkeypatch):
    put(tmp_path, "a.jpg", b"x")
    put(tmp_path, "metadata.parquet", table(file_name=["a.jpg"], text=["a"]))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    found = problems(tmp_path, NEW)["metadata.parquet"]
    assert found.detail == "pyarrow is not installed"
    assert "install imagemill[parquet]" in found.remedy
    monkeypatch.undo()
    assert problems(tmp_path, NEW) == {}
    assert parquet.SUFFIXES == (".parquet",)


def test_metadata_file_that_cannot_be_opened_fails(tmp_path, monkeypatch):
    put(tmp_path, "a.jpg", b"x")
    put(tmp_path, "captions.json", json.dumps({"a.jpg": "a"}))

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(json_document, "open_text", refuse)
    found = problems(tmp_path, NEW)["captions.json"]
    assert (found.outcome, found.reason) == ("failed", "read_error")
    assert (found.detail, found.remedy) == ("it cannot be read: Permission denied", "make it readable")
    monkeypatch.undo()
    assert problems(tmp_path, NEW) == {}


def test_every_reason_has_a_case():
    """Reason codes of the messages in `imagemill/inputs`, as docs/reference/messages.csv lists them.

    Those of `imagemill import` are in test_unpacking.py.
    """
    with open(PROJECT / "docs" / "reference" / "messages.csv", newline="", encoding="utf-8") as file:
        rows = [row for row in csv.reader(file) if row[0].startswith("imagemill/inputs/") and row[0] not in IMPORTS]
    reasons = {reason for row in rows for reason in row[3].split(" | ") if reason.isidentifier()}
    elsewhere = {"read_error", "not_a_file", "archive", "blank_caption"}
    assert reasons - elsewhere <= {case.reason for case in CASES.values()}
