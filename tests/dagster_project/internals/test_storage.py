"""dagster_project/internals/storage.py: the batching event log stores what stock storage stores, with any number of writers."""

import shutil
import sqlite3
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.storage.event_log.sqlite.sqlite_event_log import SqliteEventLogStorage
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import create_engine
from sqlalchemy.engine import Engine
from sqlalchemy.event import listen, remove

sys.path.append(str(Path(__file__).parent))  # toy_history

from toy_history import (
    BATCHES,
    KEYS,
    WRITERS,
    assert_partitions_agree,
    everything_dagster_writes,
    stable_name,
    stable_rows,
    write_in_several_processes,
)

from dagster_project.internals import batched_events
from dagster_project.internals.batched_events import BATCH_VARIABLE
from dagster_project.internals.instance import open_instance
from dagster_project.internals.storage import BatchSqliteEventLogStorage
from imagemill.domain.layout import DataRoot
from resources.dagster_internals.events import report_without_run
from resources.dagster_internals.tags import DATA_VERSION_TAG

# ---- the same tables


def _tables(home: Path) -> dict[tuple[str, str], list]:
    """Return every table of every database below `home`, without volatile values."""
    with sqlite3.connect(home / "history" / "runs.db") as connection:
        run_ids = [run_id for (run_id,) in connection.execute("select run_id from runs order by id")]
    found = {}
    for path in home.rglob("*.db"):
        with sqlite3.connect(path) as connection:
            connection.row_factory = sqlite3.Row
            for (table,) in connection.execute("select name from sqlite_master where type = 'table'").fetchall():
                rows = map(dict, connection.execute(f"select * from {table}").fetchall())
                found[stable_name(str(path.relative_to(home)), run_ids), table] = stable_rows(rows, run_ids)
    return found


