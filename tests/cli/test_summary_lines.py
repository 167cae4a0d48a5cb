"""Lines of the summary that appear only with many problems or long captions, and messages for system errors."""

import errno

import pytest

from dagster_project.cli import main
from imagemill.errors import FAILED_DISK, FULL_DISK
from tests.helpers.commands import called
from tests.helpers.stage2 import photos
from tests.helpers.stubs import StubEncoder, stub_captioner
from tests.helpers.wiring import stub_every_kind


@pytest.fixture
def stubs(monkeypatch):
    stub_every_kind(monkeypatch)
    stub_captioner(monkeypatch.setattr)


def test_problems_beyond_those_shown_in_the_summary_are_counted(data_root, stubs):
    photos(data_root, "good", size=(24, 24))
    for n in range(12):
        (data_root.approved / f"movie{n:02}.mov").write_bytes(b"x")

    done = called(data_root, "run")

    assert "and 9 more: `imagemill problems --reason unsupported_type` lists them all" in done.text
    assert "movie11.mov" in called(data_root, "problems", "--reason", "unsupported_type").text, "where the summary says"


def test_captions_beyond_the_text_encoder_limit_are_counted(data_root, stubs):
    photos(data_root, "a", "b", size=(24, 24))
    (data_root.approved / "a.txt").write_text("word " * 100)

    text = called(data_root, "run").text

    assert "captions   1 is longer than the text encoder's 77 tokens; only the beginning is used" in text


def test_batches_that_do_not_fit_into_memory_are_counted(data_root, stubs, monkeypatch):
    photos(data_root, *"abcdefghi", size=(24, 24))
    encode = StubEncoder.encode

    def out_of_memory(encoder, batch):
        if len(batch) > 4:
            raise MemoryError("out of memory")
        return encode(encoder, batch)

    monkeypatch.setattr(StubEncoder, "encode", out_of_memory)

    done = called(data_root, "run")

    assert "9 made in 3 model calls, 1 too large for memory: lower batch_size" in done.text
    assert done.code == 0


def test_dry_run_prints_the_conflicts_of_the_real_run(data_root, stubs):
    photos(data_root, "a", size=(24, 24))
    assert called(data_root, "run").code == 0

    rehearsed, real = called(data_root, "shards", "--dry-run"), called(data_root, "shards")

    assert "conflict: bucket_1024x1024/shard-000000.tar exists" in rehearsed.text
    assert (rehearsed.code, real.code) == (1, 1)
    assert called(data_root, "shards", "--dry-run", "--overwrite").code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["stage2", "--delete-embeddings"], "--delete-embeddings goes with --rollback"),
        (["stage2", "--rollback", "--pass", "t5"], "--rollback makes no embeddings"),
        (["stage2", "--cancel"], "--cancel needs the kind"),
        (["stage-a", "--mission", "m", "--sharding_mode", "per_moon"], "'per_moon' is not one of per_group, per_image"),
        (["preset", "convert", "coco", "--split", "val"], "--split without --annotations"),
    ],
)
def test_incompatible_options_are_wrong_usage(data_root, arguments, words):
    photos(data_root, "a", size=(24, 24))

    done = called(data_root, *arguments)

    assert words in done.text
    assert done.code == 2


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, FULL_DISK),
        (errno.EACCES, "make the file or folder accessible to this user"),
        (errno.EIO, FAILED_DISK),
    ],
)
def test_message_for_a_system_error_names_the_file_and_the_remedy(monkeypatch, capsys, number, remedy):
    def fails(**given):
        raise OSError(number, "the system's words", "/some/file")

    monkeypatch.setattr(main.cli, "main", fails)

    with pytest.raises(SystemExit) as ended:
        main.main()

    said = capsys.readouterr().err
    assert ended.value.code == 1
    assert "cannot write or read: the system's words" in said
    assert "where: /some/file" in said
    assert remedy in said
