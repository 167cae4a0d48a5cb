"""Captions in metadata files: which image a row belongs to, which source precedes, what is read again.

Spec: docs/spec/stage2.md#metadata-files, docs/spec/stage2.md#caption-sources
"""

import csv
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from imagemill.domain.inputs import InputSettings, distinct_captions
from imagemill.errors import MissingInput
from imagemill.inputs import row_captions
from imagemill.inputs.metadata import jsonl
from imagemill.inputs.metadata.rows import format_of, formats
from imagemill.inputs.survey import survey
from imagemill.store.ledger import FROM_METADATA, FROM_RECORD, FROM_SIDECAR, IN_MEMORY, Ledger


@pytest.fixture
def ledger():
    with Ledger(IN_MEMORY) as ledger:
        yield ledger


@pytest.fixture
def folder(tmp_path):
    return tmp_path


def put(folder, *paths):
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(b"x")


def write(folder, path, *rows):
    """Write a metadata file in the format of its name."""
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    if path.endswith(".jsonl"):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.endswith(".json"):
        file.write_text(json.dumps(list(rows)))
    elif path.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(list(rows)), file)
    else:
        with open(file, "w", newline="") as stream:
            writer = csv.DictWriter(stream, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


def row(path, text):
    return {"file_name": path, "text": text}


def texts(folder, ledger, **settings):
    survey(folder, ledger, inputs=InputSettings(**settings))
    return {i: list(caption.all_texts) for i, caption in ledger.captions().items()}


def problems(ledger):
    return {(problem.item, problem.reason) for problem in ledger.problems()}


def detail(ledger, item):
    (problem,) = (problem for problem in ledger.problems() if problem.item == item)
    return f"{problem.detail}; {problem.remedy}"


# ---- formats


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv", "metadata.parquet", "captions.json"])
def test_rows_of_every_format_are_captions(folder, ledger, name):
    put(folder, "a.jpg", "dog/b.png")
    write(folder, name, row("a.jpg", " a \n dog"), row("dog/b.png", "b"))

    assert texts(folder, ledger) == {"a": ["a dog"], "dog%2Fb": ["b"]}
    assert problems(ledger) == set()


def test_every_format_is_found_by_its_module():
    names = {name for each in formats() for name in each.FILE_NAMES}
    assert names == {"metadata.jsonl", "metadata.csv", "metadata.parquet", "captions.json"}
    assert format_of("X.JSONL") is jsonl
    assert format_of("x.txt") is None


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"a.jpg": "a"}, ["a"]),
        ({"a.jpg": ["a", " b", "a"]}, ["a", "b"]),
        ({"a.jpg": {"caption": "a", "tags": "1dog, grass"}}, ["a, 1dog, grass"]),
        ({"a": {"tags": "1dog"}}, ["1dog"]),
        ([row("a.jpg", ["a", "b"])], ["a", "b"]),
        ([row("a.jpg", "a"), row("a.jpg", "b"), row("a.jpg", "a")], ["a", "b"]),
    ],
)
def test_documents_of_trainers(folder, ledger, document, expected):
    put(folder, "a.jpg")
    (folder / "captions.json").write_text(json.dumps(document))
    assert texts(folder, ledger) == {"a": expected}


@pytest.mark.parametrize("caption", [3, ["a", 3], {"a": "b"}, True])
def test_caption_with_tags_that_is_no_text_is_a_bad_row(folder, ledger, caption):
    (folder / "captions.json").write_text(json.dumps({"a.jpg": {"caption": caption, "tags": "1dog"}, "b.jpg": "b"}))
    survey(folder, ledger)
    (problem,) = [each for each in ledger.problems() if each.reason == "bad_row"]
    assert "caption of a.jpg is neither text nor a list of texts" in problem.detail


def test_tags_count_only_in_documents_by_path(folder, ledger):
    put(folder, "a.jpg")
    write(folder, "metadata.jsonl", {**row("a.jpg", "a"), "tags": "1dog"})
    assert texts(folder, ledger) == {"a": ["a"]}


