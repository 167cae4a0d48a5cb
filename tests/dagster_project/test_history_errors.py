"""A damaged or unusable Dagster history: one message with what, where, why, do; never a traceback."""

import errno
import os
import shutil

import pytest
from sqlalchemy.exc import OperationalError

from dagster_project.history_errors import HistoryUnusable, history_errors
from dagster_project.internals.instance import open_instance, serialized_instance
from dagster_project.internals.runs import _explained
from imagemill.domain.layout import DataRoot
from imagemill.errors import disk_full_reported
from tests.helpers.product import imagemill, photos

DATABASES = ["history/runs.db", "history/runs/index.db", "schedules/schedules.db"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A data root with a history of two runs."""
    root = DataRoot(tmp_path_factory.mktemp("made") / "data")
    photos(root.approved, 2)
    done = imagemill("run", "--data-root", root.path, stub=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return root


@pytest.fixture
def root(made, tmp_path):
    shutil.copytree(made.path, tmp_path / "data")
    return DataRoot(tmp_path / "data")


def used(root):
    """Use a history as a command does."""
    with open_instance(root) as instance:
        instance.get_runs()
        instance.get_asset_keys()
        instance.all_instigator_state()


@pytest.mark.parametrize("opens", [used, serialized_instance])
@pytest.mark.parametrize("name", DATABASES)
def test_garbage_in_a_database_is_named_with_the_remedy(root, name, opens):
    file = root.dagster_home / name
    file.write_bytes(os.urandom(8192))

    with pytest.raises(HistoryUnusable, match="history cannot be used") as raised:
        opens(root)

    assert str(raised.value.where) == str(file)
    folder = root.dagster_home / name.split("/")[0]
    assert f"move {folder} elsewhere" in raised.value.do

    folder.rename(folder.with_name("moved"))
    opens(root)


@pytest.mark.parametrize("name", DATABASES[:2])
def test_damaged_pages_are_a_message_too(root, name):
    """The header is intact, so the file opens, but reading it fails later."""
    file = root.dagster_home / name
    data = bytearray(file.read_bytes())
    data[4096:] = os.urandom(len(data) - 4096)
    file.write_bytes(data)
    for journal in file.parent.glob(f"{file.name}-*"):
        journal.unlink()
    photos(root.approved, 3)

    done = imagemill("run", "--data-root", root.path, stub=True)

    text = done.stdout + done.stderr
    assert done.returncode == 1, text
    assert "the Dagster history cannot be used" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "flow node"),
        ("- a", "list"),
        ("\x00", "special characters"),
        ("storage: 3", "int"),
        ("telemetry: {enabled: 7}", "telemetry"),
        ("unknown_setting: {}", "unknown_setting"),
        ("run_coordinator: {module: dagster_project.internals.coordinator, class: Absent}", "Absent"),
        ("storage: {custom: {module: dagster_project.absent, class: X}}", "dagster_project.absent"),
        ("run_launcher: {module: dagster, class: DefaultRunLauncher, config: {x: 1}}", "x"),
        ("storage: {sqlite: {base_dir: {env: NOT_SET}}}", "NOT_SET"),
    ],
)
def test_unusable_dagster_yaml_is_named(data_root, tmp_path, monkeypatch, text, why):
    home = tmp_path / "home"
    home.mkdir()
    (home / "dagster.yaml").write_text(text)
    monkeypatch.setenv("DAGSTER_HOME", str(home))

    with pytest.raises(HistoryUnusable, match=r"dagster.yaml cannot be used") as raised:
        used(data_root)

    assert raised.value.where == home / "dagster.yaml"
    assert why in str(raised.value.why)
    assert "\n" not in str(raised.value.why)


@pytest.mark.parametrize("why", ["disk I/O error", "unable to open database file"])
def test_error_of_the_disk_below_a_database_is_a_message(tmp_path, why):
    """The disk may work again for the next command, so the message asks to check it before moving anything."""
    import sqlite3

    error = OperationalError("SELECT 1", {}, sqlite3.OperationalError(why))
    with pytest.raises(HistoryUnusable, match="history cannot be read or written") as raised, history_errors(tmp_path):
        raise error
    assert "free space and no errors, then run the same command again" in raised.value.do
    with pytest.raises(ZeroDivisionError), history_errors(tmp_path):
        raise ZeroDivisionError


CLOSED = "server closed the connection unexpectedly\n\tThis probably means the server terminated abnormally"
FULL = f"could not extend file: {os.strerror(errno.ENOSPC)}"


@pytest.mark.parametrize("why", [CLOSED, FULL])
def test_lost_server_is_a_message_that_names_the_file_with_its_address(tmp_path, why):
    """A full disk of the server is not one of this machine."""
    driver = pytest.importorskip("psycopg2")

    error = OperationalError("INSERT secret", {}, driver.OperationalError(why))
    with pytest.raises(HistoryUnusable, match="in PostgreSQL cannot be read or written") as raised:
        with disk_full_reported(tmp_path), history_errors(tmp_path):
            raise error
    assert str(tmp_path / "dagster.yaml") in raised.value.where
    assert raised.value.why == " ".join(why.split())
    assert "check that the PostgreSQL server runs" in raised.value.do


@pytest.mark.parametrize("why", [CLOSED, FULL])
def test_step_that_lost_the_server_is_reported_without_the_statement(monkeypatch, tmp_path, why):
    from dagster_shared.error import SerializableErrorInfo

    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    lost = f"sqlalchemy.exc.OperationalError: (psycopg2.OperationalError) {why}\n[SQL: INSERT secret]\n(Background)"
    cause = SerializableErrorInfo(lost, ["frame"], "OperationalError")
    error = SerializableErrorInfo("too many retries for DB connection", ["frame"], "DagsterPostgresException", cause)
    failure = _explained("dinov3_npy", error)

    assert "the Dagster history in PostgreSQL cannot be read or written" in failure.text
    assert " ".join(why.split()) in failure.text
    assert "secret" not in failure.text
    assert failure.trace == ""


def test_error_of_the_ledger_is_not_called_one_of_the_history(tmp_path):
    import sqlite3

    with pytest.raises(sqlite3.DatabaseError), history_errors(tmp_path):
        raise sqlite3.DatabaseError("file is not a database")


def test_step_that_met_a_damaged_history_is_reported(monkeypatch, tmp_path):
    from dagster_shared.error import SerializableErrorInfo

    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    message = "sqlalchemy.exc.DatabaseError: (sqlite3.DatabaseError) database disk image is malformed\n[SQL: SELECT]"
    failure = _explained("dinov3_npy", SerializableErrorInfo(message, ["frame"], "DatabaseError"))
    assert "the Dagster history cannot be used" in failure.text
    assert failure.trace == ""


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("OSError", f"OSError: [Errno 5] {os.strerror(5)}"),
        ("OperationalError", "sqlite3.OperationalError: disk I/O error"),
        ("OperationalError", "sqlite3.OperationalError: unable to open database file"),
    ],
)
def test_step_that_met_an_error_of_the_disk_names_the_step_and_the_remedy(kind, text):
    from dagster_shared.error import SerializableErrorInfo

    failure = _explained("bucket_shards", SerializableErrorInfo(text, [], kind))

    assert "where: bucket_shards" in failure.text
    assert "run the same command again" in failure.text


@pytest.mark.parametrize("name", ["data [2024]", "a*b"])
def test_settings_are_found_in_a_folder_with_wildcards_in_its_name(tmp_path, name):
    """Dagster expands wildcards in the path, and would read another folder's settings or none."""
    root = DataRoot(tmp_path / name)
    root.approved.mkdir(parents=True)
    with open_instance(root) as instance:
        assert instance.get_concurrency_config().run_queue_config.max_concurrent_runs == 1
