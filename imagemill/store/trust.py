"""Consent to settings inside a data root that can run code or send data elsewhere.

A data root may come from someone else. Dangerous settings in it need the user's consent, which is recorded outside of
it:

    ~/.config/imagemill/trust.json      {"/data/.dagster/dagster.yaml": "sha256:..."}: a changed file needs consent again

Settings given by the user need no consent: DAGSTER_HOME, --config, --summarizer.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs
import yaml

from imagemill.domain.layout import DataRoot
from imagemill.errors import ImagemillError, WrongUsage
from imagemill.formats.manifest import nested_value
from imagemill.fs.atomic import write_bytes_atomic

DAGSTER_CONFIG = "dagster.yaml"

# Packages from which a data root may name storage, run coordinator, launcher and log classes.
TRUSTED_PACKAGES = frozenset({"dagster", "dagster_postgres", "dagster_project"})

_CLASS_SETTINGS = frozenset(
    {
        "compute_logs", "defs_state_storage", "event_log_storage", "local_artifact_storage", "run_coordinator",
        "run_launcher", "run_storage", "schedule_storage",
    }
)  # fmt: skip
_PLAIN_SETTINGS = frozenset(
    {
        "auto_materialize", "backfills", "code_servers", "concurrency", "freshness", "nux", "retention", "run_monitoring",
        "run_queue", "run_retries", "schedules", "sensors", "telemetry",
    }
)  # fmt: skip
_PLAIN_LOG_SETTINGS = frozenset({"python_log_level", "managed_python_loggers"})
_STORAGES = frozenset({"sqlite", "postgres"})
# Keys that name a class or a factory, at any depth of a setting.
_NAMES_OF_CODE = frozenset({"()", "class", "class_name", "ext", "factory", "module", "module_name"})

# Settings of imagemill.yaml that send data elsewhere.
_SENDING = (("object_storage", "endpoint"), ("push",), ("engine", "address"))
SUMMARIZER, ENGINE = "summarizer.kind", "engine.address"
OF_STORAGE = frozenset({"object_storage.endpoint", "push"})


@dataclass(frozen=True, slots=True)
class Demand:
    """A setting that needs consent; `value` is its text for people, on one line."""

    file: Path
    setting: str
    value: str

    def __str__(self) -> str:
        return f"{self.setting}: {self.value}"


class NotTrusted(ImagemillError, PermissionError):
    """A data root contains settings that need the user's consent."""


def dagster_demands(file: Path) -> list[Demand]:
    """Return the settings of an instance configuration that need consent. Raises WrongUsage if the file is not YAML."""
    settings = read_mapping(file)
    return [Demand(file, name, _shown(value)) for name, value in _dangerous(settings)]


def config_demands(file: Path) -> list[Demand]:
    """Return the settings of `imagemill.yaml` that need consent. Raises WrongUsage if the file is not YAML."""
    settings = read_mapping(file)
    kind = nested_value(settings, "summarizer", "kind")
    found = [(SUMMARIZER, kind)] if isinstance(kind, str) and ":" in kind else []
    found += [(".".join(path), value) for path in _SENDING if (value := nested_value(settings, *path)) is not None]
    return [Demand(file, name, _shown(value)) for name, value in found]


def demands_of(root: DataRoot) -> list[Demand]:
    """Return all settings inside a data root that need consent."""
    return [*dagster_demands(root.dagster_home / DAGSTER_CONFIG), *config_demands(root.config_file)]


def refuse_untrusted(demands: Sequence[Demand], root: DataRoot, otherwise: str) -> None:
    """Return if the user has consented to the present content of all files of the demands.

    Args:
        demands: the settings.
        root: the data root, for the message.
        otherwise: another way to consent, for the message.

    Raises:
        NotTrusted: naming each setting without consent.
    """
    consents = _read_consents()
    open_demands = [demand for demand in demands if consents.get(_key(demand.file)) != _digest(demand.file)]
    if open_demands:
        raise NotTrusted(
            "settings inside the data root need your consent: they can run code or send data",
            where=", ".join(dict.fromkeys(str(demand.file) for demand in open_demands)),
            why="; ".join(map(str, open_demands)),
            do=f"if you trust its author: imagemill trust {root.path}; otherwise {otherwise}",
        )


def record_consent(files: Sequence[Path]) -> Path:
    """Record consent to the present content of these files; return the file that contains all consents."""
    consents = _read_consents() | {_key(file): _digest(file) for file in files}
    store = _store()
    try:
        write_bytes_atomic(store, json.dumps(consents, indent=2, sort_keys=True).encode() + b"\n")
    except OSError as error:
        do = f"make {store.parent} writable, or set XDG_CONFIG_HOME to a writable folder"
        raise ImagemillError("consent cannot be recorded", where=store, why=error.strerror, do=do) from error
    return store


def read_mapping(file: Path) -> dict[str, Any]:
    """Return the YAML mapping in a file, empty if there is no file.

    Raises:
        WrongUsage: if it cannot be read, is not YAML, or is not a mapping.
    """
    try:
        value = yaml.safe_load(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise _unreadable(file, str(error) or type(error).__name__) from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _unreadable(file, f"it contains a {type(value).__name__} instead of settings")
    return value


def _unreadable(file: Path, why: str) -> WrongUsage:
    return WrongUsage(
        f"{file.name} is not valid", where=file, why=" ".join(why.split()), do="correct or delete the file"
    )


def _dangerous(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield names and values of the settings of Dagster that are not known to be harmless."""
    for name, value in settings.items():
        if name == "storage" and isinstance(value, dict):
            yield from _dangerous_storage(value)
        elif name == "python_logs" and isinstance(value, dict):
            yield from ((f"{name}.{key}", value[key]) for key in value if key not in _PLAIN_LOG_SETTINGS)
        elif name in _CLASS_SETTINGS:
            yield from _dangerous_class(name, value)
        elif name not in _PLAIN_SETTINGS or _names_code(value):
            yield str(name), value


def _dangerous_storage(value: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for kind, config in value.items():
        if kind == "custom":
            yield from _dangerous_class("storage.custom", config)
        elif kind not in _STORAGES or _names_code(config):
            yield f"storage.{kind}", config


def _dangerous_class(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a class of another package, or one of ours whose configuration names further classes."""
    module = value.get("module") if isinstance(value, dict) else None
    package, *inner = str(module).split(".")
    known = package in TRUSTED_PACKAGES and all(part.isidentifier() and not part.startswith("__") for part in inner)
    if value is not None and (not known or _names_code(value.get("config"))):
        yield name, value


def _names_code(value: Any) -> bool:
    """Return whether a mapping at any depth has a key that names a class or a factory."""
    left, seen = [value], set()
    while left:
        item = left.pop()
        if not isinstance(item, (dict, list)) or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, dict):
            if not _NAMES_OF_CODE.isdisjoint(item):
                return True
            left += item.values()
        else:
            left += item
    return False


def _shown(value: Any) -> str:
    """Return a value on one line; YAML aliases keep self-references finite."""
    text = " ".join(yaml.safe_dump(value, default_flow_style=True, width=1_000_000, allow_unicode=True).split())
    text = text.removesuffix(" ...")
    return text if len(text) <= 200 else text[:199] + "…"


def _store() -> Path:
    return platformdirs.user_config_path("imagemill") / "trust.json"


def _read_consents() -> dict[str, str]:
    """Return the consents by file; a damaged file counts as empty."""
    try:
        found = json.loads(_store().read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _key(file: Path) -> str:
    return str(file.resolve())


def _digest(file: Path) -> str:
    try:
        return "sha256:" + hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise _unreadable(file, str(error)) from error
