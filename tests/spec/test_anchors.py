"""Citations of the specification: every anchor exists, and every rule is cited by a test."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "spec").glob("*.md"))
CITATION = re.compile(r"(?:docs/spec/|(?<=\]\()(?=[a-z0-9-]+\.md))([a-z0-9-]+\.md)#([a-z0-9-]+)")
# References to documents that the repository does not contain.
FOREIGN = re.compile(r"CONTRACTS|\b(?:[Ss]eed|[Ss]pec) 00[0-4]\b|\b[Ii]ssue \d")


def slug(heading):
    """Return the anchor that Markdown renderers give to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def headings(page):
    """Return (level, section, anchor) of each heading; the section is the last heading of level 2."""
    section, found = "", []
    for marks, text in re.findall(r"^(#+) (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
        section = text if len(marks) == 2 else section
        found.append((len(marks), section, slug(text)))
    return found


def tracked_files():
    """Return the text files that git tracks; a wheel or an archive has no such list."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.is_file() and path.suffix in {".py", ".md", ".toml", ".yaml", ".sh", ".csv", ""}:
            yield name, path.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_anchors_of_a_page_are_unique(page):
    anchors = [anchor for level, section, anchor in headings(page)]

    assert sorted(set(anchors)) == sorted(anchors)


def test_every_cited_anchor_exists():
    known = {(page.name, anchor) for page in PAGES for _, _, anchor in headings(page)}
    cited = {
        (name, *match)
        for name, text in tracked_files()
        if name.startswith("docs/spec/") or "docs/spec/" in text
        for match in CITATION.findall(text)
    }

    assert len(cited) > 100
    assert {place for place in cited if place[1:] not in known} == set()


def test_every_rule_is_cited_by_a_test():
    rules = {
        (page.name, anchor)
        for page in PAGES
        for level, section, anchor in headings(page)
        if level == 3 and section not in {"Planned", "Departures from the original specification"}
    }
    cited = {match for name, text in tracked_files() if name.startswith("tests/") for match in CITATION.findall(text)}

    assert rules - cited == set()


def test_no_file_refers_to_documents_outside_the_repository():
    found = [name for name, text in tracked_files() if name != "tests/spec/test_anchors.py" and FOREIGN.search(text)]

    assert found == []
