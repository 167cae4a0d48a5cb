"""dagster_project/internals/postgres_storage.py, with a real server: the batching event log stores what stock storage stores."""

import itertools
import subprocess
import sys
import threading
from pathlib import Path

import dagster as dg
import pytest

sys.path.append(str(Path(__file__).parent))  # toy_history

from toy_history import (
    BATCHES,
    KEYS,
    WRITERS,
    assert_partitions_agree,
    everything_dagster_writes,
    stable_rows,
    write_in_several_processes,
)

from dagster_project.history_errors import HistoryUnusable
from dagster_project.internals import batched_events
from dagster_project.internals.batched_events import BATCH_VARIABLE
from dagster_project.internals.instance import open_instance
from imagemill.domain.layout import DataRoot
from resources.dagster_internals.events import report_without_run
from tests.helpers.postgres import OURS, STOCK, keep_history, postgres_server
from tests.helpers.product import PROJECT

psycopg2 = pytest.importorskip("psycopg2")
pytest.importorskip("dagster_postgres")

from dagster_postgres import PostgresEventLogStorage  # noqa: E402

from dagster_project.internals.postgres_storage import (  # noqa: E402
    BatchPostgresEventLogStorage,
    with_driver,
)


@pytest.fixture(scope="module")
def server():
    with postgres_server() as server:
        yield server


_NUMBERS = itertools.count()


@pytest.fixture
def url(server):
    """The URL of an empty database."""
    return server.create(f"db{next(_NUMBERS)}")


def history(folder, url, storage=OURS):
    """Return a data root whose history is in this database."""
    root = DataRoot(folder / "data")
    keep_history(root, url, storage)
    return root


def _tables(url):
    """Return every table of a database, without volatile values. Ids of `asset_keys` are not comparable: upserts use them up."""
    with psycopg2.connect(url) as connection, connection.cursor() as cursor:

        def query(sql):
            cursor.execute(sql)
            return [dict(zip([column.name for column in cursor.description], row, strict=True)) for row in cursor]

        run_ids = [row["run_id"] for row in query("select run_id from runs order by id")]
        names = [row["tablename"] for row in query("select tablename from pg_tables where schemaname = 'public'")]
        found = {name: stable_rows(query(f"select * from {name} order by 1"), run_ids) for name in names}
    found["asset_keys"] = sorted(({**row, "id": 0} for row in found["asset_keys"]), key=lambda row: row["asset_key"])
    return found


def test_every_table_equals_stock_storages_after_the_same_runs(server, tmp_path, monkeypatch):
    """Rows and their order; stock storage writes one event at a time."""
    ours, stock = server.create("ours"), server.create("stock")
    with open_instance(history(tmp_path / "ours", ours)) as instance:
        assert isinstance(instance.event_log_storage, BatchPostgresEventLogStorage)
        everything_dagster_writes(instance)
    monkeypatch.setenv(BATCH_VARIABLE, "0")
    with open_instance(history(tmp_path / "stock", with_driver(stock), STOCK)) as instance:
        assert type(instance.event_log_storage) is PostgresEventLogStorage
        everything_dagster_writes(instance)

    mine, theirs = _tables(ours), _tables(stock)

    assert mine.keys() == theirs.keys()
    events = mine["event_logs"]
    assert sum(row["dagster_event_type"] == "ASSET_MATERIALIZATION" for row in events) == 12 + 12 + 9 + 4 + 1 + 3
    assert mine.pop("instance_info") != theirs.pop("instance_info"), "a history has an id of its own"
    for name, rows in theirs.items():
        for one, other in zip(mine[name], rows, strict=True):
            assert one == other, name


def test_batch_is_one_transaction(url, tmp_path, monkeypatch):
    """A connection that is lost between the events and the row of their asset leaves neither."""
    with open_instance(history(tmp_path, url)) as instance:
        log = instance.event_log_storage
        report_without_run(instance, [dg.AssetMaterialization("a", partition="first")])
        monkeypatch.setattr(log, "_store_asset_event", lambda *_: 1 / 0)
        for batch in (["one"], ["two", "three"]):
            with pytest.raises(ZeroDivisionError):
                report_without_run(instance, [dg.AssetMaterialization("a", partition=key) for key in batch])

        assert log.get_materialized_partitions(dg.AssetKey("a")) == {"first"}


def test_planned_events_are_one_transaction_per_batch(url, tmp_path, monkeypatch):
    batches = []
    together = BatchPostgresEventLogStorage._store_together
    monkeypatch.setattr(
        BatchPostgresEventLogStorage,
        "_store_together",
        lambda log, events: (batches.append([e.dagster_event_type for e in events]), together(log, events)),
    )
    with open_instance(history(tmp_path, url)) as instance:
        everything_dagster_writes(instance)

    planned = dg.DagsterEventType.ASSET_MATERIALIZATION_PLANNED
    assert [planned] * len(KEYS) in batches