@pytest.fixture(scope="module")
def both_histories(tmp_path_factory):
    """The same runs in a history of ours and in a stock one: two folders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("DAGSTER_HOME", raising=False)
        ours = DataRoot(tmp_path_factory.mktemp("ours") / "data")
        with open_instance(ours) as instance:
            assert isinstance(instance.event_log_storage, BatchSqliteEventLogStorage)
            everything_dagster_writes(instance)
        stock = DataRoot(tmp_path_factory.mktemp("stock") / "data")
        stock.dagster_home.mkdir(parents=True)
        (stock.dagster_home / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
        patch.setenv(BATCH_VARIABLE, "0")
        with open_instance(stock) as instance:
            assert type(instance.event_log_storage) is SqliteEventLogStorage
            everything_dagster_writes(instance)
    return ours.dagster_home, stock.dagster_home


def test_every_table_equals_stock_storages_after_the_same_runs(both_histories):
    """Rows, their order and their ids are those of stock storage; the files of runs lack materialisations of partitions."""
    ours, stock = (_tables(home) for home in both_histories)

    assert ours.keys() == stock.keys()
    # plain and dinov3_npy whole, dinov3_npy's inner range, totals and three buckets, watched, three without a run
    index_file = "history/runs/index.db"
    index = ours[index_file, "event_logs"]
    assert sum(row["dagster_event_type"] == "ASSET_MATERIALIZATION" for row in index) == 12 + 12 + 9 + 4 + 1 + 3
    in_runs = [key for key in stock if key[1] == "event_logs" and key[0] != index_file]
    assert len(in_runs) > 5
    for key in in_runs:
        mine, theirs = ([{**row, "id": 0} for row in history.pop(key)] for history in (ours, stock))
        left_out = [row for row in theirs if row not in mine]
        assert [row for row in theirs if row in mine] == mine, key
        assert all(row["dagster_event_type"] == "ASSET_MATERIALIZATION" and row["partition"] for row in left_out), key
    for history in (ours, stock):
        assert len(history.pop(("history/runs.db", "instance_info"))) == 1, "a history has an id of its own"
    for table in ("concurrency_limits", "concurrency_slots"):
        assert len(ours.pop((index_file, table))) == 1, "opening a history limits the pool of models to one run"
        assert stock.pop((index_file, table)) == []
    for key in stock:
        for mine, theirs in zip(ours[key], stock[key], strict=True):
            assert mine == theirs, key


def _structure(home: Path) -> dict[str, tuple]:
    """Return the journal mode, tables and indexes of each database below `home`."""
    with sqlite3.connect(home / "history" / "runs.db") as connection:
        run_ids = [run_id for (run_id,) in connection.execute("select run_id from runs order by id")]
    found = {}
    for path in home.rglob("*.db"):
        with sqlite3.connect(path) as connection:
            (mode,) = connection.execute("pragma journal_mode").fetchone()
            parts = connection.execute("select type, name, tbl_name, sql from sqlite_master order by 1, 2").fetchall()
        found[stable_name(str(path.relative_to(home)), run_ids)] = (mode, parts)
    return found


def test_new_databases_have_the_tables_and_indexes_of_stock_storage(both_histories):
    """They are made under other names and appear whole."""
    ours, stock = map(_structure, both_histories)

    assert ours == stock
    assert {mode for mode, _ in ours.values()} == {"wal"}
    assert len(ours) > 4, "also the files of runs"


def test_only_new_databases_are_written_without_syncs(data_root):
    with open_instance(data_root) as instance:
        log = instance.event_log_storage
        for connection in (log.index_connection(), log.run_connection("first"), log.run_connection("second")):
            with connection as opened:
                assert opened.exec_driver_sql("pragma synchronous").scalar() != 0


def test_thread_connects_while_another_one_makes_the_database_of_a_run(data_root):
    """SQLAlchemy raises in the first one if the other adds or removes a listener of all engines meanwhile."""
    connecting, made = threading.Event(), threading.Event()

    def wait(_connection: object, _record: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            connecting.set()
            assert made.wait(30)

    def connect() -> None:
        with create_engine("sqlite://").connect():
            pass

    with open_instance(data_root) as instance, ThreadPoolExecutor(1) as pool:
        listen(Engine, "connect", wait)
        try:
            other = pool.submit(connect)
            assert connecting.wait(30)
            with instance.event_log_storage.run_connection("made"):
                made.set()
            other.result()
        finally:
            made.set()
            remove(Engine, "connect", wait)


def test_unfinished_history_of_a_killed_process_is_removed(data_root):
    left = data_root.dagster_home / ".new-killed"
    (left / "history").mkdir(parents=True)
    shutil.copy(__file__, left / "history" / "runs.db")

    with open_instance(data_root) as instance:
        assert instance.get_run_records() == []

    assert not left.exists()


def test_asset_event_tags_point_at_the_events_they_belong_to(both_histories):
    """The ids of a batch are returned in the order of its rows."""
    index = both_histories[0] / "history" / "runs" / "index.db"
    with sqlite3.connect(index) as connection:
        pairs = connection.execute(
            "select t.value, e.event from asset_event_tags t join event_logs e on e.id = t.event_id"
        ).fetchall()

    assert len(pairs) >= 8 + 6
    assert all(f'"dagster/data_version": "{value}"' in event for value, event in pairs)


def test_batches_are_stored_one_by_one_where_a_private_name_is_gone(tmp_path, monkeypatch):
    """Another patch release of Dagster must not lose history."""
    monkeypatch.setattr(batched_events, "CAN_BATCH", False)
    monkeypatch.setattr(batched_events, "DynamicPartitionsTable", None)
    monkeypatch.setattr(BatchSqliteEventLogStorage, "_store_together", lambda *_: pytest.fail("batched"))
    log = BatchSqliteEventLogStorage(str(tmp_path))

    with dg.instance_for_test() as instance:
        monkeypatch.setattr(instance, "_event_storage", log)
        report_without_run(instance, [dg.AssetMaterialization("a", partition=key) for key in KEYS])
        log.add_dynamic_partitions("images", KEYS)

        assert log.get_materialized_partitions(dg.AssetKey("a")) == set(KEYS)
        assert log.get_dynamic_partitions("images") == KEYS


@given(st.lists(st.text(), unique=True), st.booleans(), st.text(), st.integers(-3, 3))
def test_key_is_found_where_it_is_in_any_order(keys, in_order, other, start):
    found = batched_events.KeyList(batched_events.Keys(sorted(keys) if in_order else keys))

    assert [found.index(key) for key in found] == list(range(len(found)))
    assert _index_or_none(found, other) == found._keys.position(other)
    for bounds in [(), (start,)]:
        assert _index_or_none(found, other, *bounds) == _index_or_none(list(found), other, *bounds)
    found.insert(0, other)  # a list may be changed
    assert found.index(other) == 0


def _index_or_none(keys, key, *bounds):
    try:
        return keys.index(key, *bounds)
    except ValueError:
        return None


def test_tags_of_a_large_batch_belong_to_its_events(data_root):
    """A batch that needs several statements: the ids of its rows follow each other."""
    keys = [f"image{number:04d}" for number in range(400)]
    with open_instance(data_root) as instance:
        report_without_run(
            instance,
            [dg.AssetMaterialization("a", partition=key, tags={DATA_VERSION_TAG: key.upper()}) for key in keys],
        )
    with sqlite3.connect(data_root.dagster_home / "history" / "runs" / "index.db") as index:
        query = (
            "select l.partition, t.value from event_logs l join asset_event_tags t on t.event_id = l.id order by l.id"
        )
        assert index.execute(query).fetchall() == [(key, key.upper()) for key in keys]


# ---- connections


def test_open_history_closes_its_databases_when_it_is_disposed_of(data_root):
    """Until then one connection is kept, because closing the last one syncs the database."""
    folder = data_root.dagster_home / "history"

    with open_instance(data_root) as instance:
        report_without_run(instance, [dg.AssetMaterialization("a", partition=key) for key in KEYS])
        written = sorted(folder.rglob("*.db-wal"))
        assert [path.name for path in written] == ["index.db-wal", "runs.db-wal"]

    assert not list(folder.rglob("*.db-wal"))


def test_history_that_is_replaced_while_it_is_open_is_the_one_that_is_read_and_written(data_root, tmp_path):
    """A server that runs on after a restored backup must not write into a deleted file."""
    index = data_root.dagster_home / "history" / "runs" / "index.db"
    with open_instance(data_root):
        pass
    shutil.copy(index, tmp_path / "backup.db")

    with open_instance(data_root) as instance:
        report_without_run(instance, [dg.AssetMaterialization("a", partition="before")])
        for path in index.parent.glob("index.db*"):
            path.unlink()
        shutil.copy(tmp_path / "backup.db", index)
        report_without_run(instance, [dg.AssetMaterialization("a", partition="after")])

    with sqlite3.connect(index) as connection:
        assert connection.execute("select partition from event_logs where asset_key = '[\"a\"]'").fetchall() == [
            ("after",)
        ]


# ---- several writers


def test_writers_in_several_processes_lose_and_mix_nothing(data_root):
    """Command line, daemon and code servers write one index at once, starting without a history.

    Spec: docs/spec/conventions.md#leases
    """
    expected = write_in_several_processes(data_root)

    with open_instance(data_root) as instance:
        assert instance.get_materialized_partitions(dg.AssetKey("shared")) == expected
        assert len(instance.get_dynamic_partitions("images")) == WRITERS * BATCHES
    with sqlite3.connect(data_root.dagster_home / "history" / "runs" / "index.db") as connection:
        (rows,) = connection.execute("select count(*) from event_logs where asset_key = '[\"shared\"]'").fetchone()
        (wrong,) = connection.execute(
            "select count(*) from asset_event_tags t join event_logs e on e.id = t.event_id where t.value <> e.partition"
        ).fetchone()
    assert (rows, wrong) == (len(expected), 0)


# ---- partition keys


@pytest.fixture(scope="module")
def log_and_witness(tmp_path_factory):
    """The caching storage, and a stock one over the same files, as another process would have."""
    folder = str(tmp_path_factory.mktemp("log"))
    return BatchSqliteEventLogStorage(folder), SqliteEventLogStorage(folder)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.booleans(), st.booleans(), st.sets(st.sampled_from(KEYS), min_size=1, max_size=3)), max_size=8
    )
)
def test_dynamic_partitions_are_those_in_the_database_after_any_change(log_and_witness, changes):
    """The cache is never stale, no matter which process changes the keys."""
    log, witness = log_and_witness
    for elsewhere, adding, keys in changes:
        writer = witness if elsewhere else log
        if adding:
            writer.add_dynamic_partitions("images", sorted(keys))
        else:
            writer.delete_dynamic_partition("images", min(keys))
        assert log.get_dynamic_partitions("images") == witness.get_dynamic_partitions("images")
        assert log.get_dynamic_partitions("others") == []


def test_dynamic_partitions_are_fresh_after_the_newest_key_was_replaced(log_and_witness):
    """SQLite reuses the newest row's id, and the count is the same."""
    log, witness = log_and_witness
    log.add_dynamic_partitions("swapped", ["a", "b"])
    assert log.get_dynamic_partitions("swapped") == ["a", "b"]

    witness.delete_dynamic_partition("swapped", "b")
    witness.add_dynamic_partitions("swapped", ["c"])

    assert log.get_dynamic_partitions("swapped") == ["a", "c"]


