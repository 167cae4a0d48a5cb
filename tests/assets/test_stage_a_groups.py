"""The assets of Stage-A: ranks as partitions, claims, ledger rows, metadata for the UI, checks.

Spec: docs/spec/stage-a.md#work, docs/spec/conventions.md#completion-and-identity
"""

import json
import time
from types import SimpleNamespace

import dagster as dg
import pytest

from assets import stage_a_groups as stage_a_groups_module
from assets.partitions import ranks
from assets.stage_a_groups import rank_key, split_rank_keys, stage_a_groups, stage_a_ranks
from checks.stage_a_groups import groups_valid, lines_whole
from dagster_project.deployments import test_resources
from imagemill.errors import WrongUsage
from imagemill.pipeline import leases as claims_module
from imagemill.pipeline.stage_a.rank_files import output_file, rank_file, rank_files
from imagemill.store.ledger import Ledger
from resources.dagster_internals.tags import range_tags
from tests.helpers.another_run import another_run
from tests.helpers.sessions import put
from tests.helpers.stage_a import MISSION, ticket
from tests.helpers.stage_a_runs import NAMED, groups, merge, metadata, rank, run
from tests.helpers.summarizers import MODULE, Named
from tests.helpers.wiring import QUIET, claims, failure_of, history

BLANK = f"{MODULE}:Blank"


@pytest.fixture
def instance():
    with history() as instance:
        yield instance


@pytest.fixture
def tickets(data_root):
    ticket(data_root.stage_a_input, "fail", "a", "a1.jpg", "a2.jpg", "a3.jpg")
    ticket(data_root.stage_a_input, "pass", "b", "b1.jpg")
    ticket(data_root.stage_a_input, "pass", "c", "c1.jpg", "c2.png")
    return data_root


# ---- partitions


@pytest.mark.parametrize("mode", ["per_group", "per_image"])
def test_downstream_asset_merges_ranks_run_as_partitions_one_by_one(tickets, instance, mode):
    """ "Ranks run as Dagster partitions one after another"; the checks pass on their output."""
    for number in range(2):
        done = rank(tickets, instance, number, 2, lines_whole, mode=mode)
        assert done.success
        assert [event.passed for event in done.get_asset_check_evaluations()] == [True]
    assert len(rank_files(tickets.stage_a_output, MISSION)) == 2

    done = merge(tickets, instance, groups_valid, world_size=2, mode=mode)

    assert done.success
    assert [event.passed for event in done.get_asset_check_evaluations()] == [True]
    assert {name: len(texts) for name, texts in groups(tickets).items()} == {"a": 3, "b": 1, "c": 2}
    assert metadata(instance, "stage_a_groups") | {
        "groups": 3,
        "written (groups)": 3,
        "failed (groups)": 0,
    } == metadata(instance, "stage_a_groups")
    assert [metadata(instance, asset)["summarizer"] for asset in ("stage_a_ranks", "stage_a_groups")] == [NAMED, NAMED]
    assert rank_files(tickets.stage_a_output, MISSION) == {}


def test_range_of_ranks_is_one_run_and_each_has_its_own_counters(tickets, instance):
    keys = [rank_key(MISSION, number, 2) for number in range(2)]
    instance.add_dynamic_partitions(ranks.name, keys)

    done = run(tickets, instance, stage_a_ranks, tags=range_tags(*keys), mode="per_group", batch_size=1)

    assert done.success
    records = instance.fetch_materializations(dg.AssetKey("stage_a_ranks"), limit=9).records
    inferred = {each.partition_key: each.asset_materialization.metadata["inferred (images)"].value for each in records}
    assert inferred == {keys[0]: 5, keys[1]: 1}


def test_dead_rank_fails_only_its_partition_and_the_merge_continues(tickets, instance):
    """Spec: docs/spec/conventions.md#refused-and-failed, docs/spec/stage-a.md#failed-groups"""
    ticket(tickets.stage_a_input, "pass", "b", "deadly.jpg")
    keys = [rank_key(MISSION, number, 2) for number in range(2)]
    instance.add_dynamic_partitions(ranks.name, keys)

    done = run(
        tickets, instance, stage_a_ranks, tags=range_tags(*keys), summarizer=f"{MODULE}:Deadly", workers=2,
        claim_stays=True,
    )  # fmt: skip

    assert not done.success
    assert f"rank 1 of 2 of {MISSION} ended with exit code 9 working on 审核通过/b/b1.jpg" in failure_of(
        done, "stage_a_ranks"
    )
    assert instance.get_materialized_partitions(dg.AssetKey("stage_a_ranks")) == {keys[0]}
    with Ledger(tickets.ledger) as ledger:
        assert claims(ledger) == [("stage_a", MISSION)], "the merge of this process follows"
    assert merge(tickets, instance, world_size=2, summarizer=f"{MODULE}:Deadly").success
    assert groups(tickets).keys() == {"a", "c"}


