"""Counts and messages of `run`, `stage2`, `status` and `problems` on the command line.

Spec: docs/spec/conventions.md#no-silent-loss, docs/spec/conventions.md#refused-and-failed, docs/spec/conventions.md#summary
"""

import csv
import io
import json
import re
import shutil
import subprocess
import sys

import dagster as dg
import pytest

from dagster_project import work
from dagster_project.internals.batched_events import BatchedEventLog
from dagster_project.internals.instance import open_instance
from imagemill.domain.embedding_specs import VAE, embedding_specs
from imagemill.domain.layout import DataRoot
from imagemill.formats.npy import NpyStore
from imagemill.pipeline.stage2 import current_plans, image_metadata
from tests.helpers.commands import called
from tests.helpers.product import PROJECT
from tests.helpers.spec_runs import records
from tests.helpers.stage1 import stage1_record, write_stage1
from tests.helpers.stage2 import photos
from tests.helpers.stubs import stub_captioner
from tests.helpers.wiring import stub_every_kind

OUTCOMES = ("embedded", "up to date", "refused", "failed", "waiting")
NOTHING = "nothing to do: every image is embedded, and every record and every shard is up to date"


@pytest.fixture
def root(data_root, monkeypatch):
    """Three images with captions, before any run."""
    stub_every_kind(monkeypatch)
    stub_captioner(monkeypatch.setattr)
    photos(data_root, "a", "b", "c", size=(24, 24))
    return data_root


def spoil(root):
    """Add refused inputs: four images with four different faults, and three entries that are not images."""
    (root.approved / "torn.png").write_bytes(b"no picture")
    (root.approved / "torn.txt").write_text("a caption")
    photos(root, "silent", captions=False)
    (root.approved / "twin.jpg").write_bytes(b"x")
    (root.approved / "twin.png").write_bytes(b"x")
    (root.approved / "notes.pdf").write_bytes(b"x")
    (root.approved / "sub").symlink_to(root.approved)
    (root.approved / "alone.txt").write_text("x")
    return {
        ("torn", "undecodable"), ("silent", "missing_caption"), ("twin.jpg", "id_collision"), ("twin.png", "id_collision"),
        ("notes.pdf", "unsupported_type"), ("sub", "sub_folder"), ("alone.txt", "orphan_caption"),
    }  # fmt: skip


def images(text):
    """Return the images seen, and their outcomes, as a summary or a status prints them."""
    (line,) = re.findall(r"^ *images +(.*)", text, re.MULTILINE)
    seen, _, parts = line.partition(" seen")
    counts = {name: int(count) for count, name in re.findall(rf"(\d+) ({'|'.join(OUTCOMES)})", parts)}
    assert sum(counts.values()) == int(seen.split()[0])
    return int(seen.split()[0]), counts


def test_counts_add_up_with_refused_images_and_the_run_is_not_called_done(root):
    spoil(root)

    first, again = called(root, "run"), called(root, "run")

    assert images(first.text) == (7, {"embedded": 3, "refused": 4})
    assert images(again.text) == images(called(root, "status").text) == (7, {"up to date": 3, "refused": 4})
    assert "1 unsupported file, 1 folder, 1 caption file without an image" in first.text
    assert (first.code, again.code) == (0, 0)
    assert NOTHING not in again.text
    assert "nothing new: the rest needs what is listed above" in again.text
    assert "progress: 0 migrated, 0 enriched, 0 extracted, 3 skipped (total: 7)" in again.text
    assert re.search("failed=0 refused=4$", again.text, re.MULTILINE)


def test_summary_of_a_complete_root_reports_no_work_and_its_counts(root):
    called(root, "run")

    assert NOTHING in called(root, "run").text
    assert "nothing to do: every image is embedded, and every record is up to date" in called(root, "stage2").text
    assert images(called(root, "status").text) == (3, {"up to date": 3})


def test_pass_without_work_does_not_report_that_for_the_others(root):
    called(root, "stage2", "--pass", "dinov3")

    again = called(root, "stage2", "--pass", "dinov3").text

    assert "nothing to do" not in again
    assert images(again) == (3, {"waiting": 3})


def test_images_beyond_the_limit_are_pending(root):
    done = called(root, "stage2", "--limit", "1")

    assert images(done.text) == (3, {"embedded": 1, "waiting": 2})
    assert "0 skipped (total: 3)" in done.text
    assert re.search("failed=0 waiting=2$", done.text, re.MULTILINE)
    assert done.code == 0


