"""Object storage, on moto's server and through a proxy that makes faults.

Spec: docs/spec/object-storage.md#settings, docs/spec/object-storage.md#failures
"""

import os
import pickle
import random
import sys
import time

import pytest

from imagemill.errors import ImagemillError, WrongUsage
from imagemill.fs import objects
from imagemill.fs.blobs import AnswerLost, Changed, Exists, Missing, StorageSettings, StoreFailed
from imagemill.fs.location import Location
from imagemill.fs.objects import Objects
from tests.helpers.s3 import SECRET, Answer, Cut, Dropped, certificate, fault_proxy, s3_server

SETTINGS = StorageSettings(allow_http=True)


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
def store(proxy, request):
    return Objects(Location("s3", "bucket", request.node.name.replace("[", "-").strip("]")), SETTINGS)


def keys(store, prefix=""):
    return sorted(blob.key for page in store.list(prefix) for blob in page)


def test_objects_are_written_read_listed_and_removed(store):
    tag = store.put("a/one", b"hello")
    store.put("a/two", b"")
    store.put("b/three", b"x")

    data, blob = store.read("a/one")
    assert (data, blob.key, blob.size, blob.tag) == (b"hello", "a/one", 5, tag)
    assert store.head("a/one") == blob
    assert blob.signature == f"object:5:{tag}"
    assert bytes(store.read_range("a/one", 1, 3)) == b"ell"
    assert bytes(store.read_range("a/one", 3, 30, tag)) == b"lo"
    assert keys(store) == ["a/one", "a/two", "b/three"]
    assert keys(store, "a") == ["a/one", "a/two"]
    store.delete(["a/one", "not there"])
    assert keys(store) == ["a/two", "b/three"]


def test_listing_asks_once_for_a_thousand_keys(store, proxy, server):
    for number in range(1001):
        server.request("PUT", f"/bucket/{store.location.prefix}/{number:05d}", b"x")
    proxy.clear()

    assert len(keys(store)) == 1001
    assert proxy.counts() == {"LIST": 2}


def test_conditions(store):
    tag = store.create("pointer", b"1")

    with pytest.raises(Exists):
        store.create("pointer", b"2")
    with pytest.raises(Changed):
        store.replace("pointer", b"2", '"other"')
    with pytest.raises(Changed):
        store.read("pointer", '"other"')
    assert store.read("pointer")[0] == b"1"
    store.replace("pointer", b"3", tag)
    with pytest.raises(Changed):
        store.read_range("pointer", 0, 1, tag)
    assert store.read("pointer")[0] == b"3"


def test_missing_objects(store):
    for action in (store.head, store.read, lambda key: store.read_range(key, 0, 1)):
        with pytest.raises(Missing):
            action("nothing")
    assert store.check("nothing") is None


def test_large_files_are_sent_in_parts(store, proxy, tmp_path):
    data = os.urandom(20 << 20)
    (tmp_path / "file").write_bytes(data)

    store.put("large", tmp_path / "file")

    assert store.read("large")[0] == data
    assert max(request.sent for request in proxy.requests) <= objects.PART_BYTES


def test_bytes_are_right_in_spite_of_overload_and_broken_connections(store, proxy):
    chance = random.Random(1)
    data = {f"file {number}": os.urandom(200_000) for number in range(20)} | {"large": os.urandom(20 << 20)}
    proxy.fault = lambda _: (
        Answer(503, "SlowDown") if (drawn := chance.random()) < 0.2 else Cut(chance.random()) if drawn < 0.3 else None
    )

    for key, value in data.items():
        store.put(key, value)
    read = {key: store.read(key)[0] for key in data}

    proxy.fault = lambda _: None
    assert read == data
    assert {key: store.read(key)[0] for key in data} == data


def test_lost_answer_of_a_conditional_write_is_a_failure_although_it_was_written(store, proxy):
    """So a writer must read back what it has written."""
    lost = iter([Dropped()])
    proxy.fault = lambda _: next(lost, None)

    with pytest.raises(Exists):
        store.create("pointer", b"mine")
    assert store.read("pointer")[0] == b"mine"


