"""Settings that a data root may contain, and settings that need the user's consent."""

import json
from itertools import pairwise

import pytest

from dagster_project.internals.instance import TEMPLATE
from imagemill.errors import ImagemillError, WrongUsage
from imagemill.store.trust import (
    NotTrusted,
    config_demands,
    dagster_demands,
    demands_of,
    record_consent,
    refuse_untrusted,
)

OWN = "{module: dagster_project.coordinator, class: DeferCoordinator, config: {max_concurrent_runs: 2}}"


def dagster_yaml(root, text):
    root.dagster_home.mkdir(exist_ok=True)
    file = root.dagster_home / "dagster.yaml"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    "text",
    [
        TEMPLATE.read_text(),
        "",
        "telemetry: {enabled: false}",
        f"run_coordinator: {OWN}",
        "run_launcher: {module: dagster, class: DefaultRunLauncher}",
        "storage: {sqlite: {base_dir: here}}",
        "storage: {postgres: {postgres_url: {env: URL}}}",
        "storage: {custom: {module: dagster_postgres, class: DagsterPostgresStorage, config: {postgres_url: x}}}",
        "python_logs: {python_log_level: INFO, managed_python_loggers: [root]}",
        "compute_logs: {module: dagster._core.storage.noop_compute_log_manager, class: NoOpComputeLogManager}",
        "run_retries: {enabled: true, max_retries: 3}\nconcurrency: {runs: {max_concurrent_runs: 2}}",
        "retention: {sensor: {purge_after_days: {skipped: 7}}}\nrun_queue: {max_concurrent_runs: 1}",
    ],
)
def test_storage_launcher_limits_retries_monitoring_telemetry_and_logs_need_no_consent(data_root, text):
    assert dagster_demands(dagster_yaml(data_root, text)) == []


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("run_launcher: {module: evil, class: Launcher}", "run_launcher"),
        ("run_launcher: {module: dagsterevil, class: Launcher}", "run_launcher"),
        ("run_launcher: {module: dagster.__main__, class: main}", "run_launcher"),
        ("run_launcher: {module: [dagster], class: main}", "run_launcher"),
        ("run_launcher: evil", "run_launcher"),
        ("run_coordinator: {module: dagster, class: Q, config: {a: [{module: evil, class: E}]}}", "run_coordinator"),
        ("storage: {custom: {module: evil, class: E}}", "storage.custom"),
        ("storage: {mysql: {mysql_url: x}}", "storage.mysql"),
        (
            "run_storage: {module: dagster._core.storage.legacy_storage, class: LegacyRunStorage, "
            "config: {run_storage: {module_name: evil, class_name: E, config_yaml: ''}}}",
            "run_storage",
        ),
        (
            "python_logs: {dagster_handler_config: {handlers: {x: {'()': subprocess.Popen, args: [id]}}}}",
            "python_logs.dagster_handler_config",
        ),
        ("python_logs: {python_log_level: INFO, other: 1}", "python_logs.other"),
        ("instance_class: {module: evil, class: E}", "instance_class"),
        ("secrets: {custom: {module: dagster, class: E}}", "secrets"),
        ("scheduler: {module: evil, class: E}", "scheduler"),
        ("auto_materialize: {run_tags: {'()': x}}", "auto_materialize"),
        ("unknown: 1", "unknown"),
        ("7: 1", "7"),
    ],
)
def test_anything_else_needs_consent(data_root, text, setting):
    """logging.config calls the object that `()` names."""
    (demand,) = dagster_demands(dagster_yaml(data_root, text))
    assert demand.setting == setting
    assert "\n" not in str(demand)


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("", []),
        ("threads: 2\nsummarizer: {kind: transformers}", []),
        ("summarizer: {kind: 'evil:Evil'}", ["summarizer.kind"]),
        ("object_storage: {endpoint: https://evil}", ["object_storage.endpoint"]),
        ("object_storage: {}", []),
        ("push: {to: x}\nengine: {address: ray://evil}", ["push", "engine.address"]),
        ("summarizer: [1]\nengine: x", []),
    ],
)
def test_classes_and_addresses_of_imagemill_yaml_need_consent(data_root, text, settings):
    data_root.config_file.write_text(text)
    assert [demand.setting for demand in config_demands(data_root.config_file)] == settings


def test_self_reference_and_alias_bomb_end(data_root):
    bomb = "a: &a [x]\n" + "".join(
        f"{c}: &{c} [*{p}, *{p}, *{p}, *{p}, *{p}, *{p}]\n" for p, c in pairwise("abcdefghijk")
    )
    bomb = bomb.replace("k: &k", "retention: &k")
    assert "retention" not in [d.setting for d in dagster_demands(dagster_yaml(data_root, bomb))]
    assert dagster_demands(dagster_yaml(data_root, "sensors: &s {x: *s}")) == []


@pytest.mark.parametrize("text", ["{", "[[[[" * 5000, "- a list", "text", "\x00", "a: !!python/object:os.system {}"])
def test_file_that_is_no_mapping_is_refused_and_named(data_root, text):
    file = dagster_yaml(data_root, text)
    with pytest.raises(WrongUsage, match="not valid") as refused:
        dagster_demands(file)
    assert refused.value.where == file


def test_consent_holds_for_the_file_as_it_is_and_outside_of_the_root(data_root, monkeypatch, tmp_path):
    file = dagster_yaml(data_root, "run_launcher: {module: evil, class: E}")
    data_root.config_file.write_text("summarizer: {kind: 'evil:Evil'}")
    demands = demands_of(data_root)
    with pytest.raises(NotTrusted, match="need your consent") as refused:
        refuse_untrusted(demands, data_root, "…")
    assert "run_launcher" in str(refused.value)
    assert "evil:Evil" in str(refused.value)
    assert f"imagemill trust {data_root.path}" in str(refused.value)

    store = record_consent([demand.file for demand in demands])

    assert not store.is_relative_to(data_root.path)
    assert json.loads(store.read_text())[str(file)].startswith("sha256:")
    refuse_untrusted(demands, data_root, "…")
    file.write_text("run_launcher: {module: worse, class: E}")
    with pytest.raises(NotTrusted, match="run_launcher"):
        refuse_untrusted(demands, data_root, "…")


@pytest.mark.parametrize("text", ["", "[]", "{", "null"])
def test_damaged_store_contains_no_consent(data_root, text):
    file = dagster_yaml(data_root, "run_launcher: {module: evil, class: E}")
    record_consent([file]).write_text(text)
    with pytest.raises(NotTrusted):
        refuse_untrusted(dagster_demands(file), data_root, "…")
    record_consent([file])
    refuse_untrusted(dagster_demands(file), data_root, "…")


def test_consent_that_cannot_be_recorded_names_the_folder_to_make_writable(data_root, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))

    with pytest.raises(ImagemillError, match="consent cannot be recorded") as caught:
        record_consent([dagster_yaml(data_root, "{}")])

    assert str(tmp_path / "file") in str(caught.value.do)
    assert "XDG_CONFIG_HOME" in str(caught.value.do)
