"""resources/dagster_internals/events.py: events of exactly the images with a new file, each stored once."""

import signal
import sys
import threading
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.definitions.data_version import (
    CachingStaleStatusResolver,
    extract_data_provenance_from_entry,
    extract_data_version_from_entry,
)
from dagster._core.loader import LoadingContextForTest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.engine import Engine
from sqlalchemy.event import listen, remove

sys.path.append(str(Path(__file__).parents[2] / "dagster_project/internals"))  # toy_defs

from toy_defs import defs as toy_definitions
from toy_defs import run_toy as run
from toy_defs import toy_instance

from dagster_project.internals.storage import BatchSqliteEventLogStorage
from resources.dagster_internals import events
from resources.dagster_internals.events import (
    BATCH_EVENTS,
    DEFER_TAG,
    OWNER_TAG,
    StreamedEvents,
    interrupts_held,
    report_without_run,
    version_tags,
)

KEYS = [f"k{n:02d}" for n in range(30)]
WHOLE = (KEYS[0], KEYS[-1])
STREAMED, PLAIN, SOURCE = dg.AssetKey("dinov3_npy"), dg.AssetKey("plain"), dg.AssetKey("approved_images")


@pytest.fixture
def instance(data_root):
    with toy_instance(data_root, KEYS) as opened:
        yield opened


def events_of(instance, asset=STREAMED):
    """Return the materialisations of an asset, oldest first."""
    return list(reversed(instance.fetch_materializations(asset, limit=1000).records))


def keys_of(instance, asset=STREAMED):
    return [record.partition_key for record in events_of(instance, asset)]


# ---- what is reported


def test_deferred_run_reports_exactly_the_published_images(instance, monkeypatch):
    """Each is reported once, in order, and no others; the run succeeds."""
    monkeypatch.setenv("TOY_MISSING", f"{KEYS[3]},{KEYS[7]}")
    outcome = run(instance, "dinov3_npy", partition_range=WHOLE, deferred=True)

    assert outcome.success
    assert keys_of(instance) == [key for key in KEYS if key not in {KEYS[3], KEYS[7]}]
    assert not instance.all_logs(outcome.run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION_PLANNED)


def test_event_carries_versions_and_provenance(instance):
    """The UI shows "unsynced" without them."""
    pointer = instance.event_log_storage.get_maximum_record_id()
    assert pointer is None
    report_without_run(instance, [dg.AssetObservation(SOURCE, partition=KEYS[0])])
    run(instance, "dinov3_npy", partition_range=(KEYS[0], KEYS[0]), deferred=True)

    (record,) = events_of(instance)
    provenance = extract_data_provenance_from_entry(record.event_log_entry)
    assert extract_data_version_from_entry(record.event_log_entry) == dg.DataVersion(f"v-{KEYS[0]}")
    assert provenance.code_version == "7"
    assert provenance.input_data_versions == {SOURCE: dg.DataVersion(f"in-{KEYS[0]}")}
    assert provenance.input_storage_ids[SOURCE] >= 1
    assert record.asset_materialization.metadata["n"].value == 1


def test_event_equals_one_of_dagster(instance):
    """UI, sensors and run pages read streamed events like all others."""
    one = (KEYS[0], KEYS[0])
    run(instance, "dinov3_npy", partition_range=one, deferred=True)
    run(instance, "plain", partition_range=one)
    (ours,), (theirs,) = ([r.event_log_entry for r in events_of(instance, asset)] for asset in (STREAMED, PLAIN))

    assert (ours.level, type(ours.timestamp), ours.error_info) == (theirs.level, type(theirs.timestamp), None)
    assert ours.step_key == "dinov3_npy"
    assert ours.user_message == theirs.user_message.replace("plain", "dinov3_npy")
    assert ours.dagster_event.message == theirs.dagster_event.message.replace("plain", "dinov3_npy")
    for name in ("event_type_value", "job_name", "step_kind_value", "pid"):
        assert getattr(ours.dagster_event, name) == getattr(theirs.dagster_event, name), name
    assert ours.dagster_event.step_key == "dinov3_npy"
    assert ours.dagster_event.node_name == "dinov3_npy"
    assert ours.dagster_event.partition == theirs.dagster_event.partition


