"""Locations in object storage, as URLs: `s3://bucket/prefix`, and `https://host/path` for reading.

A location contains no credentials, so it may be stored and shown. Local paths are `pathlib.Path`s.

Spec: docs/spec/object-storage.md#locations
"""

import re
from typing import Literal, NamedTuple, get_args
from urllib.parse import unquote, urlsplit

from imagemill.errors import WrongUsage

Scheme = Literal["s3", "https", "http"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
FOR_WRITING: tuple[Scheme, ...] = ("s3",)

# Path() turns `s3://bucket` into `s3:/bucket`.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
# In any text: what precedes the host of a URL, and a query, both of which may contain credentials.
_USER = re.compile(r"(?<=://)[^\s/@?#]+@")
_QUERY = re.compile(r"(\b[A-Za-z][A-Za-z0-9+.-]*://[^\s?#'\"<>]*)[?#][^\s'\"<>]*")


class Location(NamedTuple):
    """A place in object storage.

    Attributes:
        scheme: see `Scheme`.
        bucket: name of the bucket; of a web server: host and port.
        prefix: of the keys, without `/` at either end; empty for the whole bucket.
    """

    scheme: Scheme
    bucket: str
    prefix: str = ""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")

    def __truediv__(self, name: str) -> "Location":
        return self._replace(prefix=f"{self.prefix}/{name}" if self.prefix else name)

    @property
    def name(self) -> str:
        """The last part of the prefix, else the bucket."""
        return self.prefix.rpartition("/")[2] or self.bucket


def is_url(given: object) -> bool:
    """Return whether a text looks like a URL rather than a path.

    >>> is_url("s3://photos/cats"), is_url("data/photos"), is_url("C:/photos")
    (True, False, False)
    """
    return _URL.match(str(given)) is not None


def parse_location(given: str, option: str, *, schemes: tuple[Scheme, ...] = SCHEMES) -> Location:
    """Return the location that a URL names.

    Args:
        given: the URL.
        option: where it was given, for messages.
        schemes: the permitted ones.

    Raises:
        WrongUsage: for another scheme, credentials or a query in the URL, no bucket, and parts such as `..`.
    """
    shown = redact(given)
    try:
        parts = urlsplit(given)
        _ = parts.port
    except ValueError as error:
        raise WrongUsage(f"{option}: not a URL: {shown}", why=str(error), do=_FORM) from error
    if parts.scheme not in schemes:
        known = " and ".join(f"{scheme}://" for scheme in schemes)
        raise WrongUsage(f"{option}: cannot use {shown}", why=f"{known} can be used here", do=_FORM)
    if parts.username is not None or parts.password is not None:
        raise WrongUsage(
            f"{option}: the URL contains credentials",
            where=shown,
            why="a location is stored and shown",
            do="remove them from the URL; give them as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or as a profile",
        )
    if parts.query or parts.fragment:
        raise WrongUsage(
            f"{option}: the URL contains a query",
            where=shown,
            why="the query of a signed URL is a credential, and a location is stored and shown",
            do="give the URL up to the question mark",
        )
    path = parts.path if parts.scheme == "s3" else unquote(parts.path)
    prefix = path.strip("/")
    if not parts.netloc or any(part in ("", ".", "..") for part in (prefix.split("/") if prefix else [])):
        raise WrongUsage(
            f"{option}: not a location: {shown}", why="a bucket, and parts with names, are needed", do=_FORM
        )
    return Location(parts.scheme, parts.netloc, prefix)  # type: ignore[arg-type]  # a permitted scheme


_FORM = "give it as s3://bucket/prefix"


def redact(text: str) -> str:
    """Return a text without the credentials that URLs in it may contain: names before `@`, and queries.

    >>> redact("failed: https://me:secret@host/a?X-Amz-Signature=1 twice")
    'failed: https://host/a twice'
    """
    return _QUERY.sub(r"\1", _USER.sub("", text))
