"""Summarizers for `--summarizer MODULE:CLASS`; each batch is appended to the file named by $ASKED, if it is set."""

import os
import time

MODULE = "tests.helpers.summarizers"


class Named:
    """Answers with the mission and the image's name."""

    def summarize(self, images, mission):
        if os.environ.get("ASKED"):
            with open(os.environ["ASKED"], "a") as file:  # one write: several ranks append to it
                file.write(f"{os.getpid()} {' '.join(image.name for image in images)}\n")
        time.sleep(float(os.environ.get("BATCH_SECONDS", "0")))
        return [self.answer(image.name, mission) for image in images]

    def answer(self, name, mission):
        return f"{mission} {name}"


class Blank(Named):
    """Answers with an empty text for images with `blank` in their name."""

    def answer(self, name, mission):
        return " \n" if "blank" in name else super().answer(name, mission)


class Dumb(Named):
    def answer(self, name, mission):
        return ""


class Deadly(Named):
    """Ends its process at an image with `deadly` in its name."""

    def answer(self, name, mission):
        return os._exit(9) if "deadly" in name else super().answer(name, mission)


class Unpredictable(Named):
    """A different text each time, like a model that samples."""

    identity = "sampling"

    def answer(self, name, mission):
        return f"{name} {os.urandom(4).hex()}"


def asked(path):
    """Return the batches of each process; empty if there were none."""
    batches: dict[int, list[list[str]]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        pid, *names = line.split(" ")
        batches.setdefault(int(pid), []).append(names)
    return batches
