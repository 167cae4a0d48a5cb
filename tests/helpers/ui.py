"""The Dagster UI as its users have it: `imagemill ui` in processes of its own, its GraphQL, and pages in Debian's Chromium."""

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
# No sandbox: continuous integration runs as root. The rest keeps the browser from talking to anybody but us.
CHROMIUM_ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--no-first-run",
]  # fmt: skip
STUBBED = Path(__file__).with_name("stubbed")

# Generous: the machine may be busy, and nothing here is timed by them.
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
        """The `data` of an answer. Raises AssertionError where there are errors."""
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
    """A port that no process listens on now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def running_ui(root, *, stub=True, log=None):
    """`imagemill ui` over a data root until the block ends. `log`: file for what it prints."""
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
            # What a shell starts with `&` ignores SIGINT, and so would everything started from here.
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
    """Ctrl-C, and after a while the rest of its group: code servers wait for a heartbeat before they go."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(30)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until(condition, seconds, what):
    """Poll until the condition gives something true, and return that."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.2)
    return value


# ---- pages


@dataclass(slots=True)
class Watched:
    """A page and everything that went wrong on it."""

    page: object
    problems: list = field(default_factory=list)
    answers: list = field(default_factory=list)

    def errors(self):
        """Console errors, exceptions, requests that failed or were refused, GraphQL answers with errors."""
        answered = [(answer.url, answer.json().get("errors")) for answer in self.answers]
        return [*self.problems, *(f"{url}: {errors}" for url, errors in answered if errors)]


@contextmanager
def browser(**options):
    """Chromium without a window; yields a context in which pages are opened."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGUMENTS)
        try:
            context = chromium.new_context(**{"viewport": {"width": 1500, "height": 760}, **options})
            context.set_default_timeout(1000 * PAGE_SECONDS)
            # The narrow navigation leaves the graph room for what each asset says.
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
    # A page that is left aborts what it still asks for: nothing failed.
    if request.failure != "net::ERR_ABORTED":
        problems.append(f"request: {request.url}: {request.failure}")


def _note_response(watched, response):
    if response.status >= 400:
        watched.problems.append(f"response: {response.status} {response.url}")
    elif "/graphql" in response.url:
        watched.answers.append(response)


def open_graph(page, url, groups=GROUPS):
    """The lineage of all assets, these groups open and the list at its side closed, each asset with its facts."""
    page.goto(url + "/asset-groups?expanded=" + ",".join(f"global@global:{group}" for group in groups))
    node(page, "bucket_shards").wait_for()
    page.locator("button:right-of(input[placeholder^='Jump to'])").first.click()
    node(page, "bucket_shards").get_by_text("filled").wait_for()


def open_group(page, url, group):
    """One group by itself: assets that are cut alike, and can be materialised together."""
    page.goto(f"{url}/locations/__repository__@imagemill/asset-groups/{group}/lineage")


def node(page, asset):
    """An asset's box in the graph."""
    return page.locator("svg foreignObject > *", has=page.get_by_text(asset, exact=True)).last
