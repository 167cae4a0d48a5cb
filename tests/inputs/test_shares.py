"""Shares divide the images of a folder: each entry is in exactly one.

Spec: docs/spec/stage2.md#shares
"""

import hashlib
from itertools import chain

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagemill.domain.inputs import NEW_INPUTS
from imagemill.domain.shares import ImageShare, parse_share
from imagemill.inputs.scan import scan_approved
from imagemill.inputs.survey import survey
from imagemill.store.ledger import Ledger
from tests.helpers.stage2 import picture


def of_share(share):
    return msgspec.structs.replace(NEW_INPUTS, share=share)


@given(st.text(), st.integers(1, 50))
def test_share_is_the_digest_of_the_id(image_id, total):
    image_id = image_id.encode("utf-8", "replace").decode()
    digest = int(hashlib.sha256(image_id.encode()).hexdigest(), 16)

    assert [number for number in range(total) if ImageShare(number, total).has(image_id)] == [digest % total]


@pytest.mark.parametrize("text", ["0/1", "2/3", "15/16"])
def test_share_as_it_is_written(text):
    assert str(parse_share(text)) == text


@pytest.mark.parametrize("text", ["", "1", "1/", "/3", "-1/3", "3/3", "0/0", "1/3 ", "a/b", "1.0/3"])
def test_what_is_no_share(text):
    with pytest.raises(ValueError, match="share"):
        parse_share(text)


def fill(folder):
    """Images with and without captions, in folders, and one of each kind of what is not used."""
    for name in [f"photo{number:02d}.png" for number in range(30)] + ["a/b.png", "a/c d.png", "UPPER.PNG"]:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        picture(path, size=(16, 16))
        path.with_suffix(".txt").write_text(name)
    (folder / "photo00.jpg").write_bytes((folder / "photo00.png").read_bytes())
    (folder / "photo01-masklabel.png").write_bytes((folder / "photo01.png").read_bytes())
    for name in ("orphan.txt", "table.zip", "notes.pdf", ".hidden", "photo02.png.txt", "photo03.json"):
        (folder / name).write_text("text")


def test_each_entry_is_in_one_share(tmp_path):
    fill(tmp_path)
    whole = scan_approved(tmp_path)
    parts = [scan_approved(tmp_path, of_share(f"{number}/3")) for number in range(3)]

    together = {image_id: source for part in parts for image_id, source in part.sources.items()}
    assert sum(len(part.sources) for part in parts) == len(together)
    assert together == whole.sources
    assert all(part.sources for part in parts)
    for of in ("problems", "captions", "companions", "ignored"):
        found = sorted(map(str, chain.from_iterable(getattr(part, of) for part in parts)))
        assert found == sorted(map(str, getattr(whole, of))), of
    for part in parts:
        own = len(part.sources) + len(part.problems) + len(part.captions) + len(part.companions) + len(part.ignored)
        total = sum(map(len, (whole.sources, whole.problems, whole.captions, whole.companions, whole.ignored)))
        assert own + part.elsewhere == total


ROWS = [
    *({"file_name": f"photo{number:02d}.png", "text": f"row {number}"} for number in range(30)),
    {"file_name": "absent.png", "text": "no image"},
    {"file_name": "PHOTO07.PNG", "text": "also of photograph 7"},
    {"file_name": "../outside.png", "text": "elsewhere"},
]


def test_rows_of_other_shares_are_no_problems(tmp_path):
    folder = tmp_path / "approved"
    folder.mkdir()
    for number in range(30):
        picture(folder / f"photo{number:02d}.png", size=(16, 16))
    (folder / "metadata.jsonl").write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in ROWS))

    def read(name, inputs):
        with Ledger(tmp_path / name) as ledger:
            survey(folder, ledger, scan_approved(folder, inputs), inputs=inputs)
            texts = {image_id: row.all_texts for image_id, row in ledger.captions().items()}
            return texts, [problem.detail for problem in ledger.problems() if problem.asset == "metadata"]

    texts, problems = read("whole", NEW_INPUTS)
    parts = [read(f"part{number}", of_share(f"{number}/3")) for number in range(3)]

    assert {image_id: text for part, _ in parts for image_id, text in part.items()} == texts
    assert sum(len(part) for part, _ in parts) == len(texts) == 30
    assert ["without an image" in problem for problem in problems] == [True]
    assert sum("1 row without an image (31: absent.png)" in detail for _, found in parts for detail in found) == 1