def test_check_reads_all_ranks_of_its_run_in_any_order_of_registration(tickets, instance):
    ticket(tickets.stage_a_input, "pass", "other", "1.jpg", mission="other")
    rank(tickets, instance, 0, 1, mission="other")
    with rank_file(tickets.stage_a_output, "other", 0).open("a") as file:
        file.write("torn")
    keys = [rank_key(MISSION, number, 2) for number in (1, 0)]
    instance.add_dynamic_partitions(ranks.name, keys)

    done = run(tickets, instance, stage_a_ranks, lines_whole, tags=range_tags(*keys))

    (evaluation,) = done.get_asset_check_evaluations()
    assert (evaluation.passed, evaluation.metadata["checked"].value) == (True, 6)


def test_merge_with_another_number_of_ranks_deletes_the_earlier_keys_of_the_mission(tickets, instance):
    """Those of the configured number stay, because the sensor would register them again; those of other missions too."""
    kept = [rank_key(MISSION, 0, 1), rank_key("another", 0, 3), rank_key("another", 1, 3)]
    instance.add_dynamic_partitions(ranks.name, [*kept, *(rank_key(MISSION, number, 3) for number in range(3))])
    for number in range(2):
        assert rank(tickets, instance, number, 2).success

    assert merge(tickets, instance, world_size=2).success

    assert set(instance.get_dynamic_partitions(ranks.name)) == {*kept, rank_key(MISSION, 0, 2), rank_key(MISSION, 1, 2)}


def test_merge_ignores_lines_of_another_plan(tickets, instance):
    """ "The merge trusts a line only if it fits": another world size is another plan."""
    assert rank(tickets, instance, 0, 1).success

    done = merge(tickets, instance, world_size=2)

    assert not done.success
    said = failure_of(done, "stage_a_groups")
    assert "none of 3 groups could be written" in said
    assert "ranks that have not come to their end: 1" in said
    assert "ranks that worked on another plan: 0" in said


@pytest.mark.parametrize("keys", [["m"], ["m/1"], ["m/01of2"], ["m/0of2", "n/1of2"], ["m/0of2", "m/1of3"], ["m/0of0"]])
def test_keys_other_than_the_ranks_of_one_mission_are_refused(keys):
    with pytest.raises(WrongUsage, match="no ranks of one mission"):
        split_rank_keys(keys)


def test_key_contains_mission_rank_and_world_size():
    assert split_rank_keys([rank_key("3of4/件", 0, 12), rank_key("3of4/件", 11, 12)]) == ("3of4/件", [0, 11], 12)


# ---- metadata


def test_failed_groups_are_in_the_metadata_and_other_missions_keep_theirs(tickets, instance):
    """ "Group failures are listed with image and reason in the ledger, in the materialisation's metadata"."""
    other = "另一任务"
    for mission in (MISSION, other):
        ticket(tickets.stage_a_input, "pass", "bad", "blank.jpg", "fine.jpg", mission=mission)
        ticket(tickets.stage_a_input, "pass", "good", "good.jpg", mission=mission)
        assert rank(tickets, instance, 0, 1, mission=mission, summarizer=BLANK).success
        assert merge(tickets, instance, mission=mission, summarizer=BLANK).success

    assert "pass bad: blank.jpg: blank_answer" in metadata(instance, "stage_a_groups")["failed groups"]
    (tickets.stage_a_input / other / "审核通过" / "bad" / "blank.jpg").unlink()
    assert rank(tickets, instance, 0, 1, mission=other, summarizer=BLANK).success
    assert merge(tickets, instance, mission=other, summarizer=BLANK).success
    with Ledger(tickets.ledger) as ledger:
        items = [problem.item for problem in ledger.problems()]
    assert items == [f"{MISSION}/审核通过/bad", f"{MISSION}/审核通过/bad/blank.jpg"]


def test_mixed_ids_are_a_warning_in_the_metadata(tickets, instance):
    """ "Mixed ids in one directory: a warning"."""
    ticket(tickets.stage_a_input, "pass", "x", "QC-A-20250101-1-1.jpg", "QC-A-20250101-2-1.jpg")
    assert rank(tickets, instance, 0, 1).success
    assert merge(tickets, instance).success

    assert "审核通过/x" in metadata(instance, "stage_a_groups")["warnings"]
    with Ledger(tickets.ledger) as ledger:
        assert ledger.problems() == []


