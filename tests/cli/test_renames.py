"""Images that were moved or renamed, through the command line: nothing is made again, and nothing is lost.

Spec: docs/spec/stage2.md#reuse, docs/spec/stage2.md#renames
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections import Counter

import pytest

from assets.partitions import images
from dagster_project.internals.instance import open_instance
from imagemill.domain.embedding_specs import embedding_specs
from imagemill.domain.layout import DataRoot
from imagemill.fs.atomic import temporaries
from imagemill.reading import ShardSet
from imagemill.store.ledger import ACCEPTED, DONE, RECORDED, Ledger
from tests.helpers import renamed_images
from tests.helpers.commands import called
from tests.helpers.product import imagemill, start
from tests.helpers.renamed_images import IN_LEDGER, ORIGINS, PACKED, State, move, new_id, numbers, origin_of
from tests.helpers.stage2 import photos, picture
from tests.helpers.stubs import stub_captioner
from tests.helpers.wiring import stub_every_kind

ACCEPT = ("run", "--accept-renames")
LINES = re.compile(r"^  (\w+) +(\d[\d,]*) made in (\d[\d,]*) model calls?(.*)$", re.MULTILINE)


@pytest.fixture
def stubs(monkeypatch):
    stub_every_kind(monkeypatch)
    stub_captioner(monkeypatch.setattr)


def ok(root, *arguments):
    done = called(root, *arguments)
    assert done.code == 0, done.text
    return done.text


def calls(text):
    """Return the model calls of a run, of all kinds and of the captioner."""
    assert " captioned" not in text
    return sum(int(made[2].replace(",", "")) for made in LINES.finditer(text))


def record_ids(root):
    return [json.loads(line)["image_id"] for line in root.stage2_jsonl.read_text().splitlines()]


def packed(root):
    return sorted(ShardSet.open(root.shards, allow_preview=True))


def partitions(root):
    with open_instance(root) as instance:
        return set(instance.get_dynamic_partitions(images.name))


@pytest.fixture
def three(data_root, stubs):
    """Three complete images."""
    photos(data_root, "a", "b", "c", size=(24, 24))
    ok(data_root, "run")
    return data_root


def rename(root, old, new, *suffixes):
    target = root.approved / new
    target.parent.mkdir(parents=True, exist_ok=True)
    for suffix in suffixes or (".png", ".txt"):
        (root.approved / f"{old}{suffix}").rename(target.with_name(f"{target.name}{suffix}"))


# ---- every origin, in numbers


def check_moves(root, count, run):
    """Move images and back; `run` executes a command and returns its output."""
    renamed_images.fill(root, count, run)
    run("shards", "--repack")
    first, bytes_of_records = State(root, count), root.stage2_jsonl.read_bytes()
    tars = {path.name: path.read_bytes() for path in root.shards.rglob("*.tar")}
    assert first.ids == sorted(f"{n:04}" for n in range(count))
    assert {origin for _, origin in first.records.values()} == {"sidecar", "record", "captioner", "preview captioner"}

    move(root, count)
    accepted = run(*ACCEPT)

    assert calls(accepted) == 0
    assert f"{count:,} images took over the captions and records of their earlier names" in accepted
    now = State(root, count, moved=True)
    assert len(now.ids) == count
    assert set(now.ids) == {new_id(n) for n in range(count)}
    assert now.arrays == first.arrays
    for n, (record, origin) in now.records.items():
        assert (record, origin) == (first.records[n][0], IN_LEDGER[origin_of(n)])
    assert now.samples == first.samples
    assert set(now.samples) == set(numbers(count, *ORIGINS[:PACKED]))
    assert now.models == first.models, "no array has become one of an unknown model"
    assert now.leftover == set()
    assert "no Dagster run was started" in run("run")

    move(root, count, back=True)
    returned = run(*ACCEPT)

    assert calls(returned) == 0
    again = State(root, count)
    assert root.stage2_jsonl.read_bytes() == bytes_of_records
    assert (again.arrays, again.samples, again.models) == (first.arrays, first.samples, first.models)
    run("shards", "--repack")
    assert {path.name: path.read_bytes() for path in root.shards.rglob("*.tar")} == tars
    return first


def test_images_of_every_origin_keep_everything_under_new_names(data_root, stubs):
    check_moves(data_root, 42, lambda *arguments: ok(data_root, *arguments))


@pytest.mark.soak
def test_a_thousand_images_and_more_keep_everything_under_new_names(data_root):
    """1,000 of them are packed."""

    def run(*arguments):
        began = time.monotonic()
        done = imagemill(*arguments, "--data-root", data_root.path, stub=True)
        assert done.returncode == 0, done.stdout + done.stderr
        print(f"{' '.join(arguments)}: {time.monotonic() - began:.1f} s")
        return done.stdout

    first = check_moves(data_root, 1200, run)
    assert len(first.samples) == 1000


# ---- kills


def run_on(root):
    """Return a function that executes a command in a process of its own."""

    def run(*arguments):
        done = imagemill(*arguments, "--data-root", root.path, stub=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Return a function from a number of images to a data root in which they have been moved, and its state before that."""
    made = {}

    def prepare(count):
        if count not in made:
            root = DataRoot(tmp_path_factory.mktemp(f"moved{count}") / "data")
            with pytest.MonkeyPatch.context() as patch:
                stub_every_kind(patch)
                stub_captioner(patch.setattr)
                renamed_images.fill(root, count, lambda *arguments: ok(root, *arguments))
            made[count] = root, State(root, count)
            move(root, count)
        return made[count]

    return prepare


