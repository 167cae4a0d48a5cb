"""The report of near duplicates, and what shards leave out by it."""

import io
import itertools

import numpy as np
import pytest
from PIL import Image

from imagemill.config import NearDuplicateSettings
from imagemill.domain.embedding_specs import DINOV3
from imagemill.domain.encoder_settings import EncoderSettings
from imagemill.encoders.dinov3 import DinoV3Encoder
from imagemill.errors import ImagemillError, InvalidNpy, MissingInput
from imagemill.formats.images import open_rgb
from imagemill.pipeline.contact_sheet import PAGE_CHARACTERS
from imagemill.pipeline.curation import similarity
from imagemill.pipeline.curation.near_duplicates import (
    Group,
    Member,
    excluded_images,
    find_groups,
    lines_path,
    near_duplicate_reports,
    plan_near_duplicates,
    read_groups,
    read_summary,
    sheet_path,
    striking,
    summary_path,
    unit_vector,
)
from imagemill.pipeline.curation.reports import write_report
from imagemill.store.ledger import FROM_CAPTIONER, Captioned, CaptionRow, Ledger
from tests.helpers.stage2 import embed, photos

SETTINGS = NearDuplicateSettings()
EXCLUDE = NearDuplicateSettings(exclude=True)


def direction(*degrees):
    """A vector in the plane of the first two axes, of any length."""
    angle = np.radians(degrees[0])
    return (7 * np.eye(1024)[0] * np.cos(angle) + 7 * np.eye(1024)[1] * np.sin(angle)).astype(np.float32)


def vectors(root, **given):
    """Images `a`, `b`, … whose vectors point into these directions, in degrees; cos 14° is 0.9703."""
    photos(root, *given)
    embed(root, DINOV3)
    for image_id, value in given.items():
        put(root, image_id, value)


def put(root, image_id, value):
    array = direction(value) if isinstance(value, int | float) else value
    np.save(root.derived / DINOV3.folder / f"{image_id}.npy", array)


def report(root, settings=SETTINGS):
    with Ledger(root.ledger) as ledger:
        (report,) = near_duplicate_reports(plan_near_duplicates(root.derived, ledger, settings), root.approved)
    write_report(report)
    return report


def groups(root):
    return read_groups(root.derived, read_summary(root.derived))


def ids(root):
    return [[member.image_id for member in group.members] for group in groups(root)]


def excluded(root, settings=EXCLUDE):
    with Ledger(root.ledger) as ledger:
        return excluded_images(root.derived, ledger, settings)


# ---- groups


def test_images_whose_vectors_nearly_agree_form_a_group(data_root):
    vectors(data_root, a=0, b=90, c=2, d=180, e=91)

    report(data_root)

    assert ids(data_root) == [["a", "c"], ["b", "e"]]
    assert groups(data_root)[0].members[1] == Member("c", "c.png", 32, 24, round(float(np.cos(np.radians(2))), 6))


@pytest.mark.parametrize(("threshold", "expected"), [(0.99, []), (0.98, [["a", "b"]]), (0.95, [["a", "b", "c"]])])
def test_threshold_decides(data_root, threshold, expected):
    vectors(data_root, a=0, b=10, c=25)  # cosines 0.9848 and 0.9659

    report(data_root, NearDuplicateSettings(threshold=threshold))

    assert ids(data_root) == expected


def test_representative_has_the_most_pixels_and_the_first_id_among_equals(data_root):
    photos(data_root, "a", "z", size=(32, 24))
    photos(data_root, "m", "n", size=(64, 48))
    embed(data_root, DINOV3)
    for image_id in "azmn":
        put(data_root, image_id, 0)

    report(data_root)

    (group,) = groups(data_root)
    assert group.representative == "m"
    assert [member.image_id for member in group.members] == ["a", "m", "n", "z"]


def large_without_a_caption_beside_small(root):
    """Two images of one direction."""
    photos(root, "large", size=(64, 48), captions=False)
    photos(root, "small")
    embed(root, DINOV3)
    for image_id in ("large", "small"):
        put(root, image_id, 0)


def test_image_without_a_caption_represents_no_captioned_one(data_root):
    """It becomes no sample: where shards leave near duplicates out, nothing of the group would be left."""
    large_without_a_caption_beside_small(data_root)

    report(data_root)

    assert [group.representative for group in groups(data_root)] == ["small"]


def test_image_with_the_caption_of_another_picture_represents_none_either(data_root):
    large_without_a_caption_beside_small(data_root)
    with Ledger(data_root.ledger) as ledger:
        ledger.record_captions([CaptionRow("large", None, "what was there before", FROM_CAPTIONER, "c")])
        ledger.record_captioned([Captioned("large", "another picture", "model")])

    report(data_root)

    assert [group.representative for group in groups(data_root)] == ["small"]


