"""`imagemill` with counted disk accesses: `python counted.py REPORT ARGUMENT...` writes a JSON object.

ledger     connections to the ledger
config     configuration files that were parsed
folders    resolutions of the data root's folders
listed     path below the data root → number of listings
"""

import functools
import json
import os
import sys
from collections import Counter
from pathlib import Path

from dagster_project.cli import main
from imagemill import config
from imagemill.pipeline import session

REPORT, ROOT, ARGUMENTS = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
counts, listed = Counter(), Counter()


def note(event, arguments):
    if event == "sqlite3.connect" and "ledger.sqlite" in str(arguments[0]):
        counts["ledger"] += 1
    elif event in ("os.listdir", "os.scandir"):
        folder = arguments[0]
        path = os.readlink(f"/proc/self/fd/{folder}") if isinstance(folder, int) else str(folder)
        if path.startswith(f"{ROOT}/"):
            listed[os.path.relpath(path, ROOT)] += 1


def counting(name, function):
    def counted(*arguments, **options):
        counts[name] += 1
        return function(*arguments, **options)

    return counted


if __name__ == "__main__":
    config._read = functools.lru_cache(counting("config", config._read.__wrapped__))
    session.with_recorded = counting("folders", session.with_recorded)
    sys.addaudithook(note)
    sys.argv = ["imagemill", *ARGUMENTS, "--data-root", ROOT]
    try:
        main.main()
    finally:
        REPORT.write_text(json.dumps({**counts, "listed": listed}))