def test_first_known_column_is_used_unless_a_setting_names_one(folder, ledger):
    put(folder, "a.jpg")
    write(folder, "metadata.csv", {"key": "z.jpg", "image": "a.jpg", "prompt": "p", "caption": "c", "note": "n"})
    assert texts(folder, ledger) == {"a": ["c"]}
    assert texts(folder, ledger, text_column="note") == {"a": ["n"]}

    assert texts(folder, ledger, text_column="none") == {"a": ["n"]}
    assert "no column none; it has caption, image, key, note, prompt" in detail(ledger, "metadata.csv")
    assert problems(ledger) == {("metadata.csv", "bad_metadata")}


def test_file_without_known_columns_lists_those_present(folder, ledger):
    put(folder, "a.jpg")
    write(folder, "metadata.csv", {"picture": "a.jpg", "note": "x"})
    assert texts(folder, ledger) == {}
    assert "it has note, picture; name the column as captions.file_column in imagemill.yaml" in detail(
        ledger, "metadata.csv"
    )


# ---- matching of paths


@pytest.mark.parametrize(
    ("path", "image"),
    [
        ("a.jpg", "dog/a.jpg"),
        ("./a.jpg", "dog/a.jpg"),
        ("a", "dog/a.jpg"),
        ("A.JPG", "dog/a.jpg"),
        ("dog/a.jpg", "dog/a.jpg"),
        ("dog\\a.jpg", "dog/a.jpg"),
        ("e\u0301.png", "dog/é.png"),
    ],
)
def test_path_of_a_row_is_relative_to_its_file_or_to_the_folder_of_images(folder, ledger, path, image):
    put(folder, image)
    write(folder, "dog/metadata.jsonl", row(path, "text"))
    assert list(texts(folder, ledger).values()) == [["text"]]


def test_absolute_paths_are_resolved_below_the_folder(folder, ledger):
    put(folder, "dog/a.jpg", "b.jpg", "c.jpg")
    paths = [str(folder / "dog/a.jpg"), "/elsewhere/train/b.jpg", "C:\\train\\c.jpg", "../c.jpg"]
    write(folder, "metadata.jsonl", *(row(path, "text") for path in paths))

    assert list(texts(folder, ledger)) == ["dog%2Fa"]
    assert problems(ledger) == {("metadata.jsonl", "bad_path")}
    found = detail(ledger, "metadata.jsonl")
    assert "3 rows with a path outside the folder of images (2: /elsewhere/train/b.jpg; 3: C:" in found
    assert "set captions.strip_prefix in imagemill.yaml" in found

    assert set(texts(folder, ledger, strip_prefix="/elsewhere/train")) == {"dog%2Fa", "b"}
    assert set(texts(folder, ledger, strip_prefix="C:\\train\\")) == {"dog%2Fa", "c", "b"}


def test_rows_without_an_image_are_counted_with_the_first_three(folder, ledger):
    put(folder, "a.jpg", "Bx.jpg", "bX.jpg", "x.png", "x.jpg")
    write(folder, "metadata.jsonl", *(row(f"{n}.jpg", "t") for n in range(5)), row("bx.jpg", "t"), row("x.jpg", "t"))

    assert texts(folder, ledger) == {}
    assert ("metadata.jsonl", "row_without_image") in problems(ledger)
    found = detail(ledger, "metadata.jsonl")
    assert "6 rows without an image (1: 0.jpg; 2: 1.jpg; 3: 2.jpg)" in found, "x.jpg is an image, though refused"


def test_bad_rows_are_counted_and_the_others_are_used(folder, ledger):
    put(folder, "a.jpg")
    lines = [
        '{"file_name": "a.jpg", "text": "a"}',
        "no json",
        "[1]",
        "",
        '{"file_name": 3}',
        '{"file_name": "a.jpg", "text": 7}',
    ]
    (folder / "metadata.jsonl").write_text("\n".join(lines))

    assert texts(folder, ledger) == {"a": ["a"]}
    assert problems(ledger) == {("metadata.jsonl", "bad_row")}
    assert "4 rows that cannot be read (2: not JSON" in detail(ledger, "metadata.jsonl")


# ---- order of sources


