"""An embedding pass on machines that share no folder with this one: images travel, arrays return.

Here, a file that exists is kept, adopted, restored, extracted or linked, and an image whose data is known is not opened; arrays
that return are checked and staged. There, an `EmbedWorker` without folders makes them. The general part is in pipeline/remote.py.
Spec: docs/spec/engines.md#what-travels
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from imagemill.domain.embedding_specs import EmbeddingSpec
from imagemill.domain.encoder_settings import PREVIEW, EncoderSettings, settings_on_nodes
from imagemill.errors import ModelMismatch
from imagemill.formats.npy import all_finite
from imagemill.fs.fingerprints import signature_bytes
from imagemill.fs.folders import SentFolder
from imagemill.kinds import spec_named
from imagemill.pipeline.batch_size import FIRST
from imagemill.pipeline.remote import About, Parcel, about_here
from imagemill.pipeline.stage2.embed import EmbedWorker, write_empty_caption
from imagemill.pipeline.stage2.examine import (
    EmbedRow,
    Examiner,
    failed_row,
    lost_row,
    row_of_error,
    stage_array,
    wanted_input,
)
from imagemill.pipeline.stage2.plan import Job
from imagemill.pipeline.stage2.sent_images import SentImage, SentImagesWorker, image_to_send
from imagemill.store.inputs import PixelRule
from imagemill.store.provenance import ModelIdentity, RecordedModels, differing_facts, empty_caption_file

# Of a parcel without an image.
_CAPTION_BYTES = 2048

# Items of a model call where the worker finds the number itself.
_BATCH_ON_A_DEVICE = 32


@dataclass(frozen=True, kw_only=True)
class EmbedRecipe:
    """Builds the worker of a kind on any machine that has the package of the kind, and the weights.

    Attributes:
        kind: name of the kind in this data root.
        declared_as: its name in its package, if that is another one.
        contract: settings in force that determine shape or content.
        settings: of the encoder.
        recorded_models: of the existing files.
        threads: of the model's arithmetic.
        decode_threads: that open and prepare images.
        decode_ahead_pixels: most pixels of images opened ahead of the model.
        pixels: how pixels are read.
        empty_caption: whether a row shall carry the state of the empty caption.
    """

    kind: str
    declared_as: str | None
    contract: Mapping[str, Any]
    settings: EncoderSettings
    recorded_models: RecordedModels
    threads: int
    decode_threads: int
    decode_ahead_pixels: int
    pixels: PixelRule
    empty_caption: bool

    def __call__(self) -> "RemoteEmbedWorker":
        """Return the worker. The model is loaded when the first image has come."""
        return RemoteEmbedWorker(self)


class RemoteEmbedWorker(SentImagesWorker):
    """The worker, on the other machine."""

    def __init__(self, recipe: EmbedRecipe) -> None:
        super().__init__()
        self.recipe = recipe
        spec = spec_named(recipe.kind, recipe.declared_as).requested(recipe.settings)
        self.spec = replace(spec, contract=dict(recipe.contract))
        self.worker = EmbedWorker(
            spec=self.spec,
            approved=SentFolder(),
            store=None,
            recorded_models=recipe.recorded_models,
            preview_root=self.preview_root,
            settings=recipe.settings,
            threads=recipe.threads,
            decode_threads=recipe.decode_threads,
            decode_ahead_pixels=recipe.decode_ahead_pixels,
            pixels=recipe.pixels,
            empty_captions=Path() if recipe.empty_caption else None,
        )

    def about(self) -> About:
        """Return what the arrays depend on; the identity of the model is read from its files."""
        identity: ModelIdentity = self.spec.encoder_class().identify(
            self.recipe.settings, spec=self.spec, threads=self.recipe.threads, preview_root=self.preview_root
        )
        return about_here(identity, self.recipe.settings.batch_size, *_modules(self.spec))


def _modules(spec: EmbeddingSpec) -> tuple[str, ...]:
    """Return the modules that make the files of a kind, besides those of imagemill."""
    return (spec.encoder.partition(":")[0],)


class EmbedPass:
    """The pass, as the process that owns the data root sees it.

    Args:
        options: arguments of an EmbedWorker that sees the data root.
        decode_threads: threads of a worker that open images.
        gpus: GPUs of a worker, by name of the pass.
    """

    def __init__(self, options: Mapping[str, Any], decode_threads: int, gpus: Mapping[str, float]) -> None:
        self._spec: EmbeddingSpec = options["spec"]
        self._store, self._approved = options["store"], options["approved"]
        self._pixels: PixelRule = options.get("pixels") or PixelRule()
        self.gpus = gpus.get(self._spec.pass_name, 0)
        self.modules = _modules(self._spec)
        self._settings: EncoderSettings = settings_on_nodes(options["settings"], self.gpus)
        self._models: RecordedModels = options["recorded_models"]
        self._empty_captions: Path | None = options.get("empty_captions")
        self._extract_only = options.get("extract_only", False)
        self._identity: ModelIdentity | None = self._models.recorded
        self._preview_root = options["preview_root"]
        self._sent: dict[str, tuple[Job, str | None]] = {}
        self._examiner = Examiner(
            spec=self._spec,
            approved=self._approved,
            store=self._store,
            preview=self._settings.model == PREVIEW,
            pixels=self._pixels,
            donors=options.get("donors") or {},
            extract_only=self._extract_only,
            regenerate=options.get("regenerate", False),
        )
        self._store.folder.mkdir(parents=True, exist_ok=True)
        self.recipe = EmbedRecipe(
            kind=self._spec.kind,
            declared_as=self._spec.declared_as,
            contract=dict(self._spec.contract),
            settings=self._settings,
            recorded_models=self._models,
            threads=options["threads"],
            decode_threads=decode_threads,
            decode_ahead_pixels=options["decode_ahead_pixels"],
            pixels=self._pixels,
            empty_caption=self._empty_captions is not None,
        )

    @property
    def model_batch(self) -> int:
        """Items of a model call, as far as it is known before the first."""
        size = self._settings.batch_size
        if size == "auto":
            return FIRST if self._settings.device == "cpu" else _BATCH_ON_A_DEVICE
        return size

    def weight(self, job: Job) -> int:
        """Return the bytes that a job will send, from what is known without reading the image."""
        reads = self._spec.source == "pixels" or job.facts is None
        return _CAPTION_BYTES + (signature_bytes(job.stat) if reads and job.stat else 0)

    def name_of(self, key: Job | EmbedRow) -> str:
        """Return the image id of a job or of a row."""
        return key.image_id

    def send(self, job: Job) -> EmbedRow | Parcel:
        """Settle a job that needs no model; pack the image and the caption of any other."""
        try:
            needed = self._examiner.examine(job, reads_elsewhere=True)
            if isinstance(needed, EmbedRow):
                return needed
            image = None
            if self._spec.source == "pixels" or (needed.source is None and job.stat is not None):
                image = image_to_send(self._approved, job)
        except Exception as error:
            return row_of_error(job, error)
        self._sent[job.image_id] = job, needed.replaced
        bare = replace(
            job, facts=needed.source, present=None, known=(), inline=None, suspect=False, copies=(), linkable=False
        )
        return Parcel(job, SentImage(bare, image), _CAPTION_BYTES if image is None else image.nbytes)

    def fits(self, about: About) -> bool:
        """Return whether a worker has the recorded model."""
        recorded = self._models.recorded
        return recorded is not None and not differing_facts(recorded, about.identity)

    def agree(self, about: About) -> None:
        """Use the identity of the workers for the files that are staged from now on."""
        self._models.check(about.identity)
        self._identity = self._models.in_force(about.identity)

    def receive(self, row: EmbedRow) -> EmbedRow:
        """Check and stage the array of a row; a row without one is returned as it is."""
        job, row.replaced = self._sent.pop(row.image_id)
        array, row.array = row.array, None
        state, row.empty_caption = row.empty_caption, None
        if row.identity is not None:
            assert self._identity
            if row.identity.key not in {self._identity.key, self._identity.former.key}:
                raise ModelMismatch(
                    f"{self._spec.kind}: a worker changed its model from {self._identity.key} to {row.identity.key}",
                    do="run the same command again: no file of the other model was kept",
                )
            row.identity = msgspec.structs.replace(self._identity, batch_size=row.identity.batch_size)
        if array is None:
            return row
        size = (row.source.height, row.source.width) if row.source else (0, 0)
        expected = self._spec.layout(*size)
        if (array.shape, array.dtype) != expected:
            return failed_row(job, "wrong_shape", ValueError(f"{array.shape} {array.dtype}, expected {expected}"))
        if not all_finite(array):
            return failed_row(job, "non_finite", "NaN or infinity among the values that a worker returned")
        try:
            wanted = wanted_input(self._spec, job, row.source, self._pixels)
            row.file, row.staged = stage_array(self._store, job, array, wanted, row.identity)
            if state is not None and self._empty_captions and row.identity:
                path = self._empty_captions / empty_caption_file(self._spec.kind, row.identity.key)
                write_empty_caption(path, state, row.identity)
        except OSError as error:
            return failed_row(job, "write_error", error)
        return row

    def parts(self, job: Job) -> list[Job]:
        """Return the job, which cannot be divided."""
        return [job]

    def lost(self, job: Job, how: str) -> EmbedRow:
        """Return the row of a job that ended its worker each time."""
        self._sent.pop(job.image_id, None)
        return lost_row(job, how)
