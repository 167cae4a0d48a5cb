"""Peak memory of a pass: `python tests/helpers/peak.py KIND DATA_ROOT PREVIEW_ROOT DECODE_THREADS DECODE_AHEAD_PIXELS`.

Prints the bytes by which the process grew at its peak beyond its size with the model loaded. KIND `holding` is the VAE kind
without its model: each prepared item holds its pixels, and each call takes its time.
"""

import resource
import sys
import time
from pathlib import Path

import numpy as np

from imagemill.domain.embedding_specs import VAE, embedding_specs
from imagemill.domain.encoder_settings import EncoderSettings
from imagemill.domain.layout import DataRoot
from imagemill.formats.npy import NpyStore
from imagemill.models import Prepared
from imagemill.pipeline.stage2.embed import EmbedWorker
from imagemill.store.ledger import Ledger
from tests.helpers.passes import run_pass
from tests.helpers.stage2 import models_of, plan_of, with_encoder
from tests.helpers.stubs import StubEncoder


class Holding(StubEncoder):
    def prepare(self, item):
        return Prepared(item.copy(), item.shape, pixels=item.shape[0] * item.shape[1])

    def encode(self, batch):
        time.sleep(0.3)
        self.calls += 1
        return [self._latent(item.payload.shape) for item in batch]

    def _latent(self, shape):
        import numpy as np

        return np.zeros(self.spec.shape(*shape[:2]), self.spec.dtype)


def peak_bytes():
    """Return the peak memory of this process. ru_maxrss alone starts with the parent's memory."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    except FileNotFoundError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main(kind, root, preview_root, decode_threads, decode_ahead_pixels):
    root = DataRoot(Path(root))
    known = {spec.kind: spec for spec in embedding_specs()}
    spec = with_encoder(VAE, Holding) if kind == "holding" else known[kind]
    worker = EmbedWorker(
        spec=spec,
        approved=root.approved,
        store=NpyStore(root.derived / spec.folder, spec),
        recorded_models=models_of(root, spec.kind),
        preview_root=Path(preview_root),
        settings=EncoderSettings(device="cpu"),
        threads=1,
        decode_threads=int(decode_threads),
        decode_ahead_pixels=int(decode_ahead_pixels),
    )
    encoder = worker.encoder()
    if kind != "holding":
        # The code that a call needs is mapped into memory now; how much of it is counted depends on the state of the page cache.
        encoder.encode([encoder.prepare(np.zeros((64, 64, 3), np.uint8))])
    before = peak_bytes()
    with Ledger(root.ledger) as ledger:
        counts = run_pass(worker, plan_of(root, spec, ledger).jobs, ledger)
    assert counts["computed"] == len(list(root.approved.iterdir())), counts
    print(peak_bytes() - before)


if __name__ == "__main__":
    main(*sys.argv[1:])
