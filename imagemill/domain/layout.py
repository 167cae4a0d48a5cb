"""Paths of files and folders below one data root. Nothing here accesses the disk, except `is_begun`.

    data/
    ├─ approved/       {image_id}.jpg  {image_id}.txt          (may be elsewhere; only read)
    ├─ derived/        approved_image_dataset.jsonl  dinov3/  vae_latents/  t5_hidden/
    ├─ shards/         bucket_<bucket>/shard-NNNNNN.tar  index.jsonl  manifest.json
    ├─ public_data/    presets.yaml  <dataset>/raw/  <dataset>/<preset>/
    ├─ stage_a/        input/<mission>/<label>/<group>/  output/<mission>_stage_a.jsonl
    ├─ imagemill.yaml  configuration, optional
    ├─ .imagemill/     ledger.sqlite  owners/  preview_models/  weight_digests/  look/  quarantine/
    └─ .dagster/       the Dagster history of this root

Spec: docs/spec/conventions.md#locations
"""

import os
from dataclasses import dataclass
from pathlib import Path

from imagemill.errors import WrongUsage
from imagemill.fs.folders import Folder
from imagemill.fs.location import is_url

ROOT_VARIABLE = "IMAGEMILL_DATA_ROOT"
HOME_VARIABLE = "DAGSTER_HOME"
# Of the processes of a service: the root's name in the history, empty for none.
NAME_VARIABLE = "IMAGEMILL_NAME_IN_HISTORY"
DEFAULT_ROOT = "data"


def local_path(given: str | os.PathLike[str], option: str) -> Path:
    """Return a path as an absolute one, with `~` expanded.

    Raises:
        WrongUsage: if it is a URL, which would become a local folder named `s3:`. The message contains `option`.
    """
    if is_url(os.fspath(given)):
        raise WrongUsage(
            f"{option}: not a path of this machine: {os.fspath(given)}",
            why="URLs are not supported here",
            do="give a local path, for example of a mounted file system",
        )
    return Path(os.path.abspath(os.path.expanduser(given)))  # leaves an unknown ~user unchanged


@dataclass(frozen=True, slots=True)
class DataRoot:
    """One data root, as an absolute path; the fields ending in `_at` are folders located elsewhere, if any."""

    path: Path
    approved_at: Folder | None = None
    derived_at: Path | None = None
    shards_at: Path | None = None
    public_data_at: Path | None = None
    stage_a_input_at: Path | None = None
    stage_a_output_at: Path | None = None

    @classmethod
    def resolve(cls, given: str | os.PathLike[str] | None = None) -> "DataRoot":
        """Return the root for the given folder, else $IMAGEMILL_DATA_ROOT, else ./data."""
        chosen = given or os.environ.get(ROOT_VARIABLE) or DEFAULT_ROOT
        return cls(local_path(chosen, "--data-root" if given else ROOT_VARIABLE))

    @property
    def is_begun(self) -> bool:
        """Whether the folder contains part of a data root. A mistyped path usually does not."""
        names = ("approved", "derived", "shards", "public_data", "stage_a", "imagemill.yaml", ".imagemill", ".dagster")
        return any(os.path.lexists(self.path / name) for name in names)

    @property
    def approved(self) -> Folder:
        """Approved images and their captions; only `imagemill import` writes here."""
        return self.approved_at or self.path / "approved"

    @property
    def other_folders(self) -> tuple[Path, ...]:
        """The folders of the data root, except that of the approved images."""
        folders = (self.derived, self.shards, self.public_data, self.path / "stage_a")
        return (*folders, self.stage_a_input, self.stage_a_output, self.state, self.dagster_home)

    @property
    def derived(self) -> Path:
        """Output of Stage 2 and of curation."""
        return self.derived_at or self.path / "derived"

    @property
    def stage2_jsonl(self) -> Path:
        """The Stage 2 record file."""
        return self.derived / "approved_image_dataset.jsonl"

    @property
    def shards(self) -> Path:
        """Parent of the bucket folders."""
        return self.shards_at or self.path / "shards"

    @property
    def public_data(self) -> Path:
        """Parent of the public datasets."""
        return self.public_data_at or self.path / "public_data"

    @property
    def stage_a_input(self) -> Path:
        """One folder per mission; only read."""
        return self.stage_a_input_at or self.path / "stage_a" / "input"

    @property
    def stage_a_output(self) -> Path:
        """The Stage-A records."""
        return self.stage_a_output_at or self.path / "stage_a" / "output"

    @property
    def state(self) -> Path:
        """State of imagemill."""
        return self.path / ".imagemill"

    @property
    def ledger(self) -> Path:
        """The ledger's file."""
        return self.state / "ledger.sqlite"

    @property
    def owners(self) -> Path:
        """Lock files of the processes that work on this data root."""
        return self.state / "owners"

    @property
    def empty_captions(self) -> Path:
        """States of the empty caption, one file per text kind and model."""
        return self.state / "empty_captions"

    @property
    def look(self) -> Path:
        """Pictures of the viewer."""
        return self.state / "look"

    @property
    def quarantine(self) -> Path:
        """Damaged files that were moved away."""
        return self.state / "quarantine"

    @property
    def preview_models(self) -> Path:
        """Generated preview models."""
        return self.state / "preview_models"

    @property
    def config_file(self) -> Path:
        """The optional configuration file."""
        return self.path / "imagemill.yaml"

    @property
    def dagster_home(self) -> Path:
        """The Dagster history of this root."""
        return self.path / ".dagster"

    def image_path(self, file_name: str) -> str:
        """Return a record's `image_path`: relative to the data root's parent, with `/`, wherever the images are."""
        return f"{self.path.name}/approved/{file_name}"


def home_of(root: DataRoot) -> Path:
    """Return the folder of a root's Dagster history: $DAGSTER_HOME, else `.dagster` in the root, as an absolute path."""
    given = os.environ.get(HOME_VARIABLE)
    return local_path(given, HOME_VARIABLE) if given else root.dagster_home


def shares_history(root: DataRoot) -> bool:
    """Return whether a root's history is not its own: several roots may use it."""
    return os.path.realpath(home_of(root)) != os.path.realpath(root.dagster_home)