def test_run_without_the_tag_leaves_complete_ranges_to_dagster(instance):
    """There is one event per image, not two."""
    outcome = run(instance, "dinov3_npy", partition_range=WHOLE)

    assert outcome.success
    assert sorted(keys_of(instance)) == KEYS


def test_run_without_the_tag_fails_if_images_are_missing(instance, monkeypatch):
    """Dagster would also mark the missing ones. The published ones are reported first."""
    monkeypatch.setenv("TOY_MISSING", KEYS[3])
    outcome = run(instance, "dinov3_npy", partition_range=WHOLE)

    assert not outcome.success
    assert keys_of(instance) == [key for key in KEYS if key != KEYS[3]]


def test_ephemeral_run_reports_events_too(monkeypatch):
    """Unit tests of assets use `dg.materialize`, without batching storage or a command line."""
    import toy_defs

    monkeypatch.setenv("TOY_MISSING", KEYS[1])
    with dg.DagsterInstance.ephemeral() as ephemeral:
        ephemeral.add_dynamic_partitions("images", KEYS)
        range_tags = {"dagster/asset_partition_range_start": KEYS[0], "dagster/asset_partition_range_end": KEYS[2]}
        result = dg.materialize(
            [toy_defs.dinov3_npy],
            instance=ephemeral,
            tags={**range_tags, DEFER_TAG: "true"},
            resources={"stream_io": toy_defs.StreamingIO()},
        )
        assert result.success
        assert ephemeral.get_materialized_partitions(STREAMED) == {KEYS[0], KEYS[2]}


# ---- when it is stored


def batches_of(monkeypatch):
    """Record the sizes of the batches that are stored from now on."""
    sizes = []
    stored = BatchSqliteEventLogStorage.store_event_batch

    def store(self, events):
        sizes.append(len(events))
        stored(self, events)

    monkeypatch.setattr(BatchSqliteEventLogStorage, "store_event_batch", store)
    return sizes


def limits(monkeypatch, **given):
    """Apply these limits to every StreamedEvents."""
    for name, value in given.items():
        monkeypatch.setattr(events, f"BATCH_{name.upper()}", value)


def test_events_are_stored_in_batches(instance, monkeypatch):
    """Every batch except the last has the given size; single events take forty times as long."""
    limits(monkeypatch, events=8)
    sizes = batches_of(monkeypatch)
    run(instance, "dinov3_npy", partition_range=WHOLE, deferred=True)

    assert sizes == [8, 8, 8, 6]
    assert keys_of(instance) == KEYS


def test_events_of_a_slow_stream_are_stored_before_the_batch_is_full(instance, monkeypatch):
    """A kill -9 loses a second of work, not five hundred images."""
    limits(monkeypatch, seconds=0.1)
    monkeypatch.setenv("TOY_SLEEP", "0.03")
    sizes = batches_of(monkeypatch)
    run(instance, "dinov3_npy", partition_range=WHOLE, deferred=True)

    assert len(sizes) > 4
    assert keys_of(instance) == KEYS


# ---- interrupts


