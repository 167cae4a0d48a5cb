"""Objects of a store by key: the protocol, its errors and its settings.

    objects.py   object storage and web servers

Keys are relative to the location at which the store was opened; their parts are separated by `/`.

Spec: docs/spec/object-storage.md#locations
"""

from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import msgspec

from imagemill.errors import ImagemillError, MissingInput
from imagemill.fs.fingerprints import FileSignature
from imagemill.fs.location import Location


class StorageSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Address, credentials and habits of object storage.

    Attributes:
        endpoint: URL of the server; if unset, $AWS_ENDPOINT_URL, else Amazon's.
        region: if unset, $AWS_REGION, else us-east-1.
        profile: section of `~/.aws/credentials`, for `credentials: profile`.
        credentials: `environment` takes those of AWS_ACCESS_KEY_ID and its companions; `profile` those of a profile;
            `instance` those of the virtual machine.
        allow_http: whether a server without TLS is used.
        single_writer: whether to write to a store that ignores conditions: this data root must be its only writer.
        keep_days: days for which a replaced version stays readable.
        sensor_minutes: minutes between two looks of a sensor at a bucket.
    """

    endpoint: str | None = None
    region: str | None = None
    profile: str | None = None
    credentials: Literal["environment", "profile", "instance"] = "environment"
    allow_http: bool = False
    single_writer: bool = False
    keep_days: Annotated[float, msgspec.Meta(ge=0)] = 14
    sensor_minutes: Annotated[float, msgspec.Meta(ge=0)] = 15


class Missing(MissingInput):
    """There is no object with this key."""


class Exists(ImagemillError):
    """An object with this key exists already."""


class Changed(ImagemillError):
    """The object is not the expected one any more."""


class StoreFailed(ImagemillError):
    """A store cannot be used: no connection, no permission, no such bucket."""


class AnswerLost(StoreFailed):
    """A request failed on the way, and may succeed when it is repeated."""


class Blob(NamedTuple):
    """The state of an object.

    Attributes:
        key: relative to the location of the store.
        size: in bytes.
        tag: its ETag, which changes with its bytes; empty if the server gave none.
        modified: time of its last change, by the server's clock, UTC.
    """

    key: str
    size: int
    tag: str
    modified: datetime

    @property
    def modified_ns(self) -> int:
        """`modified` in nanoseconds since 1970."""
        return int(self.modified.timestamp() * 1000) * 1_000_000

    @property
    def signature(self) -> FileSignature:
        """The state as one opaque text, `object:<size>:<etag>`."""
        return FileSignature(f"object:{self.size}:{self.tag}")


class Blobs(Protocol):
    """A store, opened at a location. Every method may raise StoreFailed. Threads may share one."""

    location: Location

    def list(self, prefix: str = "") -> Iterator[list[Blob]]:
        """Yield the objects whose keys begin with `prefix/`, a thousand at a time, in any order."""
        ...

    def head(self, key: str) -> Blob:
        """Return the state of an object. Raises Missing."""
        ...

    def read(self, key: str, expect: str | None = None) -> tuple[bytes, Blob]:
        """Return the bytes of an object, and its state. Raises Missing, or Changed if its tag is not `expect`."""
        ...

    def read_range(self, key: str, start: int, size: int, expect: str | None = None) -> Any:
        """Return bytes of an object as a buffer; fewer than `size` at its end. Raises as `read`."""
        ...

    def put(self, key: str, data: bytes | Path) -> str:
        """Write an object, or replace the present one; return its tag.

        Large files are sent in parts; an interrupted call leaves no object.
        """
        ...

    def create(self, key: str, data: bytes) -> str:
        """Write an object that does not exist yet; return its tag. Raises Exists."""
        ...

    def replace(self, key: str, data: bytes, expect: str) -> str:
        """Write an object whose tag is `expect`; return its new tag. Raises Changed or Missing."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; those that do not exist are no error."""
        ...
