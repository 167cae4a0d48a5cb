"""The data root of this deployment: its paths, its configuration file, its ledger.

Belongs here: which folder and file a run works on.
Belongs elsewhere: what lies where below it (imagemill/layout.py), what the file may say (imagemill/config.py).
"""

import os
import sys
from pathlib import Path

import dagster as dg
from pydantic import Field

from imagemill.config import CONFIG_VARIABLE, Config, read_config
from imagemill.layout import SHARDS_PLACE, DataRoot
from imagemill.ledger import Ledger
from imagemill.pipeline.story import shards_folder


class DataRootResource(dg.ConfigurableResource):
    """One data root. Unset fields fall back to the environment, which the command line sets."""

    path: str | None = Field(None, description="Data root; unset: $IMAGEMILL_DATA_ROOT, else ./data.")
    config_file: str | None = Field(
        None, description="Configuration file; unset: $IMAGEMILL_CONFIG, else imagemill.yaml in the data root."
    )

    def root(self) -> DataRoot:
        return DataRoot.resolve(self.path)

    def config(self) -> Config:
        return config_of(self.root(), self.config_file)

    def ledger(self) -> Ledger:
        return Ledger(self.root().ledger)

    def shards_folder(self, given: str | None = None) -> Path:
        """Where shards go: as given (and remembered from then on), else as remembered, else below the root."""
        with self.ledger() as ledger:
            remembered = shards_folder(self.root(), ledger)
            if not given:
                return remembered
            place = Path(os.path.abspath(given))
            if place != remembered:
                print(f"shards go to {place} from now on, until now: {remembered}", file=sys.stderr, flush=True)
            ledger.remember_place(SHARDS_PLACE, place)
            return place


def config_of(root: DataRoot, given: str | None = None) -> Config:
    """The configuration in force for a data root; a file that was named must be there."""
    named = given or os.environ.get(CONFIG_VARIABLE)
    return read_config(Path(named) if named else root.config_file, required=bool(named))
