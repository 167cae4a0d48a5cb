"""Images that travel to a worker on another machine: what all passes over them have in common.

Spec: docs/spec/engines.md#what-travels
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from imagemill.fs.folders import Folder, SentFolder, file_bytes
from imagemill.pipeline.remote import NodeSide
from imagemill.pipeline.stage2.image_metadata import ImageFile


class SentImage(NamedTuple):
    """A job as it travels. `image`: the bytes of the file, uint8 (n,); None for a job that reads none."""

    job: Any
    image: np.ndarray | None


def image_to_send(approved: Folder, job: ImageFile) -> np.ndarray:
    """Return the bytes of a job's image, uint8 (n,). Raises OSError."""
    return np.frombuffer(file_bytes(approved / job.file_name, job.stat), np.uint8)


class SentImagesWorker(NodeSide):
    """A worker, on the other machine, around the `worker` of a subclass, which reads the images that were sent."""

    worker: Any

    def stream(self, payloads: Sequence[SentImage]) -> Iterator[Any]:
        """Yield one row per job, in any order."""
        files = {sent.job.file_name: sent.image.tobytes() for sent in payloads if sent.image is not None}
        self.worker.approved = SentFolder(files)
        yield from self.worker.stream(job for job in [sent.job for sent in payloads] if not self.stopped)

    def close(self) -> None:
        """Free the memory of the model."""
        self.worker.close()
        super().close()
