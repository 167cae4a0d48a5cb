"""The sample photographs: complete, credited in the packages' own words, and never mixed with a user's files."""

import importlib.resources
import os
import re
from pathlib import Path, PurePosixPath

import pytest
from PIL import Image, ImageChops, ImageOps, UnidentifiedImageError

from imagemill import demo
from imagemill.demo import CREDITS_NAME, PHOTOGRAPHS, ForeignFolder, write_demo
from imagemill.domain.buckets import BUCKETS, assign_bucket
from imagemill.errors import ImagemillError, MissingInput

NO_IMAGE = "not_a_photograph.jpg"


@pytest.fixture(scope="module")
def samples(tmp_path_factory) -> Path:
    approved = tmp_path_factory.mktemp("root") / "approved"
    write_demo(approved)
    return approved


def photographs(approved: Path) -> list[Path]:
    return [path for path in sorted(approved.iterdir()) if path.suffix != ".txt" and path.name != NO_IMAGE]


def state(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def package_file(name: str):
    package, *parts = PurePosixPath(name).parts
    return importlib.resources.files(package).joinpath(*parts)


def test_samples_hold_all_seven_buckets(samples):
    """With crops, every aspect bucket occurs."""
    found = set()
    for path in photographs(samples):
        with Image.open(path) as image:
            found.add(assign_bucket(*ImageOps.exif_transpose(image).size))

    assert found == set(BUCKETS)


def test_originals_are_the_packages_bytes(samples):
    """A photograph that is not cropped is the package's file."""
    originals = {credit.source: samples / PurePosixPath(credit.source).name for credit in PHOTOGRAPHS}

    assert len(originals) == 9
    assert all(path.read_bytes() == package_file(source).read_bytes() for source, path in originals.items())


def test_turned_copy_is_upright_by_its_exif_orientation_alone(samples):
    """One copy is stored on its side, with the orientation that rights it."""
    with Image.open(samples / "coffee_turned.jpg") as turned, Image.open(samples / "coffee.png") as coffee:
        assert turned.size == (400, 600)
        assert turned.getexif()[0x0112] == 6

        upright = ImageOps.exif_transpose(turned)
        difference = ImageChops.difference(upright.convert("L"), coffee.convert("L"))

    assert upright.size == (600, 400)
    # Only JPEG's loss remains; a copy turned the wrong way differs by tens of grey levels on average.
    assert sum(level * count for level, count in enumerate(difference.histogram())) / (600 * 400) < 3


def test_horse_has_alpha(samples):
    """One sample has an alpha channel that is not constant."""
    with Image.open(samples / "horse.png") as horse:
        levels = [level for level, count in enumerate(horse.getchannel("A").histogram()) if count]

    assert len(levels) > 1


def test_one_file_is_no_image_and_is_reported(samples):
    """"""
    with pytest.raises(UnidentifiedImageError):
        Image.open(samples / NO_IMAGE)

    assert (samples / NO_IMAGE).read_text("utf-8").startswith("This file is text")


def test_every_photograph_has_a_caption_of_one_line(samples):
    """Captions are `{image_id}.txt`, one line each; the file that is not an image has none."""
    captions = {path.stem: path.read_text("utf-8") for path in samples.glob("*.txt")}

    assert captions.keys() == {path.stem for path in photographs(samples)}
    assert all(re.fullmatch(r"\S[^\n]+\.\n", caption) for caption in captions.values())
    assert len(set(captions.values())) == len(captions)


def test_same_bytes_in_another_folder(samples, tmp_path):
    """Byte-deterministic: two fresh folders are equal."""
    write_demo(tmp_path / "approved")

    assert {p.name: p.read_bytes() for p in samples.iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "approved").iterdir()
    }


