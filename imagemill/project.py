"""Location of the Dagster packages, and its entry in sys.path.

    checkout             /        assets/  checks/  dagster_project/  io_managers/  resources/
    wheel       imagemill/_project/        the same, with a workspace.yaml

Their names are common: a folder or module of the user with one of these names must not be imported instead.
"""

import os
import sys
from pathlib import Path

PACKAGES = ("assets", "checks", "dagster_project", "io_managers", "resources")

_SHIPPED = Path(__file__).with_name("_project")
PROJECT = str(_SHIPPED if _SHIPPED.is_dir() else Path(__file__).parents[1])


def prefer_project() -> None:
    """Make this process and its child processes import the packages from `PROJECT`.

    Modules of other projects that have been imported by these names are removed from `sys.modules`.
    """
    if sys.path[:1] != [PROJECT]:
        sys.path[:] = [PROJECT, *(path for path in sys.path if path != PROJECT)]
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([PROJECT, *filter(None, given)]))
    roots = {name: Path(PROJECT, name) for name in PACKAGES}
    foreign = [name for name, root in roots.items() if name in sys.modules and root not in _places(name)]
    for name in list(sys.modules):
        if name.partition(".")[0] in foreign:
            del sys.modules[name]


def _places(name: str) -> list[Path]:
    """Return the folders of an imported package; empty for a module that is a file."""
    return [Path(path) for path in getattr(sys.modules[name], "__path__", [])]