def test_caption_file_precedes_the_nearest_metadata_file(folder, ledger):
    put(folder, "a.jpg", "b.jpg", "dog/c.jpg", "dog/deep/d.jpg")
    (folder / "a.txt").write_text("of the file")
    write(folder, "metadata.jsonl", row("a.jpg", "other"), row("b.jpg", "b"), row("dog/c.jpg", "far"))
    write(folder, "dog/metadata.csv", row("c.jpg", "near"), row("deep/d.jpg", "d"))

    assert texts(folder, ledger) == {"a": ["of the file"], "b": ["b"], "dog%2Fc": ["near"], "dog%2Fdeep%2Fd": ["d"]}
    assert {i for i, each in ledger.captions().items() if each.conflict} == {"a"}
    assert ledger.conflicts() == 1


def test_equal_text_of_a_lower_source_is_no_conflict(folder, ledger):
    put(folder, "a.jpg")
    (folder / "a.txt").write_text("a  dog")
    write(folder, "metadata.jsonl", row("a.jpg", "a dog"))
    texts(folder, ledger)
    assert ledger.conflicts() == 0


def test_named_file_precedes_caption_files(folder, ledger):
    put(folder, "a.jpg", "b.jpg")
    (folder / "a.txt").write_text("of the file")
    (folder / "b.txt").write_text("b")
    write(folder, "x/all.csv", row("a.jpg", "of the row"))

    assert texts(folder, ledger, metadata="x/all.csv") == {"a": ["of the row"], "b": ["b"]}
    assert ledger.conflicts() == 1
    assert texts(folder, ledger, metadata=str(folder / "x/all.csv")) == {"a": ["of the row"], "b": ["b"]}
    assert texts(folder, ledger, metadata="off")["a"] == ["of the file"]


def test_named_file_outside_the_folder(folder, ledger, tmp_path_factory):
    put(folder, "a.jpg")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    write(elsewhere, "all.jsonl", row("a.jpg", "a"))

    assert texts(folder, ledger, metadata=str(elsewhere / "all.jsonl")) == {"a": ["a"]}
    (elsewhere / "all.jsonl").unlink()
    with pytest.raises(MissingInput, match=r"captions\.metadata"):
        texts(folder, ledger, metadata=str(elsewhere / "all.jsonl"))


def test_of_two_kinds_in_one_folder_neither_is_read(folder, ledger):
    put(folder, "a.jpg")
    write(folder, "metadata.csv", row("a.jpg", "csv"))
    write(folder, "captions.json", row("a.jpg", "json"))

    assert texts(folder, ledger) == {}
    assert problems(ledger) == {("metadata.csv", "two_metadata_files"), ("captions.json", "two_metadata_files")}
    assert texts(folder, ledger, metadata="metadata.csv") == {"a": ["csv"]}
    assert problems(ledger) == {("captions.json", "metadata_not_read")}


def test_no_row_takes_the_place_of_a_caption_file_that_cannot_be_used(folder, ledger):
    put(folder, "a.jpg", "b.jpg")
    (folder / "a.txt").write_text("0 0.5 0.5 0.1 0.2")
    (folder / "b.txt").write_text("  \n")
    write(folder, "metadata.jsonl", row("a.jpg", "a"), row("b.jpg", "b"))

    assert texts(folder, ledger) == {"b": ["b"]}
    assert problems(ledger) == {("a", "annotation_not_caption")}


def test_row_takes_the_place_of_a_caption_file_that_was_blanked(folder, ledger):
    put(folder, "a.jpg")
    (folder / "a.txt").write_text("of the file")
    write(folder, "metadata.jsonl", row("a.jpg", "of the row"))
    texts(folder, ledger)

    (folder / "a.txt").write_text("")

    assert texts(folder, ledger) == {"a": ["of the row"]}
    assert problems(ledger) == set()