def test_folders_of_a_run_do_not_change_if_another_command_remembers_others(tickets, instance, tmp_path):
    """A command for another mission may remember an output folder while ranks of this mission run."""
    folders = {"input_dir": str(tickets.stage_a_input), "output_dir": str(tmp_path / "mine")}
    assert rank(tickets, instance, 0, 1, lines_whole, **folders).success
    put(tickets, "stage_a_input", tmp_path / "its input")
    put(tickets, "stage_a_output", tmp_path / "its output")

    done = merge(tickets, instance, groups_valid, **folders)

    assert done.success
    assert [event.passed for event in done.get_asset_check_evaluations()] == [True]
    assert len(output_file(tmp_path / "mine", MISSION).read_bytes().splitlines()) == 3
    assert not any((tmp_path / "its output").iterdir())


def test_check_finds_a_misaligned_record(tickets, instance):
    record = {
        "group_id": "g",
        "mission": MISSION,
        "label": "pass",
        "images": ["1.jpg", "2.jpg"],
        "per_image": {"image_1": "x"},
    }
    tickets.stage_a_output.mkdir(parents=True)
    output_file(tickets.stage_a_output, MISSION).write_text(json.dumps(record) + "\n")
    rank_file(tickets.stage_a_output, MISSION, 0).write_bytes(b'{"group_seq":0,"gro')

    done = dg.materialize(
        [stage_a_ranks, stage_a_groups, lines_whole, groups_valid], instance=instance, run_config=QUIET, raise_on_error=False,
        resources=test_resources(str(tickets.path)), selection=dg.AssetSelection.all_asset_checks(),
    )  # fmt: skip

    passed = {event.check_name: (event.passed, event.description) for event in done.get_asset_check_evaluations()}
    assert passed == {
        "groups_valid": (False, "coverage: 1"), "lines_whole": (False, "1 of 1 lines cannot be read"),
    }  # fmt: skip


# ---- claims


def test_mission_stays_claimed_between_ranks_and_merge_of_one_process(tickets, instance):
    """ "Locks are per asset and partition"; one claim per mission for the whole run."""
    assert rank(tickets, instance, 0, 1, claim_stays=True).success
    with Ledger(tickets.ledger) as ledger:
        assert claims(ledger) == [("stage_a", MISSION)]

    assert merge(tickets, instance).success
    with Ledger(tickets.ledger) as ledger:
        assert claims(ledger) == []


def test_failed_run_releases_its_claim(tickets, instance, monkeypatch):
    monkeypatch.setattr(Named, "__init__", lambda self: 1 / 0)

    assert not rank(tickets, instance, 0, 1, claim_stays=True).success

    with Ledger(tickets.ledger) as ledger:
        assert claims(ledger) == []


def test_ranks_and_merge_wait_only_for_runs_of_the_same_mission(tickets, instance, monkeypatch, capfd):
    """ "Locks are per asset and partition"."""
    with another_run(tickets, "stage_a", "another mission"):
        assert rank(tickets, instance, 0, 1).success
    for work in (lambda: rank(tickets, instance, 0, 1), lambda: merge(tickets, instance)):
        assert "waiting" not in capfd.readouterr().err
        with another_run(tickets, "stage_a", MISSION) as process:
            # The wait ends as soon as there is one.
            monkeypatch.setattr(
                claims_module,
                "time",
                SimpleNamespace(sleep=lambda _, p=process: p.communicate(), monotonic=time.monotonic),
            )
            assert work().success
        assert capfd.readouterr().err.count("waiting for run another") == 1


# ---- under torchrun


def test_first_rank_reports_the_ranks_of_other_processes(tickets, instance):
    """ "Only rank 0 opens the Dagster instance … merges and materialises"."""
    for number in range(2):
        assert rank(tickets, instance, number, 2, launch="one").success
    instance.wipe_assets([dg.AssetKey("stage_a_ranks")])

    assert merge(tickets, instance, world_size=2, launch="one").success

    records = instance.fetch_materializations(dg.AssetKey("stage_a_ranks"), limit=9).records
    assert [each.partition_key for each in records] == [rank_key(MISSION, 1, 2)]


def test_rank_of_another_start_has_not_ended(tickets, instance):
    for number, launch in enumerate(("one", "two")):
        assert rank(tickets, instance, number, 2, launch=launch).success

    assert merge(tickets, instance, world_size=2, launch="two").success

    assert metadata(instance, "stage_a_groups")["missing ranks"] == 1


def test_images_added_while_ranks_run_are_reported_without_waiting(tickets, instance, monkeypatch):
    """The lines of the ranks belong to the mission at their start, so no rank would ever end on the current plan."""
    waits = []
    monkeypatch.setattr(stage_a_groups_module, "wait_for_ranks", lambda *_, **__: waits.append(1) or [])
    assert rank(tickets, instance, 0, 2, launch="one").success
    ticket(tickets.stage_a_input, "pass", "new", "new.jpg")

    done = merge(tickets, instance, world_size=2, launch="one", wait_seconds=60)

    assert not done.success
    assert "ranks that worked on another plan: 0 (since then images" in failure_of(done, "stage_a_groups")
    assert waits == []
