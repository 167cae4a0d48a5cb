"""`imagemill import`: archives of img2dataset and WebDataset become images with captions.

Spec: docs/spec/stage2.md#archives
"""

import io
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import time

import pytest

from imagemill.domain.layout import DataRoot
from imagemill.reading import ShardDataset
from tests.helpers.archives import Made, img2dataset, tar_of
from tests.helpers.commands import called
from tests.helpers.product import PROJECT, imagemill, start
from tests.helpers.wiring import stub_every_kind


@pytest.fixture(autouse=True)
def stubs(monkeypatch):
    stub_every_kind(monkeypatch)


@pytest.fixture
def tars(tmp_path):
    """A function that writes an archive and returns its path."""
    (tmp_path / "tars").mkdir()

    def write(name, *members, **form):
        path = tmp_path / "tars" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(tar_of(*members, **form))
        return path

    return write


def files(root):
    return {
        str(path.relative_to(root.approved)): path.read_bytes() for path in root.approved.rglob("*") if path.is_file()
    }


def captions(root):
    lines = map(json.loads, root.stage2_jsonl.read_text().splitlines())
    return {record["image_id"]: record["caption"] for record in lines}


def test_archives_of_img2dataset_reach_the_trainer_with_two_commands(tmp_path, tars):
    """Keys repeat between archives. A new data root is begun."""
    root = DataRoot(tmp_path / "data")
    root.path.mkdir()
    first, second = tars("00000.tar", *img2dataset(2)), tars("00001.tar.gz", *img2dataset(1, first=1), packed=True)

    done = called(root, "import", first, second)

    assert done.code == 0, done.text
    assert "00000.tar: 6 files" in done.text
    assert f"imagemill run --data-root {root.path}" in done.text
    assert files(root) == {
        **{f"00000/{name}": data for name, data in img2dataset(2)},
        **{f"00001/{name}": data for name, data in img2dataset(1, first=1)},
    }
    done = called(root, "run", "--fail-on-skip")
    assert done.code == 0, done.text
    assert captions(root) == {
        "00000%2F000000000": "noise number 0", "00000%2F000000001": "noise number 1", "00001%2F000000001": "noise number 1",
    }  # fmt: skip
    dataset = ShardDataset(root.shards, batch_size=1, allow_preview=True)
    assert sorted(image_id for batch in dataset for image_id in batch["image_id"]) == sorted(captions(root))


def test_archive_of_webdataset_with_other_members(data_root, tars):
    """Members of no use are unpacked, and the run names them."""
    (_, picture), *_ = img2dataset(1)
    members = [("train/a.jpg", picture), ("train/a.caption", b"a cat"), ("train/a.json", b"{}"), ("train/a.cls", b"7")]

    assert called(data_root, "import", tars("wds.tar", *members)).code == 0
    done = called(data_root, "run")

    assert captions(data_root) == {"wds%2Ftrain%2Fa": "a cat"}
    assert "wds/train/a.cls" in done.text
    assert "unsupported_type" in done.text


def test_members_are_used_as_the_guide_says(data_root, tars):
    """docs/how-to/from-img2dataset.md, "Other tars of WebDataset"."""
    (_, picture), *_ = img2dataset(1)
    (_, other), *_ = img2dataset(1, first=1)
    members = [("a.left.jpg", picture), ("a.left.txt", b"left"), ("a.left.json", b"{}"), ("a.left.cls", b"7")]
    members += [("b.jpg", other), ("b.txt", b""), ("b.json", b"{}")]
    data_root.config_file.write_text('inputs: {exclude: ["*.cls"]}\n')

    assert called(data_root, "import", tars("0.tar", *members)).code == 0
    called(data_root, "run")

    assert captions(data_root) == {"0%2Fa.left": "left"}
    listed = json.loads(called(data_root, "problems", "--json").text)
    assert {(each["item"], each["reason"]) for each in listed} == {("0%2Fb", "missing_caption")}


def test_second_import_writes_nothing(data_root, tars):
    archive = tars("0.tar", *img2dataset(3))
    called(data_root, "import", archive)
    before = {path: path.stat().st_mtime_ns for path in data_root.approved.rglob("*")}

    done = called(data_root, "import", archive, archive)

    assert (done.code, "0 files (0 B) into approved/0, 9 already present" in done.text) == (0, True), done.text
    assert {path: path.stat().st_mtime_ns for path in data_root.approved.rglob("*")} == before


def test_archive_in_the_folder_of_images_is_imported_by_its_problem_and_moved(data_root, tars, tmp_path):
    """The remedy of `archive`, word for word, cures the problem. Spec: docs/spec/stage2.md#inputs"""
    archive = data_root.approved / "set one" / "my shard.tar"
    archive.parent.mkdir()
    archive.write_bytes(tar_of(*img2dataset(2)))
    shown = called(data_root, "run").text
    assert "archive" in shown
    listed = called(data_root, "problems").text

    remedy = re.search(r"`imagemill (import [^`]+)`\), then move the archive elsewhere", listed)
    assert remedy, listed
    done = called(data_root, *shlex.split(remedy[1]))

    assert done.code == 0, done.text
    assert f"move {archive} elsewhere" in done.text
    assert f"move {archive} elsewhere" in called(data_root, "import", archive).text
    archive.rename(tmp_path / "my shard.tar")
    assert called(data_root, "run", "--fail-on-skip").code == 0
    assert "archive" not in called(data_root, "problems").text
    assert sorted(captions(data_root)) == ["my shard%2F000000000", "my shard%2F000000001"]
    assert called(data_root, "import", tmp_path / "my shard.tar").code == 0, "the same archive at its new place"


