"""`imagemill look` as a process: its address, its end, and marks that survive its death.

Spec: docs/spec/conventions.md#viewer
"""

import random
import re
import signal
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager, suppress
from http.cookiejar import CookieJar

import pytest

from imagemill.domain.layout import DataRoot
from imagemill.store.ledger import Ledger
from tests.helpers.product import imagemill, photos, start


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = DataRoot(tmp_path_factory.mktemp("look") / "data")
    photos(root.approved, 40)
    done = imagemill("run", "--data-root", root.path, stub=True)
    assert done.returncode == 0, done.stderr
    return root


class Browser:
    """A client with cookies, and the token of the pages."""

    def __init__(self, address):
        self.base = address.partition("?")[0]
        self._open = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar())).open
        self.token = re.search(r'imagemill-token" content="([^"]+)"', self.get(address, base=""))[1]

    def get(self, path, *, base=None):
        with self._open(f"{self.base if base is None else base}{path}", timeout=30) as answer:
            return answer.read().decode("utf-8", "replace")

    def post(self, path, **fields):
        body = urllib.parse.urlencode({"token": self.token, **fields}, doseq=True).encode()
        request = urllib.request.Request(f"{self.base}{path}", body, {"Accept": "application/json"})
        with self._open(request, timeout=30) as answer:
            return answer.read()


@contextmanager
def viewer(root, *options):
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port = trial.getsockname()[1]
    process = start("look", "--data-root", root.path, "--port", port, "--no-open", *options)
    try:
        address = re.search(r"http://\S+", process.stdout.readline())[0]
        until = time.monotonic() + 60
        while True:
            try:
                browser = Browser(address)
                break
            except urllib.error.URLError:
                assert process.poll() is None, process.stdout.read()
                assert time.monotonic() < until
                time.sleep(0.1)
        yield process, browser
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_address_opens_the_pages_and_nobody_else_sees_them(root):
    with viewer(root) as (process, browser):
        assert "images in approved/" in browser.get("")
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(browser.base, timeout=30)
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(f"{browser.base}thumb?id=photo0000", timeout=30)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) in (0, 130)


@pytest.mark.parametrize("trials", [2, pytest.param(20, marks=pytest.mark.soak)])
def test_no_mark_is_lost_when_the_server_is_killed(root, trials):
    with Ledger(root.ledger) as ledger:
        ledger.unmark(ledger.marks())
    acknowledged = set()
    for trial in range(trials):
        with viewer(root) as (process, browser):
            until = time.monotonic() + random.Random(trial).uniform(0.05, 1.0)
            with suppress(OSError):
                for number in range(40):
                    if time.monotonic() > until:
                        process.kill()
                    browser.post("marks", item=f"photo{number:04d}", on="1")
                    acknowledged.add(f"photo{number:04d}")
    with Ledger(root.ledger) as ledger:
        assert acknowledged
        assert acknowledged <= ledger.marks().keys()
    done = imagemill("verify", "--data-root", root.path, stub=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_port_in_use_is_refused(root):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = imagemill("look", "--data-root", root.path, "--port", taken.getsockname()[1], "--no-open")
    assert done.returncode == 2
    assert "cannot listen on 127.0.0.1" in done.stderr


def test_folder_without_a_data_root_is_refused(tmp_path):
    done = imagemill("look", "--data-root", tmp_path, "--no-open")
    assert done.returncode == 1
    assert "not a data root" in done.stderr


def test_export_is_one_file_of_the_filter_without_withdrawn_images(root, tmp_path):
    file = tmp_path / "photos.html"
    given = ["look", "--data-root", root.path, "--export"]
    assert imagemill("withdraw", "photo0003", "--data-root", root.path, stub=True).returncode == 0
    done = imagemill(*given, file, "--filter", "images?show=in_shards&text=photo000")
    assert done.returncode == 0, done.stderr
    assert "9 of 9 inputs" in done.stdout
    text = file.read_text()
    assert text.count("data:image/jpeg;base64,") == 9
    assert "photo0003" not in text
    assert "<script" not in text
    assert file.stat().st_mode & 0o777 == 0o600

    for wrong, said in (
        ([file], "the file of the export exists"),
        ([root.path / "x.html"], "inside the data root"),
        ([tmp_path / "absent" / "x.html"], "does not exist"),
        ([tmp_path / "x.html", "--filter", "show=withdrawn"], "withdrawn images are not exported"),
        ([tmp_path / "x.html", "--filter", "show=absent"], "is not known"),
    ):
        done = imagemill(*given, *wrong)
        assert done.returncode in (1, 2)
        assert said in done.stderr
    done = imagemill("look", "--data-root", root.path, "--filter", "show=all")
    assert (done.returncode, "--filter is given without --export" in done.stderr) == (2, True)
