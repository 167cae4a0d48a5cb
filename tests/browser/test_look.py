"""The viewer in a browser: every page at two widths in light and dark, decisions by keyboard, and pictures in Dagster's UI.

One data root and one viewer for all tests of this file. Tests that change marks remove them.

Spec: docs/spec/conventions.md#viewer
"""

import os
from contextlib import contextmanager
from urllib.parse import parse_qs, urlencode, urlsplit

import numpy as np
import pytest
from PIL import Image

from imagemill.domain.layout import DataRoot
from imagemill.pipeline.curation.near_duplicates import Group, Member
from imagemill.store.ledger import Ledger
from tests.helpers.product import SEARCH_PATH, photos, product, start
from tests.helpers.situations import write_groups
from tests.helpers.ui import CHROMIUM, STUBBED, free_port, keep_screenshot, wait_until, watched_page

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM, reason="no chromium on the path: apt-get install chromium"),
]

LONG = "a-very-long-file-name-of-a-camera-or-of-a-download-" * 3
HOSTILE = ["<script>alert(1)<-script>", "![](http:--evil.example-x.png)", "a#b?c&d=e%41"]
SIZES = [(390, 844), (1440, 900)]
SCHEMES = ["light", "dark"]
MOST_CLICKS = 2
TOLERANCE = 0.01


