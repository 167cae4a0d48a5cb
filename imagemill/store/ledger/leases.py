"""`leases`: the process that is working on each partition of an asset.

A lease belongs to a living process: one whose lock file is still locked (fs/owners.py). Every publish checks that the
process still holds its lease.
"""

from collections.abc import Collection, Sequence

import msgspec

from imagemill.errors import ImagemillError
from imagemill.fs.owners import Owner, is_dead_in, use
from imagemill.store.ledger.database import IN_MEMORY, Database, json_of
from imagemill.store.ledger.table import Table

# Leased like a partition: the whole asset. No image id begins with a slash.
EVERY = "/"


class Lease(msgspec.Struct, frozen=True):
    """One partition of an asset, and the process that works on it. `owner`: name of its lock file."""

    asset: str
    item: str
    owner: str
    run_id: str
    boot_id: str
    pid_namespace: str
    host: str
    pid: int

    @property
    def holder(self) -> str:
        """The holder, for messages."""
        return f"{self.run_id} (process {self.pid} on {self.host})"


LEASES = Table("leases", Lease)


class LeaseLost(ImagemillError, RuntimeError):
    """Another process has taken over the partitions that this run works on."""


class Leases(Database):
    """Reads and writes of leases: `claim` acquires them, `release` releases them."""

    def claim(self, asset: str, items: Sequence[str], run_id: str) -> set[str]:
        """Lease all of these partitions to this process, or none of them.

        Args:
            asset: the asset.
            items: `[EVERY]` leases the whole asset, including partitions that do not exist yet.
            run_id: of the run that works on them.

        Returns:
            The holders of conflicting leases, for messages; empty if the leases were acquired.
        """
        owner, relevant = self._owner(), None if EVERY in items else [*items, EVERY]
        with self.transaction():
            held = list(self._select(LEASES, relevant, "asset = ?", (asset,), key="item"))
            owners = {lease.owner for lease in held}
            folder = self.path.parent / "owners"
            dead = {name for name in owners if name != owner.name and is_dead_in(folder, name)}
            others = {lease.holder for lease in held if lease.owner != owner.name and lease.owner not in dead}
            if not others:
                self._insert(LEASES, (self._lease(asset, item, run_id, owner) for item in items))
        return others

    def release(self, asset: str, run_id: str) -> None:
        """Release this process's leases of an asset for a run."""
        self._change(
            "DELETE FROM leases WHERE asset = ? AND owner = ? AND run_id = ?", (asset, self._owner().name, run_id)
        )

    def check_lease(self, asset: str, items: Collection[str], run_id: str) -> None:
        """Raise LeaseLost unless this process holds all of these partitions. Call it in the publishing transaction."""
        lost = self._one(
            "SELECT value FROM json_each(?) WHERE NOT EXISTS"
            " (SELECT 1 FROM leases WHERE asset = ? AND item = value AND owner = ? AND run_id = ?)",
            (json_of([*items]), asset, self._owner().name, run_id),
        )
        if lost:
            holder = next(self._select(LEASES, lost, "asset = ?", (asset,), key="item"), None)
            raise LeaseLost(
                f"{asset}: {f'run {holder.holder}' if holder else 'another run'} has taken over {lost[0]}",
                where=self.path,
                why="this process was considered dead",
                do="nothing was published twice; run the same command again when that run has ended",
            )

    def _owner(self) -> Owner:
        if self.path == IN_MEMORY:
            return Owner("memory", "", 0, "", "")
        return use(self.path.parent / "owners")

    @staticmethod
    def _lease(asset: str, item: str, run_id: str, owner: Owner) -> Lease:
        return Lease(asset, item, owner.name, run_id, owner.boot_id, owner.pid_namespace, owner.host, owner.pid)
