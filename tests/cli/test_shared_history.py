"""Several data roots in one Dagster history, as DAGSTER_HOME names it.

Spec: docs/spec/conventions.md#several-data-roots
"""

import json
import os
import shutil
import signal
import sqlite3
from contextlib import contextmanager

import dagster as dg
import pytest
from dagster._core.storage.dagster_run import NOT_FINISHED_STATUSES

from imagemill.domain.layout import DataRoot
from tests.helpers.earlier_release import undo_version_12
from tests.helpers.product import imagemill, photos, start
from tests.helpers.ui import Ui, free_port, last_tick, launch, locations, running_ui, switch_on, wait_until

KINDS = ["dinov3_npy", "t5_hidden", "vae_latents"]


@pytest.fixture
def home(tmp_path):
    return tmp_path / "history"


def made(folder, name=None, images=3):
    """Return a data root with images and, if given, a name."""
    root = DataRoot(folder)
    photos(root.approved, images)
    rename(root, name)
    return root


def rename(root, name):
    root.config_file.write_text(f"name: {name}\n" if name else "")


def run(root, home, *words):
    return imagemill(*(words or ("run",)), "--data-root", root.path, stub=True, DAGSTER_HOME=home)


@contextmanager
def history(home):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DAGSTER_HOME", str(home))
        with dg.DagsterInstance.get() as instance:
            yield instance


def known(home):
    """Return partition sets with their keys, and the assets with theirs, of a history."""
    with history(home) as instance:
        sets = ("images", "animals/images", "cars/images")
        keys = instance.all_asset_keys()
        assets = {key.to_user_string(): sorted(instance.get_materialized_partitions(key)) for key in keys}
        return {name: sorted(found) for name in sets if (found := instance.get_dynamic_partitions(name))}, assets


def refused(root, home, what):
    before = known(home)
    done = run(root, home)
    assert done.returncode == 2, done.stdout + done.stderr
    assert what in done.stderr
    assert known(home) == before
    return done.stderr


def test_roots_of_different_names_have_their_own_partitions_and_assets(tmp_path, home):
    animals, cars = made(tmp_path / "animals", "animals", 3), made(tmp_path / "cars", "cars", 2)
    plain = made(tmp_path / "plain", images=4)
    for root in (animals, cars, plain):
        done = run(root, home)
        assert done.returncode == 0, done.stdout + done.stderr

    sets, assets = known(home)
    names = [f"photo{n:04d}" for n in range(4)]
    assert sets == {"animals/images": names[:3], "cars/images": names[:2], "images": names}
    for kind in KINDS:
        assert assets[f"animals/{kind}"] == names[:3]
        assert assets[f"cars/{kind}"] == names[:2]
        assert assets[kind] == names
    assert "animals/approved_images" in assets
    with history(home) as instance:
        tags = {run.tags.get("imagemill/root") for run in instance.get_runs()}
    assert tags == {"animals", "cars", None}
    again = run(animals, home)
    assert again.returncode == 0
    assert "3 skipped" in again.stdout


def test_root_that_would_mix_with_another_is_refused(tmp_path, home):
    animals, plain = made(tmp_path / "animals", "animals"), made(tmp_path / "plain")
    assert run(animals, home).returncode == run(plain, home).returncode == 0

    text = refused(made(tmp_path / "second"), home, "a second data root without a name")
    assert "set a name, such as name: animals" in text
    refused(made(tmp_path / "third", "animals"), home, "the name animals is in use")
    assert not DataRoot(tmp_path / "third").ledger.exists()
    rename(animals, "cats")
    refused(animals, home, "the name of the data root was animals, and is now cats")
    rename(animals, None)
    refused(animals, home, "the name of the data root was animals, and is now no name")


def test_copy_of_a_root_gets_an_id_and_a_name_of_its_own(tmp_path, home):
    animals = made(tmp_path / "animals", "animals")
    assert run(animals, home).returncode == 0
    copy = DataRoot(tmp_path / "copy")
    shutil.copytree(animals.path, copy.path)
    rename(copy, "cars")

    text = refused(copy, home, "two data roots have the same id")
    assert "imagemill repair --new-id --apply" in text
    assert "nothing was changed" in run(copy, home, "repair", "--new-id").stdout
    refused(copy, home, "two data roots have the same id")
    assert run(copy, home, "repair", "--new-id", "--apply").returncode == 0

    done = run(copy, home)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(known(home)[0]) == {"animals/images", "cars/images"}


