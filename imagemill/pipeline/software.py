"""The software of this machine that determines results: fingerprints of the code, versions of Python and of the libraries.

Versions are compared without a suffix such as `+cpu`: the device is compared by itself.
"""

import functools
import hashlib
import importlib.util
import sys
from importlib import metadata
from pathlib import Path

# Distributions whose version results depend on.
_LIBRARIES = ("torch", "transformers", "diffusers", "numpy", "pillow")


def versions() -> dict[str, str]:
    """Return the versions of Python, without its last number, and of the installed libraries."""
    found = {"Python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
    return found


def sources(*modules: str) -> dict[str, str]:
    """Return the fingerprint of the Python files of imagemill, and of the packages that contain these modules."""
    packages = dict.fromkeys(["imagemill", *(module.partition(".")[0] for module in modules)])
    return {package: _source_of(package) for package in packages}


@functools.cache
def _source_of(package: str) -> str:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return "missing"
    origin = Path(spec.origin)
    files = sorted(origin.parent.rglob("*.py")) if spec.submodule_search_locations else [origin]
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(origin.parent).as_posix()}\0".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]
