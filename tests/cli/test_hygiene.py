"""Arbitrary contents of `approved/`: valid images of every form become samples, and all others are reported.

Spec: docs/spec/conventions.md#no-silent-loss, docs/spec/conventions.md#refused-and-failed, docs/spec/stage2.md#inputs,
docs/spec/stage2.md#image-id
"""

import os
import unicodedata

import numpy as np
import pytest
from PIL import Image

from imagemill.domain.ids import image_id_of
from imagemill.domain.layout import DataRoot
from imagemill.formats.jsonl import read_jsonl
from imagemill.store.ledger import Ledger
from tests.helpers.images import ROW_0_COLUMN_0, encoded, exif, png, stored_form, ycck
from tests.helpers.product import imagemill

WIDTH, HEIGHT = 48, 32
NOISE = np.random.default_rng(7).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
PHOTO = Image.fromarray(NOISE)
FRAMES = [PHOTO, PHOTO.transpose(Image.Transpose.ROTATE_180)]
SAME_PIXELS = [f"upright{n}" for n in ROW_0_COLUMN_0]


def animated(image_format, **options):
    return encoded(FRAMES[0], image_format, save_all=True, append_images=FRAMES[1:], **options)


def good_images():
    """Map file names to bytes. Upright, each image is 48x32."""
    grey, palette = PHOTO.convert("L"), PHOTO.convert("P")
    alpha = PHOTO.convert("RGBA")
    alpha.putalpha(grey)
    turned = {f"upright{n}.png": encoded(Image.fromarray(stored_form(NOISE, n)), exif=exif(n)) for n in ROW_0_COLUMN_0}
    return turned | {
        "rgba.png": encoded(alpha),
        "la.png": encoded(alpha.convert("LA")),
        "palette.png": encoded(palette),
        "palette transparent.png": encoded(palette, transparency=bytes(range(256))),
        "one bit.png": encoded(PHOTO.convert("1")),
        "grey.jpeg": encoded(grey, "JPEG"),
        "grey 16.png": png(WIDTH, HEIGHT, 16, 0, NOISE[..., :2].tobytes()),
        "colour 16.png": png(WIDTH, HEIGHT, 16, 2, np.repeat(NOISE, 2).tobytes(), (b"tRNS", bytes(6))),
        "cmyk.jpg": encoded(PHOTO.convert("CMYK"), "JPEG"),
        "ycck.jpg": ycck(WIDTH, HEIGHT, (200, 30, 60)),
        "profile.JPG": encoded(PHOTO, "JPEG", icc_profile=b"no profile"),
        "gif.png": animated("GIF"),
        "apng.png": animated("PNG"),
        "animated.webp": animated("WEBP"),
        "exif broken.jpg": encoded(PHOTO, "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff"),
        "x" * 180 + ".png": encoded(PHOTO),
        "a.b..c.png": encoded(PHOTO),
        " spaces  .png": encoded(PHOTO),
        unicodedata.normalize("NFC", "café.png"): encoded(PHOTO),
        unicodedata.normalize("NFD", "café.png"): encoded(PHOTO),
    }


