"""Time from the start of the UI to its first page with all assets, beside `dagster dev` with one empty asset.

A page is there when GraphQL reports the code location as loaded. Wall time, because several processes start at once.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence

from benchmarks.common.inputs import noise_photos, scratch
from benchmarks.common.processes import cost
from benchmarks.common.ui import STATISTICS, running_ui
from benchmarks.scale import BYTES_PER_TINY, OURS, TINY_PATH, use_tiny_kinds
from imagemill.domain.layout import DataRoot

RATIO = 2.0
_EMPTY = "import dagster as dg\n\n\n@dg.asset\ndef empty():\n    return None\n\n\ndefs = dg.Definitions([empty])\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="three kinds of 16 bytes")
    arguments = parser.parse_args()
    with scratch(in_memory_bytes=2 * BYTES_PER_TINY * arguments.images if arguments.tiny else 0) as folder:
        root = DataRoot(folder / "data")
        noise_photos(root.approved, arguments.images, width=64, height=64, smooth=8)
        if arguments.tiny:
            use_tiny_kinds(root)
        environment = {"DAGSTER_HOME": str(root.dagster_home), "PYTHONPATH": TINY_PATH}
        cost([*OURS, "run", "--data-root", root.path], **environment)
        (folder / "empty.py").write_text(_EMPTY)
        (folder / "home").mkdir()
        ours = [*OURS, "ui", "--data-root", root.path, "--port"]
        plain = ["-m", "dagster", "dev", "-f", folder / "empty.py", "--port"]
        times: dict[str, list[float]] = {"imagemill ui": [], "dagster dev": []}
        statistics_cold = []
        for _ in range(arguments.rounds):
            seconds, _ = _started(plain, DAGSTER_HOME=str(folder / "home"))
            times["dagster dev"].append(seconds)
            seconds, cold = _started(ours, **environment)
            times["imagemill ui"].append(seconds)
            statistics_cold.append(cold)
    medians = {name: statistics.median(each) for name, each in times.items()}
    for name, seconds in medians.items():
        print(f"{name:<40}{seconds:>8.2f} s")
    ratio = medians["imagemill ui"] / medians["dagster dev"]
    print(f"{'first page, relative to dagster dev':<40}{ratio:>8.2f}   (goal: at most {RATIO})")
    print(f"{'partition statistics, cold':<40}{statistics.median(statistics_cold):>8.2f} s")
    return 0 if ratio <= RATIO else 1


def _started(command: Sequence[object], **environment: str) -> tuple[float, float]:
    """Return the seconds until all assets are listed, and those of the first query for the numbers of partitions."""
    with running_ui(command, **environment) as ui:
        began = time.perf_counter()
        ui.ask(STATISTICS)
        return ui.seconds, time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
