"""Two hundred hostile ids and captions: nothing of them is markup, and every link opens its image.

Spec: docs/spec/conventions.md#viewer
"""

import html
import random
import re
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from imagemill.domain.layout import DataRoot
from imagemill.look.links import MOST_CHARACTERS, escaped, image_note, page_note
from imagemill.store.ledger import Ledger
from tests.helpers.look import viewing
from tests.helpers.product import imagemill

PARTS = [
    "<script>alert(1)<-script>", "![](http:--evil.example-x.png)", "%2F", "%", "#", "?", "&amp;", "&", "'", '"', "`", "{{7*7}}",
    "${x}", " ", "=", "+", ";", "<!--", "]]>", "[", "](x)", "*", "_", "~", "|",
    "\u202e", "é", "中", "😀", "..", "javascript:", "<b",
]  # fmt: skip
COUNT = 200


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = DataRoot(tmp_path_factory.mktemp("hostile") / "data")
    root.approved.mkdir(parents=True)
    chosen = random.Random(0)
    for number in range(COUNT):
        name = "".join(chosen.choices(PARTS, k=chosen.randint(2, 4))) + str(number)
        Image.new("RGB", (40 + number % 7, 30), (number, 9, 9)).save(root.approved / f"x{name}.png")
        text = "".join(
            chosen.choices([*PARTS, "</p><script>alert(1)</script>", "\x3cimg src=x onerror=alert(1)\x3e"], k=6)
        )
        (root.approved / f"x{name}.txt").write_text(text)
    done = imagemill("run", "--data-root", root.path, stub=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return root


def test_every_link_opens_its_image_and_no_text_is_markup(root):
    with Ledger(root.ledger, read_only=True) as ledger:
        sources = ledger.sources()
    assert len(sources) == COUNT
    with viewing(root) as client:
        seen = set()
        for number in (1, 2):
            text = client.get(f"/images?page={number}").text
            assert "<script>alert" not in text
            assert "<img src=x" not in text
            for link in set(re.findall(r'href="(image\?id=[^"]+)"', text)):
                address = html.unescape(link)
                image_id = parse_qs(urlsplit(address).query)["id"][0]
                shown = client.get(f"/{address}")
                assert shown.status_code == 200
                assert (
                    f"<bdi>{html.escape(image_id).replace('&#x27;', '&#39;').replace('&quot;', '&#34;')}</bdi>"
                    in shown.text
                )
                assert "<script>alert" not in shown.text
                picture = client.get(f"/{address.replace('image?', 'thumb?', 1)}")
                assert picture.headers["content-type"] == "image/jpeg"
                seen.add(image_id)
    assert seen == sources.keys()


def test_link_of_an_event_names_its_image(root):
    with Ledger(root.ledger, read_only=True) as ledger:
        sources = ledger.sources()
    for image_id, source in sources.items():
        note = image_note(image_id, source, name="animals", preview=True)
        found = re.fullmatch(r"\[!\[(.*)\]\((\S*)\)\]\((\S*)\) (\d+ × \d+, bucket \d+x\d+, PREVIEW WEIGHTS)", note)
        assert found, note
        assert not re.search(r"(?<!\\)[\[\]()!<>`*_]", found[1].replace("\\\\", ""))
        for address, page in ((found[2], "thumb"), (found[3], "image")):
            assert address.startswith(f"/imagemill/animals/{page}?id=")
            assert unquote(address.partition("=")[2]) == image_id


@given(st.text(min_size=1, max_size=60))
def test_escaped_text_has_no_bare_punctuation(text):
    assert not re.search(r"(?<!\\)(?:\\\\)*[\[\]()!<>`*_#|~]", escaped(text))
    assert re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", escaped(text)) == " ".join(text.split())


def test_long_id_has_no_picture_in_its_event():
    assert image_note("中" * 80, None, name=None, preview=False) == "no picture"
    assert len(image_note("a" * 250, None, name=None, preview=False)) <= MOST_CHARACTERS
    assert page_note("a [b]", "images", name=None, show="seen") == r"[a \[b\]](/imagemill/images?show=seen)"
