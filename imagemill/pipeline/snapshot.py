"""The state of a data root at the end of the last command, in `.imagemill/snapshot.json`, for readers.

    dagster_project/snapshot.py ──writes──> snapshot ──┬──> `imagemill status`, `imagemill run`
                                                       └──> the table of the viewer (image_states.py)

A snapshot holds for one content of the ledger: once another command, or a run of the UI, has changed the ledger, it is not used.

Reference: docs/decisions/0103-snapshot.md.
"""

from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime

import msgspec

from imagemill.config import Config
from imagemill.domain.embedding_specs import embedding_specs
from imagemill.domain.layout import DataRoot
from imagemill.fs.fingerprints import RunningFingerprint, folder_time, signature_if_there
from imagemill.inputs.listing import list_paths
from imagemill.inputs.scan import fingerprint_names
from imagemill.pipeline.problem_list import RENAMED
from imagemill.pipeline.session import Session
from imagemill.pipeline.stage2.quarantine import quarantine_files
from imagemill.pipeline.status import Status
from imagemill.store.ledger.overview import Listed
from imagemill.store.ledger.schema import SNAPSHOT, state_of_files
from imagemill.text.settings import described

# Raised by a release that makes something else of the same input, so that the next run after the upgrade takes the whole way.
FORMAT = 1

# Settings that came after the digest, see `described`.
_ADDED = {"engine", "limits", "name", "object_storage", "push", "share"}


class Snapshot(msgspec.Struct, frozen=True):
    """The state of a data root.

    Attributes:
        release: release of imagemill that wrote it.
        ledger: state of the ledger's file.
        names: fingerprint of the names in `approved/`.
        status: counts and problems.
        inputs: `total` and `refused` of the last merge of the records.
        checks: name → whether the check passed; `warnings`: those that warned.
        settled: digest of all that a run reads, if a run would change nothing; else blank.
        written_at: seconds since the epoch.
        format: number of the rules by which it was made; one with other rules is not used.
        read: `state_read` of what `status` and `differing` were read from; blank: they are not used by the viewer.
        differing: see `store.ledger.overview.Additions`.
        reported: state of the history, if it has every file of the ledger; else blank.
    """

    release: str
    ledger: str
    names: str
    status: Status
    inputs: dict[str, int]
    checks: dict[str, bool]
    warnings: list[str]
    settled: str
    written_at: float
    format: int = 1
    read: str = ""
    differing: dict[str, Listed | None] = {}
    reported: str = ""

    @property
    def time(self) -> str:
        """When it was written, for people."""
        return f"{datetime.fromtimestamp(self.written_at, UTC):%Y-%m-%d %H:%M:%S} UTC"

    @property
    def renames(self) -> bool:
        """Whether there were renames to accept."""
        return any(problem.reason == RENAMED for problem in self.status.problems)


def read_snapshot(root: DataRoot) -> Snapshot | None:
    """Return the snapshot; None if it does not exist, cannot be read, or the ledger has changed since."""
    with suppress(OSError, msgspec.DecodeError, ValueError):
        found = msgspec.json.decode((root.state / SNAPSHOT).read_bytes(), type=Snapshot)
        if (found.format, found.ledger) == (FORMAT, state_of_files(root.ledger)):
            return found
    return None


def names_state(session: Session) -> str:
    """Return a fingerprint of the paths in `approved/`, which are listed but not looked up; without the folder, of no paths."""
    root = session.root
    try:
        return fingerprint_names(list_paths(root.approved, session.inputs, root.other_folders))
    except FileNotFoundError:
        return fingerprint_names([])


def state_read(session: Session, approved: str) -> str:
    """Return a digest of all that `status` reads beside the ledger, without listing the folders of the embedding kinds.

    A file that is put into such a folder or removed from it changes the time of the folder. One that is overwritten does not;
    `status --fresh` and a run notice that.

    `approved`: the digest of the folder of images, see `ListedFolder`.

    Raises:
        ImagemillError: if the configuration cannot be read.
    """
    root, digest = session.root, RunningFingerprint()
    files = (root.stage2_jsonl, *quarantine_files(root.quarantine))
    folders = (root.derived / spec.folder for spec in embedding_specs())
    digest.update_lines(
        [
            approved,
            *settings_lines(session.config),
            *(f"{path} {signature_if_there(path)}" for path in files),
            *(f"{path} {folder_time(path)}" for path in folders),
        ]
    )
    return str(digest)


def settings_lines(config: Config) -> Iterator[str]:
    """Yield lines about the configuration and the embedding kinds, which any change to them changes."""
    yield described(config, Config(), _ADDED)
    yield from (repr((spec.kind, spec.folder, spec.contract)) for spec in embedding_specs())
