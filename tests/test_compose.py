"""compose.yaml: its services as processes of this machine, with its commands and variables (tests/helpers/compose.py)."""

import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from tests.helpers.compose import ComposeProject, interpolated
from tests.helpers.product import PROJECT, photos
from tests.helpers.ui import Ui, launch, locations, wait_until

pytestmark = pytest.mark.slow

ROOTS = ("animals", "cars")
STOP_SECONDS = 10
IMAGES = 3

FILE_KEYS = """query($id: ID!) { logsForRun(runId: $id) { ... on EventConnection { events {
    ... on LogsCapturedEvent { fileKey } } } } }"""
CAPTURED = "query($key: [String!]!) { capturedLogs(logKey: $key) { stdout stderr } }"


@pytest.fixture
def project(monkeypatch) -> Iterator[ComposeProject]:
    folder = Path(tempfile.mkdtemp(prefix="imagemill-compose-"))
    folder.chmod(0o755)  # the server of PostgreSQL runs as another user
    made = ComposeProject(folder, {"POSTGRES_PASSWORD": "secret"})
    try:
        yield made
    finally:
        made.kill()
        for process in processes_in(folder):
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def processes_in(folder: Path) -> list[psutil.Process]:
    """Return the live processes of the services, which have this folder in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def assert_history_is_migrated_and_restored(project: ComposeProject) -> None:
    """The commands of docs/how-to/production.md, with the services stopped."""
    migrated = project.execute("daemon", *command_of_page("docker compose run --rm daemon ", "imagemill"))
    assert migrated.returncode == 0, migrated.stderr
    count = ["psql", "--username", "imagemill", "--dbname", "imagemill", "-At", "-c", "SELECT count(*) FROM runs"]
    before = project.execute("postgres", *count)

    dumped = project.execute("postgres", *command_of_page("docker compose exec postgres "))
    assert dumped.returncode == 0, dumped.stderr
    project.execute("postgres", *count[:-1], "TRUNCATE runs")
    restored = project.execute("postgres", *command_of_page("docker compose exec -T postgres "), given=dumped.stdout)
    assert restored.returncode == 0, restored.stderr

    assert project.execute("postgres", *count).stdout == before.stdout == b"2\n"


def command_of_page(prefix: str, *before: str) -> list[str]:
    """Return the words of the command with this prefix in docs/how-to/production.md, without redirections."""
    text = (PROJECT / "docs" / "how-to" / "production.md").read_text("utf-8")
    command = text.partition(f"`{prefix}")[2].partition("`")[0]
    return [*before, *re.split(r"[<>]", command)[0].split()]


def test_services_of_compose_work_together_and_stop_in_time(project):
    """One root has an unusable configuration at first: its service ends with the reason, and the other root works."""
    for root in ROOTS:
        data = project.volume(root, "/data")
        photos(data / "approved", IMAGES)
        (data / "imagemill.yaml").write_text(f"name: {root}\n")
    broken = project.volume("cars", "/data") / "imagemill.yaml"
    broken.write_text("name: cars\nkinds: [no_such_kind]\n")

    project.start("postgres")
    project.wait_healthy("postgres")
    for service in ("animals", "cars", "daemon", "webserver"):
        project.start(service)
    for service in ("animals", "daemon", "webserver"):
        project.wait_healthy(service)
    assert project.processes["cars"].wait(60) == 2
    assert "no_such_kind" in project.log("cars").read_text()
    assert project.health("cars").returncode == 1

    ui = Ui(f"http://127.0.0.1:{project.port('webserver', 3000)}")
    assert locations(ui) == {"animals": "RepositoryLocation", "cars": "PythonError"}
    run_id = launch(ui, "animals", "photo0000")
    data = project.volume("animals", "/data")
    assert [path.name for path in sorted(data.glob("derived/*/*.npy"))] == ["photo0000.npy"] * 3

    events = ui.graphql(FILE_KEYS, id=run_id)["logsForRun"]["events"]
    (key,) = {event["fileKey"] for event in events if "fileKey" in event}
    captured = ui.graphql(CAPTURED, key=[run_id, "compute_logs", key])["capturedLogs"]
    assert captured["stderr"] is not None, "the webserver reads the output that the code service has written"

    broken.write_text("name: cars\n")
    project.start("cars")
    project.wait_healthy("cars")
    wait_until(lambda: locations(ui)["cars"] == "RepositoryLocation", 60, "the webserver finds the repaired location")
    launch(ui, "cars", "photo0001")

    began = time.monotonic()
    project.terminate("animals", "cars", "daemon", "webserver")
    codes = {name: project.processes[name].wait(60) for name in ("animals", "cars", "daemon", "webserver")}
    assert time.monotonic() - began < STOP_SECONDS
    assert codes == dict.fromkeys(codes, 0), {name: project.log(name).read_text() for name in codes}
    assert_history_is_migrated_and_restored(project)
    project.terminate("postgres")
    assert project.processes["postgres"].wait(60) == 0
    assert processes_in(project.folder) == []
    assert not (project.folder / "data").exists(), "webserver and daemon work on no data root"
    assert not any("Traceback" in project.log(name).read_text() for name in codes)


def test_ports_are_published_on_the_loopback_address_only(project):
    published = [port for service in project.services.values() for port in service.get("ports", [])]

    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_every_service_has_a_health_check_and_the_history_where_logs_are_written(project):
    services = {name: service for name, service in project.services.items() if name != "postgres"}

    assert all("healthcheck" in service for service in project.services.values())
    assert {service["environment"]["DAGSTER_HOME"] for service in services.values()} == {"/history"}
    assert all("history:/history" in service["volumes"] for service in services.values())


def test_history_is_configured_as_imagemill_does_but_for_storage_launcher_and_queue(project):
    template = yaml.safe_load((PROJECT / "dagster_project" / "dagster.yaml").read_text())
    configured = yaml.safe_load(project.file["configs"]["dagster"]["content"])
    template["concurrency"] = {"pools": {"granularity": "run"}}
    template["run_coordinator"]["config"]["max_concurrent_runs"] = 4

    assert configured.keys() - template.keys() == {"compute_logs", "run_launcher", "retention"}
    assert {name for name in template if configured.get(name) != template[name]} == {"storage"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [("${A}", "1"), ("x${B:-2}", "x2"), ("${B:-}", ""), ("${A:?message}", "1"), ("$$HOME", "$HOME")],
)
def test_variables_are_interpolated_as_compose_does(text, expected):
    assert interpolated([{"key": text}], {"A": "1"}) == [{"key": expected}]


def test_missing_variable_with_a_message_is_an_error():
    with pytest.raises(AssertionError, match="set it"):
        interpolated("${PASSWORD:?set it}", {})