@pytest.mark.parametrize("moment", ["before", "inside", "after"])
def test_interrupt_during_a_flush_neither_loses_nor_duplicates_events(instance, monkeypatch, moment):
    """An interrupt inside the insert, followed by another flush, would lock the index forever."""
    limits(monkeypatch, events=10)
    stored, tagged = BatchSqliteEventLogStorage.store_event_batch, BatchSqliteEventLogStorage._store_asset_event_tags
    flushes = []

    def store(self, events):
        flushes.append(len(events))
        if moment == "before" and len(flushes) == 2:
            signal.raise_signal(signal.SIGINT)
        stored(self, events)
        if moment == "after" and len(flushes) == 2:
            signal.raise_signal(signal.SIGINT)

    def tag(self, connection, events, ids):
        if moment == "inside" and len(flushes) == 2:
            signal.raise_signal(signal.SIGINT)
        tagged(self, connection, events, ids)

    monkeypatch.setattr(BatchSqliteEventLogStorage, "store_event_batch", store)
    monkeypatch.setattr(BatchSqliteEventLogStorage, "_store_asset_event_tags", tag)
    outcome = run(instance, "dinov3_npy", partition_range=WHOLE, deferred=True)

    assert outcome.signal == signal.SIGINT
    assert outcome.run.status is dg.DagsterRunStatus.FAILURE
    assert (outcome.failures, outcome.error) == ((), None)
    # The first twenty are stored once each in the index, and the last of each batch in the log of the run.
    assert keys_of(instance) == KEYS[:20]
    in_run = instance.all_logs(outcome.run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION)
    logged = [entry.dagster_event.partition for entry in in_run]
    assert logged == sorted(set(logged))
    assert logged[-1] == KEYS[19]
    assert set(logged) < set(KEYS[:20])
    monkeypatch.undo()
    assert run(instance, "dinov3_npy", partition_range=WHOLE, deferred=True).success


def test_events_between_flushes_survive_an_interrupt(instance, monkeypatch):
    """The rows since the last batch are stored on exit."""
    added = StreamedEvents.add

    def add(self, partition, **said):
        added(self, partition, **said)
        if partition == KEYS[11]:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(StreamedEvents, "add", add)
    outcome = run(instance, "dinov3_npy", partition_range=WHOLE, deferred=True)

    assert outcome.signal == signal.SIGTERM
    assert keys_of(instance) == KEYS[:12]


def test_interrupted_insert_of_a_log_line_is_completed_first(instance):
    """`context.log` in an asset writes to the same database, outside any flush."""
    met = []

    def interrupt(connection, cursor, statement, parameters, context, many):
        if statement.startswith("INSERT INTO event_logs") and '"streaming"' in str(parameters):
            met.append(statement)
            signal.raise_signal(signal.SIGINT)

    listen(Engine, "after_cursor_execute", interrupt)
    try:
        outcome = run(instance, "dinov3_npy", partition_range=WHOLE, deferred=True)
    finally:
        remove(Engine, "after_cursor_execute", interrupt)

    assert len(met) == 1
    assert outcome.signal == signal.SIGINT
    assert outcome.run.status is dg.DagsterRunStatus.FAILURE
    assert "streaming" in [entry.user_message for entry in instance.all_logs(outcome.run_id)]
    assert keys_of(instance) == []


@pytest.fixture(autouse=True)
def sigint_as_in_a_terminal():
    """A suite that a shell starts with `&` ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_interrupt_is_deferred_until_the_block_ends():
    """Afterwards it has its usual effect, and the handlers are restored."""
    steps = []
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt):
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
            steps.append("went on")

    assert steps == ["went on"]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_termination_is_deferred_until_the_block_ends():
    """The signal raised at the end equals the received one."""
    steps = []
    before = signal.signal(signal.SIGTERM, lambda number, _: steps.append(number))
    try:
        with interrupts_held():
            signal.raise_signal(signal.SIGTERM)
            steps.append("went on")
    finally:
        signal.signal(signal.SIGTERM, before)

    assert steps == ["went on", signal.SIGTERM]


def test_interrupt_deferred_over_a_failing_block_has_the_error_as_context():
    with pytest.raises(KeyboardInterrupt) as caught:
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
            raise ZeroDivisionError

    assert isinstance(caught.value.__context__, ZeroDivisionError)


def test_deferred_interrupts_nest():
    """Storage delays interrupts inside a flush that delays them too."""
    steps = []
    with pytest.raises(KeyboardInterrupt):
        with interrupts_held():
            with interrupts_held():
                signal.raise_signal(signal.SIGINT)
            steps.append("outer block went on")
    assert steps == ["outer block went on"]


def test_other_threads_defer_nothing():
    """Only the main thread may touch signal handlers."""
    seen = []

    def hold():
        with interrupts_held():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=hold)
    thread.start()
    thread.join()

    assert seen == [signal.default_int_handler]


# ---- without a run


def test_events_without_a_run_are_stored_in_batches(instance, monkeypatch):
    """0.14 ms each; Dagster's own call takes 9 ms."""
    sizes = batches_of(monkeypatch)
    keys = [f"s{n:04d}" for n in range(2 * BATCH_EVENTS + 1)]
    events = (dg.AssetMaterialization(SOURCE, partition=key, tags=version_tags(key, code_version="1")) for key in keys)

    assert report_without_run(instance, events) == len(keys)

    assert sizes == [BATCH_EVENTS, BATCH_EVENTS, 1]
    assert instance.get_materialized_partitions(SOURCE) == set(keys)
    assert report_without_run(instance, []) == 0