def cloned(root, folder):
    """Copy a data root with all times; a run then finds each array by its contents."""
    folder.mkdir()
    subprocess.run(["cp", "-a", str(root.path), str(folder / "data")], check=True)
    return DataRoot(folder / "data")


def kill(root, is_time):
    """Start the acceptance, and kill it once the function returns True. Return whether it was still running."""
    process = start(*ACCEPT, "--data-root", root.path)
    while process.poll() is None and not is_time():
        time.sleep(0.005)
    was_running = process.poll() is None
    if was_running:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return was_running


def check_completed(root, count, first):
    """Complete the acceptance; compare with the state before the images were moved."""
    assert calls(run_on(root)(*ACCEPT)) == 0
    now = State(root, count, moved=True)
    assert len(now.ids) == count
    assert {n: record for n, (record, _) in now.records.items()} == {
        n: record for n, (record, _) in first.records.items()
    }
    assert all(origin == IN_LEDGER[origin_of(n)] for n, (_, origin) in now.records.items())
    assert (now.arrays, now.samples, now.leftover) == (first.arrays, first.samples, set())
    assert not [path for spec in embedding_specs() for path in temporaries(root.derived / spec.folder)]
    assert partitions(root) == {new_id(n) for n in range(count)}
    with Ledger(root.ledger) as ledger:
        assert {rename.state for rename in ledger.renames()} == {DONE}


@pytest.mark.parametrize("state", [ACCEPTED, pytest.param(RECORDED, marks=pytest.mark.soak)])
def test_acceptance_killed_after_a_step_is_completed_by_the_next_run(prepared, tmp_path, state):
    """kill -9 between the transaction of the ledger and the records, and between these and the shards."""
    original, first = prepared(12)
    root = cloned(original, tmp_path / "clone")

    def is_reached():
        with Ledger(root.ledger, read_only=True) as ledger:
            return any(rename.state == state for rename in ledger.renames())

    assert kill(root, is_reached)
    check_completed(root, 12, first)


