"""A change of `pixels.color`, on data roots of this and of the earlier release.

Spec: docs/spec/stage2.md#colour, docs/spec/conventions.md#old-data-roots, docs/spec/conventions.md#staleness
"""

import io
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import tarfile
import time

import numpy as np
import pytest
from PIL import Image

from imagemill.domain.layout import DataRoot
from imagemill.formats.images import decode_rgb
from imagemill.pipeline.shards.shard_sets import read_manifest
from imagemill.store.ledger import Ledger
from tests.helpers.earlier_release import as_of_earlier_release
from tests.helpers.images import encoded
from tests.helpers.product import imagemill, photos, start
from tests.helpers.profiles import ADOBE, P3, SRGB, in_space

# Photographs by name: colour profile, and whether conversion changes their pixels.
PHOTOS = {"a.jpg": None, "b.jpg": P3, "c.png": ADOBE, "d.jpg": SRGB, "e.jpg": P3, "f.webp": None}
CONVERTED = {"b", "c", "e"}
OF_PIXELS = ("dinov3", "vae_latents")
STAGE1_VECTOR = [(n % 50 - 20) / 100 for n in range(1024)]


def picture(number):
    y, x = np.mgrid[0:48, 0:64]
    bands = [(x * 2 + number * 9) % 256, (y * 2 + number * 31) % 256, (x + y + number * 57) % 256]
    return Image.fromarray(np.stack(bands, axis=2).astype(np.uint8))


def make(root, *, stage1=True):
    """Photographs with captions; `stage1`: `a.tif` beside `a.jpg`, and a Stage 1 record with a vector, of a picture in P3."""
    root.approved.mkdir(parents=True)
    for number, (name, profile) in enumerate(PHOTOS.items()):
        image = in_space(picture(number), profile) if profile in (P3, ADOBE) else picture(number)
        form = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP"}[name[2:]]
        options = {"icc_profile": profile} if profile else {}
        (root.approved / name).write_bytes(encoded(image, form, **options))
        (root.approved / f"{name[0]}.txt").write_text(f"a picture called {name}")
    if not stage1:
        return
    (root.approved / "a.tif").write_bytes(encoded(picture(9), "TIFF"))
    root.derived.mkdir()
    record = {
        "image_path": "data/approved/e.jpg", "caption": "a picture called e.jpg", "height": 48, "width": 64,
        "dinov3_embedding": STAGE1_VECTOR,
    }  # fmt: skip
    root.stage2_jsonl.write_text(json.dumps(record) + "\n")