def test_failed_check_is_not_reported_as_no_work(root):
    called(root, "run")
    tar = next(root.shards.rglob("*.tar"))
    tar.write_bytes(tar.read_bytes() + b"x")

    again = called(root, "run")

    assert again.code == 1
    assert "nothing to do" not in again.text


def test_one_is_singular_and_a_slow_rate_is_not_zero(data_root, monkeypatch):
    stub_every_kind(monkeypatch)
    photos(data_root, "a", size=(24, 24))

    text = called(data_root, "run").text

    assert "1 image seen: 1 embedded" in text
    assert "1 made in 1 model call\n" in text
    assert "1 sample in 1 shard\n" in text
    assert "0.0 images/s" not in text
    assert not re.search(r"\b1 (images|samples|shards|calls|inputs|problems)\b", text)


def test_photos_that_were_never_in_stage1_are_not_called_migrated(root):
    """Only the progress line, whose wording is specified, uses that word for them."""
    text = called(root, "run").text

    assert [line for line in text.splitlines() if "migrated" in line] == [
        line for line in text.splitlines() if "progress: 3 migrated" in line
    ]


def test_groups_of_stage_a_are_not_counted_as_images(root):
    from imagemill.store.ledger import Ledger, Problem

    called(root, "run")
    with Ledger(root.ledger) as ledger:
        ledger.record_problems([Problem("m/pass/g", "stage_a_groups", "failed", "incomplete_group", "d", "r")])

    done = called(root, "run")

    assert done.code == 0
    assert images(done.text) == (3, {"up to date": 3})
    assert "incomplete_group" not in done.text
    assert "m/pass/g" in called(root, "problems").text


# ---- problems


def test_every_missing_input_is_listed_with_its_remedy(root):
    expected = spoil(root)
    photos(root, *(f"silent{n}" for n in range(30)), size=(24, 24), captions=False)
    called(root, "run")

    text = called(root, "problems").text

    assert text.splitlines()[-1] == f"{len(expected) + 30} problems"
    for item, reason in expected:
        assert re.search(rf"^{re.escape(item)}: refused: {reason} \(.*since 2", text, re.MULTILINE)
    assert text.count("  do: ") == len(expected) + 30
    assert "`imagemill problems --reason missing_caption` lists them all" in called(root, "run").text
    assert f"and {len(expected) + 30 - 20} more: `imagemill problems` lists them all" in called(root, "status").text


def test_json_and_csv_have_the_same_entries(root):
    expected = spoil(root)
    called(root, "run")

    rows = json.loads(called(root, "problems", "--json").text)
    table = list(csv.DictReader(io.StringIO(called(root, "problems", "--csv").text)))

    assert {(row["item"], row["reason"]) for row in rows} == expected
    assert [{**row, "assets": " ".join(row["assets"])} for row in rows] == table
    status = json.loads(called(root, "status", "--json").text)
    assert status["problems"] == rows
    assert status["images"] == {"seen": 7, "embedded": 0, "up_to_date": 3, "refused": 4, "failed": 0, "waiting": 0}
    assert (status["complete"], status["reasons"]["id_collision"]) == (False, 2)


def test_reason_filters_and_an_unknown_one_lists_existing_reasons(root):
    spoil(root)
    called(root, "run")

    assert called(root, "problems", "--reason", "undecodable").text.splitlines()[-1] == "1 problem"
    unknown = called(root, "problems", "--reason", "undecodeable").text
    assert "no input has the reason undecodeable; reasons here: id_collision, missing_caption" in unknown
    assert called(root, "problems", "--json", "--csv").code == 2


def test_renamed_image_is_reported_with_the_command_that_resolves_it(root):
    called(root, "run")
    for suffix in (".png", ".txt"):
        (root.approved / f"a{suffix}").rename(root.approved / f"new{suffix}")

    done = called(root, "run")

    assert "renamed    1 image with a new name (new); `imagemill run --accept-renames` gives it" in done.text
    listed = called(root, "problems", "--reason", "renamed").text
    assert "the same bytes as a.png, which no longer exists" in listed
    (remedy,) = set(re.findall(r"`imagemill (withdraw \w+)`", listed))
    assert called(root, *remedy.split()).code == 0
    assert "refused: withdrawn" in called(root, "problems").text
    assert "1 problem\n" in called(root, "problems").text
    assert called(root, "run", "--fail-on-skip").code == 0
    assert "3 samples in 1 shard" in called(root, "status").text


def test_quarantined_line_is_reported_with_file_and_number(root):
    called(root, "run")
    with root.stage2_jsonl.open("a") as file:
        file.write('{"image_id": \n')

    done = called(root, "run")

    assert "1 line put into quarantine" in done.text
    assert f"malformed_line   {root.stage2_jsonl.name}:4: " in done.text
    assert called(root, "run", "--fail-on-skip").code == 1


