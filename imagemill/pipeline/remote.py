"""Work that other machines do, which share no folder with this one: what a pass sends and takes back, and who does what.

    keys ──send──> parcels ──batches──> workers ──rows──receive──> rows
           here, on threads             elsewhere     here, on threads

`send` settles a key that needs no worker, and packs what a worker needs for any other. `receive` stages what came back. Batches,
the deaths of workers and the keys that cause them are counted here; how workers are started and reached is the engine's affair
(resources/ray_pool.py).

Spec: docs/spec/engines.md
"""

import pickle
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from imagemill.errors import ImagemillError
from imagemill.pipeline.software import sources, versions
from imagemill.store.provenance import ModelIdentity

# A part of the results of a batch: at most so many bytes, and those of so many seconds.
PART_BYTES = 16 << 20
PART_SECONDS = 0.5

# A key that was alone at so many deaths of its worker is not tried again.
DEATHS_ALONE = 2


class Parcel(NamedTuple):
    """The data of one key that a worker needs.

    Attributes:
        key: the key.
        payload: what travels.
        size: bytes of the payload.
    """

    key: Any
    payload: Any
    size: int


class Worker(Protocol):
    """A worker on another machine, built there by the recipe of its pass."""

    def about(self) -> "About":
        """Return what its results depend on. Loads no model."""
        ...

    def stream(self, payloads: Sequence[Any]) -> Iterator[Any]:
        """Yield one row per payload, in any order."""
        ...

    def stop(self) -> None:
        """Begin no other model call; called from another thread."""
        ...

    def close(self) -> None:
        """Free the memory of the model."""
        ...


class RemotePass(Protocol):
    """A pass over keys, as the process that owns the data root sees it. Its methods are called on threads."""

    recipe: Callable[[], Worker]
    """Picklable: builds the worker."""

    gpus: float
    """GPUs, or the share of one, that each worker needs."""

    modules: Sequence[str]
    """Modules of other packages that make the results."""

    @property
    def model_batch(self) -> int:
        """Keys of a model call, as far as it is known before the first."""
        ...

    def weight(self, key: Any) -> int:
        """Return the bytes that a key will send, as far as they are known before it is read."""
        ...

    def send(self, key: Any) -> Any:
        """Return the row of a key that needs no worker, or a Parcel."""
        ...

    def receive(self, row: Any) -> Any:
        """Check a row that came back, and store what it carries; return the row to publish."""
        ...

    def parts(self, key: Any) -> Sequence[Any]:
        """Return the keys into which a key is divided if it ended its worker; one if it cannot be divided."""
        ...

    def lost(self, key: Any, how: str) -> Any:
        """Return the row of a key that ended its worker each time, given how."""
        ...

    def name_of(self, key: Any) -> str:
        """Return the name of a key, which its row has too."""
        ...

    def fits(self, about: "About") -> bool:
        """Return whether a worker has the model of the existing files; False without any."""
        ...

    def agree(self, about: "About") -> None:
        """Use these facts for what comes back. Raises ModelMismatch for another model than that of the existing files."""
        ...


@dataclass(frozen=True, kw_only=True)
class About:
    """The facts on which the results of a worker depend.

    Attributes:
        node: name of its machine.
        sources: fingerprints of the code, by package.
        versions: of Python and of the libraries, by name.
        device: type of its device, such as `cpu`.
        batch_size: most items of a model call, as text.
        identity: of its model; None if the pass has none.
        model: facts of the model, by name.
    """

    node: str
    sources: dict[str, str]
    versions: dict[str, str]
    device: str = "cpu"
    batch_size: str = ""
    identity: Any = None
    model: dict[str, Any] = field(default_factory=dict)


def about_here(identity: ModelIdentity | None = None, batch_size: object = "", *modules: str) -> About:
    """Return the facts of this machine, and those of a model on it.

    Args:
        identity: of the model; None for the software alone.
        batch_size: most items of a model call, as configured.
        modules: of other packages that make the results.
    """
    about = About(node=socket.gethostname(), sources=sources(*modules), versions=versions())
    if identity is None:
        return about
    device = identity.device.partition(":")[0]
    return replace(about, device=device, batch_size=str(batch_size), identity=identity, model=identity.facts)


