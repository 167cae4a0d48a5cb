"""Tar archives for tests: as other programs write them, and hostile ones from a seed."""

import gzip
import io
import random
import tarfile
from typing import NamedTuple

from tests.helpers.images import encoded

TYPES = {
    "link": tarfile.SYMTYPE, "hardlink": tarfile.LNKTYPE, "fifo": tarfile.FIFOTYPE, "device": tarfile.CHRTYPE,
    "folder": tarfile.DIRTYPE,
}  # fmt: skip


class Made(NamedTuple):
    """A member to write: bytes of a file, or the type and target of anything else."""

    name: str
    data: bytes = b""
    kind: str = "file"
    target: str = ""


def tar_of(*members, packed=False, form=tarfile.PAX_FORMAT):
    """Return the bytes of an archive; a member is a Made, or a name and the bytes of a file."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=form) as tar:
        for member in members:
            made = member if isinstance(member, Made) else Made(*member)
            info = tarfile.TarInfo(made.name)
            info.type, info.linkname = TYPES.get(made.kind, tarfile.REGTYPE), made.target
            info.size = len(made.data)
            tar.addfile(info, io.BytesIO(made.data))
    return gzip.compress(stream.getvalue(), mtime=0) if packed else stream.getvalue()


def img2dataset(count, first=0):
    """Return the members of an archive of img2dataset: picture, caption, and metadata for each key."""
    from PIL import Image

    members = []
    for number in range(first, first + count):
        key = f"{number:09d}"
        noise = Image.frombytes("RGB", (32, 24), random.Random(number).randbytes(32 * 24 * 3))
        members += [
            (f"{key}.jpg", encoded(noise, "JPEG")),
            (f"{key}.txt", f"noise number {number}".encode()),
            (f"{key}.json", b'{"caption": "noise", "status": "success"}'),
        ]
    return members


def header(name=b"a", *, size=b"0", kind=b"0", target=b"", prefix=b"", magic=b"ustar\x0000"):
    """Return a header block with any values and a valid checksum."""
    block = bytearray(512)
    for start, length, value in (
        (0, 100, name), (100, 8, b"0000644"), (124, 12, size), (136, 12, b"0"), (156, 1, kind), (157, 100, target),
        (257, 8, magic), (345, 155, prefix),
    ):  # fmt: skip
        block[start : start + length] = value[:length].ljust(length, b"\0")
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def octal(size):
    return b"%011o" % size


def member(name, data=b"", **fields):
    """Return the blocks of a member."""
    return header(name, size=octal(len(data)), **fields) + data + bytes(-len(data) % 512)


def record(key, value):
    """Return a record of an extended header."""
    body = b" " + key + b"=" + value + b"\n"
    length = len(body)
    while len(str(length).encode()) + len(body) != length:
        length = len(str(length).encode()) + len(body)
    return str(length).encode() + body


def pax(*records, kind=b"x"):
    return member(b"PaxHeader", b"".join(record(*each) for each in records), kind=kind)


END = bytes(1024)


# ---- hostile archives

_NAMES = [
    b"a.jpg", b"A.JPG", b"a", b"a/b", b"a/b/c.jpg", b"000000000.jpg", b"000000000.txt", b"../outside", b"a/../../outside", b"..",
    b"/tmp/imagemill-outside", b"//outside", b"./x.jpg", b".", b"", b"./", b".hidden", b"a/.hidden/b", b".tmp-1-2x000001",
    b"a\nb.jpg", b"\xff\xfe.jpg", b"caf\xc3\xa9.jpg", b"back\\slash.jpg", b"x" * 100, b"link/inside.jpg", b"link", b"C:/x.jpg",
    b"\x1b[2J.jpg", b"~/x.jpg", b"-rf", b"a/", b"con.jpg", b"\xe2\x80\xae.jpg",
]  # fmt: skip
_TARGETS = [b"../../outside", b"/etc/passwd", b"a", b".", b"..", b"link", b"/", b"000000000.jpg"]


def _hostile_name(rng):
    if rng.random() < 0.7:
        return rng.choice(_NAMES)
    return bytes(rng.choice(b"a./\\-\n\xff\x00\xc3\xa9%~") for _ in range(rng.randrange(1, 40)))


def _hostile_member(rng):  # noqa: PLR0911, PLR0912
    data = rng.randbytes(rng.choice([0, 1, 511, 512, 513, 5000]))
    name = _hostile_name(rng)
    match rng.randrange(60):
        case 0 | 1:
            return header(name, kind=rng.choice(b"12").to_bytes(1, "big"), target=rng.choice(_TARGETS))
        case 2:
            return header(name, kind=rng.choice([b"3", b"4", b"6"]))
        case 3:
            return member(name, kind=b"5")
        case 4:  # a long name
            return pax(
                (b"path", b"/".join([rng.choice([b"d", b"x" * 255, b"x" * 256, b".."])] * rng.randrange(1, 300)))
            ) + member(b"short", data)
        case 5:
            return pax((b"path", name + b"\0" + name), (b"size", str(len(data)).encode())) + member(b"short", data)
        case 6:
            return member(b"././@LongLink", name * rng.randrange(1, 200) + b"\0", kind=b"L") + member(b"short", data)
        case 7:  # sparse, in the forms of GNU tar
            if rng.random() < 0.5:
                return pax((b"GNU.sparse.major", b"1"), (b"GNU.sparse.realsize", b"99999999999")) + member(name, data)
            block = bytearray(header(name, size=octal(len(data)), kind=b"S", magic=b"ustar  \0"))
            return bytes(block) + data + bytes(-len(data) % 512)
        case 8:  # a huge size
            size = rng.choice(
                [octal(8**11 - 1), b"\x80" + b"\xff" * 11, b"\xff" * 12, b"\x80" + bytes(3) + b"\x7f" + bytes(7)]
            )
            return header(name, size=size) + data
        case 9:
            return pax(
                (b"size", rng.choice([b"99999999999999999999", b"-1", b"", b"1e9", b"4611686018427387904"]))
            ) + member(name, data)
        case 10:  # chains of extended headers
            return pax((b"path", name)) * rng.randrange(2, 1500) + member(b"short", data)
        case 11:
            return pax((b"path", name), (b"size", b"0"), kind=b"g") + member(name, data)
        case 12:  # records of an extended header with wrong lengths
            return member(
                b"p",
                rng.choice([b"99 path=x\n", b"0 a=b\n", b"x", b"5 a=\n", b"-1 a=b\n", b"9" * 30 + b" a=b\n"]),
                kind=b"x",
            )
        case 13:
            return member(name, data, kind=rng.choice([b"V", b"M", b"D", b"Z", b"\xff"]))
        case 14:
            return bytes(rng.choice([512, 1024, 5120]))
        case 15:
            return rng.randbytes(512)
        case 16:
            return member(name, data) + member(name, data) + member(name, data + b"x")
        case _:
            return member(name, data, prefix=rng.choice([b"", b"", b"..", b"d" * 155]))


def hostile(seed):
    """Return the bytes of a hostile archive."""
    rng = random.Random(seed)
    data = b"".join(_hostile_member(rng) for _ in range(rng.randrange(1, 40))) + END
    if rng.random() < 0.3:
        damaged = bytearray(data)
        for _ in range(rng.randrange(1, 20)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        data = bytes(damaged)
    packed = rng.random() < 0.4
    if packed:
        data = gzip.compress(data + bytes(rng.choice([0, 0, 1 << 22])), mtime=0)
    if rng.random() < 0.3:
        data = data[: rng.randrange(len(data))]
    if packed and rng.random() < 0.2:
        damaged = bytearray(data)
        if damaged:
            damaged[rng.randrange(len(damaged))] ^= 0xFF
        data = bytes(damaged)
    return data
