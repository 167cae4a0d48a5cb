"""`imagemill look` as a process: its address, its end, and marks that survive its death.

Spec: docs/spec/conventions.md#viewer
"""

import random
import re
import shutil
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
from tests.helpers.product import contents, imagemill, photos, start


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


def test_thirty_of_128_marked_under_three_filters_are_withdrawn_as_by_the_command(tmp_path):
    """The shards have the bytes that `withdraw` with the same ids gives, and those of before after the restoration."""
    root, other = DataRoot(tmp_path / "data"), DataRoot(tmp_path / "other")
    photos(root.approved, 128)
    root.config_file.write_text("shard_size: 16\n")
    assert imagemill("run", "--data-root", root.path, stub=True).returncode == 0
    before = bytes_of_shards(root)
    shutil.copytree(root.path, other.path, symlinks=True)
    chosen = []
    with viewer(root) as (_, browser):
        for query in (
            "show=in_shards&text=photo001",
            "show=in_shards&sort=tokens&order=desc",
            "bucket=1216x832&page=2",
        ):
            items = re.findall(r'data-item="([^"]+)"', browser.get(f"images?{query}"))
            new = [item for item in dict.fromkeys(items) if item not in chosen][:10]
            browser.post("marks", item=new, on="1")
            chosen += new
        assert len(chosen) == 30
        browser.post("withdraw", item=sorted(chosen))
        assert "done" in ended(browser)
        withdrawn = bytes_of_shards(root)
        done = imagemill("withdraw", *chosen, "--data-root", other.path, stub=True)
        assert done.returncode == 0, done.stderr
        assert withdrawn == bytes_of_shards(other) != before
        assert imagemill("verify", "--data-root", root.path, stub=True).returncode == 0

        browser.post("restore", item=chosen)
        assert "done" in ended(browser)
    done = imagemill("withdraw", "--restore", *chosen, "--data-root", other.path, stub=True)
    assert done.returncode == 0, done.stderr
    assert bytes_of_shards(root) == bytes_of_shards(other)
    with Ledger(root.ledger) as ledger:
        assert (ledger.withdrawals(), ledger.marks()) == ({}, {})


def bytes_of_shards(root):
    return {path: content for path, content in contents(root).items() if path.startswith("shards/bucket")}


def ended(browser):
    until = time.monotonic() + 120
    while "running" in (said := browser.get("task")) and time.monotonic() < until:
        time.sleep(0.2)
    return said
