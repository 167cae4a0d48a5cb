"""Damaged npy files found during packing, and their replacement by copies.

    a file does not contain its recorded bytes ──> all files of the bucket's plan are read once
        a tar contains the recorded bytes  ──> these are packed
        no tar contains them               ──> the sample is left out

Refusing a damaged file while packing is in formats/tar.py; its ledger row is handled in pipeline/stage2/damage.py.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from imagemill.domain.embedding_specs import embedding_specs
from imagemill.formats.tar import StoredSample
from imagemill.fs.fingerprints import has_content
from imagemill.pipeline.shards.copies import find_copies
from imagemill.pipeline.shards.readiness import ReadySample

# Kind and image id of a file.
FileKey = tuple[str, str]


@dataclass(frozen=True, slots=True)
class RottenFiles:
    """The damaged files of one plan.

    `copies`: samples that contain the recorded bytes; files without a copy are `lost`.
    """

    files: tuple[FileKey, ...] = ()
    copies: Mapping[FileKey, StoredSample] = dataclasses.field(default_factory=dict)

    @property
    def lost(self) -> set[str]:
        """Ids of images that have a damaged file without any copy of its recorded bytes."""
        return {image_id for kind, image_id in self.files if (kind, image_id) not in self.copies}


def find_rotten(loaded: Iterable[ReadySample], derived: Path, output: Path) -> RottenFiles:
    """Read every file of these samples, and look up copies of the damaged ones in all sets below `output`."""
    damaged = [
        (spec, row)
        for sample in loaded
        for spec, row in zip(embedding_specs(), sample.files, strict=True)
        if not has_content(derived / spec.folder / f"{row.image_id}.npy", row.content)
    ]
    samples = find_copies(output, {row.image_id for _, row in damaged})
    copies: dict[FileKey, StoredSample] = {}
    for spec, row in damaged:
        for sample in samples.get(row.image_id, ()):
            if sample.file(spec, row.content) is not None:
                copies[spec.kind, row.image_id] = sample
                break
    return RottenFiles(tuple((spec.kind, row.image_id) for spec, row in damaged), copies)