def test_dynamic_partitions_are_not_read_again_while_nothing_changes(log_and_witness, monkeypatch):
    """A range run reads them fifteen times. The caller may modify the returned list."""
    log, witness = log_and_witness
    log.add_dynamic_partitions("still", ["a", "b"])
    log.get_dynamic_partitions("still").append("not mine")
    monkeypatch.setattr(batched_events, "_keys", lambda *_: pytest.fail("read again"))
    witness.add_dynamic_partitions("others", ["c"])
    assert log.get_dynamic_partitions("still") == ["a", "b"]
    monkeypatch.setattr(
        log, "_stamp_columns", lambda *_: pytest.fail("counted again, which takes longer the more there are")
    )

    assert log.get_dynamic_partitions("still") == ["a", "b"]


def test_of_partitions_with_new_keys_only_the_new_ones_are_read(log_and_witness):
    log, witness = log_and_witness
    log.add_dynamic_partitions("more", ["a", "b"])
    log.get_dynamic_partitions("more")
    log._partition_keys["more"] = log._partition_keys["more"]._replace(keys=("as known", "b"))

    witness.add_dynamic_partitions("more", ["d", "c"])
    assert log.get_dynamic_partitions("more") == ["as known", "b", "d", "c"]

    witness.delete_dynamic_partition("more", "d")
    witness.add_dynamic_partitions("more", ["e"])
    assert log.get_dynamic_partitions("more") == ["a", "b", "c", "e"]