def test_unsafe_members_are_named_and_the_others_are_imported(data_root, tars):
    archive = tars(
        "0.tar", *img2dataset(1), ("../evil.jpg", b"x"), Made("link.jpg", kind="link", target="/etc/passwd"), ("a\nb.jpg", b"x"),
        ("._a.jpg", b"x"),
    )  # fmt: skip

    done = called(data_root, "import", archive)

    assert done.code == 1
    lines = done.text.splitlines()
    assert "  ignored    1 member with a name that begins with a dot: ._a.jpg" in lines
    assert [line.split() for line in lines if line.startswith("  problem")] == [
        ["problem", "bad_name", "1"], ["problem", "link", "1"], ["problem", "unsafe_path", "1"],
    ]  # fmt: skip
    assert f"    {archive}: a\\nb.jpg: bad_name: its name contains a control character" in done.text
    assert f"    {archive}: link.jpg: link: a link to /etc/passwd" in done.text
    assert len(files(data_root)) == 3


def test_many_problems_are_counted(data_root, tars):
    done = called(data_root, "import", tars("0.tar", *((f"../{number}", b"") for number in range(50))))

    assert "    and 30 more" in done.text
    assert "unsafe_path        50" in done.text


def test_limits_end_the_import(data_root, tars):
    first, second = tars("0.tar", *img2dataset(2)), tars("1.tar", *img2dataset(2))

    done = called(data_root, "import", first, second, "--max-files", 4)

    assert (done.code, len(files(data_root))) == (1, 4)
    assert "  not begun  1 archive: 1.tar" in done.text
    assert "give a larger --max-files" in done.text
    assert called(data_root, "import", first, second, "--max_files", 8).code == 0
    assert len(files(data_root)) == 12
    assert called(data_root, "import", tars("2.tar", ("a", b"x" * 2000)), "--max-bytes", 1000).code == 1


def test_damaged_archive_is_named_and_the_next_is_imported(data_root, tars):
    bad, good = tars("bad.tar", *img2dataset(3)), tars("good.tar", *img2dataset(1))
    whole = bad.read_bytes()
    bad.write_bytes(whole[:4000])

    done = called(data_root, "import", bad, good)

    assert done.code == 1
    assert f"{bad}: damaged: it was cut off; what was read before is imported" in done.text
    assert len([name for name in files(data_root) if name.startswith("good/")]) == 3
    bad.write_bytes(whole)
    assert called(data_root, "import", bad).code == 0


def test_two_archives_of_one_name_are_refused(data_root, tars):
    """In one command and in two: keys repeat, so captions of one would become those of the other."""
    (data_root.path.parent / "tars").mkdir(exist_ok=True)
    one, other = tars("0.tar", *img2dataset(1)), tars("../other/0.tar", *img2dataset(1, first=1))

    done = called(data_root, "import", one, other)
    assert (done.code, files(data_root)) == (2, {})
    assert "two archives would be unpacked into approved/0" in done.text

    assert called(data_root, "import", one).code == 0
    done = called(data_root, "import", other)
    assert (done.code, len(files(data_root))) == (1, 3)
    assert "other_archive: approved/0 was unpacked from another archive" in done.text

    other.rename(other.with_name("1.tar"))
    assert called(data_root, "import", other.with_name("1.tar")).code == 0, "the remedy"


def test_edited_caption_is_kept_and_named(data_root, tars):
    archive = tars("0.tar", *img2dataset(1))
    called(data_root, "import", archive)
    (data_root.approved / "0" / "000000000.txt").write_text("my own words")

    done = called(data_root, "import", archive)

    assert done.code == 1
    assert f"{archive}: 000000000.txt: exists: a file of 12 bytes has its name; the member has 14" in done.text
    assert files(data_root)["0/000000000.txt"] == b"my own words"


@pytest.mark.parametrize("way", ["link", "option"])
def test_folder_that_is_only_read_is_refused(data_root, tars, tmp_path, way):
    photographs = tmp_path / "photographs"
    data_root.approved.rename(photographs)
    if way == "link":
        data_root.approved.symlink_to(photographs)
    else:
        called(data_root, "run", "--approved", photographs)

    done = called(data_root, "import", tars("0.tar", *img2dataset(1)))

    assert (done.code, list(photographs.iterdir())) == (2, [])
    assert "the folder of images is only read" in done.text
    assert ("is a link" if way == "link" else "imagemill run --approved named it") in done.text


