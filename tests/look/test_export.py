"""The HTML file to send: complete, without script, for its owner alone; it overwrites nothing."""

import io
import os
import stat
from datetime import UTC, datetime
from html.parser import HTMLParser

import pytest
from PIL import Image

from imagemill.errors import MissingInput, WrongUsage
from imagemill.look import export as module
from imagemill.look.export import MOST_ENTRIES, ExportEntry, ExportReason, export_html

HOSTILE = [
    "<script>alert(1)</script>", "\"><img src=x onerror=alert(1)>", "' onload='alert(1)", "![](http://example.com/a.png)",
    "{{ 7 * 7 }}", "{% raw %}", "%2F..%2F#a?b&amp;c", "\u202egpj.exe", "مرحبا", "\udcff", "]]>-->", "javascript:alert(1)",
]  # fmt: skip
AT = datetime(2026, 3, 1, 12, 30, tzinfo=UTC)


class Page(HTMLParser):
    """Elements with their attributes, and the text of a page."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.words = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return "\n".join(self.words)


def jpeg(colour=(200, 30, 40)):
    buffer = io.BytesIO()
    Image.new("RGB", (16, 12), colour).save(buffer, "JPEG")
    return buffer.getvalue()


def entry(name="a", **changes):
    given = {
        "file": f"{name}.jpg", "caption": f"a photo of {name}", "outcome": "refused", "bucket": "1216x832",
        "sizes": ("640 × 480", "enlarged 1.9 times"), "picture": jpeg(),
        "reasons": (ExportReason("missing_caption", "no text file", f"write {name}.txt"),),
    }  # fmt: skip
    return ExportEntry(name, **{**given, **changes})


def exported(root, path, entries, **options):
    return export_html(path, entries, root=root, **{"title": "refused", "total": len(entries), "at": AT, **options})


def test_page_shows_picture_caption_reasons_remedies_sizes_and_date(data_root, tmp_path):
    assert exported(data_root, tmp_path / "page.html", [entry("a"), entry("b", picture=None)], total=3214) == 2

    page = Page((tmp_path / "page.html").read_text("utf-8"))
    for text in (
        "refused", "2 of 3,214 images, 2026-03-01 12:30 UTC", "a.jpg", "a photo of a", "missing_caption", "no text file",
        "write b.txt", "refused, 1216x832, 640 × 480, enlarged 1.9 times", "no picture",
    ):  # fmt: skip
        assert text in page.text
    (image,) = [attributes for tag, attributes in page.elements if tag == "img"]
    assert image["alt"] == "a photo of a"
    assert image["src"].startswith("data:image/jpeg;base64,/9j/")


def test_hostile_texts_are_text(data_root, tmp_path):
    """Neither elements nor attributes come from them, and the page may load and execute nothing."""
    plain = Page(_page_of(data_root, tmp_path / "plain.html", ["x"] * len(HOSTILE)))
    text = _page_of(data_root, tmp_path / "hostile.html", HOSTILE)
    page = Page(text)

    assert [(tag, set(attributes)) for tag, attributes in page.elements] == [
        (tag, set(attributes)) for tag, attributes in plain.elements
    ]
    assert {tag for tag, _ in page.elements} <= {
        "html", "head", "meta", "title", "style", "body", "h1", "h2", "ul", "li", "img", "p", "strong",
    }  # fmt: skip
    assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'" in text
    for hostile in HOSTILE:
        assert page.text.count(hostile.encode("utf-8", "replace").decode()) >= 5


def _page_of(root, path, texts):
    entries = [
        ExportEntry(text, text, text, text, (ExportReason(text, text, text),), text, (text,), jpeg()) for text in texts
    ]
    exported(root, path, entries, title=" ".join(texts))
    return path.read_text("utf-8")


def test_file_is_for_its_owner_alone(data_root, tmp_path):
    before = os.umask(0)
    try:
        exported(data_root, tmp_path / "page.html", [entry()])
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "page.html").stat().st_mode) == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "page.html"]


def test_no_more_than_500_pictures_are_taken(data_root, tmp_path):
    taken = []

    def entries():
        for n in range(2000):
            taken.append(n)
            yield entry(f"{n}")

    assert (
        export_html(tmp_path / "page.html", entries(), root=data_root, title="all", total=2000) == MOST_ENTRIES == 500
    )
    assert len(taken) == 500
    assert "500 of 2,000 images" in (tmp_path / "page.html").read_text("utf-8")


@pytest.mark.parametrize("existing", ["file", "broken link", "folder"])
def test_existing_file_is_kept(data_root, tmp_path, existing):
    path = tmp_path / "page.html"
    {"file": lambda: path.write_text("mine"), "broken link": lambda: path.symlink_to("gone"), "folder": path.mkdir}[
        existing
    ]()

    with pytest.raises(WrongUsage, match=r"(?s)exists.*never overwrites"):
        exported(data_root, path, [entry()])
    assert existing != "file" or path.read_text() == "mine"


def test_file_that_appears_meanwhile_is_kept(data_root, tmp_path):
    def entries():
        (tmp_path / "page.html").write_text("mine")
        yield entry()

    with pytest.raises(WrongUsage, match="exists"):
        export_html(tmp_path / "page.html", entries(), root=data_root, title="all", total=1)
    assert (tmp_path / "page.html").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "page.html"]


@pytest.mark.parametrize("place", ["", "approved", "link"])
def test_place_inside_the_data_root_is_refused_also_through_a_link(data_root, tmp_path, place):
    (tmp_path / "link").symlink_to(data_root.approved)
    folder = tmp_path / "link" if place == "link" else data_root.path / place

    with pytest.raises(WrongUsage, match=r"(?s)cannot be inside the data root.*another folder"):
        exported(data_root, folder / "page.html", [entry()])
    assert not (folder / "page.html").exists()


def test_folder_that_does_not_exist_is_not_created(data_root, tmp_path):
    with pytest.raises(MissingInput, match="does not exist"):
        exported(data_root, tmp_path / "gone" / "page.html", [entry()])
    assert not (tmp_path / "gone").exists()


def test_file_system_without_hard_links_gets_the_file_too(data_root, tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(module.os, "link", unsupported)
    exported(data_root, tmp_path / "page.html", [entry()])
    assert (tmp_path / "page.html").read_text("utf-8").startswith("<!DOCTYPE html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "page.html"]
