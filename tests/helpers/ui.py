"""The Dagster UI as users run it: `imagemill ui` in separate processes, its GraphQL, and pages in Debian's Chromium."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.helpers.product import PROJECT

CHROMIUM = shutil.which("chromium")
# No sandbox, because continuous integration runs as root. The other options prevent connections to other hosts.
CHROMIUM_ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--no-first-run",
]  # fmt: skip
STUBBED = Path(__file__).with_name("stubbed")

# Generous limits, because the machine may be busy; they measure nothing.
READY_SECONDS = 120
PAGE_SECONDS = 45

GROUPS = ("stage2", "shards")
_LOADED = (
    "{ workspaceOrError { ... on Workspace { locationEntries { loadStatus locationOrLoadError { __typename } } } } }"
)


# ---- the server


@dataclass(frozen=True, slots=True)
class Ui:
    """A running UI."""

    url: str

    def graphql(self, query, **variables):
        """Return the `data` of an answer. Raises AssertionError if there are errors."""
        body = json.dumps({"query": query, "variables": variables}).encode()
        request = urllib.request.Request(f"{self.url}/graphql", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as response:
            answer = json.load(response)
        assert "errors" not in answer, answer["errors"]
        return answer["data"]

    def loaded(self):
        try:
            entries = self.graphql(_LOADED)["workspaceOrError"]["locationEntries"]
        except (OSError, urllib.error.URLError):
            return False
        return [entry["loadStatus"] for entry in entries] == ["LOADED"]


def free_port():
    """Return a port on which no process listens now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def running_ui(root, *, stub=True, log=None):
    """Run `imagemill ui` over a data root until the block ends. `log` is the file for its output."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "dagster_project.cli.main",
        "ui",
        "--data-root",
        str(root.path),
        "--port",
        str(port),
    ]
    path = [str(PROJECT), *([str(STUBBED)] if stub else [])]
    environment = {k: v for k, v in os.environ.items() if k not in {"DAGSTER_HOME", "IMAGEMILL_DATA_ROOT"}}
    with open(log or os.devnull, "w") as output:
        process = subprocess.Popen(
            command, cwd=PROJECT, env={**environment, "PYTHONPATH": os.pathsep.join(path)}, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
            # A process that a shell starts with `&` ignores SIGINT, and so would its children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        )  # fmt: skip
        try:
            ui = Ui(f"http://127.0.0.1:{port}")
            wait_until(lambda: process.poll() is not None or ui.loaded(), READY_SECONDS, "the UI answers")
            assert process.poll() is None, Path(log).read_text() if log else "the UI ended"
            yield ui
        finally:
            _end(process)


def _end(process):
    """Send SIGINT, and after a while end the rest of the group: code servers wait for a heartbeat before they exit."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(30)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until(condition, seconds, what):
    """Poll until the condition returns a true value, and return it."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.2)
    return value


# ---- pages


@dataclass(slots=True)
class Watched:
    """A page and its errors."""

    page: object
    problems: list = field(default_factory=list)
    answers: list = field(default_factory=list)

    def errors(self):
        """Return console errors, exceptions, failed or refused requests, and GraphQL answers with errors."""
        answered = [(answer.url, answer.json().get("errors")) for answer in self.answers]
        return [*self.problems, *(f"{url}: {errors}" for url, errors in answered if errors)]


@contextmanager
def browser(**options):
    """Run headless Chromium; yield a context in which pages are opened."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGUMENTS)
        try:
            context = chromium.new_context(**{"viewport": {"width": 1500, "height": 760}, **options})
            context.set_default_timeout(1000 * PAGE_SECONDS)
            # The narrow navigation leaves room in the graph for the details of each asset.
            context.add_init_script("localStorage.setItem('dagster-nav-collapsed', 'true')")
            yield context
        finally:
            chromium.close()


@contextmanager
def watched_page(context):
    """A new page whose errors are collected; closed when the block ends."""
    page = context.new_page()
    watched = Watched(page)
    page.on("console", lambda message: _note_console(watched.problems, message))
    page.on("pageerror", lambda error: watched.problems.append(f"exception: {error}"))
    page.on("requestfailed", lambda request: _note_failure(watched.problems, request))
    page.on("response", lambda response: _note_response(watched, response))
    try:
        yield watched
    finally:
        page.close()


def _note_console(problems, message):
    if message.type == "error":
        problems.append(f"console: {message.text}")


def _note_failure(problems, request):
    # Leaving a page aborts its pending requests, which is not a failure.
    if request.failure != "net::ERR_ABORTED":
        problems.append(f"request: {request.url}: {request.failure}")


def _note_response(watched, response):
    if response.status >= 400:
        watched.problems.append(f"response: {response.status} {response.url}")
    elif "/graphql" in response.url:
        watched.answers.append(response)


def open_graph(page, url, groups=GROUPS):
    """Open the lineage of all assets with these groups expanded and the side list closed, with each asset's details."""
    page.goto(url + "/asset-groups?expanded=" + ",".join(f"global@global:{group}" for group in groups))
    node(page, "bucket_shards").wait_for()
    page.locator("button:right-of(input[placeholder^='Jump to'])").first.click()
    node(page, "bucket_shards").get_by_text("filled").wait_for()


def open_group(page, url, group):
    """Open one group of assets, which share partitions and can be materialised together."""
    page.goto(f"{url}/locations/__repository__@imagemill/asset-groups/{group}/lineage")


def node(page, asset):
    """Return the box of an asset in the graph."""
    return page.locator("svg foreignObject > *", has=page.get_by_text(asset, exact=True)).last
