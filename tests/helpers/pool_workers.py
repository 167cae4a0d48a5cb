"""Workers for the engine's tests; processes import them by name."""

import os
import signal
import time

from imagemill.pipeline.stage2.embed import EmbedWorker


class Doubling:
    """Rows (key, twice the key, process id, serial number of the worker's batch)."""

    def __init__(self, log=None, nap=0.0):
        self.batches, self.log, self.nap = 0, log, nap

    def stream(self, keys):
        self.batches += 1
        for key in keys:
            time.sleep(self.nap)
            if self.log:
                (self.log / str(key)).touch()
            yield key, 2 * key, os.getpid(), self.batches

    def close(self):
        if self.log:
            (self.log / f"closed-{os.getpid()}").touch()


class Poisoned(Doubling):
    """Key 13 kills its process; key 14 raises an error of `errors.py`; key 15 raises one that cannot be pickled."""

    def stream(self, keys):
        for key in keys:
            if key == 13:
                os.kill(os.getpid(), signal.SIGKILL)
            if key == 14:
                from imagemill.errors import DiskFull

                raise DiskFull("no space", where="/there")
            if key == 15:
                raise type("Local", (Exception,), {})("strange")
            yield key


class Counted(Poisoned):
    """Appends to a file per key, before key 13 kills the process."""

    def stream(self, keys):
        for key in keys:
            with open(self.log / str(key), "a") as file:
                file.write("x")
            yield from super().stream([key])


class Deadly(Doubling):
    """Every key kills its process."""

    def stream(self, keys):
        for key in keys:
            (self.log / f"{key}-{os.getpid()}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
            yield key


class Quitting(Doubling):
    """Key 13 ends its process with exit code 0."""

    def stream(self, keys):
        for key in keys:
            if key == 13:
                os._exit(0)
            yield key


class Broken:
    """Cannot be constructed."""

    def __init__(self):
        raise ValueError("no model")


class Wordy(Doubling):
    """Rows far larger than the buffer of a pipe."""

    def stream(self, keys):
        return iter(["x" * 300_000 for _ in keys])


class KilledEmbedWorker(EmbedWorker):
    """Kills its process in the middle of a batch, for the image `dies`; the first `times` times."""

    def __init__(self, *, log, dies, times, **options):
        super().__init__(**options)
        self.log, self.dies, self.times = log, dies, times

    def stream(self, jobs):
        (self.log / f"device-{os.getpid()}").write_text(self.settings.device)
        rows = super().stream(jobs)
        for row in rows:
            if any(job.image_id == self.dies for job in jobs):
                deaths = len(list(self.log.glob("death-*")))
                if deaths < self.times:
                    (self.log / f"death-{deaths}").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            yield row