def test_vector_without_a_direction_is_left_out_and_counted(data_root):
    vectors(data_root, a=0, b=0, c=0)
    put(data_root, "c", np.zeros(1024, np.float32))
    (data_root.derived / DINOV3.folder / "b.npy").write_bytes(b"not an array")

    counts = report(data_root).counts

    assert counts == {"images": 1, "groups": 0, "members": 0, "left out: unreadable": 1, "left out: zero_norm": 1}
    with pytest.raises(InvalidNpy, match="zero_norm"):
        unit_vector(np.zeros(3, np.float32))
    with pytest.raises(InvalidNpy, match="non_finite"):
        unit_vector(np.array([1, np.inf], np.float32))


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_images_have_an_empty_report(data_root, count):
    if count:
        vectors(data_root, a=0)

    assert report(data_root).counts == {"images": count, "groups": 0, "members": 0}
    assert groups(data_root) == []
    assert sheet_path(data_root.derived).exists()


def test_large_index_makes_the_same_report(data_root, monkeypatch):
    random = np.random.default_rng(0)
    given = {f"i{n:03d}": random.standard_normal(1024).astype(np.float32) for n in range(300)}
    given |= {
        f"j{n:03d}": given[f"i{n:03d}"] * 2 + random.standard_normal(1024).astype(np.float32) / 8 for n in range(50)
    }
    vectors(data_root, **given)
    report(data_root)
    exact = lines_path(data_root.derived).read_bytes()
    summary_path(data_root.derived).unlink()
    monkeypatch.setattr(similarity, "EXACT_UP_TO", 100)

    report(data_root)

    assert lines_path(data_root.derived).read_bytes() == exact
    assert len(ids(data_root)) == 50


# ---- real photographs


def reencoded(pixels, quality, *, scale=1.0):
    picture = Image.fromarray(pixels)
    picture = picture.resize((int(picture.width * scale), int(picture.height * scale)))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=quality)
    return np.asarray(Image.open(buffer).convert("RGB"))


def cropped(pixels, part):
    height, width = pixels.shape[:2]
    y, x = round(height * part), round(width * part)
    return np.ascontiguousarray(pixels[y : height - y, x : width - x])


@pytest.fixture(scope="module")
def photographs(coco128, preview_root):
    """The 128 photographs as vectors of the preview model, and that model as a function."""
    settings = EncoderSettings(device="cpu")
    encoder = DinoV3Encoder.load(settings, spec=DINOV3, threads=2, preview_root=preview_root)

    def vector_of(pixels):
        return encoder.encode([encoder.prepare(pixels)])[0]

    pixels = [open_rgb(path) for path in sorted((coco128 / "images" / "train2017").iterdir())]
    return pixels, np.stack([vector_of(image) for image in pixels]), vector_of


def unlike(rows, threshold):
    """Photographs no two of which the preview model finds alike: its weights are random, and it goes by layout."""
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    chosen = []
    for n, row in enumerate(unit):
        if not chosen or (unit[chosen] @ row).max() < threshold:
            chosen.append(n)
    return chosen


def test_copies_of_photographs_are_found_and_different_photographs_are_not(data_root, photographs):
    """Cropped by half a percent a side, JPEG at quality 70 and 40, smaller."""
    pixels, rows, vector_of = photographs
    chosen = unlike(rows, 0.9)
    assert len(chosen) >= 12
    given = {f"photo{n:03d}": rows[n] for n in chosen}
    changes = [
        lambda image: cropped(image, 0.005), lambda image: reencoded(image, 70),
        lambda image: reencoded(image, 40), lambda image: reencoded(image, 70, scale=0.6),
    ]  # fmt: skip
    expected = []
    for n, change in zip(chosen[:8], itertools.cycle(changes), strict=False):
        given[f"photo{n:03d}-copy"] = vector_of(change(pixels[n]))
        expected.append([f"photo{n:03d}", f"photo{n:03d}-copy"])
    vectors(data_root, **given)

    report(data_root)

    assert ids(data_root) == expected
    assert min(member.cosine for group in groups(data_root) for member in group.members) > 0.97


def test_all_photographs_are_grouped_as_comparing_every_pair_groups_them(data_root, photographs):
    _, rows, _ = photographs
    vectors(data_root, **{f"photo{n:03d}": row for n, row in enumerate(rows)})
    unit = rows.astype(np.float64) / np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    near = np.nonzero(np.triu(unit @ unit.T >= 0.97, 1))
    expected = [[f"photo{n:03d}" for n in group] for group in similarity.connected(len(rows), [near])]

    report(data_root)

    assert sorted(ids(data_root)) == sorted(expected)
    assert expected