def test_caption_whose_row_is_gone_stays_as_that_of_a_record(folder, ledger):
    put(folder, "a.jpg", "b.jpg")
    write(folder, "metadata.jsonl", row("a.jpg", "a"), row("b.jpg", "b"))
    texts(folder, ledger)

    write(folder, "metadata.jsonl", row("a.jpg", "a"))
    assert texts(folder, ledger) == {"a": ["a"], "b": ["b"]}
    assert {i: each.origin for i, each in ledger.captions().items()} == {"a": FROM_METADATA, "b": FROM_RECORD}

    (folder / "metadata.jsonl").unlink()
    assert texts(folder, ledger) == {"a": ["a"], "b": ["b"]}
    assert {each.origin for each in ledger.captions().values()} == {FROM_RECORD}


def test_caption_file_that_comes_later_replaces_the_row(folder, ledger):
    put(folder, "a.jpg")
    write(folder, "metadata.jsonl", row("a.jpg", "a"))
    texts(folder, ledger)

    (folder / "a.txt").write_text("of the file")

    assert texts(folder, ledger) == {"a": ["of the file"]}
    assert ledger.captions()["a"].origin == FROM_SIDECAR
    (folder / "a.txt").unlink()
    assert texts(folder, ledger) == {"a": ["a"]}


# ---- what is read again


@pytest.fixture
def reads(monkeypatch):
    """Paths of metadata files that are read."""
    found = []

    def read_rows(path, columns, encoding):
        found.append(path.name)
        return original(path, columns, encoding)

    original = jsonl.read_rows
    monkeypatch.setattr(jsonl, "read_rows", read_rows)
    return found


def test_unchanged_file_is_not_read_again(folder, ledger, reads):
    put(folder, "a.jpg", "b.jpg")
    write(folder, "metadata.jsonl", row("a.jpg", "a"))
    texts(folder, ledger)
    texts(folder, ledger)
    assert len(reads) == 1

    put(folder, "c.jpg")
    texts(folder, ledger)
    assert len(reads) == 2, "a new image may have a row"
    put(folder, "b.txt")
    texts(folder, ledger)
    texts(folder, ledger)
    assert len(reads) == 3, "an image has a caption file now"


def test_problem_of_an_unchanged_file_stays(folder, ledger, reads):
    put(folder, "a.jpg")
    write(folder, "metadata.jsonl", row("gone.jpg", "a"))
    texts(folder, ledger)
    texts(folder, ledger)
    assert len(reads) == 1
    assert problems(ledger) == {("metadata.jsonl", "row_without_image")}


def test_only_the_caption_of_an_edited_row_changes(folder, ledger):
    put(folder, *(f"{n}.jpg" for n in range(5)))
    rows = [row(f"{n}.jpg", f"text {n}") for n in range(5)]
    write(folder, "metadata.jsonl", *rows)
    texts(folder, ledger)
    ledger.record_masks((i, each.fingerprint, [1, 0], False) for i, each in ledger.captions().items())

    write(folder, "metadata.jsonl", *rows[:3], row("3.jpg", "edited"), rows[4])
    texts(folder, ledger)

    assert [i for i, each in ledger.captions().items() if each.mask is None] == ["3"]


def test_file_that_becomes_unreadable_keeps_its_captions(folder, ledger):
    put(folder, "a.jpg")
    write(folder, "metadata.jsonl", row("a.jpg", "a"))
    texts(folder, ledger)

    (folder / "metadata.jsonl").write_bytes(b"\0\0\0")

    assert texts(folder, ledger) == {"a": ["a"]}
    assert ledger.captions()["a"].origin == FROM_METADATA
    assert problems(ledger) == {("metadata.jsonl", "bad_metadata")}


def test_rows_are_written_in_parts(folder, ledger, monkeypatch):
    monkeypatch.setattr(row_captions, "_CHUNK", 2)
    put(folder, *(f"{n}.jpg" for n in range(5)))
    write(folder, "metadata.jsonl", *(row(f"{n}.jpg", f"{n}") for n in (0, 1, 2, 3, 4, 0)), row("0.jpg", "again"))
    assert texts(folder, ledger) == {"0": ["0", "again"], **{str(n): [str(n)] for n in range(1, 5)}}


def test_captions_are_kept_once_with_their_white_space_normalised():
    assert distinct_captions(["a\n b", "a b", " ", "c"]) == ("a b", "c")
