"""A table of approved images gives back what it was given."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from imagemill.domain.ids import image_id_of
from imagemill.formats.jsonl import Span, SpanTable
from imagemill.fs.fingerprints import FileSignature, posix_signature
from imagemill.fs.listing import FileListing
from imagemill.inputs.sources import SourceFile, SourceTable

_PART = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), min_size=1, max_size=8)
_PATH = st.lists(_PART, min_size=1, max_size=3).map("/".join)
_SIGNATURE = st.text("posix:0123456789", max_size=40).map(FileSignature)


@st.composite
def _sources(draw: st.DrawFn) -> SourceFile:
    """An image with the usual captions, with others, or without; in sub-folders, or with a name like those of their files."""
    path = draw(_PATH) + draw(st.sampled_from([".jpg", ".PNG", "", ".a.webp"]))
    stem = path.rpartition(".")[0]
    usual = st.sampled_from([f"{stem}.txt", f"{path}.txt", f"{stem}.caption"])
    captions = draw(st.lists(usual | _PATH, max_size=3))
    image_id = draw(st.just(image_id_of(path)) | _PART)
    stats = draw(_SIGNATURE), draw(st.none() | _SIGNATURE)
    return SourceFile(image_id, path, *stats, draw(st.integers(-(2**63), 2**64 - 1)), tuple(captions))


@given(st.lists(_sources(), unique_by=lambda source: source.image_id))
def test_table_has_the_images_in_their_order(sources: list[SourceFile]) -> None:
    table, expected = SourceTable(sources), {source.image_id: source for source in sources}
    assert list(table.items()) == list(expected.items())
    assert (len(table), list(table.keys())) == (len(expected), list(expected))
    assert all(image_id in table for image_id in expected)
    assert table.get("no image has so long an id") is None
    assert "no image has so long an id" not in table


def test_ids_of_all_tables_are_in_memory_once() -> None:
    made = ["".join(["photo", "0001"]) for _ in range(3)]  # equal strings that are not the same
    image = SourceFile(made[0], "photo0001.jpg", posix_signature(1, 2, 3), None, 4)

    tables = (
        SourceTable([image]),
        FileListing([(made[1], 1, 2, 3)]),
        SpanTable([(made[2], Span(Path("file"), 1, 0, 9))]),
    )

    assert len({id(key) for table in tables for key in table}) == 1
