"""Object storage, and web servers for reading, through obstore: the only module that imports it.

Errors of the library contain addresses, headers and several lines; here each becomes one sentence.

Pitfalls (docs/spec/object-storage.md#facts): after a request, every request in a forked child hangs for ever; pickled stores
contain their secret; a repeated conditional write can fail because the first one succeeded (pipeline/push.py reads it back).
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import msgspec

from imagemill.errors import ImagemillError, WrongUsage
from imagemill.fs.blobs import AnswerLost, Blob, Changed, Exists, Missing, StorageSettings, StoreFailed
from imagemill.fs.location import Location, redact
from imagemill.parts import in_parts

T = TypeVar("T")
Failures = type[ImagemillError] | tuple[type[ImagemillError], ...]

PART_BYTES = 8 << 20
# Parts of one object, and so of 8 MB each in memory, that are sent at a time.
PARTS_AT_ONCE = 4
KEYS_AT_ONCE = 1000
# A connection can break in the middle of an answer, after which the library does not repeat the request.
READS, UPLOADS = 3, 5

# Of one request, a part of 8 MB included.
_TIMEOUT = "120s"
# Of the first requests of a command, which find a wrong address or wrong credentials.
_CHECK_SECONDS = 8
_FORKED = False
_USED = False


def _after_fork() -> None:
    global _FORKED  # noqa: PLW0603 - of the process
    _FORKED = _FORKED or _USED


os.register_at_fork(after_in_child=_after_fork)


def library() -> ModuleType:
    """Return obstore. Raises WrongUsage if it is not installed."""
    try:
        import obstore
    except ImportError as error:
        raise WrongUsage(
            "object storage needs the package obstore", why="it is not installed", do="pip install 'imagemill[s3]'"
        ) from error
    return obstore


class Objects:
    """A store of objects at a location, see `Blobs`. Pickled without credentials, which the other process finds itself."""

    def __init__(self, location: Location, settings: StorageSettings = StorageSettings()) -> None:  # noqa: B008 - frozen
        self.location, self.settings = location, settings
        self._listed = False

    def __reduce__(self) -> tuple[Any, ...]:
        # A fork server keeps the environment that it was started in, so address and region travel. Credentials do not.
        endpoint = self._endpoint and redact(self._endpoint)
        return type(self), (
            self.location,
            msgspec.structs.replace(self.settings, endpoint=endpoint, region=self._region),
        )

    @cached_property
    def _store(self) -> Any:
        return self._opened({"timeout": _TIMEOUT, "connect_timeout": "5s"}, {})

    @cached_property
    def _checking(self) -> Any:
        """The same store, whose requests end after a few seconds."""
        limit = timedelta(seconds=_CHECK_SECONDS)
        options = {"timeout": f"{_CHECK_SECONDS // 2}s", "connect_timeout": "3s"}
        return self._opened(options, {"max_retries": 3, "retry_timeout": limit})

    def _opened(self, options: dict[str, Any], retries: dict[str, Any]) -> Any:
        stores = library().store
        location, settings = self.location, self.settings
        if location.scheme == "s3":
            _refuse_no_credentials(settings)
        options["allow_http"] = settings.allow_http or location.scheme == "http"
        if authorities := os.environ.get("AWS_CA_BUNDLE"):
            options["root_certificate"] = Path(authorities).read_bytes()
        kept: dict[str, Any] = {"client_options": options, "retry_config": retries or None}
        if location.scheme != "s3":
            return stores.HTTPStore.from_url(str(location), **kept)
        config: dict[str, Any] = {"region": self._region}
        if self._endpoint:
            config["endpoint"] = self._endpoint
        if settings.credentials == "profile":
            kept["credential_provider"] = _profile(settings)
        return stores.S3Store(location.bucket, prefix=location.prefix or None, config=config, **kept)  # type: ignore[arg-type]  # names of S3Config

    def _do(self, key: str, action: Callable[[], T]) -> T:
        """Call a function of the library, and convert its errors."""
        global _USED  # noqa: PLW0603 - of the process
        if _FORKED:
            raise StoreFailed(
                "object storage cannot be used in a forked process",
                where=self.location,
                why="the parent has used it before the fork, after which every request would wait for ever",
                do='start processes in another way: multiprocessing_context="forkserver"',
            )
        _USED = True
        try:
            return action()
        except ImagemillError:
            raise
        except Exception as error:
            raise _converted(error, self.location / key if key else self.location, self.settings) from None

    def check(self, key: str) -> tuple[bytes, Blob] | None:
        """Return the bytes of an object and its state, within 10 seconds; None if it does not exist.

        Raises:
            StoreFailed: if the store cannot be used.
        """

        def read() -> tuple[bytes, Blob]:
            result = library().get(self._checking, key)
            return bytes(result.bytes()), _blob(key, result.meta)

        try:
            return repeated(READS, AnswerLost, lambda: self._do(key, read))
        except Missing:
            return None

    def check_listing(self) -> None:
        """Ask for some of the keys, once for each store.

        Raises:
            StoreFailed: if the store cannot be used, within 10 seconds.
        """
        if not self._listed:
            with suppress(OddKey):
                self._do("", lambda: next(library().list(self._checking, None, chunk_size=1), None))
            self._listed = True

    def _list_all(self, prefix: str, last: str) -> Iterator[list[Blob]]:
        """Yield the objects after `last`, with any keys."""
        client = self._client()
        from botocore.exceptions import BotoCoreError, ClientError

        base = f"{self.location.prefix}/" if self.location.prefix else ""
        given: dict[str, Any] = {"Bucket": self.location.bucket, "Prefix": f"{base}{prefix}/" if prefix else base}
        if last:
            given["StartAfter"] = base + last
        try:
            for page in client.get_paginator("list_objects_v2").paginate(**given):
                yield [
                    Blob(each["Key"].removeprefix(base), each["Size"], each["ETag"], each["LastModified"])
                    for each in page.get("Contents", ())
                ]
        except (BotoCoreError, ClientError) as error:
            why = redact(str(error).partition("\n")[0])
            raise StoreFailed("the objects cannot be listed", where=self.location, why=why, do=_AGAIN) from None

    def list(self, prefix: str = "") -> Iterator[list[Blob]]:
        """Yield the objects whose keys begin with `prefix/`, a thousand at a time, in any order.

        A key that the library does not accept has it list nothing at all; all keys are then listed in another way, which takes
        about twenty times as long.
        """
        last = ""
        try:
            pages = self._do(prefix, lambda: library().list(self._store, prefix or None, chunk_size=KEYS_AT_ONCE))
            while page := self._do(prefix, lambda: next(pages, None)):
                last = page[-1]["path"]
                yield [_blob(meta["path"], meta) for meta in page]
        except OddKey:
            yield from self._list_all(prefix, last)

    def _client(self) -> Any:
        """Return a client of botocore, which accepts every key."""
        session = _botocore(self.settings)
        from botocore import UNSIGNED
        from botocore.config import Config

        unsigned = {"signature_version": UNSIGNED} if _unsigned() else {}
        config = Config(s3={"addressing_style": "path"}, **unsigned)
        return session.create_client("s3", region_name=self._region, endpoint_url=self._endpoint, config=config)

    @property
    def _region(self) -> str:
        return self.settings.region or os.environ.get("AWS_REGION") or "us-east-1"

    @property
    def _endpoint(self) -> str | None:
        return self.settings.endpoint or os.environ.get("AWS_ENDPOINT_URL")

    def head(self, key: str) -> Blob:
        """Return the state of an object. Raises Missing."""
        return self._do(key, lambda: _blob(key, library().head(self._store, key)))

    def read(self, key: str, expect: str | None = None) -> tuple[bytes, Blob]:
        """Return the bytes of an object, and its state. Raises Missing, or Changed if its tag is not `expect`."""
        data, meta = self._read(key, {"if_match": expect} if expect else {})
        return bytes(data), _blob(key, meta)

    def read_range(self, key: str, start: int, size: int, expect: str | None = None) -> Any:
        """Return bytes of an object as a buffer; fewer than `size` at its end. Raises as `read`."""
        options: dict[str, Any] = {"range": (start, start + size)}
        if expect:
            options["if_match"] = expect
        return self._read(key, options)[0]

    def fetch(self, key: str, path: Path) -> None:
        """Copy an object to a file, several parts at a time. Raises Missing, or Changed if it changes meanwhile."""
        blob = self.head(key)
        with open(path, "wb") as file, ThreadPoolExecutor(PARTS_AT_ONCE) as pool:

            def copy(start: int) -> None:
                os.pwrite(file.fileno(), self.read_range(key, start, PART_BYTES, blob.tag), start)

            for _ in pool.map(copy, range(0, blob.size, PART_BYTES)):
                pass

    def _read(self, key: str, options: dict[str, Any]) -> tuple[Any, Any]:
        def read() -> tuple[Any, Any]:
            result = library().get(self._store, key, options=options)
            tag, expected = result.meta["e_tag"], options.get("if_match")
            if tag and expected and tag != expected:  # a server that ignores the condition
                raise Changed("the object has changed", where=self.location / key, do=_AGAIN)
            return result.bytes(), result.meta

        return repeated(READS, AnswerLost, lambda: self._do(key, read))

    def put(self, key: str, data: bytes | Path) -> str:
        """Write an object, or replace the present one; return its tag.

        Large files are sent in parts; an interrupted call leaves no object.
        """
        parts: dict[str, Any] = {"chunk_size": PART_BYTES, "max_concurrency": PARTS_AT_ONCE}
        # The answer to the end of an upload in parts may be lost; the library repeats that request, and the server no longer
        # knows the upload.
        return repeated(UPLOADS, (Missing, AnswerLost), lambda: self._put(key, data, **parts))

    def create(self, key: str, data: bytes) -> str:
        """Write an object that does not exist yet; return its tag. Raises Exists."""
        return self._put(key, data, mode="create")

    def replace(self, key: str, data: bytes, expect: str) -> str:
        """Write an object whose tag is `expect`; return its new tag. Raises Changed or Missing."""
        return self._put(key, data, mode={"e_tag": expect})

    def _put(self, key: str, data: bytes | Path, **how: Any) -> str:
        return self._do(key, lambda: library().put(self._store, key, data, **how))["e_tag"] or ""

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; those that do not exist are no error."""
        for some in in_parts(keys, KEYS_AT_ONCE):
            try:
                self._delete(some)
            except Missing:
                continue

    def _delete(self, keys: Sequence[str]) -> None:
        repeated(READS, AnswerLost, lambda: self._do("", lambda: library().delete(self._store, keys)))