def run(root, *, code=0):
    done = imagemill("run", "--data-root", root.path, stub=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def set_color(root, color):
    root.config_file.write_text(f"pixels: {{color: {color}}}\n")


def written(root):
    """Bytes and time of every array, record and tar."""
    paths = [path for folder in (root.derived, root.shards) for path in folder.rglob("*")]
    return {
        str(path.relative_to(root.path)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in paths if path.suffix in {".npy", ".jsonl", ".tar"}
    }  # fmt: skip


def changed(before, after):
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def arrays(root):
    """Image id → bytes of its arrays of pixels."""
    return {
        name[0]: tuple((root.derived / kind / f"{name[0]}.npy").read_bytes() for kind in OF_PIXELS) for name in PHOTOS
    }


def packed(root):
    """Image id → bytes of the arrays of pixels in its sample."""
    found = {}
    for path in root.shards.rglob("*.tar"):
        with tarfile.open(path) as tar:
            members = {member.name: tar.extractfile(member).read() for member in tar}
        for image_id in (name.removesuffix(".json") for name in members if name.endswith(".json")):
            found[image_id] = (members[f"{image_id}.dinov3.npy"], members[f"{image_id}.vae.npy"])
    return found


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    """A data root as the earlier release leaves it."""
    root = DataRoot(tmp_path_factory.mktemp("earlier") / "data")
    make(root)
    root.config_file.write_text("pixels: {color: ignore}\ninputs: {formats: [jpg, jpeg, png, webp]}\n")
    run(root)
    root.config_file.unlink()
    as_of_earlier_release(root)
    return root


@pytest.fixture
def old(earlier, tmp_path):
    shutil.copytree(earlier.path, tmp_path / "data", symlinks=True)
    _keep_signatures(earlier.path, tmp_path / "data")
    return DataRoot(tmp_path / "data")


def _keep_signatures(source, target):
    """Record the copied files' inodes, so that the copy is the data root and not another one."""
    with sqlite3.connect(target / ".imagemill" / "ledger.sqlite") as db:
        inodes = {
            str(path.stat().st_ino): str((target / path.relative_to(source)).stat().st_ino)
            for path in source.rglob("*")
        }
        for table in ("sources", "captions", "files"):
            for rowid, signature in list(db.execute(f"SELECT image_id, signature FROM {table}")):
                if signature and (inode := inodes.get(signature.rpartition(":")[2])):
                    new = f"{signature.rpartition(':')[0]}:{inode}"
                    db.execute(
                        f"UPDATE {table} SET signature = ? WHERE image_id = ? AND signature = ?",
                        (new, rowid, signature),
                    )


def test_old_root_keeps_every_byte_until_it_is_changed_and_then_exactly_the_converted_arrays(old):
    expected = {f"derived/{kind}/{image_id}.npy" for kind in OF_PIXELS for image_id in CONVERTED}
    before = written(old)
    assert "derived/dinov3/e.npy" in before, "from the Stage 1 record"

    first = run(old)

    assert changed(before, written(old)) == set()
    assert "pixels.color: srgb would convert 0 images (6 images not examined)" in first
    assert "would add" not in first, "a.tif has the id of a.jpg"

    set_color(old, "srgb")
    second = run(old)

    in_srgb = written(old)
    assert {name for name in changed(before, in_srgb) if name.endswith(".npy")} == expected
    assert "pixels.color is now srgb; it was ignore" in second
    assert packed(old) == arrays(old)

    set_color(old, "ignore")
    run(old)

    back = written(old)
    assert {name for name in changed(in_srgb, back) if name.endswith(".npy")} == expected
    assert packed(old) == arrays(old)
    of_vae = {f"derived/vae_latents/{image_id}.npy" for image_id in CONVERTED}
    assert {name: back[name][0] for name in of_vae} == {name: before[name][0] for name in of_vae}


def test_run_with_nothing_to_do_opens_no_image(old):
    """Not even one whose colours are unknown: each file is made unreadable to prove it."""
    for name in PHOTOS:
        data = (old.approved / name).read_bytes()
        stat = (old.approved / name).stat()
        with open(old.approved / name, "r+b") as file:
            file.write(bytes(len(data)))
        os.utime(old.approved / name, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    before = written(old)

    run(old)

    assert changed(before, written(old)) == set()


def test_new_root_converts_and_says_so_everywhere(tmp_path):
    root = DataRoot(tmp_path / "data")
    make(root, stage1=False)

    said = run(root)

    line = "2 Display P3, 1 Adobe RGB (1998), 1 sRGB built-in; 3 converted to sRGB"
    assert line in said
    assert line in imagemill("status", "--data-root", root.path).stdout
    explained = imagemill("explain", "b", "--data-root", root.path).stdout
    assert "colours    profile Display P3, pixels converted to sRGB, pixels.color srgb" in explained
    (manifest,) = (json.loads(path.read_bytes()) for path in root.shards.rglob("manifest.json"))
    assert manifest["pixels"] == {
        "color": "srgb", "profiles": {"Display P3": 2, "Adobe RGB (1998)": 1, "sRGB built-in": 1}, "converts": 3,
        "bad_profile": 0, "hdr": 0, "unknown": 0,
    }  # fmt: skip
    assert line in (root.shards / "README.md").read_text()
    with Ledger(root.ledger, read_only=True) as ledger:
        assert ledger.setting("pixels.color") == "srgb"
    copy = json.loads((root.derived / ".imagemill.json").read_bytes())
    assert copy["settings"]["pixels.color"] == "srgb"
    report = json.loads(imagemill("scan", root.approved, "--json").stdout)
    assert report["colours"] == manifest["pixels"]
    assert report["formats"] == {"JPEG": 4, "PNG": 1, "WEBP": 1}


def test_hdr_picture_is_refused_under_srgb_only(tmp_path):
    """Its array of `ignore` is neither packed under `srgb` nor made again afterwards."""
    root = DataRoot(tmp_path / "data")
    make(root, stage1=False)
    data = encoded(picture(11), "AVIF")
    at = data.index(b"nclx") + 4
    (root.approved / "h.avif").write_bytes(data[:at] + b"\0\x09\0\x10" + data[at + 4 :])
    (root.approved / "h.txt").write_text("a bright picture")
    set_color(root, "ignore")
    run(root)
    assert "h" in packed(root)
    array = root.derived / "vae_latents" / "h.npy"
    made = array.stat().st_mtime_ns

    set_color(root, "srgb")
    said = run(root)

    assert "hdr_transfer" in said
    assert "h" not in packed(root)

    set_color(root, "ignore")
    run(root)

    assert array.stat().st_mtime_ns == made
    assert "h" in packed(root)


def test_vector_of_a_stage1_record_counts_as_made_without_conversion(tmp_path):
    root = DataRoot(tmp_path / "data")
    make(root)
    set_color(root, "srgb")

    run(root)

    vector = np.load(root.derived / "dinov3" / "e.npy")
    assert not np.array_equal(vector, np.array(STAGE1_VECTOR, vector.dtype))


def test_lost_ledger_adopts_arrays_as_its_second_copy_says(tmp_path):
    root = DataRoot(tmp_path / "data")
    make(root, stage1=False)
    run(root)
    before = {name: value for name, value in written(root).items() if name.endswith(".npy")}
    for path in root.state.glob("ledger.sqlite*"):
        path.unlink()

    run(root)

    assert {name: value for name, value in written(root).items() if name.endswith(".npy")} == before


def test_arrays_without_a_ledger_or_copy_count_as_made_without_conversion(tmp_path):
    root = DataRoot(tmp_path / "data")
    make(root)
    (root.approved / "a.tif").unlink()
    set_color(root, "ignore")
    run(root)
    before = {name: value for name, value in written(root).items() if name.endswith(".npy")}
    shutil.rmtree(root.state)
    for copy in root.path.glob("*/.imagemill.json"):
        copy.unlink()
    root.config_file.unlink()

    run(root)

    assert {name: value for name, value in written(root).items() if name.endswith(".npy")} == before
    with Ledger(root.ledger, read_only=True) as ledger:
        assert ledger.setting("pixels.color") == "ignore"


def kill_while_changing(root, kills, seed):
    """Change the setting back and forth; kill each run at a random moment; return the arrays of both settings."""
    chosen = random.Random(seed)
    expected, longest = {}, 0.0
    for color in ("srgb", "ignore"):
        set_color(root, color)
        began = time.monotonic()
        run(root)
        longest = 2 * (time.monotonic() - began)
        expected[color] = arrays(root)
    for number in range(kills):
        color = ("srgb", "ignore")[number % 2]
        set_color(root, color)
        process = start("run", "--data-root", root.path, IMAGEMILL_STUB_SLEEP=0.1)
        try:
            process.communicate(timeout=chosen.uniform(0, longest))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        for image_id, files in packed(root).items():
            assert files in (expected["srgb"][image_id], expected["ignore"][image_id]), f"{image_id} is a mixture"
        if chosen.random() < 0.5 or number == kills - 1:
            run(root)
            assert arrays(root) == expected[color]
            assert packed(root) == expected[color]


def test_killed_at_any_moment_nothing_is_mixed(old):
    kill_while_changing(old, 3, seed=1)


@pytest.mark.soak
def test_killed_fifty_times_nothing_is_mixed(old):
    kill_while_changing(old, 50, seed=2)


def test_stub_sees_the_pixels(old):
    """The arrays of this file's tests depend on the pixels; without this they would prove nothing."""
    data = (old.approved / "b.jpg").read_bytes()
    assert not np.array_equal(decode_rgb(data, "b", "srgb"), decode_rgb(data, "b", "ignore"))
    assert np.load(io.BytesIO((old.derived / "vae_latents" / "b.npy").read_bytes())).size


def test_manifest_states_a_setting_that_changes_no_pixel_and_every_tar_stays(data_root):
    photos(data_root.approved, 3)
    run(data_root)
    tars = {path: path.stat().st_ino for path in data_root.shards.rglob("*.tar")}
    assert {read_manifest(tar.parent).pixels.color for tar in tars} == {"srgb"}

    set_color(data_root, "ignore")
    said = run(data_root)

    assert {read_manifest(tar.parent).pixels.color for tar in tars} == {"ignore"}
    assert {path: path.stat().st_ino for path in data_root.shards.rglob("*.tar")} == tars
    assert "1 tar kept, 0 written" in said
    assert "no Dagster run was started" in run(data_root)


def test_old_data_root_is_told_only_of_settings_that_the_user_left_open(old):
    (old.approved / "other.tif").write_bytes(encoded(picture(10), "TIFF"))
    said = imagemill("status", "--fresh", "--data-root", old.path).stdout
    assert (
        "inputs      as in an earlier release; pixels.color: srgb would convert 0 images (6 images not examined)"
        in said
    )
    assert "inputs.formats of a new data root would add 1 file" in said, "a.tif has the id of a.jpg"

    set_color(old, "ignore")

    assert "srgb would convert" not in imagemill("status", "--fresh", "--data-root", old.path).stdout