def test_batches_are_stored_by_dagster_where_a_private_name_is_gone(url, tmp_path, monkeypatch):
    """Another patch release of Dagster must not lose history."""
    monkeypatch.setattr(batched_events, "CAN_BATCH", False)
    monkeypatch.setattr(batched_events, "DynamicPartitionsTable", None)
    monkeypatch.setattr(BatchPostgresEventLogStorage, "_store_together", lambda *_: pytest.fail("batched"))
    with open_instance(history(tmp_path, url)) as instance:
        report_without_run(instance, [dg.AssetMaterialization("a", partition=key) for key in KEYS])
        instance.add_dynamic_partitions("images", KEYS)

        assert instance.get_materialized_partitions(dg.AssetKey("a")) == set(KEYS)
        assert instance.get_dynamic_partitions("images") == KEYS


def test_partitions_are_those_that_stock_storage_finds(url, tmp_path):
    """With any cursors, after a wipe, and for keys that are not registered."""
    with open_instance(history(tmp_path, url)) as instance:
        everything_dagster_writes(instance)
        assert_partitions_agree(instance, PostgresEventLogStorage(instance.event_log_storage.postgres_url))


def test_partition_keys_are_cached_until_any_process_changes_them(url, tmp_path, monkeypatch):
    with open_instance(history(tmp_path, url)) as instance:
        log = instance.event_log_storage
        other = PostgresEventLogStorage(log.postgres_url)
        other.add_dynamic_partitions("images", ["a", "b"])
        assert log.get_dynamic_partitions("images") == ["a", "b"]
        other.delete_dynamic_partition("images", "b")
        other.add_dynamic_partitions("images", ["c"])
        assert log.get_dynamic_partitions("images") == ["a", "c"]
        other.delete_dynamic_partition("images", "a")
        assert log.get_dynamic_partitions("images") == ["c"]
        assert log.get_dynamic_partitions("others") == []

        log.get_dynamic_partitions("images").append("not mine")
        monkeypatch.setattr(PostgresEventLogStorage, "get_dynamic_partitions", lambda *_: pytest.fail("read again"))
        assert log.get_dynamic_partitions("images") == ["c"]


def test_writers_of_several_assets_do_not_block_each_other(url, tmp_path):
    """Two transactions that update the same assets in opposite orders would end in a deadlock."""
    assets = [f"asset{n}" for n in range(6)]
    errors = []
    with open_instance(history(tmp_path, url)) as instance:

        def write(names):
            try:
                for _ in range(15):
                    report_without_run(instance, [dg.AssetMaterialization(name, partition="p") for name in names])
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=write, args=(names,)) for names in (assets, assets[::-1])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert not errors


def test_writers_in_several_processes_lose_and_mix_nothing(url, tmp_path):
    """Command line, daemon and code servers create the tables of an empty database at once, and write into them."""
    root = history(tmp_path, url)

    expected = write_in_several_processes(root)

    with open_instance(root) as instance:
        assert instance.get_materialized_partitions(dg.AssetKey("shared")) == expected
        assert len(instance.get_dynamic_partitions("images")) == WRITERS * BATCHES
    with psycopg2.connect(url) as connection, connection.cursor() as cursor:
        cursor.execute(
            "select count(*), count(distinct event_id) from asset_event_tags t join event_logs e on e.id = event_id "
            "where t.value = partition"
        )
        assert cursor.fetchone() == (len(expected), len(expected))


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("postgresql://u:p@h/d", "postgresql+psycopg2://u:p@h/d"),
        ("postgres://u@/d?host=/tmp", "postgresql+psycopg2://u@/d?host=/tmp"),
        ("postgresql+psycopg2://u@h/d", "postgresql+psycopg2://u@h/d"),
        ("postgresql+psycopg://u@h/d", "postgresql+psycopg://u@h/d"),
    ],
)
def test_url_gets_the_driver_that_is_installed_unless_it_names_one(given, url):
    assert with_driver(given) == url


def test_missing_packages_are_named_with_the_extra(tmp_path):
    """In a process that cannot import them."""
    script = (
        "import sys; from pathlib import Path; sys.modules['dagster_postgres'] = None\n"
        "from dagster_project.internals.instance import open_instance\n"
        "from imagemill.domain.layout import DataRoot\n"
        "with open_instance(DataRoot(Path(sys.argv[1]))): pass\n"
    )
    root = history(tmp_path, "postgresql://u@/d")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, root.path],
        capture_output=True,
        text=True,
        cwd=PROJECT,
        check=False,
    )

    assert f"{HistoryUnusable.__name__}: the packages for a history in PostgreSQL are not installed" in done.stderr
    assert "install imagemill[postgres]" in done.stderr


def test_server_that_is_not_there_is_a_message(tmp_path):
    root = history(tmp_path, f"postgresql://u:secret@/d?host={tmp_path}")
    with pytest.raises(HistoryUnusable, match="in PostgreSQL cannot be read or written") as raised:
        with open_instance(root):
            pass
    assert str(root.dagster_home / "dagster.yaml") in str(raised.value.where)
    assert "No such file or directory" in raised.value.why
    assert "secret" not in str(raised.value)