def repeated(attempts: int, failures: Failures, action: Callable[[], T]) -> T:
    """Return the result of an action, which is repeated if it fails in one of these ways."""
    for _ in range(attempts - 1):
        try:
            return action()
        except failures:
            continue
    return action()


def _blob(key: str, meta: Any) -> Blob:
    return Blob(key, meta["size"], meta["e_tag"] or "", meta["last_modified"])


def _refuse_no_credentials(settings: StorageSettings) -> None:
    """Raise StoreFailed if no credentials are configured: the library would ask the network of a virtual machine for them."""
    if settings.credentials == "environment" and not _unsigned() and not any(map(os.environ.get, _CREDENTIALS)):
        raise StoreFailed(
            "no credentials for object storage",
            why="AWS_ACCESS_KEY_ID is not set",
            do="set it and AWS_SECRET_ACCESS_KEY, or set object_storage.credentials to profile or instance; "
            "AWS_SKIP_SIGNATURE=true reads a public bucket without any",
        )


def _unsigned() -> bool:
    """Return whether requests are not signed: a public bucket."""
    return os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("true", "1")


_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


def _botocore(settings: StorageSettings) -> Any:
    """Return botocore's session. Raises WrongUsage if it is not installed, StoreFailed for a profile that does not exist."""
    try:
        import botocore.session
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise WrongUsage(
            "this use of object storage needs the package botocore",
            why="it is not installed; it reads profiles, and lists keys with unusual characters",
            do="pip install 'imagemill[s3]'",
        ) from error
    name = settings.profile if settings.credentials == "profile" else None
    session = botocore.session.Session(profile=name)
    try:
        session.get_scoped_config()
    except BotoCoreError as error:
        raise StoreFailed("the profile cannot be used", where=name, why=str(error), do=_CHECK_PROFILE) from None
    return session