@pytest.mark.soak
def test_acceptance_of_many_images_killed_twenty_times_is_completed(prepared, tmp_path):
    """Moments at random, from the start to the end of an undisturbed acceptance."""
    original, first = prepared(1200)
    undisturbed = cloned(original, tmp_path / "undisturbed")
    began = time.monotonic()
    run_on(undisturbed)(*ACCEPT)
    seconds = time.monotonic() - began
    shutil.rmtree(undisturbed.path)
    moment, killed = random.Random(22), 0
    while killed < 20:
        root = cloned(original, tmp_path / f"kill{moment.random()}")
        wait = moment.uniform(1, seconds)
        end = time.monotonic() + wait
        if kill(root, lambda end=end: time.monotonic() >= end):
            killed += 1
            with Ledger(root.ledger, read_only=True) as ledger:
                states = Counter(rename.state for rename in ledger.renames())
            print(f"kill {killed} of 20 after {wait:.0f} of {seconds:.0f} s: {dict(states)}")
            check_completed(root, 1200, first)
        shutil.rmtree(root.path)


# ---- steps, one by one


def reported(text, reason):
    """Return the lines of a summary about a reason."""
    return [line for line in text.splitlines() if line.strip().startswith(reason)]


def test_run_without_the_option_reports_renames_and_keeps_both_names(three):
    rename(three, "a", "dog/a")

    said = ok(three, "run")

    assert calls(said) == 0
    assert said.count("1 linked from files of equal inputs") == len(embedding_specs())
    assert [line for line in said.splitlines() if "dog" in line] == [
        "  renamed    1 image with a new name (dog%2Fa); `imagemill run --accept-renames` gives it the caption and the record "
        "of the earlier name, `imagemill problems --reason renamed` lists both names"
    ]
    assert "the same bytes as a.png, which no longer exists" in ok(three, "problems", "--reason", "renamed")
    assert record_ids(three) == ["a", "b", "c", "dog%2Fa"]
    assert packed(three) == ["a", "b", "c", "dog%2Fa"]
    status = ok(three, "status")
    assert "renamed     1 image with a new name (dog%2Fa); `imagemill run --accept-renames`" in status
    assert "to dog%2Fa, accepted not yet" in ok(three, "explain", "a")
    assert "no Dagster run was started" in ok(three, "run")


@pytest.mark.parametrize("first", [(), ("run",)], ids=["at once", "later"])
def test_accepted_rename_ends_the_earlier_name(three, first):
    """Record, sample and partition end; the arrays stay."""
    (three.approved / "a.txt").unlink()
    lines = {json.loads(line)["image_id"]: json.loads(line) for line in three.stage2_jsonl.read_text().splitlines()}
    rename(three, "a", "z", ".png")
    if first:
        ok(three, *first)
        assert record_ids(three) == ["a", "b", "c"], "the new image has no caption of its own"

    said = ok(three, *ACCEPT)

    assert "1 image took over the caption and record of its earlier name: a.png → z.png" in said
    now = {json.loads(line)["image_id"]: json.loads(line) for line in three.stage2_jsonl.read_text().splitlines()}
    assert now["z"] == lines["a"] | {"image_id": "z", "image_path": "data/approved/z.png"}
    assert packed(three) == sorted(now) == ["b", "c", "z"]
    assert partitions(three) == {"b", "c", "z"}
    assert (three.derived / "dinov3" / "a.npy").exists()
    kept = (three.quarantine / f"{three.stage2_jsonl.name}.quarantine.jsonl").read_text()
    assert json.loads(json.loads(kept)["text"]) == lines["a"]
    assert json.loads(kept)["why"] == "renamed to z"
    assert re.search(r"renamed +to z, accepted 20", ok(three, "explain", "a"))
    assert "0 problems" in ok(three, "problems")
    assert "problem" not in ok(three, "status", "--fresh")
    assert "no Dagster run was started" in ok(three, *ACCEPT)
    assert ok(three, "verify")


def test_option_without_renames_starts_no_dagster_run(three):
    assert "no Dagster run was started" in ok(three, *ACCEPT)


def test_caption_file_of_the_new_name_precedes_the_earlier_caption(three):
    rename(three, "a", "z", ".png")
    (three.approved / "z.txt").write_text("another caption")

    ok(three, *ACCEPT)

    captions = {json.loads(line)["image_id"]: json.loads(line)["caption"] for line in three.stage2_jsonl.open()}
    assert captions == {"b": "noise called b", "c": "noise called c", "z": "another caption"}