def test_event_without_a_run_equals_one_of_dagster(instance):
    """Level, names and payload. Reference: `DagsterInstance.report_runless_asset_event`."""
    event = dg.AssetMaterialization(SOURCE, partition="a", metadata={"n": 1})
    report_without_run(instance, [event])
    instance.report_runless_asset_event(event)
    ours, theirs = (record.event_log_entry for record in events_of(instance, SOURCE))

    assert ours._replace(timestamp=0.0, dagster_event=None) == theirs._replace(timestamp=0.0, dagster_event=None)
    assert ours.dagster_event.event_specific_data == theirs.dagster_event.event_specific_data
    assert (ours.run_id, ours.job_name) == ("", "")


def staleness(instance, key):
    graph = toy_definitions().get_repository_def().asset_graph
    return CachingStaleStatusResolver(instance, graph, LoadingContextForTest(instance)).get_status(STREAMED, key).value


def test_observed_change_of_a_source_makes_exactly_its_image_stale(instance):
    """v1 → v2 is stale, v1 → v1 is fresh, and a new materialisation is fresh. Dagster compares observations."""

    def observe(key, version):
        tags = {"dagster/data_version": version}
        report_without_run(instance, [dg.AssetObservation(SOURCE, partition=key, tags=tags)])

    for key in KEYS[:2]:
        observe(key, "1")
    run(instance, "dinov3_npy", partition_range=(KEYS[0], KEYS[1]), deferred=True)
    assert [staleness(instance, key) for key in KEYS[:3]] == ["FRESH", "FRESH", "MISSING"]

    observe(KEYS[0], "1")
    observe(KEYS[1], "2")
    assert [staleness(instance, key) for key in KEYS[:2]] == ["FRESH", "STALE"]

    run(instance, "dinov3_npy", partition_range=(KEYS[0], KEYS[1]), deferred=True)
    assert [staleness(instance, key) for key in KEYS[:2]] == ["FRESH", "FRESH"]


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,9}(/[a-z_]{1,9})?", fullmatch=True), st.text(min_size=1), max_size=3))
def test_version_tags_are_read_back_by_dagster(inputs):
    """Names of upstream assets can be arbitrary."""
    from dagster._core.definitions.data_version import DataProvenance

    provenance = DataProvenance.from_tags(version_tags("d", code_version="c", inputs=inputs, pointer=None))

    assert {key.to_user_string(): version.value for key, version in provenance.input_data_versions.items()} == inputs
    assert {key.to_user_string(): pointer for key, pointer in provenance.input_storage_ids.items()} == dict.fromkeys(
        inputs
    )
    assert (provenance.code_version, provenance.is_user_provided) == ("c", True)


def test_command_line_run_records_its_process_once(instance):
    """`run_here` tags the run when it is created; the stream finds the tag."""
    outcome = run(instance, "dinov3_npy", partition_range=WHOLE, deferred=True)

    assert outcome.run.tags[OWNER_TAG].endswith(outcome.run_id)
