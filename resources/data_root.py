"""The data root of this deployment: its paths, its configuration file, its ledger.

They are opened in imagemill/pipeline/session.py; the layout of the folder is in imagemill/domain/layout.py.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import dagster as dg
from pydantic import Field, PrivateAttr

from imagemill.config import named_config
from imagemill.domain.layout import DataRoot
from imagemill.pipeline.session import Session, current_session, open_session
from imagemill.pipeline.shards.shard_sets import refuse_no_sets
from imagemill.store.locations import refuse_no_folder


class DataRootResource(dg.ConfigurableResource):
    """One data root. Empty fields fall back to the environment, which the command line sets.

    A run has one session, shared by all its resources; a run of a command uses the command's.
    """

    path: str | None = Field("", description="Data root; empty: $IMAGEMILL_DATA_ROOT, else ./data.")
    config_file: str | None = Field(
        "", description="Configuration file; empty: $IMAGEMILL_CONFIG, else imagemill.yaml in the data root."
    )

    output_base_dir: str | None = Field(
        "", description="Folder for records and embeddings instead of derived/, remembered from then on."
    )

    _session: Session | None = PrivateAttr(None)

    @contextmanager
    def yield_for_execution(self, context: dg.InitResourceContext) -> Iterator[Self]:
        """Open the session of a run."""
        with open_session(self.path or None, self.config_file or None) as session:
            if self.output_base_dir and Path(os.path.abspath(self.output_base_dir)) != session.root.derived:
                session.put("derived", self.output_base_dir)
            self._session = session
            yield self

    @property
    def session(self) -> Session:
        """The run's session; outside a run, the one that this thread has open."""
        return self._session or current_session(self.path or None, self.config_file or None)

    def root(self) -> DataRoot:
        """Return the data root with its folders."""
        return self.session.root

    def own_config_file(self) -> Path | None:
        """Return `imagemill.yaml` of the data root, or None if another configuration file was named."""
        return None if named_config(self.config_file or None) else self.root().config_file

    def shards_folder(self, given: str | None = None) -> Path:
        """Return the folder of shards: the given one (remembered from now on), else the remembered one, else that below the root.

        Raises ImagemillError if the path is not a folder of shards and cannot become one.
        """
        if given:
            self.session.put("shards", given)
        shards = self.root().shards
        refuse_no_folder("shards", shards)
        refuse_no_sets(shards)
        return shards