def differences(mine: About, other: About, *, code: bool = True, model: bool = True) -> list[str]:
    """Return the facts in which two workers differ, each as `name theirs, name mine`, for a message.

    Args:
        mine: what is expected.
        other: the worker in question.
        code: compare sources and versions.
        model: compare model, device and batch size.
    """
    pairs: list[tuple[str, Any, Any]] = []
    if code:
        for what, here, there in (("source of", mine.sources, other.sources), ("", mine.versions, other.versions)):
            pairs += [(f"{what} {name}".strip(), here.get(name), there.get(name)) for name in {*here, *there}]
    if model:
        pairs += [("device", mine.device, other.device), ("batch size", mine.batch_size, other.batch_size)]
        pairs += [(name, mine.model.get(name), other.model.get(name)) for name in {*mine.model, *other.model}]
    return sorted(f"{name} is {_short(b)}, not {_short(a)}" for name, a, b in pairs if a != b)


def _short(value: Any) -> str:
    text = "missing" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:37]}…"


# ---- on the node


class BatchFailed(NamedTuple):
    """The error that ended a batch."""

    error: Exception


class BatchEnded(NamedTuple):
    """The end of a batch, which took so many seconds."""

    seconds: float


class NodeSide:
    """Base of workers on other machines: a temporary folder for preview models, and whether to begin no other model call."""

    def __init__(self) -> None:
        self._previews = tempfile.TemporaryDirectory(prefix="imagemill-")
        self.stopped = False

    @property
    def preview_root(self) -> Path:
        """Folder in which this worker makes preview models."""
        return Path(self._previews.name)

    def stop(self) -> None:
        """Begin no other model call."""
        self.stopped = True

    def close(self) -> None:
        """Remove the preview models."""
        self._previews.cleanup()


class NodeWorker:
    """The process of one worker. `run` works on one batch at a time; the other methods answer meanwhile, on another thread."""

    def __init__(self, recipe: bytes) -> None:
        self._worker: Worker = pickle.loads(recipe)()
        self._stopped = threading.Event()

    def about(self) -> About | BatchFailed:
        """Return what the results depend on, or the error."""
        try:
            return self._worker.about()
        except Exception as error:
            return BatchFailed(_portable(error))

    def stop(self) -> None:
        """Begin no other model call."""
        self._stopped.set()
        self._worker.stop()

    def close(self) -> None:
        """Free memory and temporary files; called between batches."""
        self._worker.close()

    def run(self, payloads: Sequence[Any]) -> Iterator[list[Any] | BatchFailed | BatchEnded]:
        """Yield the rows of a batch in parts, and its end."""
        began = flushed = time.monotonic()
        part: list[Any] = []
        size = 0
        try:
            for row in () if self._stopped.is_set() else self._worker.stream(payloads):
                part.append(row)
                size += bytes_of(row)
                if size >= PART_BYTES or time.monotonic() - flushed >= PART_SECONDS:
                    yield part
                    part, size, flushed = [], 0, time.monotonic()
        except Exception as error:
            if part:
                yield part
            yield BatchFailed(_portable(error))
            return
        if part:
            yield part
        yield BatchEnded(time.monotonic() - began)


class LinkEnd:
    """The other end of a link whose speed is measured."""

    def take(self, data: np.ndarray) -> int:
        """Take bytes; return how many."""
        return len(data)

    def give(self, size: int) -> np.ndarray:
        """Return so many bytes."""
        return np.zeros(size, np.uint8)


def bytes_of(row: Any) -> int:
    """Return the bytes of the array that a row carries."""
    return getattr(getattr(row, "array", None), "nbytes", 0)