def test_wrong_usage(data_root, tars, tmp_path):
    good = tars("0.tar", *img2dataset(1))
    for arguments, code, text in (
        ([], 2, "Missing argument"),
        ([good, "--max-files", "0"], 2, "max-files"),
        (["s3://bucket/0.tar"], 2, "not a path of this machine"),
        ([good, tmp_path / "none.tar"], 1, "no such archive"),
        ([good, tmp_path / "tars"], 1, f"give the archives in it: {tmp_path}/tars/*.tar"),
        ([tars(".tar", *img2dataset(1))], 2, "the archive's name gives no folder"),
    ):
        done = called(data_root, "import", *arguments)
        assert (done.code, text in done.text) == (code, True), done.text
        assert files(data_root) == {}
    done = called(DataRoot(tmp_path / "mistyped"), "import", good)
    assert (done.code, "the data root does not exist" in done.text) == (1, True)
    assert not (tmp_path / "mistyped").exists()


def test_old_data_root_is_told_how_to_read_the_folder(data_root, tars):  # quoted
    data_root.config_file.write_text("inputs: {recursive: false}\n")

    done = called(data_root, "import", tars("0.tar", *img2dataset(1)))
    assert "set inputs.recursive: true" in done.text

    data_root.config_file.write_text("inputs: {recursive: true}\n")
    assert "1 embedded" in called(data_root, "run").text


def test_neither_torch_nor_dagster_is_imported(data_root, tars):
    program = (
        "import sys; from click.testing import CliRunner; from dagster_project.cli.main import cli\n"
        "done = CliRunner().invoke(cli, ['import', *sys.argv[1:]]); assert done.exit_code == 0, done.output\n"
        "heavy = ('torch', 'dagster', 'pandas', 'webdataset', 'transformers')\n"
        "sys.exit(', '.join(name for name in heavy if name in sys.modules) or 0)"
    )
    arguments = [str(tars("0.tar", *img2dataset(1))), "--data-root", str(data_root.path)]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=PROJECT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# ---- killed at any moment


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """An archive whose import takes long enough to be killed in the middle, and its members."""
    path = tmp_path_factory.mktemp("large") / "0.tar.gz"
    rng = random.Random(0)
    # Files of one folder are written in batches; a change of the folder ends a batch.
    folders = ["batches"] * 1000 + [str(number % 3) for number in range(200)]
    members = [(f"{folder}/{n:06d}.jpg", rng.randbytes(rng.randrange(20_000))) for n, folder in enumerate(folders)]
    path.write_bytes(tar_of(*members, packed=True))
    return path, dict(members)


def kill_and_continue(root, large, seed):
    archive, members = large
    moment = random.Random(seed)
    process = start("import", archive, "--data-root", root.path, stub=False)
    wanted = moment.randrange(len(members))
    folder = root.approved / "0"
    while process.poll() is None and sum(1 for _ in folder.rglob("*.jpg")) < wanted:
        time.sleep(0.001)
    time.sleep(moment.uniform(0, 0.05))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()

    found = files(root)
    for name, data in found.items():
        if ".tmp-" not in name:
            assert members[name.removeprefix("0/")] == data, f"{name} is not whole"

    done = imagemill("import", archive, "--data-root", root.path)

    assert done.returncode == 0, done.stdout + done.stderr
    complete = {f"0/{name}": data for name, data in members.items()}
    assert files(root) == complete, "complete, without temporaries"
    return found != complete


@pytest.mark.parametrize("seed", range(3))
def test_killed_import_is_completed_by_the_next_one(data_root, large, seed):
    """kill -9 at a random moment. Spec: docs/spec/conventions.md#atomic-names"""
    kill_and_continue(data_root, large, seed)


@pytest.mark.soak
def test_import_killed_at_many_moments_is_completed(tmp_path, large):
    interrupted = 0
    for seed in range(100, 140):
        root = DataRoot(tmp_path / str(seed))
        root.approved.mkdir(parents=True)
        interrupted += kill_and_continue(root, large, seed)
    assert interrupted >= 30, "most kills hit an import that was not finished"


def test_interrupted_import_keeps_whole_files(data_root, large):
    process = start("import", large[0], "--data-root", data_root.path, stub=False)
    while process.poll() is None and not any(data_root.approved.rglob("*.jpg")):
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate()

    assert process.returncode in {130, 0}
    assert "Traceback" not in said
    assert list(data_root.approved.rglob(".tmp-*")) == []
    assert called(data_root, "import", large[0]).code == 0


def test_archive_that_tar_wrote_is_imported(data_root, tmp_path):
    """GNU tar writes `./` in front of names, and an entry for each folder."""
    folder = tmp_path / "made"
    (folder / "x").mkdir(parents=True)
    (folder / "x" / "a.txt").write_text("a")
    subprocess.run(["tar", "-czf", tmp_path / "0.tgz", "-C", folder, "."], check=True)

    assert called(data_root, "import", tmp_path / "0.tgz").code == 0
    assert files(data_root) == {"0/x/a.txt": b"a"}
    with tarfile.open(fileobj=io.BytesIO((tmp_path / "0.tgz").read_bytes())) as tar:
        assert "./x/a.txt" in tar.getnames()