def test_root_that_was_moved_goes_on(tmp_path, home):
    animals = made(tmp_path / "animals", "animals")
    assert run(animals, home).returncode == 0
    moved = DataRoot(tmp_path / "moved")
    animals.path.rename(moved.path)

    assert run(moved, home).returncode == 0
    refused(made(tmp_path / "other", "animals"), home, f"another data root of this history has it: {moved.path}")


def test_ledger_that_was_lost_keeps_its_id(tmp_path, home):
    animals = made(tmp_path / "animals", "animals")
    assert run(animals, home).returncode == 0
    shutil.rmtree(animals.state)

    done = run(animals, home)
    assert done.returncode == 0, done.stdout + done.stderr


def as_of_previous_release(root):
    with sqlite3.connect(root.ledger) as db:
        undo_version_12(db)
        db.execute("DELETE FROM settings WHERE name = 'root.id'")
        db.execute("PRAGMA user_version = 10")
    for copy in root.path.glob("*/.imagemill.json"):
        document = json.loads(copy.read_bytes())
        del document["settings"]["root.id"]
        copy.write_text(json.dumps(document))


def test_history_of_an_earlier_release_belongs_to_the_root_whose_images_it_has(tmp_path, home):
    """That release did not list the roots of a history."""
    root, other = made(tmp_path / "root"), made(tmp_path / "other", images=5)
    assert run(root, home).returncode == 0
    as_of_previous_release(root)
    with history(home) as instance:
        instance.daemon_cursor_storage.set_cursor_values({"imagemill/roots": "[]"})
    before, runs = known(home), runs_of(home)
    for image in other.approved.iterdir():
        image.rename(image.with_name(f"other_{image.name}"))

    refused(other, home, "the history has images of another data root")
    done = run(root, home)
    assert done.returncode == 0, done.stdout + done.stderr
    assert known(home) == before
    added = [made for run_id, made in runs_of(home).items() if run_id not in runs]
    assert added == [{"stage2_jsonl", "bucket_shards"}]  # as after every change of the release: nothing is made again
    refused(other, home, "a second data root without a name")


def runs_of(home):
    """Return the assets of each run of a history."""
    with history(home) as instance:
        runs = instance.get_runs()
    return {run.run_id: {key.to_user_string() for key in run.asset_selection or ()} for run in runs}


def test_name_changes_nothing_in_a_history_of_ones_own(tmp_path):
    root = made(tmp_path / "animals", "animals")

    assert imagemill("run", "--data-root", root.path, stub=True).returncode == 0
    sets, assets = known(root.dagster_home)
    assert set(sets) == {"images"}
    assert "dinov3_npy" in assets


@pytest.mark.parametrize("name", ["Animals", "9lives", "a/b", "a-b", ""])
def test_name_that_cannot_begin_a_key_is_refused(tmp_path, home, name):
    root = made(tmp_path / "animals")
    root.config_file.write_text(f"name: '{name}'\n")

    done = run(root, home)
    assert done.returncode == 2
    assert "name" in done.stderr


def test_dead_run_of_another_root_does_not_block_the_queue(tmp_path, home):
    """That root need not have a service, and its next command may come much later."""
    animals, cars = made(tmp_path / "animals", "animals", 40), made(tmp_path / "cars", "cars")
    killed = start("run", "--data-root", animals.path, DAGSTER_HOME=home, IMAGEMILL_STUB_SLEEP=1)
    wait_until(lambda: killed.poll() is not None or list(animals.derived.glob("*/*.npy")), 60, "the first files exist")
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()

    def unfinished():
        with history(home) as instance:
            return instance.get_runs(dg.RunsFilter(statuses=NOT_FINISHED_STATUSES))

    assert [run.tags["imagemill/root"] for run in unfinished()] == ["animals"]

    assert run(cars, home).returncode == 0
    assert unfinished() == []
    assert run(animals, home).returncode == 0


def test_root_whose_configuration_cannot_be_read_is_not_listed_without_its_name(tmp_path, home):
    animals = made(tmp_path / "animals", "animals")
    animals.config_file.write_text("name: animals\nkinds: [")

    process = start("ui", "--data-root", animals.path, "--port", free_port(), DAGSTER_HOME=home)
    try:
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()

    assert (process.returncode, "imagemill.yaml" in output) == (2, True), output
    with history(home) as instance:
        assert instance.daemon_cursor_storage.get_cursor_values({"imagemill/roots"}) == {}