@pytest.mark.parametrize(
    ("status", "code", "what"),
    [
        (400, "ExpiredToken", "the credentials have expired"),
        (403, "AccessDenied", "no permission"),
        (403, "", "no permission"),
        (403, "InvalidAccessKeyId", "the server does not know the access key"),
        (403, "SignatureDoesNotMatch", "the secret key is wrong"),
        (403, "RequestTimeTooSkewed", "the clocks of this machine and of the server differ"),
        (404, "NoSuchBucket", "there is no such bucket"),
        (301, "PermanentRedirect", "the bucket is in another region"),
        (400, "AuthorizationHeaderMalformed", "the bucket is in another region"),
        (503, "SlowDown", "the server is overloaded"),
    ],
)
def test_failure_is_one_sentence_within_ten_seconds(store, proxy, status, code, what):
    proxy.fault = lambda _: Answer(status, code)
    began = time.monotonic()

    with pytest.raises(StoreFailed) as caught:
        store.check("current.json")

    assert time.monotonic() - began < 10
    assert caught.value.what == what
    assert caught.value.do
    assert all(len(line) < 300 and SECRET not in line for line in str(caught.value).splitlines())


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        (StorageSettings(endpoint="http://127.0.0.1:9", allow_http=True), "cannot connect to the server"),
        (StorageSettings(endpoint="https://127.0.0.1:9"), "cannot connect to the server"),
        (StorageSettings(endpoint="http://127.0.0.1:9"), "a server without TLS is not used"),
        (StorageSettings(credentials="profile", profile="unknown"), "the profile cannot be used"),
    ],
)
def test_server_that_cannot_be_used(proxy, settings, what):
    with pytest.raises(ImagemillError) as caught:
        Objects(Location("s3", "bucket"), settings).check("current.json")

    assert caught.value.what == what


def test_answers_that_stay_broken_are_a_failure(store, proxy, monkeypatch):
    store.put("a", bytes(100_000))
    proxy.fault = lambda _: Cut()
    monkeypatch.setattr(objects, "READS", 1)

    with pytest.raises(AnswerLost) as caught:
        store.read("a")

    assert len(str(caught.value).splitlines()) == 4


def test_profile_without_credentials(proxy, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    (tmp_path / "config").write_text("[profile empty]\nregion = us-east-1\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))

    with pytest.raises(StoreFailed, match="the profile has no credentials"):
        Objects(Location("s3", "bucket"), StorageSettings(credentials="profile", profile="empty")).check("a")


def test_credentials_of_a_profile_are_used(proxy, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    (tmp_path / "credentials").write_text("[trainer]\naws_access_key_id = of-a-profile\naws_secret_access_key = x\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    settings = StorageSettings(credentials="profile", profile="trainer", allow_http=True)

    Objects(Location("s3", "bucket"), settings).put("of-a-profile", b"1")

    assert "Credential=of-a-profile/" in proxy.requests[0].headers["authorization"]


def test_without_botocore_there_is_no_profile(proxy, monkeypatch):
    monkeypatch.setitem(sys.modules, "botocore.session", None)

    with pytest.raises(WrongUsage, match="needs the package botocore"):
        Objects(Location("s3", "bucket"), StorageSettings(credentials="profile")).check("a")


def test_server_with_a_certificate_of_its_own_authority(server, monkeypatch, tmp_path):
    files = certificate(tmp_path)
    location = Location("s3", "bucket", "tls")
    with fault_proxy(server, files) as proxy:
        for name, value in proxy.environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(StoreFailed, match="the certificate of the server is not trusted"):
            Objects(location).check("a")
        monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "authority.pem"))
        store = Objects(location)
        store.put("a", b"1")

        assert store.read("a")[0] == b"1"
        assert keys(store) == ["a"]


def test_listing_of_odd_keys_that_fails(store, proxy, server):
    server.request("PUT", f"/bucket/{store.location.prefix}/a//b", b"x")
    server.request("PUT", f"/bucket/{store.location.prefix}/a/../b", b"x")
    assert keys(store) == ["a/../b", "a//b"]
    proxy.fault = lambda request: Answer(403, "AccessDenied") if "encoding-type" in request.query else None

    with pytest.raises(StoreFailed, match="the objects cannot be listed"):
        keys(store)


def test_without_credentials_nothing_is_asked(proxy, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")

    with pytest.raises(StoreFailed, match="no credentials for object storage"):
        Objects(Location("s3", "bucket"), SETTINGS).check("a")

    assert proxy.requests == []


def test_without_the_package_there_is_one_sentence(proxy, monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)

    with pytest.raises(WrongUsage) as caught:
        Objects(Location("s3", "bucket"), SETTINGS).check("a")

    assert "imagemill[s3]" in str(caught.value)


def test_pickled_store_contains_no_secret(store):
    store.put("a", b"1")

    pickled = pickle.dumps(store)

    assert SECRET.encode() not in pickled
    os.environ["AWS_ENDPOINT_URL"] = "http://127.0.0.1:9"  # as in a fork server that was started before
    assert pickle.loads(pickled).read("a")[0] == b"1"


def test_forked_process_gets_an_error_instead_of_waiting_for_ever(store):
    store.put("a", b"1")
    child = os.fork()
    if not child:
        try:
            store.read("a")
        except StoreFailed as error:
            os._exit(7 if "forkserver" in str(error) else 1)
        os._exit(2)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
