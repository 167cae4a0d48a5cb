"""dagster_project/internals/history_state.py: what makes a history another one for a data root.

That a run compares it is tested in tests/cli/test_unchanged.py, and with PostgreSQL in tests/cli/test_postgres.py.
"""

import shutil

import dagster as dg
import pytest

from dagster_project.internals.history_state import _postgres, history_state
from dagster_project.internals.instance import open_instance
from resources.dagster_internals.events import report_without_run


def test_state_is_of_the_keys_of_one_root_in_a_shared_history(data_root, tmp_path, monkeypatch):
    """Another root of the history may add images without making this one's next run take the whole way."""
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    data_root.config_file.write_text("name: animals\n")

    def changed(instance, change):
        before = history_state(data_root)
        change(instance)
        return history_state(data_root) != before

    with open_instance(data_root) as instance:
        report_without_run(instance, [dg.AssetMaterialization(["animals", "dinov3_npy"], partition="a")])
        assert history_state(data_root).id == instance.run_storage.get_run_storage_id()
        for added in ("plants/images", "images", "animalsandplants/images"):
            assert not changed(instance, lambda it, name=added: it.add_dynamic_partitions(name, ["a"]))
        for key in (["plants", "dinov3_npy"], ["dinov3_npy"]):
            one = dg.AssetMaterialization(key, partition="a")
            assert not changed(instance, lambda it, event=one: report_without_run(it, [event]))
        assert changed(instance, lambda it: it.add_dynamic_partitions("animals/images", ["a"]))
        assert changed(instance, lambda it: it.wipe_assets([dg.AssetKey(["animals", "dinov3_npy"])]))


def test_copy_of_a_history_has_its_id_and_another_state(data_root):
    with open_instance(data_root):
        pass
    before = history_state(data_root)
    shutil.move(data_root.dagster_home, data_root.path / "moved")
    shutil.copytree(data_root.path / "moved", data_root.dagster_home)

    after = history_state(data_root)
    assert after.id == before.id
    assert after.state != before.state


@pytest.mark.parametrize("text", [None, "storage: {custom: {module: elsewhere, class: Storage, config: {}}}", "{"])
def test_history_that_is_not_there_or_is_kept_elsewhere_has_no_state(data_root, text):
    if text:
        data_root.dagster_home.mkdir()
        (data_root.dagster_home / "dagster.yaml").write_text(text)
    assert history_state(data_root) is None


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"postgres_db": {"username": "u"}, "auth_provider": {"gcp_wif": {}}},
        {"postgres_url": {"env": "NOT_SET"}},
        {"postgres_db": "x"},
    ],
)
def test_settings_that_only_dagster_understands_are_left_to_it(config):
    with pytest.raises(LookupError):
        _postgres({"postgres": config})


def test_database_is_that_of_the_settings(monkeypatch):
    monkeypatch.setenv("SECRET", "s")
    assert _postgres({"sqlite": {"base_dir": "x"}}) is None
    assert _postgres({"postgres": {"postgres_url": "postgresql+psycopg2://u@h/d"}}) == {"dsn": "postgresql://u@h/d"}
    fields = {
        "username": "u",
        "password": {"env": "SECRET"},
        "hostname": "h",
        "db_name": "d",
        "params": {"sslmode": "require"},
    }
    assert _postgres({"postgres": {"postgres_db": fields}}) == {
        "user": "u", "password": "s", "host": "h", "port": None, "dbname": "d", "sslmode": "require",
    }  # fmt: skip
