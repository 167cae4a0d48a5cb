"""LVIS: COCO's document, with underscores in category names and images identified by their URL.

Reference: lvisdataset.org, "Data format".
"""

from collections.abc import Iterator
from typing import Any

from imagemill.adapters.coco import read_instances
from imagemill.adapters.source import Source


def read(source: Source) -> Iterator[dict[str, Any]]:
    """Yield the records; `aerosol_can` is written as `aerosol can`."""
    return read_instances(source, described=lambda name: name.replace("_", " "))