RELOAD = "mutation($name: String!) { reloadRepositoryLocation(repositoryLocationName: $name) { __typename } }"


@pytest.mark.slow
def test_broken_root_keeps_its_keys_and_the_other_one_works(tmp_path, home):
    """A code server keeps the name with which its root was listed, also if the file is edited and the location reloaded."""
    animals, cars = made(tmp_path / "animals", "animals"), made(tmp_path / "cars", "cars")
    assert run(animals, home).returncode == run(cars, home).returncode == 0
    photos(cars.approved, 5)
    before = known(home)[0]
    animals.config_file.write_text("name: animals\nkinds: [no_such_kind]")

    def ticked(ui, name):
        tick = last_tick(ui, name)
        return tick and tick["status"] != "STARTED" and (tick["status"], str(tick["error"]))

    with running_ui(animals, cars, log=tmp_path / "ui.log", DAGSTER_HOME=home) as ui:
        keys = found(ui)
        assert keys.keys() == {"animals", "cars"}
        assert all(key.startswith(f"{name}/") for name in keys for key in keys[name])
        for name in keys:
            switch_on(ui, name)
        status, message = wait_until(lambda: ticked(ui, "animals"), 60, "the sensor of the broken root ticks")
        assert (status, "imagemill.yaml" in message) == ("FAILURE", True)
        assert wait_until(lambda: ticked(ui, "cars"), 60, "the sensor of the other root ticks")[0] in {
            "SUCCESS",
            "SKIPPED",
        }
        launch(ui, "cars", "photo0003")

        for text in ("name: cars\n", "name: animals\nkinds: ["):
            animals.config_file.write_text(text)
            ui.graphql(RELOAD, name="animals")
            assert locations(ui) == dict.fromkeys(("animals", "cars"), "RepositoryLocation")
            assert found(ui)["animals"] == keys["animals"]
        rename(animals, "animals")
        launch(ui, "animals", "photo0000")
    sets = known(home)[0]
    assert sets["animals/images"] == before["animals/images"]
    assert set(sets) == set(before)


ASSETS = """{ repositoriesOrError { ... on RepositoryConnection { nodes {
    location { name } assetNodes { assetKey { path } }
} } } }"""


def test_ui_shows_each_root_in_a_location_of_its_own(tmp_path, home):
    roots = [made(tmp_path / "animals", "animals"), made(tmp_path / "plain")]
    port = free_port()
    chosen = [word for root in roots for word in ("--data-root", root.path)]
    process = start("ui", *chosen, "--port", port, DAGSTER_HOME=home)
    try:
        ui = Ui(f"http://127.0.0.1:{port}")
        wait_until(
            lambda: process.poll() is not None or found(ui).keys() == {"animals", "imagemill"}, 180, "both locations"
        )
        assert process.poll() is None, process.communicate()[0]
        keys = found(ui)
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 143
    assert "animals/vae_latents" in keys["animals"]
    assert {key.removeprefix("animals/") for key in keys["animals"]} == keys["imagemill"]
    assert all(key.startswith("animals/") for key in keys["animals"])


def found(ui):
    """Return the asset keys by location, as far as they are loaded."""
    try:
        nodes = ui.graphql(ASSETS)["repositoriesOrError"].get("nodes", ())
    except OSError:
        return {}
    return {
        each["location"]["name"]: {"/".join(node["assetKey"]["path"]) for node in each["assetNodes"]} for each in nodes
    }


def test_several_roots_of_a_ui_need_a_common_history(tmp_path):
    roots = [made(tmp_path / name, name) for name in ("animals", "cars")]
    chosen = [word for root in roots for word in ("--data-root", root.path)]

    done = imagemill("ui", *chosen)
    assert done.returncode == 2
    assert "set DAGSTER_HOME to the folder of their history" in done.stderr
    done = imagemill("ui", *chosen, "--config", tmp_path / "imagemill.yaml", DAGSTER_HOME=tmp_path / "history")
    assert done.returncode == 2
    assert "write an imagemill.yaml into each data root" in done.stderr
