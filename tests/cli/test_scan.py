"""`imagemill scan`: formats, colours and problems of a folder, from file headers.

Spec: docs/spec/stage2.md#scan
"""

import json
import subprocess
import sys

import pytest
from PIL import Image

from imagemill.formats import images
from imagemill.pipeline import folder_report
from tests.helpers.images import encoded
from tests.helpers.product import PROJECT, imagemill
from tests.helpers.profiles import P3, avif_with_nclx

PICTURE = Image.new("RGB", (16, 16), (200, 10, 10))


@pytest.fixture
def folder(tmp_path):
    files = {
        "a.jpg": encoded(PICTURE, "JPEG", icc_profile=P3),
        "b.PNG": encoded(PICTURE),
        "c.webp": encoded(PICTURE, "PNG"),
        "d.gif": encoded(PICTURE, "GIF", save_all=True, append_images=[Image.new("RGB", (16, 16))]),
        "bad.jpg": b"no picture",
        "bright.avif": avif_with_nclx(PICTURE, 9, 16),
        "e.jpg": encoded(PICTURE, "JPEG", icc_profile=b"\0" * 200),
        "notes.psd": b"",
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "a.txt").write_text("red")
    return tmp_path


def test_report_for_people(folder):
    lines = imagemill("scan", folder).stdout.splitlines()

    assert lines == [
        f"folder      {folder}",
        "images      5: 2 JPEG, 2 PNG, 1 GIF",
        "captions    1 from text files, 4 without",
        "            4 images without a caption, the first b.PNG",
        "pixels      pixels.color: srgb",
        "colours     1 Display P3, 1 unreadable profile; 1 converted to sRGB, 1 with an unusable profile",
        "            1 file with several pictures: the first, or the primary one, is used",
        "problem     hdr_transfer       1 input",
        "problem     undecodable        1 input",
        "problem     unsupported_type   1 input",
        "  bad.jpg: undecodable: cannot be decoded: not an image in a supported format; replace the file by a complete image",
        "  bright.avif: hdr_transfer: colours of high dynamic range: BT.2020, PQ (nclx); export it as an sRGB or Display P3 "
        "picture, or set pixels.color: ignore",
        "  notes.psd: unsupported_type: not jpg, jpeg, jpe, jfif, png, webp, bmp, gif, tif, tiff, avif, heic, heif or hif; "
        "convert it, or move it elsewhere",
    ]


def test_report_for_programs_has_every_problem(folder):
    for number in range(25):
        (folder / f"x{number}.psd").touch()

    report = json.loads(imagemill("scan", folder, "--json").stdout)

    assert (report["images"], report["captions"], report["first_frames"]) == (5, {"text files": 1, "none": 4}, 1)
    assert report["formats"] == {"JPEG": 2, "PNG": 2, "GIF": 1}
    assert (report["colours"]["converts"], report["colours"]["bad_profile"]) == (1, 1)
    assert len(report["problems"]) == 28
    assert "and 8 more: `imagemill scan --json` lists them all" in imagemill("scan", folder).stdout


def test_folder_without_profiles(tmp_path):
    (tmp_path / "a.png").write_bytes(encoded(PICTURE))
    assert "colours     no image has a colour profile: sRGB" in imagemill("scan", tmp_path).stdout


def test_without_a_folder_the_approved_images_are_reported(folder, tmp_path_factory):
    """As recorded: a data root of an earlier release reads four formats, and converts nothing."""
    root = tmp_path_factory.mktemp("data")
    (root / "approved").symlink_to(folder)
    (root / "derived").mkdir()
    (root / "derived" / "approved_image_dataset.jsonl").touch()

    said = imagemill("scan", "--data-root", root).stdout

    assert "pixels      pixels.color: ignore" in said
    assert "images      4: 2 JPEG, 2 PNG" in said
    assert "1 would be converted by pixels.color: srgb" in said
    assert not (root / ".imagemill").exists()