def photograph(path, size, caption=None):
    """Write a colour gradient with a caption."""
    path.parent.mkdir(parents=True, exist_ok=True)
    across, down = np.meshgrid(np.linspace(0, 255, size[0]), np.linspace(0, 255, size[1]))
    pixels = np.stack([across, down, 255 - across / 2 - down / 2], axis=2).astype(np.uint8)
    Image.fromarray(pixels).save(path)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Photographs that are refused, waiting, withdrawn, near duplicates, changed and gone; hostile names and long texts."""
    root = DataRoot(tmp_path_factory.mktemp("look") / "data")
    approved = root.approved
    photos(approved, 12)
    photograph(approved / "wide.png", (900, 120), "a wide picture")
    photograph(approved / "tall.jpg", (300, 1100), "a tall picture")
    photograph(approved / f"{LONG}.jpg", (640, 480), "word " * 300)
    photograph(
        approved / "holidays/2026/beach.jpg", (800, 600), "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd (1)"
    )
    for number, name in enumerate(HOSTILE):
        photograph(approved / f"{name}.png", (64 + number, 48), f"{name} <img src=x onerror=alert(1)>")
    (approved / "broken.jpg").write_bytes(b"no image")
    (approved / "broken.txt").write_text("no image")
    (approved / "photo0001.txt").unlink()
    product(root, "run")
    product(root, "withdraw", "photo0006")
    photograph(approved / "photo0002.jpg", (200, 100))
    photograph(approved / "new/waiting.jpg", (320, 240), "not run yet")
    (approved / "photo0007.jpg").unlink()
    write_groups(
        root.derived,
        [
            Group("photo0003", [member("photo0003", 1.0), member("photo0004", 0.98), member("photo0006", 0.95)]),
            Group("tall", [member("tall", 1.0), member("wide", 0.97)]),
        ],
    )
    return root


def member(image_id, cosine):
    return Member(image_id, f"{image_id}.jpg", 48, 32, cosine)


@contextmanager
def running_viewer(root, *options):
    """Run `imagemill look` until the block ends; yield the address that it prints."""
    process = start(
        "look", "--data-root", root.path, "--port", free_port(), "--no-open", *options, stub=False,
        PYTHONPATH=os.pathsep.join([SEARCH_PATH, str(STUBBED)]),
    )  # fmt: skip
    try:
        yield next(word for word in process.stdout.readline().split() if word.startswith("http"))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def address(root):
    with running_viewer(root) as address:
        yield address


@pytest.fixture(scope="module")
def base(context, address):
    """The address of the pages, after the browser has its cookie."""
    page = context.new_page()
    wait_until(lambda: answers(page, address), 60, "the viewer answers")
    page.close()
    return address.partition("?")[0]


def answers(page, address):
    from playwright.sync_api import Error

    try:
        return page.goto(address).ok
    except Error:
        return False


@pytest.fixture
def page(watched, root):
    """A page without errors, over a data root without marks."""
    yield watched.page
    assert watched.errors() == []
    with Ledger(root.ledger) as ledger:
        ledger.unmark(ledger.marks())


def marks(root):
    with Ledger(root.ledger) as ledger:
        return set(ledger.marks())


# ---- every page

PAGES = [
    "", "images", "images?crop=1&sort=size&order=desc", "images?show=problems", "images?text=absent", "images?show=marked",
    f"image?{urlencode({'id': LONG})}", "image?id=broken", "image?id=tall", "image?id=new%252Fwaiting", "image?id=photo0001",
    "image?id=photo0002", "image?id=photo0006", "image?id=holidays%252F2026%252Fbeach&show=in_shards", "duplicates", "changes",
    "marked", "task", "presets",
]  # fmt: skip

# Width and height of each picture as drawn, its own, and whether it can be seen.
_PICTURES = """() => [...document.images].map((image) => {
    const box = image.getBoundingClientRect();
    return [image.src, box.width / box.height, image.naturalWidth / image.naturalHeight, image.naturalWidth, box.height];
})"""
_OVERFLOW = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
_LOAD_ALL = """() => { document.querySelectorAll("img").forEach((image) => { image.loading = "eager"; }); }"""
_LOADED = "() => [...document.images].every((image) => image.complete)"


@pytest.mark.parametrize(
    ("width", "height", "scheme"),
    [
        pytest.param(*size, scheme, marks=() if (size == SIZES[0]) == (scheme == SCHEMES[0]) else pytest.mark.soak)
        for size in SIZES
        for scheme in SCHEMES
    ],
)
def test_every_page_fits_is_accessible_and_shows_its_pictures(page, base, root, width, height, scheme, tmp_path):
    """There is no console error, failed request, horizontal overflow or serious violation; pictures are not distorted."""
    from axe_playwright_python.sync_playwright import Axe

    with Ledger(root.ledger) as ledger:
        ledger.mark(["photo0000", "tall"])
    page.set_viewport_size({"width": width, "height": height})
    page.emulate_media(color_scheme=scheme)
    pictures, wrong = 0, []
    for number, path in enumerate(PAGES):
        page.goto(base + path)
        page.evaluate(_LOAD_ALL)
        page.wait_for_function(_LOADED)
        keep_screenshot(page, tmp_path / f"{number}.png")
        if overflow := page.evaluate(_OVERFLOW):
            wrong.append(f"{path}: {overflow} pixels too wide")
        for source, drawn, own, pixels, high in page.evaluate(_PICTURES):
            pictures += 1
            # The box of a picture is rounded to 1/64 pixel.
            if not pixels or abs(drawn / own - 1) > max(TOLERANCE, 1 / high):
                wrong.append(f"{path}: {source} is drawn as {drawn:.3f}, and is {own:.3f}")
        found = Axe().run(page).response["violations"]
        wrong += [
            f"{path}: {each['id']}: {each['nodes'][0]['html']}"
            for each in found
            if each["impact"] in {"serious", "critical"}
        ]
    assert wrong == []
    assert pictures > 50


def test_photograph_crop_and_latents_have_one_scale(page, base):
    """Also of a picture that is much smaller than its column, and of one that is much taller than the window."""
    for name in ("photo0000", "tall", "wide"):
        page.goto(f"{base}image?id={name}")
        boxes = [part.bounding_box() for part in page.locator(".pictures svg").all()]
        assert len(boxes) == 3
        assert len({(round(box["width"]), round(box["height"])) for box in boxes}) == 1
        width, height = map(
            int, page.locator(".pictures figcaption").first.inner_text().split(";")[0][12:].split(" × ")
        )
        whole = page.locator(".pictures image").first.bounding_box()
        assert whole["width"] / whole["height"] == pytest.approx(width / height, rel=TOLERANCE)
        frame = page.locator(".outside").bounding_box()
        # The box of the frame includes the space for its line.
        assert [frame[side] for side in frame] == pytest.approx([whole[side] for side in frame], abs=9)


# ---- answers within two clicks

ANSWERS = {
    "who did not make it and why": (["with a problem", "broken"], "cannot be decoded: not an image"),
    "bucket 1216x832": (["1216x832"], "Bucket 1216x832"),
    "changes since yesterday": (["added"], "added since 24h"),
    "duplicates side by side": (["Near duplicates"], "cosine 0.9800"),
}


@pytest.mark.parametrize("question", ANSWERS)
def test_question_is_answered_within_two_clicks_of_the_overview(page, base, question):
    clicks, answer = ANSWERS[question]
    page.goto(base)
    for text in clicks:
        page.locator(
            f"dl div:has(dt:text-is('{text}')) a, a:text-is('{text}'), .card[data-item='{text}'] > a"
        ).first.click()
    page.get_by_text(answer).first.wait_for()
    assert len(clicks) <= MOST_CLICKS


def test_duplicates_are_side_by_side_without_withdrawn_ones(page, base):
    page.goto(f"{base}duplicates")
    first, second = page.locator("section").first.locator(".card").all()
    assert "representative" in first.inner_text()
    assert first.bounding_box()["y"] == second.bounding_box()["y"]
    assert page.get_by_text("photo0006").count() == 0


# ---- decisions by keyboard alone


def press(page, *keys):
    for key in keys:
        page.keyboard.press(key)


def follow(page, key):
    """Press a key that opens another page, and release it there: the browser may never confirm a key while it changes pages."""
    with page.expect_navigation():
        page.keyboard.down(key)
    page.keyboard.up(key)


def focused(page):
    return page.evaluate("document.activeElement.closest('.card')?.dataset.item")


def press_link(page, role, name):
    """Move to an element with the Tab key, and press Enter."""
    wanted = page.get_by_role(role, name=name).first
    for _ in range(80):
        if wanted.evaluate("element => element === document.activeElement"):
            follow(page, "Enter")
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"{name} is not reached with Tab")


def test_images_are_marked_withdrawn_and_restored_by_keyboard_alone(page, base, root):
    page.goto(f"{base}images?show=in_shards")
    press(page, "ArrowRight", "ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft")
    third = focused(page)
    press(page, "x")
    page.get_by_text("1 marked").wait_for()
    assert marks(root) == {third}
    press(page, "ArrowDown", "ArrowUp", "ArrowRight", "ArrowRight", "Shift+X")
    page.get_by_text("3 marked").wait_for()
    assert third in marks(root)

    follow(page, "Enter")
    assert "/image?" in page.url
    opened = page.locator("article").get_attribute("data-item")
    press(page, "x")
    page.get_by_text("2 marked").wait_for()
    assert opened not in marks(root)
    follow(page, "Escape")
    assert "/images?" in page.url
    assert focused(page) == opened

    press_link(page, "button", "Mark all")
    page.get_by_role("heading", name="marked images").wait_for()
    everything = marks(root)
    assert len(everything) == 17
    page.goto(f"{base}images?show=marked")
    press_link(page, "button", "Remove their marks")
    page.get_by_text("No image is marked.").wait_for()
    assert marks(root) == set()

    page.goto(f"{base}images?text=photo0008")
    press(page, "ArrowRight", "x")
    page.get_by_text("1 marked").wait_for()
    press_link(page, "link", "Marked")
    press_link(page, "button", "Withdraw 1 image")
    page.get_by_role("heading", name="Withdraw 1 image: done").wait_for()
    assert "withdrawn: photo0008" in page.locator("pre").inner_text()
    page.goto(f"{base}images?show=withdrawn")
    assert page.locator("[data-item=photo0008]").count() == 1
    page.goto(f"{base}task")
    press_link(page, "button", "Restore 1 image")
    page.get_by_role("heading", name="Restore 1 image: done").wait_for()
    page.goto(f"{base}images?show=in_shards&text=photo0008")
    assert page.locator("[data-item=photo0008]").count() == 1


def test_range_marks_only_what_can_be_marked(page, base, root):
    """A file that was never decoded has no button, and x says why."""
    page.goto(f"{base}images?show=problems")
    press(page, "ArrowRight")
    assert focused(page) == "broken"
    press(page, "x")
    page.get_by_text("it cannot be marked").wait_for()
    press(page, "ArrowRight", "x")
    page.get_by_text("1 marked").wait_for()
    press(page, "ArrowLeft", "Shift+X")
    page.get_by_text("it cannot be marked").wait_for()
    assert marks(root) == {"photo0001"}


@pytest.mark.parametrize("path", ["", "changes", "marked", "image?id=broken", "presets", "task"])
def test_keys_do_nothing_where_there_is_nothing_to_do(page, base, root, path):
    page.goto(base + path)
    press(page, "x", "Shift+X", "ArrowDown", "ArrowUp")
    assert page.url == base + path
    assert marks(root) == set()


def test_neighbours_end_at_the_ends_of_the_filter(page, base):
    page.goto(f"{base}image?id=photo0001&show=refused")
    assert page.locator("[rel=next], [rel=prev]").count() > 0
    for key, gone in (("ArrowLeft", "prev"), ("ArrowRight", "next")):
        while page.locator(f"[rel={gone}]").count():
            follow(page, key)
        before = page.url
        press(page, key)
        assert page.url == before


def test_page_that_is_opened_again_shows_the_marks_of_now(page, base, root):
    page.goto(f"{base}images")
    page.goto(f"{base}changes")
    with Ledger(root.ledger) as ledger:
        ledger.mark(["photo0000"])
    page.go_back()
    page.locator("[data-item=photo0000].marked").wait_for()


def test_caption_from_right_to_left_keeps_its_direction(page, base):
    page.goto(f"{base}image?id=holidays%252F2026%252Fbeach")
    assert page.locator(".caption").evaluate("element => getComputedStyle(element).direction") == "rtl"


# ---- in Dagster's UI


@pytest.mark.parametrize("item", ["photo0000", *HOSTILE])
def test_event_of_an_image_shows_its_picture_and_opens_its_page(ui, page, item):
    """No request goes to another host, also with names that look like HTML or Markdown."""
    hosts = set()
    page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
    page.goto(f"{ui.url}/assets/vae_latents?{urlencode({'view': 'partitions', 'partition': item})}")
    picture = page.locator("a[href*='/imagemill/image'] img").first
    picture.wait_for()
    page.wait_for_function("image => image.naturalWidth > 0", arg=picture.element_handle())
    target = page.locator("a[href*='/imagemill/image']").first.get_attribute("href")
    assert parse_qs(urlsplit(target).query)["id"] == [item]
    with watched_page(page.context) as other:
        other.page.goto(ui.url + target)
        assert other.page.locator("article").get_attribute("data-item") == item
        assert other.errors() == []
    assert hosts == {urlsplit(ui.url).netloc}