def bad_images():
    """Map file names to (bytes, reason) of images that are refused after opening."""
    jpeg, png_file = encoded(PHOTO, "JPEG"), encoded(PHOTO)
    return {
        "empty.jpg": (b"", "undecodable"),
        "text.png": (b"no image at all", "undecodable"),
        "cut.jpg": (jpeg[: len(jpeg) // 2], "undecodable"),
        "cut too.png": (png_file[: len(png_file) // 2], "undecodable"),
        "header.webp": (encoded(PHOTO, "WEBP")[:30], "undecodable"),
        "vector.png": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "undecodable"),
        "float.png": (encoded(Image.new("F", (WIDTH, HEIGHT)), "TIFF"), "undecodable"),
        "bomb.png": (png(14_000, 13_000, 8, 2, b""), "too_large"),
        "large bomb.png": (png(2**31 - 1, 2**31 - 1, 8, 2, b""), "too_large"),
        "flat.png": (encoded(Image.new("RGB", (100, 7))), "too_small"),
        "dot.webp": (encoded(Image.new("RGB", (1, 1)), "WEBP"), "too_small"),
    }


def put_bad_entries(approved):
    """Add entries that are refused by name alone; return item → reason."""
    (approved / "folder.jpg").symlink_to(approved)
    (approved / "dangling.png").symlink_to(approved / "nowhere.png")
    os.mkfifo(approved / "pipe.jpg")
    for name in ("twin.jpg", "twin.png", "case.jpg", "case.JPG", "drawing.svg", "new\nline.jpg"):
        (approved / name).write_bytes(encoded(PHOTO))
    (approved / "alone.txt").write_text("a caption without an image")
    (approved / os.fsdecode(b"latin\xff.jpg")).write_bytes(encoded(PHOTO))
    (approved / ".hidden.jpg").write_bytes(b"not looked at")
    return {
        "folder": "sub_folder", "dangling": "not_a_file", "pipe": "not_a_file", "twin": "id_collision",
        "case": "id_collision", "drawing": "unsupported_type", "alone": "orphan_caption",
    }  # fmt: skip


def put(approved, name, data, caption="a caption"):
    approved.mkdir(parents=True, exist_ok=True)
    (approved / name).write_bytes(data)
    (approved / f"{image_id_of(name)}.txt").write_text(caption)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A data root that contains all of them, after a run. Its linked image is valid."""
    root = DataRoot(tmp_path_factory.mktemp("mixed") / "data")
    for name, data in good_images().items():
        put(root.approved, name, data)
    for name, (data, _) in bad_images().items():
        put(root.approved, name, data)
    put(root.approved, "wide.png", encoded(Image.new("RGB", (400, 40))))
    put_bad_entries(root.approved)
    (root.path / "elsewhere.png").write_bytes(encoded(PHOTO))
    (root.approved / "linked.png").symlink_to(root.path / "elsewhere.png")
    (root.approved / "linked.txt").write_text("a link")
    return root, imagemill("run", "--data-root", root.path, stub=True)


def records_of(root):
    return {line.value["image_id"]: line.value for line in read_jsonl(root.stage2_jsonl)}


def rows_of(root):
    """Return ledger rows by the id or name that `explain` accepts."""
    rows = {}
    with Ledger(root.ledger) as ledger:
        for problem in ledger.problems():
            by_name = problem.asset == "approved_images"
            rows.setdefault(image_id_of(problem.item) if by_name else problem.item, []).append(problem)
    return rows


def test_every_valid_image_becomes_a_sample(mixed):
    """The refused ones do not stop the run: exit code 0."""
    root, done = mixed

    assert done.returncode == 0, done.stdout + done.stderr
    expected = {image_id_of(name) for name in good_images()} | {"wide", "linked"}
    records = records_of(root)
    assert records.keys() == expected
    assert {(r["width"], r["height"]) for i, r in records.items() if i != "wide"} == {(WIDTH, HEIGHT)}
    with Ledger(root.ledger) as ledger:
        assert not [p for p in ledger.problems() if p.asset == "bucket_shards"], "all of them are in the shards"
    assert imagemill("verify", "--data-root", root.path).returncode == 0


def test_eight_orientations_of_one_photo_give_one_embedding(mixed):
    root, _ = mixed
    vectors = {(root.derived / "dinov3" / f"{image_id}.npy").read_bytes() for image_id in SAME_PIXELS}
    assert len(vectors) == 1


def test_warnings_of_libraries_are_not_printed(mixed):
    """Warnings of libraries do not name the file."""
    _, done = mixed
    assert "Warning" not in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize("name", bad_images())
def test_unusable_file_has_one_row_with_reason_and_remedy(mixed, name):
    root, _ = mixed

    (row,) = rows_of(root)[image_id_of(name)]

    assert (row.outcome, row.reason) == ("refused", bad_images()[name][1])
    assert row.detail
    assert row.remedy


def test_every_entry_refused_by_its_name_has_one_row_with_reason_and_remedy(mixed, tmp_path):
    """Both of two files with one stem are refused, also if their extensions differ in case."""
    root, _ = mixed
    (tmp_path / "approved").mkdir()
    expected = put_bad_entries(tmp_path / "approved")

    rows = rows_of(root)

    for item, reason in expected.items():
        assert {row.reason for row in rows[item]} == {reason}
        assert len(rows[item]) == (2 if reason == "id_collision" else 1)
        assert all(row.detail and row.remedy for row in rows[item])
    assert len([row for found in rows.values() for row in found if row.reason == "bad_id"]) == 2
    assert not any("hidden" in item for item in rows)


def test_no_other_input_is_refused(mixed):
    """The number of rows equals that of unused inputs."""
    root, _ = mixed
    rows = [row for found in rows_of(root).values() for row in found]
    assert len(rows) == len(bad_images()) + len(["folder", "dangling", "pipe", "drawing", "alone"]) + 2 * 2 + 2


@pytest.mark.parametrize("image_id", ["empty", "bomb", "flat", "folder", "dangling", "twin", "alone"])
def test_explain_prints_reason_and_remedy(mixed, image_id):
    root, _ = mixed
    row = rows_of(root)[image_id][0]

    done = imagemill("explain", image_id, "--data-root", root.path)

    assert done.returncode == 0, done.stderr
    assert row.reason in done.stdout
    assert f"do: {row.remedy}" in done.stdout


def test_extreme_ratio_is_a_warning_and_never_a_failure(mixed):
    """An image of 10:1 has a nearest bucket, a sample, and a finding. Spec: docs/spec/stage2.md#buckets"""
    root, _ = mixed
    assert records_of(root)["wide"]["aspect_bucket"] == "1344x704"
    assert "wide" not in rows_of(root)

    found = imagemill("validate", root.stage2_jsonl, "--json")

    assert found.returncode == 0
    assert '"unusual_ratio":1' in found.stdout
    assert '"errors":0' in found.stdout


def test_second_run_does_not_retry_refused_images(mixed):
    """Spec: docs/spec/conventions.md#refused-and-failed"""
    root, _ = mixed
    before = rows_of(root)

    again = imagemill("run", "--data-root", root.path, stub=True)

    assert again.returncode == 0
    assert "nothing new: the rest needs what is listed above" in again.stdout
    assert rows_of(root).keys() == before.keys()


def test_refused_image_becomes_a_sample_once_replaced_by_a_valid_one(data_root):
    put(data_root.approved, "a.png", b"broken")
    put(data_root.approved, "b.png", encoded(PHOTO))
    imagemill("run", "--data-root", data_root.path, stub=True)
    put(data_root.approved, "a.png", encoded(PHOTO))

    done = imagemill("run", "--data-root", data_root.path, stub=True)

    assert done.returncode == 0, done.stdout
    assert records_of(data_root).keys() == {"a", "b"}
    assert imagemill("run", "--fail-on-skip", "--data-root", data_root.path, stub=True).returncode == 0


def test_refused_input_fails_a_run_only_on_request(mixed):
    root, _ = mixed
    assert imagemill("run", "--fail-on-skip", "--data-root", root.path, stub=True).returncode == 1


@pytest.mark.parametrize("command", ["run", "stage2"])
def test_every_input_refused_exits_with_1(data_root, command):
    """Spec: docs/spec/conventions.md#refused-and-failed"""
    for name, (data, _) in bad_images().items():
        put(data_root.approved, name, data)

    done = imagemill(command, "--data-root", data_root.path, stub=True)

    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
