"""Photographs in object storage: the same results as from a folder, at the cost of what has changed.

Spec: docs/spec/object-storage.md#photographs
"""

import io
import math
import os
import re
from concurrent.futures import ThreadPoolExecutor
from html import unescape
from urllib.parse import quote

import dagster as dg
import pytest
from PIL import Image

from dagster_project import sensors
from dagster_project.internals.instance import open_instance
from imagemill.domain.layout import DataRoot
from imagemill.formats.manifest import read_json
from resources.data_root import DataRootResource
from tests.helpers.look import numbers_of_reasons, viewing
from tests.helpers.product import coco_photos, photos, product
from tests.helpers.s3 import SECRET, fault_proxy, s3_server

URL = "s3://photos/cats"


@pytest.fixture(scope="module")
def server():
    with s3_server() as running:
        running.make_bucket("photos")
        yield running


@pytest.fixture
def proxy(server, monkeypatch):
    with fault_proxy(server) as running:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        empty(server)
        yield running


def upload(server, folder, prefix="cats"):
    """Write the files of a folder as objects."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            put(server, f"{prefix}/{path.relative_to(folder).as_posix()}", path.read_bytes())


def put(server, key, data):
    server.request("PUT", f"/photos/{quote(key)}", data)


def empty(server):
    listed = server.request("GET", "/photos?list-type=2").decode()
    for key in re.findall("<Key>(.*?)</Key>", listed):
        server.request("DELETE", f"/photos/{quote(unescape(key))}")


def root_of(folder, name):
    root = DataRoot(folder / name / "data")
    root.path.mkdir(parents=True)
    root.config_file.write_text("object_storage: {allow_http: true}\n")
    return root


def results(root):
    """Return the bytes of records, arrays and tars."""
    paths = [
        root.stage2_jsonl,
        *root.derived.rglob("*.npy"),
        *root.shards.rglob("*.tar"),
        *root.shards.rglob("index.jsonl"),
    ]
    return {path.relative_to(root.path).as_posix(): path.read_bytes() for path in paths}


def test_results_are_those_of_a_folder(tmp_path, server, proxy):
    local, remote = root_of(tmp_path, "local"), root_of(tmp_path, "remote")
    photos(local.approved, 6)
    photos(local.approved / "sub folder", 2, first=6)
    (local.approved / "broken.jpg").write_bytes(b"no image")
    (local.approved / "metadata.jsonl").write_text('{"file_name": "photo0001.jpg", "text": "of a row"}\n')
    (local.approved / "photo0001.txt").unlink()
    upload(server, local.approved)
    put(server, "cats/empty/", b"")

    of_folder, of_bucket = product(local, "run"), product(remote, "run", "--approved", URL)

    assert results(remote) == results(local)
    assert len(results(local)) > 20
    manifests = [read_json(next(root.shards.rglob("manifest.json"))) for root in (local, remote)]
    assert [manifest.get("images") for manifest in manifests] == [None, URL]
    assert not remote.approved.exists()
    assert [line for line in of_bucket.splitlines() if "broken" in line] == [
        line for line in of_folder.splitlines() if "broken" in line
    ]


@pytest.mark.soak
@pytest.mark.parametrize("count", [6, 128])
def test_real_photographs_give_the_results_of_a_folder(tmp_path, server, proxy, coco128, count):
    """With preview models."""
    local, remote = root_of(tmp_path, "local"), root_of(tmp_path, "remote")
    coco_photos(coco128, local.approved)
    kept = {path.stem for path in sorted(local.approved.glob("*.jpg"))[:count]}
    for path in local.approved.iterdir():
        if path.stem not in kept:
            path.unlink()
    upload(server, local.approved)

    product(local, "run", stub=False)
    product(remote, "run", "--approved", URL, stub=False)

    assert results(remote) == results(local)
    assert len(list(local.derived.rglob("*.npy"))) >= 2 * count


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.soak)])
def test_many_photographs_with_captions_cost_listings_alone(tmp_path, server, proxy, count):
    root = root_of(tmp_path, "data")
    photos(tmp_path / "one", 1)
    photo = (tmp_path / "one" / "photo0000.jpg").read_bytes()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: put(server, f"cats/p{n:06}.jpg", photo), range(count)))
        list(pool.map(lambda n: put(server, f"cats/p{n:06}.txt", b"number %d" % n), range(count)))
    product(root, "run", "--approved", URL)

    proxy.clear()
    assert "nothing to do" in product(root, "run")
    assert set(proxy.counts()) == {"LIST"}
    assert proxy.counts()["LIST"] <= math.ceil(2 * count / 1000) + 2

    put(server, "cats/p000007.jpg", photo + b"\0")
    server.request("DELETE", "/photos/cats/p000008.jpg")
    put(server, "cats/new.jpg", photo + b"\0\0")  # equal bytes under another name would not be read
    put(server, "cats/new.txt", b"new")
    proxy.clear()
    product(root, "run")
    assert proxy.read_keys() == {"cats/p000007.jpg", "cats/new.jpg", "cats/new.txt"}
    assert len(list((root.derived / "dinov3").glob("*.npy"))) == count + 1


def test_a_run_costs_what_has_changed(tmp_path, server, proxy):
    root = root_of(tmp_path, "data")
    photos(tmp_path / "photos", 5)
    upload(server, tmp_path / "photos")
    proxy.clear()
    product(root, "run", "--approved", URL)
    assert proxy.counts() == {"LIST": 2, "GET": 5 * (3 + 1)}, "a photograph three times, a caption once"

    proxy.clear()
    assert "nothing to do" in product(root, "run")
    assert set(proxy.counts()) == {"LIST"}
    assert proxy.counts()["LIST"] <= 3

    put(server, "cats/photo0001.jpg", (tmp_path / "photos" / "photo0002.jpg").read_bytes())
    server.request("DELETE", "/photos/cats/photo0003.jpg")
    photos(tmp_path / "more", 1, first=9)
    upload(server, tmp_path / "more")
    proxy.clear()
    product(root, "run")
    assert proxy.read_keys() == {"cats/photo0001.jpg", "cats/photo0009.jpg", "cats/photo0009.txt"}
    assert "photo0003.jpg is no longer in" in product(root, "status")


def test_report_of_a_bucket(tmp_path, server, proxy):
    root = root_of(tmp_path, "data")
    photos(tmp_path / "photos", 3)
    (tmp_path / "photos" / "notes.pdf").write_bytes(b"pdf")
    upload(server, tmp_path / "photos")
    put(server, "cats/a//b.jpg", b"x")

    found = product(root, "scan", URL)

    assert URL in found
    assert "bad_key" in found
    assert not root.state.exists()
    assert "3" in next(line for line in found.splitlines() if line.startswith("images"))


def test_withdrawal_and_explanation(tmp_path, server, proxy):
    root = root_of(tmp_path, "data")
    photos(tmp_path / "photos", 3)
    upload(server, tmp_path / "photos")
    product(root, "run", "--approved", URL)

    product(root, "withdraw", "photo0001")

    assert "withdrawn" in product(root, "explain", "photo0001")
    assert "photo0001.jpg" in {request.key.rpartition("/")[2] for request in proxy.requests}


@pytest.mark.parametrize(
    ("url", "code", "what"),
    [
        ("gs://photos/cats", 2, "--approved: cannot use gs://photos/cats"),
        ("https://host/cats", 2, "--approved: cannot use https://host/cats"),
        ("s3://me:secret@photos/cats", 2, "the URL contains credentials"),
        ("s3://no-such-bucket/cats", 1, "there is no such bucket"),
    ],
)
def test_url_that_cannot_be_used_creates_nothing(tmp_path, proxy, url, code, what):
    root = root_of(tmp_path, "data")
    root.approved.mkdir()

    said = product(root, "run", "--approved", url, code=code)

    assert what in said
    assert "secret" not in said.replace("AWS_SECRET_ACCESS_KEY", "")
    assert sorted(os.listdir(root.path)) == ["approved", "imagemill.yaml"]


def test_object_that_changes_while_it_is_read_fails_until_the_next_run(tmp_path, server, proxy):
    root = root_of(tmp_path, "data")
    photos(tmp_path / "photos", 2)
    upload(server, tmp_path / "photos")
    newer = (tmp_path / "photos" / "photo0000.jpg").read_bytes()

    def replace(request):
        if request.method == "GET" and request.key == "cats/photo0001.jpg" and not replaced:
            replaced.append(request)
            put(server, "cats/photo0001.jpg", newer)

    replaced = []
    proxy.fault = replace
    product(root, "run", "--approved", URL, code=1)
    assert replaced
    proxy.fault = lambda _: None
    product(root, "run")

    other = root_of(tmp_path, "other")
    product(other, "run", "--approved", URL)
    arrays = {path: data for path, data in results(root).items() if path.endswith(".npy")}
    assert arrays == {path: data for path, data in results(other).items() if path.endswith(".npy")}


@pytest.mark.soak
def test_two_workers_read_a_bucket(tmp_path, server, proxy):
    root = root_of(tmp_path, "data")
    root.config_file.write_text(root.config_file.read_text() + "devices: [cpu, cpu]\n")
    photos(tmp_path / "photos", 12)
    upload(server, tmp_path / "photos")

    product(root, "run", "--approved", URL)

    assert len(list(root.derived.rglob("*.npy"))) == 36


def test_secret_is_nowhere(tmp_path, server, proxy):
    root = root_of(tmp_path, "data")
    photos(tmp_path / "photos", 2)
    upload(server, tmp_path / "photos")

    said = product(root, "run", "--approved", URL) + product(root, "status", "--json")

    assert SECRET not in said
    assert [path for path in root.path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()] == []


def test_sensor_lists_a_bucket_every_few_minutes(tmp_path, server, proxy, monkeypatch):
    root = root_of(tmp_path, "data")
    photos(tmp_path / "photos", 2)
    upload(server, tmp_path / "photos")
    product(root, "run", "--approved", URL)
    monkeypatch.setattr(sensors, "STILL_SECONDS", 0.0)
    photos(tmp_path / "more", 1, first=5)
    upload(server, tmp_path / "more")
    with open_instance(root) as instance:
        proxy.clear()
        requests, _, cursor = tick(root, instance)
        assert [request.job_name for request in requests] == ["embed_images"]
        assert proxy.counts()["LIST"] > 0
        proxy.clear()
        requests, skipped, _ = tick(root, instance, cursor)
        assert (requests, proxy.counts()) == ([], {})
        assert skipped == f"{URL} is listed every 15 minutes (object_storage.sensor_minutes)"
        root.config_file.write_text("object_storage: {allow_http: true, sensor_minutes: 0}\n")
        assert tick(root, instance, cursor)[0]


def tick(root, instance, cursor=None):
    resources = {"data_root": DataRootResource(path=str(root.path), config_file=None)}
    with dg.build_sensor_context(instance=instance, cursor=cursor, resources=resources) as context:
        data = sensors.new_images.evaluate_tick(context)
    return data.run_requests or [], data.skip_message, data.cursor


def test_viewer_shows_photographs_of_a_bucket(tmp_path, server, proxy):
    root = root_of(tmp_path, "data")
    photos(tmp_path / "photos", 2, size=(64, 48))
    upload(server, tmp_path / "photos")
    product(root, "run", "--approved", URL)

    with viewing(root) as client:
        answer = client.get("/thumb?id=photo0001")
        assert answer.status_code == 200
        assert Image.open(io.BytesIO(answer.content)).size == (64, 48)
        put(server, "cats/photo0001.jpg", (tmp_path / "photos" / "photo0000.jpg").read_bytes())
        assert client.get("/image?id=photo0001").status_code == 200


def test_number_of_keys_that_are_no_paths_is_that_of_its_filter_and_of_the_command_line(tmp_path, server, proxy):
    root = root_of(tmp_path, "data")
    photos(tmp_path / "photos", 2)
    upload(server, tmp_path / "photos")
    for key in ("a//b.jpg", "a/../c.jpg"):
        put(server, f"cats/{key}", b"x")
    product(root, "run", "--approved", URL)

    assert numbers_of_reasons(root)["bad_key"] == 2
