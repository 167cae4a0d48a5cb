"""Lines removed from a JSONL file are kept with their reason. Spec: docs/spec/conventions.md#jsonl-input"""

from imagemill.formats.jsonl import read_jsonl
from imagemill.pipeline.stage2.quarantine import MALFORMED, QuarantinedLine, quarantine, quarantined
from tests.helpers.stage2 import write_text


def test_every_line_is_kept_once_and_new_ones_are_counted(tmp_path):
    first = QuarantinedLine(3, MALFORMED, "malformed", b"{")
    second = QuarantinedLine(9, MALFORMED, "malformed: invalid UTF-8", b"\xff\x00")

    assert quarantine(tmp_path / "q", "x.jsonl", [first, second]) == 2
    assert quarantine(tmp_path / "q", "x.jsonl", [first, QuarantinedLine(3, MALFORMED, "malformed", b"[")]) == 1
    assert quarantine(tmp_path / "q", "x.jsonl", []) == 0

    kept = [line.value for line in read_jsonl(tmp_path / "q" / "x.jsonl.quarantine.jsonl")]
    assert kept == [
        {"line": 3, "reason": "malformed_line", "why": "malformed", "text": "{"},
        {"line": 9, "reason": "malformed_line", "why": "malformed: invalid UTF-8", "hex": "ff00"},
        {"line": 3, "reason": "malformed_line", "why": "malformed", "text": "["},
    ]
    assert [(line.origin, line.number, line.reason) for line in quarantined(tmp_path / "q")] == [
        ("x.jsonl", 3, MALFORMED), ("x.jsonl", 9, MALFORMED), ("x.jsonl", 3, MALFORMED),
    ]  # fmt: skip


def test_no_file_is_written_without_lines(tmp_path):
    assert quarantine(tmp_path / "q", "x.jsonl", []) == 0
    assert not (tmp_path / "q").exists()
    assert list(quarantined(tmp_path / "q")) == []


def test_lines_of_earlier_releases_have_a_reason_and_foreign_lines_are_skipped(tmp_path):
    write_text(
        tmp_path / "x.jsonl.quarantine.jsonl",
        '{"line": 1, "why": "replaced by line 4", "text": "{}"}',
        '{"line": 2, "why": "caption replaced by the sidecar", "text": "{}"}',
        '{"line": 3, "why": "bad image id \'../x\': …", "text": "{}"}',
        '{"line": 4, "why": "blank", "text": ""}',
        '{"line": 5, "reason": 7, "why": "null", "text": "null"}',
        "not ours",
        '{"line": "6", "why": "blank"}',
    )

    assert [(line.number, line.reason) for line in quarantined(tmp_path)] == [
        (1, "duplicate_id"), (2, "caption_replaced"), (3, "bad_id"), (4, "malformed_line"), (5, "malformed_line"),
    ]  # fmt: skip