# ---- files and pages


def test_second_report_of_the_same_vectors_reads_none_and_writes_none(data_root, monkeypatch):
    vectors(data_root, a=0, b=0, c=90)
    first = report(data_root)
    paths = [path(data_root.derived) for path in (lines_path, sheet_path, summary_path)]
    before = [(path.read_bytes(), path.stat().st_mtime_ns) for path in paths]
    monkeypatch.setattr("imagemill.pipeline.stage2.valid_files.read_npy", lambda path: pytest.fail(f"read {path}"))

    second = report(data_root)

    assert [(path.read_bytes(), path.stat().st_mtime_ns) for path in paths] == before
    assert (second.files, second.counts, second.pages) == ({}, first.counts, first.pages)


@pytest.mark.parametrize("spoil", ["lines", "sheet", "summary", "other lines"])
def test_report_with_a_file_missing_or_foreign_is_made_again(data_root, spoil):
    vectors(data_root, a=0, b=0)
    report(data_root)
    before = lines_path(data_root.derived).read_bytes()
    paths = {"lines": lines_path, "sheet": sheet_path, "summary": summary_path}
    if spoil in paths:
        paths[spoil](data_root.derived).unlink()
    else:
        lines_path(data_root.derived).write_bytes(b"{}\n")

    report(data_root)

    assert lines_path(data_root.derived).read_bytes() == before
    assert all(path(data_root.derived).exists() for path in paths.values())


def test_page_shows_the_sheet_and_stays_small(data_root):
    vectors(data_root, **{f"i{n:02d}": 3 * (n // 2) * 30 for n in range(24)})

    (page,) = report(data_root).pages.values()

    assert page.startswith("groups: 4\n")
    assert "data:image/jpeg;base64," in page
    assert len(page) <= PAGE_CHARACTERS


def test_sheet_shows_the_largest_groups_first_then_the_most_alike():
    def group(name, *cosines):
        return Group(name, [Member(f"{name}{n}", "f", 1, 1, cosine) for n, cosine in enumerate(cosines)])

    small, alike, large = group("s", 1, 0.97), group("a", 1, 0.99), group("l", 1, 0.98, 0.97)

    assert striking([small, alike, large]) == [large, alike, small]


def test_image_that_is_gone_is_still_in_the_report(data_root):
    vectors(data_root, a=0, b=0)
    (data_root.approved / "a.png").unlink()

    report(data_root)

    assert ids(data_root) == [["a", "b"]]


def test_groups_are_the_same_with_any_number_of_threads(data_root):
    vectors(data_root, **{f"i{n:02d}": n * 11 for n in range(30)})
    with Ledger(data_root.ledger) as ledger:
        plan = plan_near_duplicates(data_root.derived, ledger, SETTINGS)

    assert find_groups(plan, threads=1, search=1) == find_groups(plan, threads=4, search=2)


# ---- what shards leave out


def test_nothing_is_left_out_unless_asked(data_root):
    assert excluded(data_root, SETTINGS) == {}


def test_all_but_the_representative_are_left_out_where_asked(data_root):
    vectors(data_root, a=0, b=2, c=90)
    report(data_root)

    assert excluded(data_root) == {"b": "cosine 0.9994 to a, which represents it"}


def test_end_of_a_chain_that_is_unlike_the_representative_is_not_left_out(data_root):
    """a and b are alike, b and c too, a and c are not: c is not a near duplicate of the group's representative."""
    vectors(data_root, a=0, b=12, c=24)
    report(data_root)

    assert ids(data_root) == [["a", "b", "c"]]
    assert excluded(data_root).keys() == {"b"}


def test_missing_report_says_what_to_do(data_root):
    vectors(data_root, a=0)

    with pytest.raises(MissingInput, match="no report of near duplicates") as error:
        excluded(data_root)
    assert "near_duplicates" in str(error.value)
    assert "imagemill run" in str(error.value)


@pytest.mark.parametrize("change", ["vector", "image", "threshold", "lines"])
def test_report_of_something_else_is_refused(data_root, change):
    vectors(data_root, a=0, b=2)
    report(data_root, EXCLUDE)
    assert excluded(data_root)
    settings = EXCLUDE
    if change == "vector":
        put(data_root, "a", 50)
    elif change == "image":
        vectors(data_root, c=4)
    elif change == "threshold":
        settings = NearDuplicateSettings(exclude=True, threshold=0.99)
    else:
        lines_path(data_root.derived).write_bytes(b"")

    with pytest.raises(ImagemillError, match=r"older than the vectors|no report"):
        excluded(data_root, settings)