def _profile(settings: StorageSettings) -> Any:
    """Return a provider of the credentials of a profile."""
    found = _botocore(settings).get_credentials()
    if found is None:
        where = settings.profile or "default"
        raise StoreFailed("the profile has no credentials", where=where, do=_CHECK_PROFILE)

    def provide() -> dict[str, Any]:
        frozen = found.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": None,
        }

    return provide


_CHECK_PROFILE = "check object_storage.profile and ~/.aws/credentials"

# ---- errors

_AGAIN = "run the same command again; finished work is kept"


class OddKey(StoreFailed):
    """The library refuses a key of a listing, such as one with a part `..`."""


# By the code of an answer: what, and what to do.
_BY_CODE = {
    "ExpiredToken": ("the credentials have expired", "get new ones"),
    "ExpiredTokenException": ("the credentials have expired", "get new ones"),
    "TokenRefreshRequired": ("the credentials have expired", "get new ones"),
    "AccessDenied": ("no permission", "check the policy of the user and of the bucket"),
    "AllAccessDisabled": ("no permission", "check the policy of the user and of the bucket"),
    "InvalidAccessKeyId": ("the server does not know the access key", "check AWS_ACCESS_KEY_ID and the endpoint"),
    "SignatureDoesNotMatch": ("the secret key is wrong", "check AWS_SECRET_ACCESS_KEY"),
    "RequestTimeTooSkewed": ("the clocks of this machine and of the server differ", "set the clock of this machine"),
    "NoSuchBucket": ("there is no such bucket", "check the URL, object_storage.endpoint and object_storage.region"),
    "PermanentRedirect": ("the bucket is in another region", "set object_storage.region to the bucket's"),
    "AuthorizationHeaderMalformed": ("the bucket is in another region", "set object_storage.region to the bucket's"),
    "IllegalLocationConstraintException": ("the bucket is in another region", "set object_storage.region to the bucket's"),
    "SlowDown": ("the server is overloaded", "run the same command again later; finished work is kept"),
    "NotImplemented": (
        "the server does not support a request",
        "if this data root is the only writer there, set object_storage.single_writer: true",
    ),
}  # fmt: skip
_CODE = re.compile(r"<Code>\s*([A-Za-z0-9]+)\s*</Code>")
# By a part of the message, where there is no code.
_BY_TEXT = {
    "BadScheme": (
        "a server without TLS is not used",
        "use https:// in object_storage.endpoint, or set object_storage.allow_http: true",
    ),
    "InvalidCertificate": (
        "the certificate of the server is not trusted",
        "set AWS_CA_BUNDLE to the file with the certificate of its authority",
    ),
    "Range request not supported": (
        "the web server sends whole files only, not ranges of them",
        "read from object storage, or from a web server that supports ranges",
    ),
    "redirect without LOCATION": _BY_CODE["PermanentRedirect"],
    "403 Forbidden": _BY_CODE["AccessDenied"],
    "401 Unauthorized": _BY_CODE["AccessDenied"],
    "PermissionDenied": _BY_CODE["AccessDenied"],
    "Unauthenticated": _BY_CODE["AccessDenied"],
}
_NO_CONNECTION = re.compile(r"kind: (Connect|Timeout)|dns error|error sending request|TimedOut|ConnectError")


