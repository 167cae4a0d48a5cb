"""The snippet of the README runs on the output of `make run`."""

import re
import subprocess
import sys

from imagemill import demo
from tests.docs.console import ROOT
from tests.helpers.product import imagemill


def test_snippet_of_the_readme_reads_the_output_of_make_run(tmp_path):
    demo.main([str(tmp_path / "data")])
    done = imagemill("run", "--data-root", tmp_path / "data", stub=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (snippet,) = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    assert "allow_preview=True" in snippet

    program = snippet + '    print(batch["bucket"], tuple(batch["vae"].shape))\n'
    read = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert read.returncode == 0, read.stderr
    assert len(read.stdout.splitlines()) > 2
