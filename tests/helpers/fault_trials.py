"""Trials of disk faults: a command that was killed or failed at one change of the disk continues to the undisturbed result.

folder/data          the data root of the trial, always at this path
folder/prepared/N    the initial root of a command, copied for each trial
"""

import os
import random
import re
import shutil
import sqlite3
import subprocess
from contextlib import closing
from typing import NamedTuple

from imagemill.domain.layout import DataRoot
from imagemill.store.second_copy import NAME as SECOND_COPY
from tests.helpers.disk_faults import KILLED, SCOPES, Fault, Product
from tests.helpers.product import bytes_of
from tests.helpers.writing_commands import COMMANDS

# Caches of times and inodes: of a preset, and of `imagemill.reading`.
_CACHES = {".images.jsonl"}
_WHOLE = {".npy", ".tar", ".jpg", ".png"}
# In a second copy, the time of a withdrawal and the model of an earlier regeneration differ from run to run.
_VARIES = re.compile(rb'\d{4}-\d\d-\d\dT[0-9:.+]+|"previous\.[^\n]+\n')
_SIGNATURE = re.compile(r"posix:\d+:\d+:(\d+)")
_FULL = re.compile(r"the disk is full:|No space left")
_REMEDY = re.compile(r"do:  |run imagemill again|run the same command again")
_COMMAND = re.compile(r"`?imagemill ((?:run|shards|stage2|preset [a-z]+|repair)(?: --[a-z-]+)*)")
# Half of the faults concern output files and their temporary files.
_SHARES = (0.2, 0.3, 0.5)


class Undisturbed(NamedTuple):
    """Outputs and changes of a command without a fault.

    Attributes:
        before: outputs by path before the command.
        after: outputs by path after the command.
        changes: number of changes of the disk, by scope.
    """

    before: dict[str, bytes]
    after: dict[str, bytes]
    changes: dict[str, int]


class Trial(NamedTuple):
    """The result of one trial; `failure` is empty if it passed."""

    command: str
    fault: Fault
    at: str
    failure: str

    def __str__(self):
        fault = f"{self.fault.mode} at {self.fault.number} of {self.fault.scope}"
        return f"{'FAILED' if self.failure else 'passed'} {self.command}: {fault} ({self.at or 'not reached'})"


class Workshop:
    """Prepared roots, and trials on copies of them."""

    def __init__(self, folder):
        self.folder, self.root = folder, DataRoot(folder / "data")
        self._product = Product(folder, self.root)
        self._undisturbed = {}

    def close(self):
        self._product.close()

    def choose(self, name, mode, seed):
        """Choose the change to fail at."""
        rng, changes = random.Random(seed), self.undisturbed(name).changes
        (scope,) = rng.choices(SCOPES, _SHARES)
        return Fault(mode, rng.randint(1, max(1, changes[scope])), scope)

    def try_fault(self, name, fault):
        """Run one command with a fault, continue it, and compare."""
        command, expected = COMMANDS[name], self.undisturbed(name)
        self._lay_out(command)
        ended = self._run(command.arguments, fault=fault)
        failure = (
            _of_fault(ended, fault)
            or self._of_outputs_at_fault(ended, expected, command)
            or self._of_continuation(command, expected)
        )
        return Trial(name, fault, ended.at, f"{failure}\n--- under the fault ---\n{ended.text}" if failure else "")

    def undisturbed(self, name):
        if name not in self._undisturbed:
            command = COMMANDS[name]
            self._lay_out(command)
            before = outputs(self.root)
            ended = self._ended_well(command.arguments)
            self._finish(command)
            self._undisturbed[name] = Undisturbed(before, outputs(self.root), ended.changes)
        return self._undisturbed[name]

    def _lay_out(self, command):
        shutil.rmtree(self.root.path, ignore_errors=True)
        prepared = self.folder / "prepared" / command.prepare.__name__
        if command.copied and prepared.exists():
            copy_root(prepared, self.root)
            return
        self.root.path.mkdir()
        command.prepare(self.root, lambda *arguments: self._ended_well(arguments))
        if command.copied:
            prepared.parent.mkdir(exist_ok=True)
            self.root.path.rename(prepared)
            copy_root(prepared, self.root)

    def _run(self, arguments, **options):
        return self._product.run(*(part.format(root=self.root.path) for part in arguments), **options)

    def _ended_well(self, arguments):
        ended = self._run(arguments)
        assert ended.code == 0, f"{arguments}: exit code {ended.code}\n{ended.text}"
        return ended

    def _finish(self, command):
        for arguments in (command.then, command.check):
            if arguments:
                self._ended_well(arguments)

    def _of_outputs_at_fault(self, ended, expected, command):
        """Check that files under final names are complete, old or new, and that a successful command has made all.

        A command that continues after one image has failed packs the others: no undisturbed run makes such tars.
        """
        found, whole = outputs(self.root), _WHOLE if ended.code == KILLED else _WHOLE - {".tar"}
        for name, data in found.items():
            if os.path.splitext(name)[1] in whole and data not in (expected.before.get(name), expected.after.get(name)):
                return f"{name} is neither the old file nor the new one"
        if ended.code == 0 and not command.then:
            return _difference(found, expected.after, "although the command reported success")
        return ""

    def _of_continuation(self, command, expected):
        try:
            self._continue(command)
            self._finish(command)
        except AssertionError as error:
            return f"does not continue: {error}"
        if left := list(self.root.path.rglob(".tmp-*")):
            return f"temporary files are left: {', '.join(str(path.relative_to(self.root.path)) for path in left)}"
        return _difference(outputs(self.root), expected.after, "after the same command again")

    def _continue(self, command):
        """Run the same command again; if it is refused, run the commands in its message."""
        ended = self._run(command.arguments)
        assert "Traceback" not in ended.text, f"a traceback in the next command\n{ended.text}"
        if ended.code == 0 or (command.done and command.done in ended.text):
            return
        named = remedies(ended.text)
        assert named, f"exit code {ended.code} without a command as remedy\n{ended.text}"
        for arguments in named:
            self._ended_well(arguments)


