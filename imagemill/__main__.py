"""Entry point of the command `imagemill`; also `python -m imagemill`, for launchers such as torchrun."""

import importlib

from imagemill.processes import run_process
from imagemill.project import prefer_project

# At import time, because a worker process imports this module before it unpickles its work.
prefer_project()


def main() -> None:
    """Run the command line as this process."""
    # Imported by name: this package must not depend on the packages above it.
    run_process(lambda: importlib.import_module("dagster_project.cli.main").main())


if __name__ == "__main__":
    __spec__ = None  # multiprocessing skips a main module of this name in worker processes, and runs its file instead
    main()