def test_second_call_touches_nothing_and_restores_only_what_is_gone(tmp_path):
    """Existing files stay byte for byte, including an edited caption."""
    approved = tmp_path / "approved"
    write_demo(approved)
    (approved / "horse.txt").write_text("A horse.\n")
    (tmp_path / CREDITS_NAME).write_text("my own page\n")
    before = state(tmp_path)
    removed = approved / "rocket_tall.jpg"
    removed.unlink()

    write_demo(approved)
    after = state(tmp_path)

    assert after.pop(removed.name)[0] == before.pop(removed.name)[0]
    assert after == before


@pytest.mark.parametrize("name", ["holiday.jpg", "holiday.txt", "album/holiday.jpg"])
def test_folder_with_a_file_of_someone_else_is_left_alone(tmp_path, name):
    """Samples and the user's own photos are never mixed."""
    foreign = tmp_path / "approved" / name
    foreign.parent.mkdir(parents=True)
    foreign.write_bytes(b"mine")
    before = state(tmp_path)

    with pytest.raises(ForeignFolder, match=f"(?s)approved.*{re.escape(name.split('/')[0])}.*do:") as caught:
        write_demo(tmp_path / "approved")

    assert isinstance(caught.value, ImagemillError)
    assert state(tmp_path) == before


def test_folder_behind_a_symlink_is_only_read(tmp_path):
    """`approved/` may be a symlink; nothing is written through it, even an empty one."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "approved").symlink_to(tmp_path / "mine")

    with pytest.raises(ForeignFolder, match="symlink"):
        write_demo(tmp_path / "approved")

    assert os.listdir(tmp_path / "mine") == []
    assert not (tmp_path / CREDITS_NAME).exists()


def test_dot_files_do_not_make_a_folder_foreign(tmp_path):
    """Dot-files are ignored in `approved/`. Spec: docs/spec/stage2.md#inputs"""
    (tmp_path / "approved").mkdir()
    (tmp_path / "approved" / ".DS_Store").write_bytes(b"")

    assert write_demo(tmp_path / "approved") == PHOTOGRAPHS


def test_missing_extra_is_named_and_nothing_is_written(tmp_path, monkeypatch):
    """"""

    def files(package):
        raise ModuleNotFoundError(package)

    monkeypatch.setattr(demo.importlib.resources, "files", files)

    with pytest.raises(MissingInput, match=re.escape("pip install 'imagemill[demo]'")):
        write_demo(tmp_path / "root" / "approved")

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("credit", PHOTOGRAPHS, ids=lambda credit: credit.title)
def test_licence_is_quoted_from_the_package(credit):
    """The words of a credit occur in the installed package, apart from line breaks."""
    stated = " ".join(package_file(credit.stated_in).read_text("utf-8").split())

    assert all(part in stated for part in credit.licence.split(" [...] "))


def test_credits_page_names_every_sample_with_author_and_licence(samples):
    """"""
    page = (samples.parent / CREDITS_NAME).read_text("utf-8")

    assert all(f"{path.name} (" in page for path in photographs(samples))
    assert all(credit.author in page and credit.licence in page for credit in PHOTOGRAPHS)


def test_command_shows_credits_and_goes_on_where_the_folder_is_foreign(tmp_path, capsys):
    """`make run` then works with the files in `approved/`."""
    assert demo.main([str(tmp_path)]) == 0
    assert "Chelsea the cat, by Stefan van der Walt: chelsea.png (unchanged)" in capsys.readouterr().out

    (tmp_path / "approved" / "holiday.jpg").write_bytes(b"mine")

    assert demo.main([str(tmp_path)]) == 0
    assert "'holiday.jpg'" in capsys.readouterr().out


def test_command_fails_with_the_message_where_the_extra_is_missing(tmp_path, capsys, monkeypatch):
    """Exit 1 and no traceback. Spec: docs/spec/conventions.md#exit-codes"""
    monkeypatch.setattr(demo, "_packaged_bytes", lambda source: _raise(MissingInput("not there", do="install it")))

    assert demo.main([str(tmp_path)]) == 1
    assert "do:    install it" in capsys.readouterr().err


def _raise(error: Exception):
    raise error
