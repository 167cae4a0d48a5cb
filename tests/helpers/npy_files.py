"""npy files under their final names."""

import os
from pathlib import Path

import numpy as np

from imagemill.formats.npy import stage_npy


def write_npy(path: Path, array: np.ndarray) -> None:
    """Write one file; missing folders are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    os.replace(stage_npy(path.parent, array), path)
