"""Rank files: names, lines that survive a kill, marks. Spec: docs/spec/stage-a.md#rank-files"""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagemill.formats.jsonl import LineAppender, encode_line
from imagemill.pipeline.stage_a.rank_files import (
    RankLine,
    RankMark,
    mark_file,
    new_rank_file,
    parse_rank_line,
    rank_file,
    rank_files,
    read_mark,
    read_rank_lines,
    remove_rank_files,
    unfinished_ranks,
    write_mark,
)

MARK = RankMark("plan", "start", True)


def line(index=1, **fields):
    given = {"group_seq": 0, "group_id": "g", "label": "pass", "image_index": index, "image_name": f"{index}.jpg"}
    return RankLine(**given, **{"ok": True, "summary": "甲", "fingerprint": "xxh3:0", **fields})


def test_line_has_the_specified_fields():
    """Spec: docs/spec/stage-a.md#rank-files"""
    first = ["group_seq", "group_id", "label", "image_index", "image_name", "ok"]
    failed = RankLine(
        group_seq=0, group_id="g", label="pass", image_index=1, image_name="1.jpg", ok=False, error="e", fingerprint=""
    )

    assert [*first, "summary", "fingerprint"] == list(json.loads(encode_line(line())))
    assert [*first, "error", "fingerprint"] == list(json.loads(encode_line(failed)))
    assert failed == parse_rank_line(encode_line(failed))


@pytest.mark.parametrize(
    "raw",
    [b"", b"null", b"[]", b"{}", b"\xff", b'{"group_seq":"0"}', encode_line(line()).replace(b'"ok":true', b'"ok":1')],
)
def test_invalid_line_is_skipped(raw):
    assert parse_rank_line(raw) is None


def test_file_is_named_after_mission_and_rank(tmp_path):
    assert rank_file(tmp_path, "m", 3).name == "m_stage_a.images.rank3.jsonl"


def test_only_files_of_the_mission_are_found_and_removed(tmp_path):
    wanted = [rank_file(tmp_path, "m[1]", rank) for rank in (0, 2, 10)]
    others = [
        rank_file(tmp_path, "m1", 0), rank_file(tmp_path, "xm[1]", 0), tmp_path / "m[1]_stage_a.jsonl",
        tmp_path / "m[1]_stage_a.images.rank01.jsonl", tmp_path / "m[1]_stage_a.images.rank٣.jsonl",
    ]  # fmt: skip
    for path in [*wanted, *others, mark_file(tmp_path, "m[1]", 7)]:
        path.write_bytes(b"")

    assert dict(zip((0, 2, 10), wanted, strict=True)) == rank_files(tmp_path, "m[1]")
    assert remove_rank_files(tmp_path, "m[1]") == 3
    assert set(others) == set(tmp_path.iterdir())
    assert rank_files(tmp_path / "nowhere", "m") == {}


@given(st.integers(0, 400))
def test_lines_before_and_after_a_truncated_one_are_read(tmp_path_factory, cut):
    """A kill truncates the last line at any byte. Lines appended later are not lost."""
    path = tmp_path_factory.mktemp("cut") / "lines"
    data = b"".join(encode_line(line(index)) for index in (1, 2))
    path.write_bytes(data[:cut])
    whole = sum(len(data[:cut]) >= end for end in (len(encode_line(line(1))) - 1, len(data) - 1))

    assert [1, 2][:whole] == [each.image_index for each in read_rank_lines(path)]
    with LineAppender(path) as appender:
        appender.append(line(3))

    assert [*[1, 2][:whole], 3] == [each.image_index for each in read_rank_lines(path)]


def test_flushed_lines_are_on_disk_before_the_file_is_closed(tmp_path):
    with LineAppender(tmp_path / "deep" / "lines") as appender:
        appender.append(line())
        appender.flush()

        assert [line()] == list(read_rank_lines(tmp_path / "deep" / "lines"))


def test_restarted_rank_does_not_share_its_file_with_an_earlier_writer(tmp_path):
    """A process presumed dead must not write to the file of its successor."""
    path = tmp_path / "lines"
    with LineAppender(path) as earlier, new_rank_file(path) as later:
        earlier.append(line(1))
        later.append(line(2))

    assert [each.image_index for each in read_rank_lines(path)] == [2]


def test_mark_applies_only_to_its_plan_and_start(tmp_path):
    write_mark(tmp_path, "m", 0, MARK)
    write_mark(tmp_path, "m", 1, RankMark("plan", "start", False))
    write_mark(tmp_path, "m", 2, RankMark("other plan", "start", True))
    write_mark(tmp_path, "m", 3, RankMark("plan", "other start", True))
    mark_file(tmp_path, "m", 4).write_bytes(b'{"plan"')

    assert read_mark(tmp_path, "m", 0) == MARK
    assert unfinished_ranks(tmp_path, "m", range(6), "plan", "start") == [1, 2, 3, 4, 5]
    assert unfinished_ranks(tmp_path, "m", range(6), "plan", None) == [1, 2, 4, 5]
