"""The Python blocks of docs/how-to/train are executed on a set of shards.

The examples that the other pages show are run by tests/examples.
"""

import re
import shutil
import subprocess
import sys

import pytest

from tests.docs.console import ROOT
from tests.helpers.product import PROJECT

PAGES = ROOT / "docs" / "how-to" / "train"
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("energon", r"^\d+x\d+ torch.Size\(\[4, 16, \d+, \d+\]\) \[.+\]$"),
        ("webdataset", r"^bucket_1216x832 \(4, 16, 104, 152\) \[.+\]$"),
        ("huggingface-datasets", r"^1216x832 4$"),
    ],
)
def test_code_of_the_page_runs(square_set, page, expected, tmp_path):
    (block,) = re.findall(r"^```python\n(.*?)^```", (PAGES / f"{page}.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    shutil.copytree(square_set.shards, tmp_path / "data" / "shards")
    # Workers of a loader import the program again; that of the page has no `if __name__` because notebooks need none.
    (tmp_path / "page.py").write_text(block.replace("num_workers=4", "num_workers=0"))

    done = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, env={"PYTHONPATH": str(PROJECT), "HF_HOME": str(tmp_path), "PATH": ""},
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert re.search(expected, done.stdout, re.MULTILINE), done.stdout


def test_every_page_shows_an_example_or_code_that_a_test_runs():
    for page in PAGES.glob("*.md"):
        text = page.read_text("utf-8")
        assert '--8<-- "examples/' in text or page.stem in {"energon", "webdataset", "huggingface-datasets"}, page.name
