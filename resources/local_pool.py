"""Worker processes of this machine: batches of keys in, rows out, nobody waits for a process that is gone.

    caller ──batch──▶ worker 1   one pipe each; at most two batches in it, so that no worker waits for the caller
           ◀──rows──
           ──batch──▶ worker 2   ...

Processes are spawned, never forked: libraries with threads of their own do not survive a fork. A worker that dies ends the
work at once with its process id and the keys it had; what it had finished lies on the disk, and the next run goes on from there.
Where the caller says what becomes of its batch, another process takes the dead worker's place and the others go on.
Workers whose caller was killed find their pipe closed and end after their batch.

Belongs here: processes and pipes; no Dagster, which every worker would have to import.
Belongs elsewhere: the engine that assets see (resources/engine.py), what a worker does (imagemill/pipeline/).
"""

import multiprocessing
import queue
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain, islice
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from imagemill.errors import ImagemillError
from imagemill.fs.owners import current_folder, use

BATCHES_AHEAD = 2
STOP_SECONDS = 10.0


class WorkerDied(ImagemillError, RuntimeError):
    """A worker process ended before its work did; `pid`, `exitcode` and the `keys` it may have been busy with."""

    def __init__(self, pid: int | None, exitcode: int | None, keys: list[Any]) -> None:
        self.pid, self.exitcode, self.keys = pid, exitcode, keys
        self.how = _how(exitcode)
        shown = ", ".join(_short(key) for key in keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
        super().__init__(
            f"worker process {pid} {self.how}",
            where=f"at work on {shown}" if keys else None,
            why="something outside ended it (the system does when memory runs out), or one of these files brought it down",
            do="run the same command again: what was finished stays; with fewer workers, less memory is used",
        )


def run_on_processes(
    worker_class: type[Any],
    keys: Iterable[Any],
    *,
    workers: int,
    batch_size: int,
    options: Mapping[str, Any],
    died: Callable[[list[Any], WorkerDied], Iterable[Any]] | None = None,
) -> Iterator[Any]:
    """Yield what `worker_class(**options).stream(batch)` yields, for batches of the keys, as it arrives.

    No more processes are started than there are batches. An exception of a worker is raised here, and ends the others.

    Args:
        died: the rows of the batch that a worker was at work on when it died; None: its death ends the work.
    """
    remaining = iter(keys)
    todo: Iterator[list[Any]] = iter(lambda: list(islice(remaining, batch_size)), [])
    members: list[_Member] = []
    try:
        for batch in islice(todo, workers):
            members.append(_Member(worker_class, options))
            members[-1].send(batch)
        for member in members:
            _fill(member, todo)
        while busy := [member for member in members if member.batches]:
            for member in _ready(busy):
                try:
                    rows = member.receive()
                except WorkerDied as death:
                    if died is None:
                        raise
                    lost, *waiting = member.batches
                    rows, todo = died(lost, death), chain(waiting, todo)
                    members.remove(member)
                    member.connection.close()
                    member.process.kill()  # its pipe is closed; it may not be dead
                    if batch := next(todo, None):
                        members.append(member := _Member(worker_class, options))
                        member.send(batch)
                _fill(member, todo)
                yield from rows
    except BaseException:
        for member in members:
            member.process.terminate()
        raise
    finally:
        _end(members)


class _Member:
    """One worker process, and the batches it has not answered yet."""

    def __init__(self, worker_class: type[Any], options: Mapping[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs, worker_class, dict(options), current_folder()), daemon=True
        )
        self.process.start()
        # The worker's end must be open in the worker alone: then the pipe closes when it dies.
        theirs.close()
        self.batches: deque[list[Any]] = deque()

    def send(self, batch: list[Any]) -> None:
        self.batches.append(batch)
        with suppress(BrokenPipeError, ConnectionResetError):  # it is dead: `receive` says so
            self.connection.send(batch)

    def receive(self) -> list[Any]:
        try:
            answer = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(STOP_SECONDS)
            keys = [key for batch in self.batches for key in batch]
            raise WorkerDied(self.process.pid, self.process.exitcode, keys) from None
        if isinstance(answer, BaseException):
            raise answer
        self.batches.popleft()
        return answer


def _ready(members: list[_Member]) -> list[_Member]:
    by_connection: dict[Any, _Member] = {member.connection: member for member in members}
    return [by_connection[connection] for connection in wait(list(by_connection))]


def _fill(member: _Member, todo: Iterator[list[Any]]) -> None:
    for batch in islice(todo, BATCHES_AHEAD - len(member.batches)):
        member.send(batch)


def _end(members: list[_Member]) -> None:
    """Leave no process behind: closed pipes end them, and what does not end is ended."""
    for member in members:
        member.connection.close()
    for member in members:
        member.process.join(STOP_SECONDS)
        if member.process.is_alive():
            member.process.kill()
            member.process.join()


# ---- in the worker


def _serve(connection: Connection, worker_class: type[Any], options: dict[str, Any], owners: Path | None) -> None:
    if owners is not None:
        use(owners)  # its temporary files name it: what it leaves is removed while its caller lives
    # An interrupt of the terminal reaches the whole group of processes; what it means is for the caller to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    batches: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
    # Read on a thread: were a full pipe in either direction to wait for the other, neither would move again.
    closed = threading.Event()
    threading.Thread(target=_read, args=(connection, batches, closed), daemon=True).start()
    try:
        worker = worker_class(**options)
        try:
            while (batch := batches.get()) is not None and not closed.is_set():
                connection.send(list(worker.stream(batch)))
        finally:
            worker.close()
    except (BrokenPipeError, ConnectionResetError):  # the caller is gone
        return
    except Exception as error:
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.send(_portable(error))


def _read(connection: Connection, batches: "queue.SimpleQueue[list[Any] | None]", closed: threading.Event) -> None:
    with suppress(EOFError, OSError):
        while True:
            batches.put(connection.recv())
    closed.set()  # nobody wants what still waits
    batches.put(None)


def _portable(error: Exception) -> Exception:
    """The exception, if it survives the journey; else its words."""
    import pickle

    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return ImagemillError(f"{type(error).__name__}: {error}", where="a worker process")
    return error


def _how(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        with suppress(ValueError):
            return f"was ended by {signal.Signals(-exitcode).name}"
    return f"ended with exit code {exitcode}"


def _short(key: object) -> str:
    text = str(getattr(key, "name", key))
    return text if len(text) <= 80 else f"{text[:77]}…"
