"""The command with a simulated device: `python -m benchmarks.common.simulated MILLISECONDS PREPARED REPORT ARGS…`.

Each item takes MILLISECONDS on a device that computes while the processor does other work, as a GPU does: `launch` returns at
once, and the batches run one after the other. With PREPARED `1`, images are neither read nor decoded. When all files of a pass
are published, its figures are written to REPORT as JSON: seconds from the first launch to the end of the last batch (`wall`) and
to the end of publishing (`published`), CPU seconds until then, seconds in which the device was busy, items and batches.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from imagemill.domain.embedding_specs import EmbeddingSpec
from imagemill.domain.inputs import NO_DESCRIPTION
from imagemill.fs.fingerprints import fingerprint
from imagemill.models import Prepared
from imagemill.pipeline.stage2 import embed, examine, image_metadata
from imagemill.pipeline.stage2.plan import Job
from imagemill.pipeline.stage2.publish import publish_on_thread
from imagemill.store.ledger import SourceRow
from io_managers import npy
from tests.helpers.stubs import StubEncoder

SIDE = 1024


class SimulatedEncoder(StubEncoder):
    """An encoder whose calls take time and no processor.

    Attributes:
        seconds: time of one item on the device.
        report: file that gets the figures.
        used: the encoder that was used last; None before the first launch.
    """

    overlaps = True
    seconds = 0.0
    report = Path("/dev/null")
    began = ended = free_at = busy = cpu = 0.0
    items = 0
    used: "SimulatedEncoder | None" = None

    def prepare(self, item):
        if isinstance(item, str):
            return super().prepare(item)
        shape = self.spec.shape(*item.shape[:2])
        # As with the models: the cost of an image grows with its size where the array does.
        grows = shape != self.spec.shape(0, 0)
        return Prepared((1, shape), shape, pixels=item.shape[0] * item.shape[1] if grows else 0)

    def launch(self, batch: Sequence[Prepared]) -> Callable[[], list[np.ndarray]]:
        """Start a batch on the device; the result waits for its end."""
        now = time.monotonic()
        if not self.calls:
            self.began, self.free_at, self.cpu = now, now, time.process_time()
            SimulatedEncoder.used = self
        self.calls += 1
        duration = self.seconds * len(batch)
        self.free_at = end = max(now, self.free_at) + duration
        self.busy, self.items = self.busy + duration, self.items + len(batch)
        shapes = [(item.payload[1], item.payload[0]) for item in batch]

        def collect() -> list[np.ndarray]:
            time.sleep(max(0.0, end - time.monotonic()))
            self.ended = time.monotonic()
            return [np.full(shape, value, self.spec.dtype) for shape, value in shapes]

        return collect

    def encode(self, batch: Sequence[Prepared]) -> list[np.ndarray]:
        return self.launch(batch)()

    def write_figures(self) -> None:
        """Append the figures of a pass whose files are published to the report."""
        figures = {
            "busy": self.busy,
            "wall": self.ended - self.began,
            "published": time.monotonic() - self.began,
            "items": self.items,
            "batches": self.calls,
            "cpu": time.process_time() - self.cpu,
        }
        with self.report.open("a") as file:
            file.write(json.dumps(figures) + "\n")


def publish_and_report(*arguments: Any, **options: Any) -> None:
    """Publish the rows of a pass, then write its figures."""
    publish_on_thread(*arguments, **options)
    if SimulatedEncoder.used:
        SimulatedEncoder.used.write_figures()
        SimulatedEncoder.used = None


def prepared_image(approved: Path, job: Job, color: str) -> tuple[SourceRow, np.ndarray]:
    """Return facts and pixels of an image without opening it."""
    assert job.stat
    facts = SourceRow(
        job.image_id, job.file_name, job.stat, fingerprint(job.image_id.encode()), SIDE, SIDE, NO_DESCRIPTION
    )
    return facts, _PIXELS


def _refuse(*_: object) -> NoReturn:
    raise RuntimeError("an image was decoded although all of them are prepared")


_PIXELS = np.zeros((SIDE, SIDE, 3), np.uint8)


def use_simulated(milliseconds: float, prepared: bool, report: Path) -> None:
    """Give every embedding kind a simulated device, in this process."""
    SimulatedEncoder.seconds, SimulatedEncoder.report = milliseconds / 1000, report
    EmbeddingSpec.encoder_class = lambda self: SimulatedEncoder
    npy.publish_on_thread = publish_and_report
    if prepared:
        embed.inspect_image = examine.inspect_image = prepared_image
        image_metadata.decode = _refuse


if __name__ == "__main__":
    from dagster_project.cli.main import main
    from imagemill.processes import run_process

    milliseconds, prepared, report, *arguments = sys.argv[1:]
    use_simulated(float(milliseconds), prepared == "1", Path(report))
    sys.argv[1:] = arguments
    run_process(main)
