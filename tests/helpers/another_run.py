"""A living process that works on a partition, as another command would."""

import subprocess
import sys
from contextlib import contextmanager

from tests.helpers.product import PROJECT

OTHER = """
import sys
from pathlib import Path
from imagemill.store.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]))
assert not ledger.claim(sys.argv[2], [sys.argv[3]], "another")
print("claimed", flush=True)
sys.stdin.read()
"""


@contextmanager
def another_run(root, asset, item):
    """Run a process that holds the claim until its input is closed."""
    command = [sys.executable, "-c", OTHER, str(root.ledger), asset, item]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=PROJECT) as process:
        assert process.stdout
        assert process.stdout.readline() == "claimed\n"
        try:
            yield process
        finally:
            process.kill()
