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
# No sandbox, because continuous integration runs as root, and no shared memory, of which a container may have 64 MB.
# The other options prevent connections to other hosts.
CHROMIUM_ARGUMENTS = [
    "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run",
]  # fmt: skip
STUBBED = Path(__file__).with_name("stubbed")

# Generous limits, because the machine may be busy; they measure nothing.
READY_SECONDS = 120
RUN_SECONDS = 120
PAGE_SECONDS = 45

GROUPS = ("stage2", "shards")
_LOADED = (
    "{ workspaceOrError { ... on Workspace { locationEntries { loadStatus locationOrLoadError { __typename } } } } }"
)

LOCATIONS = """{ workspaceOrError { ... on Workspace { locationEntries { name locationOrLoadError {
    __typename ... on PythonError { message } } } } } }"""
ADD_KEY = """mutation($selector: RepositorySelector!, $set: String!, $key: String!) {
    addDynamicPartition(repositorySelector: $selector, partitionsDefName: $set, partitionKey: $key) { __typename
        ... on PythonError { message } ... on UnauthorizedError { message } } }"""
LAUNCH = """mutation($params: ExecutionParams!) { launchRun(executionParams: $params) { __typename
    ... on LaunchRunSuccess { run { runId } } ... on PythonError { message }
    ... on RunConfigValidationInvalid { errors { message } } } }"""
STATUS = "query($id: ID!) { runOrError(runId: $id) { ... on Run { status } } }"

START_SENSOR = """mutation($selector: SensorSelector!) { startSensor(sensorSelector: $selector) { __typename
    ... on PythonError { message } } }"""
LAST_TICK = """query($selector: SensorSelector!) { sensorOrError(sensorSelector: $selector) { ... on Sensor { sensorState {
    ticks(limit: 1) { timestamp status skipReason error { message causes { message } } } } } } }"""


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

    def loaded(self, locations=1):
        """Return whether so many code locations are loaded, with or without an error."""
        try:
            entries = self.graphql(_LOADED)["workspaceOrError"]["locationEntries"]
        except (OSError, urllib.error.URLError):
            return False
        return [entry["loadStatus"] for entry in entries] == ["LOADED"] * locations


def free_port():
    """Return a port on which no process listens now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def locations(ui: Ui) -> dict[str, str]:
    """Return the type of each code location, or its error."""
    entries = ui.graphql(LOCATIONS)["workspaceOrError"]["locationEntries"]
    return {entry["name"]: (entry["locationOrLoadError"] or {}).get("__typename") for entry in entries}


def launch(ui: Ui, root: str, image: str) -> str:
    """Embed one image of a root in a run that the UI launches; return the run's id after it has succeeded."""
    repository = {"repositoryLocationName": root, "repositoryName": "__repository__"}
    ui.graphql(ADD_KEY, selector=repository, set=f"{root}/images", key=image)
    params = {
        "selector": {**repository, "jobName": "embed_images"},
        "runConfigData": {},
        "executionMetadata": {"tags": [{"key": "dagster/partition", "value": image}]},
    }
    launched = ui.graphql(LAUNCH, params=params)["launchRun"]
    assert launched["__typename"] == "LaunchRunSuccess", launched
    run_id = launched["run"]["runId"]

    def ended() -> str | None:
        status = ui.graphql(STATUS, id=run_id)["runOrError"]["status"]
        return status if status in {"SUCCESS", "FAILURE", "CANCELED"} else None

    assert wait_until(ended, RUN_SECONDS, "the run ends") == "SUCCESS"
    return run_id


def switch_on(ui, location):
    """Switch on the sensor `new_images` of a location."""
    answer = ui.graphql(START_SENSOR, selector=_new_images(location))["startSensor"]
    assert answer["__typename"] == "Sensor", answer


def last_tick(ui, location):
    """Return the last tick of `new_images` of a location, None without one."""
    ticks = ui.graphql(LAST_TICK, selector=_new_images(location))["sensorOrError"]["sensorState"]["ticks"]
    return ticks[0] if ticks else None


def _new_images(location):
    return {"repositoryLocationName": location, "repositoryName": "__repository__", "sensorName": "new_images"}


@contextmanager
def running_ui(*roots, stub=True, log=None, **variables):
    """Run `imagemill ui` over data roots until the block ends, with these variables. `log` is the file for its output."""
    port = free_port()
    chosen = [word for root in roots for word in ("--data-root", str(root.path))]
    command = [sys.executable, "-m", "dagster_project.cli.main", "ui", *chosen, "--port", str(port)]
    path = [str(PROJECT), *([str(STUBBED)] if stub else [])]
    environment = {k: v for k, v in os.environ.items() if k not in {"DAGSTER_HOME", "IMAGEMILL_DATA_ROOT"}}
    environment |= {name: str(value) for name, value in variables.items()}
    with open(log or os.devnull, "w") as output:
        process = subprocess.Popen(
            command, cwd=PROJECT, env={**environment, "PYTHONPATH": os.pathsep.join(path)}, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
            # A process that a shell starts with `&` ignores SIGINT, and so would its children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        )  # fmt: skip
        try:
            ui = Ui(f"http://127.0.0.1:{port}")
            wait_until(lambda: process.poll() is not None or ui.loaded(len(roots)), READY_SECONDS, "the UI answers")
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


def keep_screenshot(page, path):
    """Save a screenshot for a person who looks at a failed test.

    On a busy machine Chromium sometimes answers "Unable to capture screenshot", which says nothing about the page.
    """
    from playwright.sync_api import Error

    with suppress(Error):
        page.screenshot(path=path)


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
