"""Runs shared by the tests of the specification: their pictures, and short names for the contents of a data root."""

import io
import re
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

import numpy as np
import pytest
from PIL import Image

from dagster_project.cli.main import main
from imagemill.config import CONFIG_VARIABLE
from imagemill.domain.buckets import BUCKETS, bucket_size
from imagemill.domain.embedding_specs import EmbeddingSpec, embedding_specs
from imagemill.domain.layout import ROOT_VARIABLE, DataRoot
from imagemill.formats.jsonl import read_jsonl
from imagemill.store.second_copy import NAME
from tests.helpers.stage1 import stage1_record, write_stage1
from tests.helpers.stubs import StubEncoder

FIELDS = {
    "image_id", "image_path", "caption", "t5_attention_mask", "height", "width", "aspect_bucket", "format_version",
}  # fmt: skip

# Ten pictures as (width, height): the example of the specification, a megapixel, one for each bucket, one outside [0.4, 2.5].
PORTRAIT, MEGAPIXEL, PANORAMA = "abc123xyz", "megapixel", "panorama"
SAMPLES = {
    PORTRAIT: (768, 1024),
    MEGAPIXEL: (1024, 1024),
    **{f"near_{bucket}": tuple(side // 16 for side in bucket_size(bucket)) for bucket in BUCKETS},
    PANORAMA: (120, 40),
}
LATER = "zz_later"  # sorts behind the ten

# Pictures of the interrupted migration, and those that are added afterwards.
INTERRUPTED_IMAGES, NEW = 16, ("photo0016", "photo0017", "photo0018")

# Records of Stage 1, the last of them without its image.
STAGE_1_RECORDS, STAGE_1_IMAGES = 6, 5


@dataclass(frozen=True)
class Ran:
    """A data root after a run of the product; `before` is its Stage 1 file."""

    root: DataRoot
    output: str
    before: bytes = b""


@dataclass(frozen=True)
class Interrupted:
    """A migration that SIGINT stopped in its last pass, three new photos, and the same command again.

    Attributes:
        while_running: the file of records when the first hidden states had their names.
        code: exit code of the stopped process.
        said: its output.
        stopped_with: the ids with hidden states after it.
        stopped: every file of the outputs after it.
        recorded: the records after it.
        left: whether there was a `.tmp`.
        output: output of the second command.
    """

    root: DataRoot
    before: bytes
    while_running: bytes
    code: int
    said: str
    stopped_with: set[str]
    stopped: dict[str, tuple[bytes, int]]
    recorded: dict[str, dict]
    left: bool
    output: str


def product(root, *arguments, code=0):
    """Run a command on a data root in this process with stub encoders; return standard output and error."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said), redirect_stderr(said):
        patch.setattr(EmbeddingSpec, "encoder_class", lambda self: StubEncoder)
        patch.setattr(sys, "argv", ["imagemill", *map(str, arguments), "--data-root", str(root.path)])
        patch.setenv(ROOT_VARIABLE, str(root.path))
        for name in ("DAGSTER_HOME", CONFIG_VARIABLE):
            patch.delenv(name, raising=False)
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == code, said.getvalue()
    return said.getvalue()


def sample_pictures(approved):
    approved.mkdir(parents=True)
    for seed, (image_id, (width, height)) in enumerate({**SAMPLES, LATER: (64, 64)}.items()):
        noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(noise).save(approved / f"{image_id}.jpg")
        (approved / f"{image_id}.txt").write_text(f"noise of {width} by {height} pixels")


def stage1_root(path):
    """Write six records with an additional field, and five images; return the root and the file's bytes."""
    root = DataRoot(path)
    records = [stage1_record(n, score=n / 3) for n in range(STAGE_1_RECORDS)]
    return root, write_stage1(root, records, images=STAGE_1_IMAGES)


def copy_of(root, path):
    shutil.copytree(root.path, path)
    return DataRoot(path)


def records(root):
    """Records by id, those of Stage 1 by the stem of their path."""
    values = [line.value for line in read_jsonl(root.stage2_jsonl)]
    return {
        value.get("image_id") or value["image_path"].rpartition("/")[2].partition(".")[0]: value for value in values
    }


def ids_in(root, spec):
    return {path.stem for path in (root.derived / spec.folder).glob("*.npy")}


def load(root, spec, image_id):
    """Load one array with NumPy."""
    return np.load(root.derived / spec.folder / f"{image_id}.npy", allow_pickle=False)


def derived_files(root):
    """Return every file below `derived/` except the second copy of the settings: relative path → bytes."""
    files = (path for path in root.derived.rglob("*") if path.is_file() and path.name != NAME)
    return {str(path.relative_to(root.derived)): path.read_bytes() for path in files}


def stage1_backup(root):
    return root.stage2_jsonl.with_name(f"{root.stage2_jsonl.name}.stage1.backup")


def unfinished(root):
    return root.stage2_jsonl.with_name(f"{root.stage2_jsonl.name}.tmp")


def made(output):
    """Return the number of files that the models made, per kind."""
    return {spec.kind: int(re.search(rf"{spec.kind} +(\d+) made", output)[1]) for spec in embedding_specs()}


def counters(output):
    """Return the numbers of the progress line, by their words."""
    (line,) = re.findall(r"progress: .*", output)
    found = {word: int(number) for number, word in re.findall(r"(\d+) (migrated|enriched|extracted|skipped)", line)}
    return found | {name: int(re.search(rf"{name}[:=] ?(\d+)", line)[1]) for name in ("total", "failed")}
