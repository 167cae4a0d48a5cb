"""Encoders without a model: real shapes, real dtypes, values that depend on the input, no cost.

`python tests/helpers/stubs.py ARGS…` is `imagemill ARGS…` with the stub for every embedding kind and for the captioner; importing
this module changes nothing. `IMAGEMILL_STUB_SLEEP` makes each call take that many seconds, or as many as the file with this
absolute path contains, so that a run can be killed in the middle; `IMAGEMILL_STUB_CAPTIONED` names a file to which a line is
appended per captioned image; `IMAGEMILL_STUB_DEADLY` is the caption that kills the process; `IMAGEMILL_STUB_WEIGHTS` names other
weights, and `IMAGEMILL_STUB_DEVICE` another device; `IMAGEMILL_STUB_ADDED` is added to all values; the model named
`IMAGEMILL_STUB_NO_MODEL` is reported as missing.
"""

import os
import signal
import time
import zlib
from pathlib import Path

import numpy as np

from imagemill.domain.embedding_specs import EmbeddingSpec
from imagemill.errors import ModelUnusable
from imagemill.models import CutShort, Prepared
from imagemill.store.provenance import ModelIdentity


def _pause():
    given = os.environ.get("IMAGEMILL_STUB_SLEEP", "0")
    time.sleep(float(Path(given).read_text() if os.path.isabs(given) else given))


class StubEncoder:
    """Fills the stored shape with one value taken from the input's bytes."""

    def __init__(self, spec, identity):
        self.spec, self.identity, self.calls = spec, identity, 0

    @classmethod
    def identify(cls, settings, *, spec, threads, preview_root):
        if (
            settings.model in ("no such model", os.environ.get("IMAGEMILL_STUB_NO_MODEL"))
            or "no such model" in settings.model
        ):
            raise ModelUnusable(f"{spec.kind}: {settings.model} cannot be found", do="name another model")
        return ModelIdentity(
            kind=spec.kind,
            model=settings.model,
            preview=settings.model == "preview",
            threads=threads,
            device=os.environ.get("IMAGEMILL_STUB_DEVICE", "cpu"),
            facts={"stub": spec.kind, "model": settings.model}
            | ({"weights_sha256": weights} if (weights := os.environ.get("IMAGEMILL_STUB_WEIGHTS")) else {})
            | {name: getattr(settings, name) for name in ("size", "reduce") if hasattr(settings, name)},
        )

    @classmethod
    def in_force(cls, settings, *, spec, threads, preview_root):
        return spec.requested(settings)

    @classmethod
    def look_up(cls, settings, **given):
        return cls.identify(settings, **given)

    @classmethod
    def load(cls, settings, *, spec, threads, preview_root):
        return cls(spec, cls.identify(settings, spec=spec, threads=threads, preview_root=preview_root))

    @classmethod
    def tokenizer(cls, settings, *, spec, threads, preview_root):
        return StubTokenizer()

    def prepare(self, item):
        data = item.encode() if isinstance(item, str) else np.ascontiguousarray(item).tobytes()
        value = zlib.crc32(data) % 1000 + int(os.environ.get("IMAGEMILL_STUB_ADDED", "0"))
        if isinstance(item, str) and item == os.environ.get("IMAGEMILL_STUB_DEADLY"):
            os.kill(os.getpid(), signal.SIGKILL)
        if isinstance(item, str):
            ((mask, truncated),) = StubTokenizer().masks([item])
            return Prepared((value, self.spec.shape(0, 0)), "text", facts={"mask": mask, "truncated": truncated})
        shape = self.spec.shape(*item.shape[:2])
        return Prepared((value, shape), shape, pixels=item.shape[0] * item.shape[1])

    def encode(self, batch):
        self.calls += 1
        _pause()
        return [np.full(shape, value, self.spec.dtype) for value, shape in (item.payload for item in batch)]

    def close(self):
        pass


class StubTokenizer:
    def masks(self, captions):
        counts = [min(len(caption.split()) + 1, 77) for caption in captions]
        return [([1] * n + [0] * (77 - n), n == 77) for n in counts]


class StubCaptioner:
    """Answers with the prompt and a number that depends on the pixels."""

    def __init__(self, prompt):
        self.prompt = prompt

    @staticmethod
    def identify(settings, prompt):
        facts = {"stub": "captioner", "model": settings.model, "prompt": prompt}
        return ModelIdentity(kind="captioner", model=settings.model, preview=settings.model == "preview", facts=facts)

    def caption(self, images):
        _pause()
        said = [f"{self.prompt} {zlib.crc32(image.tobytes()) % 10**6}" for image in images]
        if log := os.environ.get("IMAGEMILL_STUB_CAPTIONED"):
            with open(log, "a") as file:
                file.writelines(f"{line}\n" for line in said)
        cut = os.environ.get("IMAGEMILL_STUB_CUT_OFF")
        return [CutShort(line) if cut else line for line in said]

    def close(self):
        pass


def stub_captioner(set_attribute=setattr):
    """Replace the configured captioner by a stub with its name and prompt."""
    import resources.captioner as room

    def identity(resource):
        settings = resource.settings()
        return StubCaptioner.identify(settings, room.caption_prompt(settings.prompt, resource._tokens()))

    set_attribute(room, "make_captioner", lambda settings, prompt, threads, root: StubCaptioner(prompt))
    set_attribute(room.CaptionerResource, "made_by", identity)


if __name__ == "__main__":
    from dagster_project.cli.main import main
    from imagemill.processes import run_process

    stub_captioner()
    EmbeddingSpec.encoder_class = lambda self: StubEncoder
    run_process(main)
