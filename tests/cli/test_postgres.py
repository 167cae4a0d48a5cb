"""The main job with its Dagster history in PostgreSQL: no run without news, a new history, a server that crashes.

Reference: docs/decisions/0121-history-that-was-reported-to.md
"""

import random
import time

import pytest

from imagemill.domain.embedding_specs import embedding_specs
from imagemill.store.ledger import HISTORY, Ledger
from imagemill.store.second_copy import newest
from tests.helpers.commands import called
from tests.helpers.postgres import keep_history, postgres_server
from tests.helpers.product import imagemill, photos, start
from tests.helpers.stubs import StubEncoder
from tests.helpers.wiring import stub_every_kind

pytest.importorskip("dagster_postgres")

UNCHANGED = "no Dagster run was started"
IMAGES = 60


@pytest.fixture(scope="module")
def server():
    with postgres_server() as server:
        yield server


def materialized(server, database):
    """Return the number of materialised partitions of each image asset."""
    rows = server.query(
        "SELECT asset_key, count(DISTINCT partition) FROM event_logs "
        "WHERE dagster_event_type = 'ASSET_MATERIALIZATION' AND partition IS NOT NULL GROUP BY 1",
        database,
    )
    found = {key.strip('[]"'): int(count) for key, count in rows}
    return {name: found.get(name, 0) for name in ("approved_images", *(spec.kind for spec in embedding_specs()))}


def run_ids(server, database):
    return [row for (row,) in server.query("SELECT run_id FROM runs ORDER BY id", database)]


def everything(count):
    return dict.fromkeys(("approved_images", *(spec.kind for spec in embedding_specs())), count)


def recorded_history(root):
    with Ledger(root.ledger, read_only=True) as ledger:
        return ledger.setting(HISTORY)


def test_empty_history_is_filled_from_the_ledger_and_then_no_run_is_started(server, data_root, monkeypatch):
    """The ledger records the history that it reported to; only there does a run without news start no Dagster run."""
    stub_every_kind(monkeypatch)
    photos(data_root.approved, 3)
    keep_history(data_root, server.create("first"))
    assert called(data_root, "run").code == 0
    assert materialized(server, "first") == everything(3)
    ((first,),) = server.query("SELECT run_storage_id FROM instance_info", "first")
    assert recorded_history(data_root) == first
    assert newest(data_root).copy.settings[HISTORY] == first

    before = run_ids(server, "first")
    assert UNCHANGED in called(data_root, "run").text
    assert run_ids(server, "first") == before

    keep_history(data_root, server.create("second"))
    with monkeypatch.context() as patch:
        patch.setattr(StubEncoder, "load", lambda *_, **__: pytest.fail("a model was loaded"))
        done = called(data_root, "run")
    assert (done.code, UNCHANGED in done.text) == (0, False)
    assert materialized(server, "second") == everything(3)
    assert recorded_history(data_root) != first
    assert UNCHANGED in called(data_root, "run").text

    keep_history(data_root, server.url("first"))
    assert UNCHANGED not in called(data_root, "run").text, "the ledger reported to another history since"
    assert UNCHANGED in called(data_root, "run").text


def test_settings_by_field_and_by_variable_are_read_as_dagster_reads_them(server, data_root, monkeypatch):
    stub_every_kind(monkeypatch)
    photos(data_root.approved, 1)
    monkeypatch.setenv("HISTORY_URL", server.create("fields"))
    keep_history(data_root, "x")
    config = data_root.dagster_home / "dagster.yaml"
    by_url = config.read_text()
    config.write_text(by_url.replace("'x'", "{env: HISTORY_URL}"))
    assert called(data_root, "run").code == 0
    assert UNCHANGED in called(data_root, "run").text

    fields = (
        "postgres_db: {username: postgres, password: {env: HISTORY_PASSWORD}, hostname: '', db_name: fields, "
        f"params: {{host: {server.folder}}}}}"
    )
    monkeypatch.setenv("HISTORY_PASSWORD", "secret")
    config.write_text(by_url.replace("postgres_url: 'x'", fields))
    assert called(data_root, "run").code == 0
    assert UNCHANGED in called(data_root, "run").text


def test_run_without_news_reads_the_history_without_dagster(server, data_root):
    photos(data_root.approved, 1)
    keep_history(data_root, server.create("light"))
    assert imagemill("run", "--data-root", data_root.path, stub=True).returncode == 0

    done = imagemill("run", "--data-root", data_root.path, PYTHONPROFILEIMPORTTIME="1")  # the stubs import Dagster

    assert UNCHANGED in done.stdout
    assert "psycopg2" in done.stderr
    assert " dagster\n" not in done.stderr
    assert " sqlalchemy\n" not in done.stderr


def wait_for_files(root, count, process):
    """Wait until that many arrays have their final names, or the process has ended."""
    while process.poll() is None and sum(1 for _ in root.derived.glob("*/*.npy")) < count:
        time.sleep(0.01)


def crash_in_a_run(server, root, database, seed):
    """Restart the server during a run as a crash does; check the message, and the counts after one more run."""
    photos(root.approved, IMAGES)
    keep_history(root, server.create(database))
    process = start("run", "--data-root", root.path, IMAGEMILL_STUB_SLEEP=0.02)
    moment = random.Random(seed)
    wait_for_files(root, moment.randrange(len(embedding_specs()) * IMAGES), process)
    time.sleep(moment.uniform(0, 0.3))
    assert process.poll() is None, "the run ended before the crash"
    server.restart()
    text, _ = process.communicate()

    assert "Traceback" not in text
    assert process.returncode in {0, 1}, text
    print(f"exit code {process.returncode}:\n{text}")
    if process.returncode:
        assert "the Dagster history in PostgreSQL cannot be read or written" in text
        assert "do:    check that the PostgreSQL server runs" in text
    done = imagemill("run", "--data-root", root.path, stub=True)
    assert done.returncode == 0, text + done.stdout + done.stderr
    assert materialized(server, database) == everything(IMAGES)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 12))])
def test_crash_of_the_server_ends_a_run_with_a_message_and_the_next_run_completes_the_history(server, data_root, seed):
    crash_in_a_run(server, data_root, f"crash{seed}", seed)


def test_server_that_is_gone_is_a_message(server, data_root, monkeypatch):
    stub_every_kind(monkeypatch)
    photos(data_root.approved, 1)
    keep_history(data_root, server.url("absent"))

    began = time.monotonic()
    done = called(data_root, "run")

    assert done.code == 1
    assert "why:   connection to server on socket" in done.text
    assert 'database "absent" does not exist' in done.text
    assert "secret" not in done.text
    assert time.monotonic() - began < 60