def test_missing_folder_is_refused(tmp_path):
    done = imagemill("scan", tmp_path / "nowhere")
    assert done.returncode == 1
    assert "no folder of approved images" in done.stderr


def test_file_that_cannot_be_read_is_a_problem(folder, monkeypatch):
    def fail(path):
        raise OSError(5, "input/output error")

    monkeypatch.setattr(folder_report, "read_facts", fail)

    report = folder_report.report_folder(folder, folder_report.InputSettings())

    assert {(p.reason, p.remedy) for p in report.problems} == {
        ("read_error", "make the file readable"), ("unsupported_type", "convert it, or move it elsewhere"),
    }  # fmt: skip


def test_neither_torch_nor_dagster_is_imported(folder):
    program = (
        "import sys; from click.testing import CliRunner; from dagster_project.cli.main import cli\n"
        f"done = CliRunner().invoke(cli, ['scan', {str(folder)!r}]); assert done.exit_code == 0, done.output\n"
        "sys.exit(', '.join(name for name in ('torch', 'dagster', 'transformers') if name in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp", "a.heic"])
def test_heic_without_its_library_names_the_extra(tmp_path, monkeypatch, name):
    """Under any name, and its caption is no orphan."""
    (tmp_path / name).write_bytes((PROJECT / "tests/data/heic/srgb.heic").read_bytes())
    (tmp_path / "a.txt").write_text("a gradient")
    for module in (images, sys.modules["imagemill.inputs.scan"]):
        monkeypatch.setattr(module, "heif_is_installed", lambda: False)

    report = folder_report.report_folder(tmp_path, folder_report.InputSettings())

    (problem,) = report.problems
    assert (problem.item, problem.reason) == (name, "unsupported_type")
    assert problem.remedy == "install imagemill[heic], then run imagemill again"


def test_captions_are_reported_by_source(tmp_path):
    for name in ("3_dog/a.jpg", "3_dog/b.jpg", "c.jpg", "d.jpg", "d-masklabel.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(encoded(PICTURE, "JPEG"))
    (tmp_path / "3_dog/a.txt").write_text("one\ntwo")
    (tmp_path / "Thumbs.db").touch()
    rows = [{"file_name": "c.jpg", "text": ["c", "another c"]}, {"file_name": "3_dog/a.jpg", "text": "of the row"}]
    (tmp_path / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    assert imagemill("scan", tmp_path).stdout.splitlines() == [
        f"folder      {tmp_path}",
        "layout      kohya: 1 folder, repeats 3",
        "            OneTrainer: 1 companion image (masks, control images)",
        "            Hugging Face imagefolder: metadata.jsonl",
        "images      4: 4 JPEG",
        "captions    1 from metadata.jsonl, 1 from text files, 2 without",
        "            2 images without a caption, the first 3_dog/b.jpg",
        "            1 image with several captions",
        "            1 text of several lines: see captions.lines",
        "            1 image with another caption in a source of a lower rank (caption_conflict)",
        "companions  1 companion image (masks, control images)",
        "ignored     1 input",
        "pixels      pixels.color: srgb",
        "colours     no image has a colour profile: sRGB",
        "settings    these lines in imagemill.yaml would use what is not used:",
        "inputs: {repeats: kohya}",
        "captions: {lines: each, folder: true}",
    ]


def test_folder_is_read_as_imagemill_yaml_says(tmp_path, data_root):
    (tmp_path / "a.jpg").write_bytes(encoded(PICTURE, "JPEG"))
    (tmp_path / "a.txt").write_text("one\ntwo")
    data_root.path.mkdir(exist_ok=True)
    data_root.config_file.write_text("captions: {lines: each}\n")

    report = json.loads(imagemill("scan", tmp_path, "--data-root", data_root.path, "--json").stdout)

    assert (report["several_captions"], report["settings"]) == (1, [])
    assert not data_root.state.exists()