def _converted(error: Exception, where: Location, settings: StorageSettings) -> ImagemillError:
    """Return the error of the library as one of ours."""
    from obstore import exceptions

    text = str(error)
    code = (found := _CODE.search(text)) and found[1]
    if code in _BY_CODE:
        what, do = _BY_CODE[code]
        return StoreFailed(what, where=where, why=f"the server answers {code}", do=do)
    kinds: tuple[tuple[Any, type[ImagemillError], str], ...] = (
        (FileNotFoundError, Missing, "there is no such object"),
        (exceptions.AlreadyExistsError, Exists, "the object exists already"),
        ((exceptions.PreconditionError, exceptions.NotModifiedError), Changed, "the object has changed"),
    )
    for raised, kind, what in kinds:
        if isinstance(error, raised):
            return kind(what, where=where, do="run the same command again")
    for part, (what, do) in _BY_TEXT.items():
        if part in text:
            return StoreFailed(what, where=where, do=do)
    if "object with invalid path" in text:
        return OddKey("a key cannot be used", where=where, why=redact(text.partition("\n")[0]), do="rename the object")
    if _NO_CONNECTION.search(text):
        endpoint = settings.endpoint or os.environ.get("AWS_ENDPOINT_URL") or "the endpoint of the region"
        server = redact(endpoint) if where.scheme == "s3" else where.bucket
        do = "check the network, object_storage.endpoint and AWS_ENDPOINT_URL"
        return StoreFailed("cannot connect to the server", where=where, why=f"{server} does not answer", do=do)
    first = redact(text.partition("\n")[0])
    return AnswerLost("the request failed", where=where, why=first, do=_AGAIN)