def test_missing_folder_is_named(root, tmp_path):
    output = tmp_path / "shards"
    called(root, "run")
    text = called(root, "shards", "--output-dir", output, "--allow-preview").text
    assert "written_samples=3" in text

    shutil.rmtree(output)

    assert f"gone        shards: the recorded folder {output} does not exist" in called(root, "status").text


def test_checks_are_evaluated_by_the_last_of_several_runs_over_ranges(root, monkeypatch):
    """They look at whole folders: evaluating them after each range would make the cost of a range depend on the others."""
    monkeypatch.setattr(work, "IMAGES_PER_RUN", 1)
    ended = []
    swept, sweep = [], NpyStore.sweep
    monkeypatch.setattr(NpyStore, "sweep", lambda store: swept.append(store.folder) or sweep(store))
    ran = work.run_here
    monkeypatch.setattr(work, "run_here", lambda *args, **how: ended.append(ran(*args, **how)) or ended[-1])

    done = called(root, "run")

    assert done.code == 0
    assert [len(outcome.checks) for outcome in ended] == [0, 0, 6, 5]
    assert sorted(swept) == sorted(root.derived / spec.folder for spec in embedding_specs()), "once each"
    assert "checks     11 of 11 passed" in done.text
    with open_instance(root) as instance:
        assert instance.get_materialized_partitions(dg.AssetKey("t5_hidden")) == {"a", "b", "c"}


def test_registered_images_are_counted_once_for_all_ranges(root, monkeypatch, tmp_path):
    """Counting them takes longer the more there are."""
    photos(root, "d", "e", "f", size=(24, 24))
    counted, current_keys = [], BatchedEventLog._current_keys
    monkeypatch.setattr(
        BatchedEventLog, "_current_keys", lambda log, name: counted.append(name) or current_keys(log, name)
    )
    shutil.copytree(root.path, tmp_path / "other")
    assert called(DataRoot(tmp_path / "other"), "run").code == 0
    in_one_range = len(counted)
    counted.clear()
    monkeypatch.setattr(work, "IMAGES_PER_RUN", 2)

    assert called(root, "run").code == 0

    assert len(counted) == in_one_range


def test_headers_of_new_images_are_read_once(root, monkeypatch):
    """By the forecast of the command, and neither by those of its ranges nor by the decoders."""
    monkeypatch.setattr(work, "IMAGES_PER_RUN", 1)
    read, header_size = [], image_metadata.header_size
    monkeypatch.setattr(image_metadata, "header_size", lambda path: read.append(path.name) or header_size(path))

    assert called(root, "run").code == 0

    assert sorted(read) == sorted(path.name for path in root.approved.iterdir() if path.suffix != ".txt")


def test_limit_takes_the_first_images_with_work_however_they_are_planned(root, monkeypatch):
    """One at a time here. An image whose record is of Stage 1 has work, also if all its files are there."""
    monkeypatch.setattr(current_plans, "PLANNED_AT_ONCE", 1)
    write_stage1(root, [stage1_record(n) for n in range(3)], sidecars=True)
    expected = ["a", "b", "c", "photo0000", "photo0001", "photo0002"]

    for count, arguments in ((2, ["--limit", 2]), (3, ["--limit", 1]), (5, ["--limit", 2]), (6, [])):
        assert called(root, "stage2", *arguments).code == 0
        assert sorted(path.stem for path in (root.derived / VAE.folder).iterdir()) == expected[:count]
        migrated = [image_id for image_id, record in records(root).items() if "format_version" in record]
        assert sorted(migrated) == expected[:count]
    (root.derived / VAE.folder / "b.npy").unlink()
    called(root, "stage2", "--limit", 9)
    assert (root.derived / VAE.folder / "b.npy").is_file(), "planned behind images that are complete"


def test_reports_import_neither_numpy_nor_dagster(root):
    """Their libraries would take more time than the report itself."""
    called(root, "run")
    program = (
        "import sys; from click.testing import CliRunner; from dagster_project.cli.main import cli\n"
        "for words in (['status'], ['explain', 'a'], ['problems'], ['marks']):\n"
        "    done = CliRunner().invoke(cli, [*words, '--data-root', sys.argv[1]]); assert done.exit_code == 0, done.output\n"
        "    found = [name for name in ('numpy', 'PIL', 'dagster', 'torch') if name in sys.modules]\n"
        "    assert not found, (words, found)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, root.path], cwd=PROJECT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
