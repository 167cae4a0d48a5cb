"""The command `imagemill`; also `python -m imagemill`, for launchers such as torchrun."""

import importlib

from imagemill.project import prefer_project

# At import, since a worker process imports this module before it unpickles its work.
prefer_project()


def main() -> None:
    # By name: this package imports none of the packages above it.
    importlib.import_module("dagster_project.cli.main").main()


if __name__ == "__main__":
    __spec__ = None  # multiprocessing skips a main module of this name in worker processes, and runs its file instead
    main()
