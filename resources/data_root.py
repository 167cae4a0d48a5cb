"""The data root of this deployment: its paths, its configuration file, its ledger.

Belongs here: which folder and file a run works on.
Belongs elsewhere: what lies where below it (imagemill/domain/layout.py), what the file may say (imagemill/config.py).
"""

import os
from pathlib import Path

import dagster as dg
from pydantic import Field

from imagemill.config import Config, config_in_force, named_config
from imagemill.domain.layout import DataRoot
from imagemill.pipeline.shards.shard_sets import refuse_no_sets
from imagemill.store.ledger import Ledger
from imagemill.store.locations import locate, put, refuse_no_folder
from imagemill.store.second_copy import open_ledger


class DataRootResource(dg.ConfigurableResource):
    """One data root. Empty fields fall back to the environment, which the command line sets."""

    path: str | None = Field("", description="Data root; empty: $IMAGEMILL_DATA_ROOT, else ./data.")
    config_file: str | None = Field(
        "", description="Configuration file; empty: $IMAGEMILL_CONFIG, else imagemill.yaml in the data root."
    )

    output_base_dir: str | None = Field(
        "", description="Folder for records and embeddings instead of derived/, remembered from then on."
    )

    def root(self) -> DataRoot:
        root = locate(self.path or None)
        if self.output_base_dir and Path(os.path.abspath(self.output_base_dir)) != root.derived:
            return put(root, "derived", self.output_base_dir)
        return root

    def config(self) -> Config:
        return config_of(self.root(), self.config_file or None)

    def own_config_file(self) -> Path | None:
        """`imagemill.yaml` of the data root; None if another configuration file was named."""
        return None if named_config(self.config_file or None) else self.root().config_file

    def ledger(self) -> Ledger:
        return open_ledger(self.root())

    def shards_folder(self, given: str | None = None) -> Path:
        """Where shards go: as given (and remembered from then on), else as remembered, else below the root.

        Raises ImagemillError where no folder of shards is or can be.
        """
        root = self.root()
        if given:
            root = put(root, "shards", given)
        refuse_no_folder("shards", root.shards)
        refuse_no_sets(root.shards)
        return root.shards


def config_of(root: DataRoot, given: str | None = None) -> Config:
    """The configuration in force for a data root; a file that was named must be there."""
    return config_in_force(root, given)
