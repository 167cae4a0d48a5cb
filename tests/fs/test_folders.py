"""Folders of inputs in object storage."""

import io
import random

import pytest
from PIL import Image

from imagemill.domain.inputs import NEW_INPUTS, InputSettings
from imagemill.fs.blobs import StorageSettings
from imagemill.fs.folders import ObjectFolder, file_bytes, on_disk, signed_bytes, state_of_file
from imagemill.fs.location import Location
from imagemill.fs.objects import Objects
from imagemill.inputs.listing import list_entries, list_paths
from imagemill.inputs.scan import classify
from tests.helpers.s3 import fault_proxy, s3_server


@pytest.fixture(scope="module")
def server():
    with s3_server() as running:
        running.make_bucket("bucket")
        yield running


@pytest.fixture
def proxy(server, monkeypatch):
    with fault_proxy(server) as running:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        yield running


@pytest.fixture
def folder(proxy, request):
    return ObjectFolder(Objects(Location("s3", "bucket", request.node.name), StorageSettings(allow_http=True)))


def test_file_is_read_in_parts(folder, proxy):
    data = random.Random(1).randbytes(300_000)
    folder.store.put("a", data)
    with (folder / "a").open() as file:
        assert file.read(10) == data[:10]
        file.seek(200_000)
        assert file.read(100_000) == data[200_000:]
        assert file.read(1) == b""
        assert file.seek(-5, 2) == 299_995
        assert file.read() == data[-5:]
        file.seek(0)
        assert file.read() == data
    folder.store.put("empty", b"")
    assert (folder / "empty").open().read() == b""


def test_header_of_a_picture_takes_one_request(folder, proxy):
    buffer = io.BytesIO()
    Image.effect_noise((900, 700), 90).save(buffer, "PNG")
    assert buffer.tell() > 400_000
    folder.store.put("noise.png", buffer.getvalue())
    proxy.clear()

    with (folder / "noise.png").open() as file, Image.open(file) as image:
        assert image.size == (900, 700)
    assert [(request.method, request.got) for request in proxy.requests] == [("GET", 1 << 16)]


def test_only_the_expected_bytes_are_read(folder):
    folder.store.put("a", b"one")
    data, signature = signed_bytes(folder / "a")
    assert (data, signature) == (b"one", state_of_file(folder / "a")[0])
    assert file_bytes(folder / "a", signature) == b"one"
    folder.store.put("a", b"two")

    with pytest.raises(OSError, match="changed"):
        file_bytes(folder / "a", signature)
    with pytest.raises(FileNotFoundError):
        file_bytes(folder / "b")
    with on_disk(folder / "a") as path:
        assert path.read_bytes() == b"two"
    assert not path.exists()


def listed(folder, inputs=NEW_INPUTS):
    return {entry.path: entry.kind for entry in list_entries(folder, inputs)}


def test_keys_are_entries_as_of_a_disk(folder, server):
    keys = ["a.jpg", "a.txt", "sub/b.jpg", "sub/deep/c.jpg", ".hidden/d.jpg", "sub/.e.jpg", "sub/", "no extension"]
    for key in keys:
        folder.store.put(key.rstrip("/"), b"x") if not key.endswith("/") else server.request(
            "PUT", f"/bucket/{folder.location.prefix}/sub/", b""
        )

    recursive, flat = listed(folder), listed(folder, InputSettings(recursive=False))

    assert recursive == {
        "a.jpg": "file", "a.txt": "file", "sub/b.jpg": "file", "sub/deep/c.jpg": "file", "no extension": "file",
        ".hidden": "ignored", "sub/.e.jpg": "ignored",
    }  # fmt: skip
    assert flat == {"a.jpg": "file", "a.txt": "file", "no extension": "file", ".hidden": "ignored", "sub": "folder"} | {
        "sub/.e.jpg": "ignored"
    }
    assert sorted(list_paths(folder, NEW_INPUTS)) == sorted(recursive)


def test_keys_that_no_path_can_have_are_problems(folder, server):
    for key in ("ok.jpg", "a//b.jpg", "a/../c.jpg", "a/./d.jpg", "tab%09.jpg"):
        server.request("PUT", f"/bucket/{folder.location.prefix}/{key}", b"x")

    scan = classify(list_entries(folder, NEW_INPUTS))

    assert list(scan.sources) == ["ok"]
    assert {(problem.item, problem.reason) for problem in scan.problems} == {
        ("a//b.jpg", "bad_key"), ("a/../c.jpg", "bad_key"), ("a/./d.jpg", "bad_key"), ("tab\\t.jpg", "bad_id"),
    }  # fmt: skip