def test_keys_are_kept_in_a_block_except_for_own_changes(log_and_witness):
    log, witness = log_and_witness
    log.add_dynamic_partitions("kept", ["a", "b"])
    with log.keeping_partitions():
        assert log.get_dynamic_partitions("kept") == ["a", "b"]
        witness.add_dynamic_partitions("kept", ["c"])
        log.get_dynamic_partitions("kept").append("not mine")
        assert log.get_dynamic_partitions("kept") == ["a", "b"]
        with log.keeping_partitions():
            log.add_dynamic_partitions("kept", ["d"])
            assert log.get_dynamic_partitions("kept") == ["a", "b", "c", "d"]
        witness.delete_dynamic_partition("kept", "a")
        assert log.get_existing_dynamic_partitions("kept", ["a", "x"]) == {"a"}
        log.delete_dynamic_partition("kept", "b")
        assert log.get_dynamic_partitions("kept") == ["c", "d"]
        witness.add_dynamic_partitions("kept", ["e"])
    assert log.get_dynamic_partitions("kept") == ["c", "d", "e"]


def test_key_is_looked_up_in_a_block_without_reading_all_keys(log_and_witness, monkeypatch):
    log, _ = log_and_witness
    log.add_dynamic_partitions("many", [f"image{number:03d}" for number in range(100)])
    asked = {"image007": True, "image0070": False, "a": False, "z": False}
    assert {key: log.has_dynamic_partition("many", key) for key in asked} == asked
    with log.keeping_partitions():
        log.has_dynamic_partition("many", "a")
        log._of_block["many"].__class__ = _NeverRead
        monkeypatch.setattr(log, "index_connection", lambda: pytest.fail("asked the database"))

        assert {key: log.has_dynamic_partition("many", key) for key in asked} == asked


class _NeverRead(batched_events.Keys):
    def __iter__(self):
        pytest.fail("all keys were read")


def test_databases_of_the_history_wait_for_whoever_writes_them(tmp_path):
    """A busy disk takes longer than Python's five seconds to flush; one of two concurrent commands would lose its run."""
    with open_instance(DataRoot(tmp_path / "data")) as instance:
        with instance.run_storage.connect() as connection:
            assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 60_000
        with instance.schedule_storage.connect() as connection:
            assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 60_000
        with instance.event_log_storage.index_connection() as connection:
            assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 60_000


# ---- partitions


def test_partitions_are_those_that_stock_storage_finds(tmp_path):
    """With any cursors, after a wipe, and for keys that are not registered."""
    (tmp_path / "home").mkdir()
    with open_instance(DataRoot(tmp_path / "home")) as instance:
        everything_dagster_writes(instance)
        assert_partitions_agree(instance, SqliteEventLogStorage(instance.event_log_storage._base_dir))