def remedies(text):
    """Return the commands in the last remedy of an output, in order."""
    lines = [line for line in text.splitlines() if line.strip().startswith("do:")]
    return [found.split() for found in _COMMAND.findall(lines[-1])] if lines else []


def _of_fault(ended, fault):
    if fault.mode == "kill":
        return "" if ended.code in {KILLED, 0} else f"exit code {ended.code} of a killed command"
    if "Traceback" in ended.text:
        return "a traceback"
    if ended.code == 0:
        return ""
    if ended.code != 1:
        return f"exit code {ended.code}; failed work is 1"
    if fault.mode == "eio" and _FULL.search(ended.text):
        return "an I/O error is called a full disk"
    return "" if _REMEDY.search(ended.text) else "no message with a remedy"


def _difference(found, expected, when):
    names = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    if not names:
        return ""
    words = [f"{n} {'missing' if n not in found else 'extra' if n not in expected else 'differs'}" for n in names]
    return f"{len(names)} files differ {when}: {'; '.join(words[:8])}"


def outputs(root):
    """Return every output file that a user may read: bytes by path; of a link, its target."""
    found = {}
    for folder in (root.derived, root.shards, root.public_data, root.stage_a_output):
        for path in sorted(folder.rglob("*")):
            name = str(path.relative_to(root.path))
            if any(part.startswith(".tmp-") for part in path.relative_to(folder).parts):
                continue
            if path.is_symlink():
                found[name] = os.readlink(path).encode()
            elif path.is_file() and path.name not in _CACHES:
                data = bytes_of(path)
                found[name] = _VARIES.sub(b"", data) if path.name == SECOND_COPY else data
    return found


def copy_root(source, root):
    """Copy a data root, with its hardlinks; recorded file signatures become those of the copies."""
    subprocess.run(["cp", "-a", source, root.path], check=True)
    inodes = {
        str(path.lstat().st_ino): str((root.path / path.relative_to(source)).lstat().st_ino)
        for path in source.rglob("*")
    }

    def of_copy(text):
        return _SIGNATURE.sub(lambda found: found[0][: -len(found[1])] + inodes.get(found[1], found[1]), text)

    for path in root.path.rglob(".images.jsonl"):
        path.write_text(of_copy(path.read_text()))
    if root.ledger.exists() and root.ledger.read_bytes()[:15] == b"SQLite format 3":
        _rewrite(root.ledger, of_copy)


def _rewrite(ledger, of_copy):
    with closing(sqlite3.connect(ledger)) as db, db:
        for (table,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            for _, column, *_ in db.execute(f"PRAGMA table_info({table})").fetchall():
                found = db.execute(f"SELECT DISTINCT {column} FROM {table} WHERE {column} LIKE 'posix:%'").fetchall()
                db.executemany(
                    f"UPDATE {table} SET {column} = ? WHERE {column} = ?", [(of_copy(old), old) for (old,) in found]
                )