def _portable(error: Exception) -> Exception:
    """Return an error that the driver can read."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return ImagemillError(f"{type(error).__name__}: {error}", where=f"a worker on {socket.gethostname()}")
    return error


# ---- batches, and what follows a death


@dataclass(eq=False)
class Batch:
    """Parcels that one worker gets together.

    Attributes:
        parcels: in order.
        names: of the keys without a row.
        suspect: whether its worker gets no other batch until it ends.
        begun: whether the worker may have begun it.
        alone: whether the worker had no other batch when it died.
    """

    parcels: list[Parcel]
    names: set[str]
    suspect: bool = False
    begun: bool = False
    alone: bool = False

    @property
    def size(self) -> int:
        """Bytes of the payloads."""
        return sum(parcel.size for parcel in self.parcels)


def runs_again(
    keys: Sequence[Any], deaths_alone: int, parts: Callable[[Any], Sequence[Any]] = lambda key: [key]
) -> list[list[Any]]:
    """Return the batches in which the keys of a batch run again after the death of its worker; none if its only key is lost.

    Args:
        keys: those without a row.
        deaths_alone: deaths at which the only key was alone, this one included; 0 if the batch had other keys.
        parts: returns the keys into which a key is divided.
    """
    if not deaths_alone:
        return [[key] for key in keys]
    (key,) = keys
    divided = parts(key)
    if len(divided) > 1:
        return [[part] for part in divided]
    return [[key]] if deaths_alone < DEATHS_ALONE else []


class WorkQueue:
    """Keys in the order in which they are sent, and those that have to be sent again after a death.

    A batch whose worker died is divided: the keys without a row are suspects, and each runs alone from then on, on a worker that
    has no other batch: rows that a worker has made are lost with it, so a death says nothing about the batches around the one
    that caused it. A batch that the worker had not begun returns as it was. A key that was alone at a death is divided, if it has
    parts. One without parts that was alone at `DEATHS_ALONE` deaths is lost. A death whose cause is known to be another one,
    such as the loss of a machine, counts for no key.

    Args:
        name_of: returns the name of a key.
        call: keys of a model call.
        parts: returns the keys into which a key is divided.
    """

    def __init__(
        self, name_of: Callable[[Any], str], call: int, parts: Callable[[Any], Sequence[Any]] = lambda key: [key]
    ) -> None:
        self._name_of, self._call, self._parts = name_of, max(1, call), parts
        self._size = 2 * self._call
        self._again: deque[list[Any]] = deque()
        self._alone: dict[str, int] = {}

    def again(self, *, idle: bool = True) -> list[Any] | None:
        """Return the keys of the next batch that was given back, None without one.

        Args:
            idle: whether the worker has no batch; if it has one, it gets no single key.
        """
        chosen = next((keys for keys in self._again if idle or len(keys) > 1), None)
        if chosen is not None:
            self._again.remove(chosen)
        return chosen

    def batch(self, parcels: Iterable[Parcel], *, suspect: bool = False) -> Batch:
        """Return a batch of these parcels."""
        chosen = list(parcels)
        return Batch(chosen, {self._name_of(parcel.key) for parcel in chosen}, suspect)

    def died(self, batch: Batch, *, counts: bool) -> list[Any]:
        """Give back the keys of a batch whose worker died; return those that are lost.

        Args:
            batch: with `names`, `begun` and `alone`.
            counts: whether the keys may be the cause.
        """
        keys = [parcel.key for parcel in batch.parcels if self._name_of(parcel.key) in batch.names]
        if not keys:
            return []
        one = len(batch.parcels) == 1
        if not batch.begun or not counts or (one and not batch.alone):
            self._again.append(keys)
            return []
        deaths = 0
        if one:
            name = self._name_of(keys[0])
            deaths = self._alone[name] = self._alone.get(name, 0) + 1
        again = runs_again(keys, deaths, self._parts)
        self._again.extend(again)
        return [] if again else keys

    @property
    def size(self) -> int:
        """Keys of the next batch."""
        return self._size

    def took(self, keys: int, seconds: float, most_seconds: float, calls: int) -> None:
        """Let the next batches have so many keys that they take about `most_seconds`, from one model call to `calls`."""
        if keys and seconds > 0:
            wanted = int(most_seconds * keys / seconds)
            self._size = max(self._call, min(wanted, calls * self._call))

    def __bool__(self) -> bool:
        return bool(self._again)
