"""The session of a run, command or sensor tick: configuration, folders and ledger of one data root, resolved once.

    with open_session(path) as session:       in the process and thread that opened it, a second `open_session` joins it
        session.root  session.config  session.ledger

A run that a command executes in its own process joins the command's session and uses the command's listings.

Recorded folders are in store/locations.py, the contents of the configuration file in config.py.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

from imagemill.config import Config, config_in_force, named_config
from imagemill.domain.embedding_specs import EmbeddingSpec
from imagemill.domain.inputs import InputSettings
from imagemill.domain.layout import DEFAULT_ROOT, ROOT_VARIABLE, DataRoot
from imagemill.errors import ImagemillError, WrongUsage
from imagemill.fs.blobs import StorageSettings
from imagemill.store.inputs import first_inputs, recorded_inputs
from imagemill.store.ledger import BEGUN, IN_MEMORY, Ledger
from imagemill.store.locations import Place, put, remember, with_recorded
from imagemill.store.provenance import spec_in_force
from imagemill.store.second_copy import newest, open_ledger
from imagemill.store.trust import OF_STORAGE, config_demands, refuse_untrusted

if TYPE_CHECKING:  # the import loads numpy, which commands that list nothing do not need
    from imagemill.pipeline.stage2.inventory import Inventory

_OPEN = threading.local()


class Session:
    """Configuration, folders and ledger of one data root.

    Attributes:
        root: the data root, with the folders recorded by the last runs.
        planned: a command's listing for the runs that it executes; None if each step makes its own.
        input_changes: what the configuration has changed in the recorded input settings, one line each.
    """

    def __init__(self, root: DataRoot, config_file: str | None) -> None:
        self._config_file = config_file
        self._read_only = Ledger(root.ledger, read_only=True) if root.ledger.is_file() else None
        self.root = root
        if self._read_only:
            self.root = with_recorded(root, self._read_only.setting, self._recorded_storage)
        self.planned: Inventory | None = None
        self._looked: tuple[Inventory, int] | None = None
        self.input_changes: list[str] = []
        self.users = 0

    @cached_property
    def config(self) -> Config:
        """The configuration in force. Raises as `read_config`; a file that was named must exist."""
        return config_in_force(self.root, self._config_file)

    def storage(self) -> StorageSettings:
        """Return the settings of object storage.

        Raises:
            NotTrusted: for a server or a URL that only the data root's own file names, without the user's consent.
        """
        settings = self.config.object_storage
        if named_config(self._config_file) is None:
            own = [each for each in config_demands(self.root.config_file) if each.setting in OF_STORAGE]
            refuse_untrusted(own, self.root, "set AWS_ENDPOINT_URL, and give URLs on the command line")
        return settings

    def _recorded_storage(self) -> StorageSettings:
        """Return `storage`; the default settings if the configuration cannot be read, which its use reports."""
        try:
            _ = self.config
        except ImagemillError:
            return StorageSettings()
        return self.storage()

    def in_force(self, spec: EmbeddingSpec) -> EmbeddingSpec:
        """Return a kind with its settings, and with the contract of its recorded model if there is one."""
        return spec_in_force(spec, self.reading, self.config.encoder(spec))

    @property
    def captioned(self) -> bool:
        """Whether a captioner is configured. False if the configuration cannot be read, which is reported on its use."""
        try:
            return self.config.captioner.enabled
        except ImagemillError:
            return False

    @property
    def inputs(self) -> InputSettings:
        """Input settings of this data root: those recorded; before anything is recorded, those of the first run."""
        setting = self.reading.setting
        if setting(BEGUN) is not None:
            return recorded_inputs(setting)
        found = newest(self.root)
        first = first_inputs(self.root, copied=found is not None)
        recorded = recorded_inputs((found.copy.settings if found else {}).get, first)
        try:
            return self.config.inputs_in_force(recorded)
        except ImagemillError:  # reported on the use of the configuration
            return recorded

    @cached_property
    def ledger(self) -> Ledger:
        """The ledger for writing. Created if it does not exist."""
        return open_ledger(self.root)

    @property
    def reading(self) -> Ledger:
        """The ledger for reading: an empty one in memory if the data root has none."""
        if "ledger" in self.__dict__:
            return self.ledger
        if self._read_only is None:
            self._read_only = Ledger(IN_MEMORY)
        return self._read_only

    def put(self, name: Place, folder: str | os.PathLike[str]) -> None:
        """Use this folder from now on. Raises as `store.locations.put`; nothing is recorded then."""
        self.root = put(self.root, name, folder, self.storage)
        remember(self.root, self.ledger, name)

    def take_share(self, share: str) -> None:
        """Take this share of the images from now on.

        Raises:
            WrongUsage: if the configuration has another one, or if the data root already has images of another one.
        """
        from imagemill.pipeline.stage2.input_settings import take_share

        if self.config.chosen_inputs.get("share", share) != share:
            raise WrongUsage(
                f"--share {share} contradicts share: {self.config.share} in imagemill.yaml", do="leave one of them out"
            )
        take_share(self.ledger, share)

    def look(self) -> "Inventory":
        """Return a listing without recording it; the next `plan` continues with it."""
        inventory = self._inventory()
        self._looked = inventory, self.reading.version_seen()
        return inventory

    def plan(self) -> "Inventory":
        """List the folders for the runs that a command executes next, and record what is new."""
        self.planned = self._listed()
        return self.planned

    def inventory(self) -> "Inventory":
        """Return the listing that a step works on. Call it once the step holds its lease.

        Returns:
            the command's listing unless another process has changed the ledger since; a new one in a run of the UI.
        """
        if self.planned is None:
            return self._listed()
        return self.planned if self._is_current(self.planned) else self.plan()

    def overview(self) -> "Inventory":
        """Return the listing of a step that only reads: as `inventory`, but a new listing is not recorded in the ledger."""
        return self.planned if self.planned and self._is_current(self.planned) else self._inventory()

    def _inventory(self) -> "Inventory":
        from imagemill.pipeline.stage2.inventory import Inventory

        return Inventory(self.root, in_force=self.in_force, inputs=self.inputs)

    def _is_current(self, inventory: "Inventory") -> bool:
        return inventory.ledger_version == self.ledger.version_seen()

    def _listed(self) -> "Inventory":
        from imagemill.inputs.folder_words import caption_by_folder
        from imagemill.pipeline.stage2.image_metadata import adopt_captions
        from imagemill.pipeline.stage2.input_settings import apply_inputs
        from imagemill.pipeline.stage2.record_index import state_of

        self.input_changes += apply_inputs(self.config, self.root.approved, self.ledger)
        version, looked, self._looked = self.ledger.version_seen(), self._looked, None
        inventory = self._inventory()
        if (
            looked and self._read_only and self._read_only.version_seen() == looked[1]
        ):  # the ledger has not changed since
            inventory = looked[0]
        inventory.ledger_version, inventory.kept, inventory.compared = version, None, {}
        self.ledger.forget_solved()
        inventory.survey(self.ledger)
        inventory.records_state = state_of(self.root.stage2_jsonl)
        if inventory.settled and inventory.records_state != (inventory.settled.records, None):
            inventory.settled = None  # the records were edited a moment ago
        adopt_captions(inventory, self.ledger)
        caption_by_folder(inventory.scan, self.ledger, inventory.inputs)
        return inventory

    def close(self) -> None:
        """Close the ledger."""
        for ledger in (self._read_only, self.__dict__.get("ledger")):
            if ledger is not None:
                ledger.close()


@contextmanager
def open_session(path: str | os.PathLike[str] | None = None, config_file: str | None = None) -> Iterator[Session]:
    """Open the session of a data root, or join the one that this thread has open.

    Args:
        path: the data root, else $IMAGEMILL_DATA_ROOT, else ./data.
        config_file: else $IMAGEMILL_CONFIG, else imagemill.yaml in the data root.
    """
    sessions, key = _sessions(), _key(path, config_file)
    session = sessions[key] = sessions.get(key) or Session(DataRoot.resolve(path), key[1])
    session.users += 1
    try:
        yield session
    finally:
        session.users -= 1
        if not session.users:
            del sessions[key]
            session.close()


def current_session(path: str | os.PathLike[str] | None = None, config_file: str | None = None) -> Session:
    """Return the session that this thread has open. Raises RuntimeError if it has none."""
    key = _key(path, config_file)
    try:
        return _sessions()[key]
    except KeyError:
        raise RuntimeError(f"no session of {key[0]} is open in this thread; use open_session()") from None


_Key = tuple[str, str | None]


def _sessions() -> dict[_Key, Session]:
    return _OPEN.__dict__.setdefault("sessions", {})


def _key(path: str | os.PathLike[str] | None, config_file: str | None) -> _Key:
    """Return the key of a session: absolute path of the data root, and configuration file if one is named."""
    return os.path.abspath(path or os.environ.get(ROOT_VARIABLE) or DEFAULT_ROOT), named_config(config_file)