def test_row_of_a_metadata_file_precedes_the_earlier_caption(three):
    """The nearest file with a row for the new path counts; without a row the caption is taken over."""
    (three.approved / "a.txt").unlink()
    (three.approved / "b.txt").unlink()
    (three.approved / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "row"}\n')
    for name in ("a", "b"):
        rename(three, name, f"set/{name}", ".png")
    (three.approved / "set" / "metadata.csv").write_text("file_name,text\na.png,row of the set\n")

    ok(three, *ACCEPT)

    with Ledger(three.ledger) as ledger:
        found = {i: (row.text, row.origin) for i, row in ledger.captions().items()}
    assert found == {
        "c": ("noise called c", "sidecar"),
        "set%2Fa": ("row of the set", "metadata"),
        "set%2Fb": ("noise called b", "record"),
    }


def test_withdrawn_image_stays_withdrawn_under_its_new_name(three):
    ok(three, "withdraw", "a")
    time.sleep(1.1)
    rename(three, "a", "z")

    ok(three, *ACCEPT)

    assert packed(three) == ["b", "c"]
    with Ledger(three.ledger) as ledger:
        assert set(ledger.withdrawals()) == {"z"}
    copy = json.loads((three.derived / ".imagemill.json").read_text())
    assert set(copy["withdrawn"]) == {"z"}
    ok(three, "withdraw", "--restore", "z")
    assert packed(three) == ["b", "c", "z"]


def test_earlier_name_that_was_withdrawn_after_the_rename_is_no_longer_reported(three):
    """The new name is not withdrawn with it."""
    rename(three, "a", "z")
    ok(three, "run")
    ok(three, "withdraw", "a")

    said = ok(three, *ACCEPT)

    assert not reported(said, "renamed")
    assert packed(three) == ["b", "c", "z"]


def test_images_that_cannot_be_paired_are_named(three):
    data = (three.approved / "a.png").read_bytes()
    for suffix in (".png", ".txt"):
        (three.approved / f"a{suffix}").unlink()
    for name in ("x", "y"):
        (three.approved / f"{name}.png").write_bytes(data)

    said = ok(three, *ACCEPT)

    (line,) = reported(said, "unpaired")
    assert "a.png is no longer in approved/; x.png, y.png have the same bytes, so its new name is not clear" in line
    assert "a" in record_ids(three)


def test_rename_of_a_rename_is_followed_to_the_last_name(three):
    rename(three, "a", "x")
    ok(three, *ACCEPT)
    rename(three, "x", "y")
    ok(three, *ACCEPT)

    assert re.search(r"renamed +to y, accepted", ok(three, "explain", "a"))
    assert re.search(r"renamed +to y, accepted", ok(three, "explain", "x"))
    assert record_ids(three) == ["b", "c", "y"]


def test_another_image_under_the_earlier_name_is_a_new_one(three):
    rename(three, "a", "z")
    ok(three, *ACCEPT)
    picture(three.approved / "a.png", size=(24, 24))
    (three.approved / "a.txt").write_text("another image")

    ok(three, "run")

    assert record_ids(three) == ["a", "b", "c", "z"]
    assert "renamed" not in ok(three, "explain", "a")
    assert partitions(three) == {"a", "b", "c", "z"}


def test_image_moved_back_before_acceptance_has_its_own_record(three):
    before = three.stage2_jsonl.read_bytes()
    rename(three, "a", "z")
    ok(three, "run")
    rename(three, "z", "a")

    ok(three, *ACCEPT)

    assert three.stage2_jsonl.read_bytes() == before
    assert packed(three) == ["a", "b", "c"]


def test_limit_leaves_renamed_images_to_a_later_run(three):
    rename(three, "a", "x")
    rename(three, "b", "y")

    ok(three, "stage2", "--limit", "1")
    assert record_ids(three) == ["a", "b", "c", "x"]
    said = ok(three, *ACCEPT)

    assert "2 images took over" in said
    assert record_ids(three) == ["c", "x", "y"]
