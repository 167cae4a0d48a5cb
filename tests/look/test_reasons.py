"""A data root with every reason for which an input is not used, as far as one set of settings permits.

Each number of the viewer's first page is that of its filter, of `imagemill status --json` and of `imagemill problems --json`.

Spec: docs/spec/conventions.md#viewer, docs/spec/conventions.md#no-silent-loss
"""

import html
import json
import re
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from imagemill.domain.embedding_specs import VAE
from imagemill.domain.layout import DataRoot
from tests.helpers.look import viewing
from tests.helpers.product import imagemill, photos
from tests.inputs.test_remedies import CASES, NEW


def product(root, *arguments):
    done = imagemill(*arguments, "--data-root", root.path, stub=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = DataRoot(tmp_path_factory.mktemp("reasons") / "data")
    photos(root.approved, 12)
    for number, case in enumerate(case for case in CASES.values() if case.inputs == NEW):
        for path, content in case.files.items():
            file = root.approved / f"case{number:02d}" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            if path.endswith("/"):
                file.mkdir(exist_ok=True)
            elif isinstance(content, bytes):
                file.write_bytes(content)
            else:
                file.write_text(content)
    product(root, "run")
    (root.approved / "photo0000.txt").unlink()
    (root.approved / "photo0001.jpg").unlink()
    (root.approved / "photo0002.jpg").rename(root.approved / "renamed.jpg")
    (root.approved / "photo0003.jpg").write_bytes(b"no image")
    Image.new("RGB", (40_000, 3)).save(root.approved / "photo0004.jpg")
    np.save(root.derived / VAE.folder / "photo0005.npy", np.zeros(3))
    with open(root.stage2_jsonl, "ab") as records:
        records.write(b"no json\n{}\n")
    product(root, "run")
    product(root, "withdraw", "photo0006")
    return root


def test_each_number_is_that_of_its_filter_of_status_and_of_problems(root):
    status = json.loads(product(root, "status", "--fresh", "--json"))
    problems = [p for p in json.loads(product(root, "problems", "--json")) if p["item"] != "photo0006"]
    with viewing(root) as client:
        text = client.get("/").text
        shown = {}
        for query, count in re.findall(r'href="images\?([^"]+)">([\d,]+)</a>', text):
            number = int(count.replace(",", ""))
            shown[html.unescape(query)] = number
            page = client.get(f"/images?{html.unescape(query)}").text
            assert int(re.search(r'<p class="count">([\d,]+) input', page)[1].replace(",", "")) == number, query
            assert page.count('class="card') == min(number, 100)

    reasons = Counter(problem["reason"] for problem in problems)
    assert {name.partition("=")[2]: n for name, n in status["filters"].items() if name.startswith("reason=")} == reasons
    assert {query.partition("=")[2]: n for query, n in shown.items() if query.startswith("reason=")} == reasons
    filters = {name: n for name, n in status["filters"].items() if "=" not in name and name != "all"}
    assert {query.partition("=")[2]: n for query, n in shown.items() if query.startswith("show=")} == filters
    assert filters["refused"] == status["images"]["refused"]
    assert len(reasons) >= 16, sorted(reasons)
