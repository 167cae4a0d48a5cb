"""LVIS: COCO's document, with names of one word for each category and images told by their address.

Reference: lvisdataset.org, "Data format".
"""

from collections.abc import Iterator
from typing import Any

from imagemill.adapters.coco import read_instances
from imagemill.adapters.source import Source


def read(source: Source) -> Iterator[dict[str, Any]]:
    """`aerosol_can` is written `aerosol can`."""
    return read_instances(source, described=lambda name: name.replace("_", " "))
