"""`imagemill` with Dagster's defaults: `python -m benchmarks.common.stock ARGUMENTS`, with DAGSTER_HOME in its own folder.

The command, the assets and the range are the same. The difference is what imagemill adds: stock SQLite storage replaces
ours, and Dagster's own events replace streamed ones.
"""

import functools
import os
from pathlib import Path

import dagster_project.work
from benchmarks.common.encoders import use_free_encoders
from dagster_project.cli.main import main
from dagster_project.internals.runs import run_here
from imagemill.processes import run_process


def run_on_defaults() -> None:
    home = Path(os.environ["DAGSTER_HOME"])
    home.mkdir(parents=True, exist_ok=True)
    (home / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")

    @functools.wraps(run_here)
    def without_the_tag(*given, **how):
        return run_here(*given, **{**how, "deferred": False})

    dagster_project.work.run_here = without_the_tag
    main()


if __name__ == "__main__":
    use_free_encoders()
    run_process(run_on_defaults)
