"""Which image a caption file belongs to.

Spec: docs/spec/stage2.md#caption-sources
"""

import unicodedata

import pytest

from imagemill.domain.ids import split_suffix
from imagemill.domain.inputs import NEW_INPUTS, OLD_INPUTS, Sidecars
from imagemill.inputs.listing import concerns
from imagemill.inputs.matching import caption_extension, match_texts
from imagemill.inputs.scan import scan_approved

NFD = unicodedata.normalize("NFD", "café")


def matched(texts, images, sidecars=NEW_INPUTS.sidecars):
    def extension_of(suffix):
        return caption_extension(suffix, sidecars)

    found = (name for name in sorted(texts) if extension_of(split_suffix(name)[1]))
    return match_texts(found, extension_of, images, exact=sidecars.exact)


def by_image(found):
    return {image_id: found.captions_of(image_id) for image_id in found.images}


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["a.txt"], ("a.txt",)),
        (["a.caption", "a.txt"], ("a.txt", "a.caption")),
        (["a.jpg.txt"], ("a.jpg.txt",)),
        (["a.jpg.txt", "a.caption"], ("a.caption", "a.jpg.txt")),
        (["A.TXT"], ("A.TXT",)),
        (["a.TXT", "a.txt"], ("a.txt",)),
        (["A.txt", "a.TXT"], ("a.TXT",)),
    ],
)
def test_captions_of_one_image_have_an_order(texts, expected):
    assert by_image(matched(texts, {"a": ["a.jpg"]})) == {"a": expected}


def test_order_of_extensions_is_that_of_the_setting():
    found = matched(["a.caption", "a.txt"], {"a": ["a.jpg"]}, Sidecars(("caption", "txt")))

    assert by_image(found) == {"a": ("a.caption", "a.txt")}


def test_caption_named_after_a_file_belongs_to_it_although_an_id_is_equal():
    """`x.jpg.txt` belongs to `x.jpg`, also beside `x.jpg.png`."""
    found = matched(["x.jpg.txt"], {"x": ["x.jpg"], "x.jpg": ["x.jpg.png"]})

    assert by_image(found) == {"x": ("x.jpg.txt",)}


def test_decomposed_name_is_found():
    assert by_image(matched([f"{NFD}.txt"], {"café": ["café.jpg"]})) == {"café": (f"{NFD}.txt",)}


def test_closer_match_is_read_and_the_other_is_named():
    found = matched(["A.txt", "a.txt"], {"a": ["a.jpg"]})

    assert (by_image(found), found.doubles, found.ties) == ({"a": ("a.txt",)}, {"A.txt": "a.txt"}, {})


def test_two_captions_that_match_equally_well_are_both_left():
    found = matched(["IMG.txt", "Img.txt"], {"img": ["img.jpg"]})

    assert (by_image(found), found.ties) == ({}, {"IMG.txt": "Img.txt", "Img.txt": "IMG.txt"})


def test_caption_of_two_possible_images_belongs_to_neither():
    found = matched(["Img.txt"], {"IMG": ["IMG.jpg"], "img": ["img.jpg"]})

    assert (by_image(found), found.shared) == ({}, {"Img.txt": ["IMG", "img"]})


def test_exact_names_match_letter_by_letter_only():
    """Spec: docs/spec/conventions.md#old-data-roots"""
    found = matched(
        ["a.jpg.txt", "b.txt", "C.txt"], {"a": ["a.jpg"], "b": ["b.jpg"], "c": ["c.jpg"]}, OLD_INPUTS.sidecars
    )

    assert (by_image(found), found.orphans) == ({"b": ("b.txt",)}, ["C.txt", "a.jpg.txt"])


@pytest.mark.parametrize("image_id", ["a", "A", "a.jpg", "b", "b-masklabel", "a\\x01", "none"])
def test_part_of_a_scan_is_the_scan_of_the_part(tmp_path, image_id):
    """Only the entries of an id are looked up, and give what all entries give."""
    names = [
        "a.jpg",
        "A.TXT",
        "a.jpg.png",
        "a.jpg.txt",
        "b.png",
        "b-masklabel.png",
        "b-masklabel.txt",
        "a\x01.png",
        "c.txt",
    ]
    for name in names:
        (tmp_path / name).write_bytes(b"x")

    whole, part = scan_approved(tmp_path), scan_approved(tmp_path, only={image_id})

    assert (part.sources, part.problems) == (whole.of({image_id}).sources, whole.of({image_id}).problems)
    assert concerns({image_id})("c.txt") is False
