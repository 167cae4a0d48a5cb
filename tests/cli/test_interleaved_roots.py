"""Two data roots in one history on PostgreSQL, with the services of the UI, sensors and commands at the same time.

Spec: docs/spec/conventions.md#several-data-roots
"""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from imagemill.domain.embedding_specs import embedding_specs
from imagemill.domain.layout import DataRoot
from imagemill.fs.owners import is_dead_in
from imagemill.store.ledger import Ledger
from tests.helpers.postgres import OURS, PostgresServer, postgres_server, program
from tests.helpers.product import PROJECT, SEARCH_PATH, command, imagemill, photos
from tests.helpers.ui import Ui, last_tick, running_ui, switch_on, wait_until

pytest.importorskip("dagster_postgres")

NAMES = ("animals", "cars")
KINDS = {spec.kind: spec.folder for spec in embedding_specs()}
UNSHARE = ["unshare", "--uts", *([] if os.getuid() == 0 else ["--user", "--map-root-user"])]
# Longest wait for a dead run, and the interval at which Dagster reads its queue.
WAIT_SECONDS, QUEUE_SECONDS = 5, 5

can_unshare = pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode != 0,
    reason="host names cannot be changed here (they need root or user namespaces)",
)

COUNTS = """query($keys: [AssetKeyInput!]) { assetNodes(assetKeys: $keys) { assetKey { path } partitionStats {
    numMaterialized numPartitions numFailed } } }"""


@dataclass(frozen=True)
class Deployment:
    """Two roots and their history.

    Attributes:
        roots: the data roots by name.
        home: DAGSTER_HOME.
        server: the server of the history.
        database: its database.
    """

    roots: dict[str, DataRoot]
    home: Path
    server: PostgresServer
    database: str

    def query(self, sql: str) -> list[list[str]]:
        return self.server.query(sql, self.database)

    def column(self, sql: str) -> list[str]:
        return [value for (value,) in self.query(sql)]

    def arrive(self, first: int, count: int) -> None:
        """Add images to both roots. Their names begin with that of the root, so that a foreign one is recognised."""
        for name, root in self.roots.items():
            photos(root.approved, count, prefix=name, first=first)

    @contextmanager
    def started(self, name: str, *, host: str = "", sleep: float = 0):
        """Start `imagemill run` of a root, also under another host name; kill what is left of it at the end."""
        words = command("run", "--data-root", self.roots[name].path, stub=True)
        if host:
            words = [*UNSHARE, "sh", "-c", 'hostname "$0"; exec "$@"', host, *words]
        kept = {key: value for key, value in os.environ.items() if key != "IMAGEMILL_DATA_ROOT"}
        variables = {"DAGSTER_HOME": str(self.home), "PYTHONPATH": SEARCH_PATH, "IMAGEMILL_STUB_SLEEP": str(sleep)}
        process = subprocess.Popen(
            words, cwd=PROJECT, env={**kept, **variables}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()

    # ---- the history

    def working(self, name: str, *, command: bool) -> str | None:
        """Return the run of a root that has reported an image of it, of a command or of a service; None without one."""
        found = self.column(
            "SELECT DISTINCT r.run_id FROM runs r JOIN event_logs e ON e.run_id = r.run_id "
            f"JOIN run_tags t ON t.run_id = r.run_id AND t.key = 'imagemill/root' AND t.value = '{name}' "
            f"WHERE r.status = 'STARTED' AND e.dagster_event_type = 'ASSET_MATERIALIZATION' AND e.partition LIKE '{name}%' "
            f"AND {'' if command else 'NOT '}EXISTS (SELECT 1 FROM run_tags c WHERE c.run_id = r.run_id "
            "AND c.key = 'imagemill/command')"
        )
        return found[0] if found else None

    def is_complete(self, name: str) -> bool:
        """Return whether every image of a root has all arrays."""
        root = self.roots[name]
        ids = {path.stem for path in root.approved.glob("*.jpg")}
        return all({path.stem for path in (root.derived / folder).glob("*.npy")} == ids for folder in KINDS.values())

    def tag(self, run_id: str, key: str) -> str:
        (value,) = self.column(f"SELECT value FROM run_tags WHERE run_id = '{run_id}' AND key = '{key}'")
        return value

    def process_of(self, name: str, run_id: str) -> int:
        """Return the id of the process that executes a run."""
        lock = self.tag(run_id, "imagemill/owner").partition("/")[0]
        return json.loads((self.roots[name].owners / lock).read_bytes())["pid"]

    def unfinished(self) -> list[list[str]]:
        """Return the runs that are queued or in progress."""
        return self.query("SELECT run_id, status FROM runs WHERE status NOT IN ('SUCCESS', 'FAILURE', 'CANCELED')")

    def dump(self) -> str:
        """Return the contents of all tables."""
        words = [program("pg_dump"), "--data-only", "--inserts", self.server.url(self.database)]
        done = subprocess.run(words, check=True, capture_output=True, text=True)
        # Lines of psql contain random words.
        return "\n".join(line for line in done.stdout.splitlines() if not line.startswith("\\"))


@pytest.fixture(scope="module")
def server():
    with postgres_server() as server:
        yield server


@pytest.fixture
def deployment(server, tmp_path):
    database = tmp_path.name
    home = tmp_path / "history"
    home.mkdir()
    settings = yaml.safe_load((PROJECT / "dagster_project" / "dagster.yaml").read_text())
    settings["storage"] = {"custom": yaml.safe_load(OURS % server.create(database))}
    settings["run_coordinator"]["config"]["max_concurrent_runs"] = 4
    (home / "dagster.yaml").write_text(yaml.safe_dump(settings))
    roots = {name: DataRoot(tmp_path / name) for name in NAMES}
    for name, root in roots.items():
        root.path.mkdir()
        root.config_file.write_text(f"name: {name}\n")
    return Deployment(roots, home, server, database)


def assert_resumed(deployment: Deployment, name: str, dead: str, output: str) -> None:
    """The command has reported the dead run as ended before its own began, and waited neither for it nor for its lease."""
    assert f"waiting for run {dead}" not in output
    ((status, ended),) = deployment.query(f"SELECT status, end_time FROM runs WHERE run_id = '{dead}'")
    assert status == "FAILURE"
    ((run_id, began, first), *_) = deployment.query(
        "SELECT r.run_id, r.start_time, min(extract(epoch FROM e.timestamp)) FROM runs r "
        "JOIN run_tags t ON t.run_id = r.run_id AND t.key = 'imagemill/command' "
        f"JOIN run_tags n ON n.run_id = r.run_id AND n.key = 'imagemill/root' AND n.value = '{name}' "
        "JOIN event_logs e ON e.run_id = r.run_id AND e.dagster_event_type = 'ASSET_MATERIALIZATION' "
        f"WHERE r.start_time >= {ended} GROUP BY 1, 2 ORDER BY 2"
    )
    wait = float(first) - float(began)
    print(f"{name}: first image of {run_id}, which follows the dead {dead}, after {wait:.1f} s")
    assert wait < WAIT_SECONDS


def assert_pool_was_free(deployment: Deployment, dead: str) -> None:
    """The next run of the queue started soon after the end of the dead run, or of the command that resumed it."""
    ((ended,),) = deployment.query(f"SELECT end_time FROM runs WHERE run_id = '{dead}'")
    started = "SELECT run_id, extract(epoch FROM timestamp) AS at FROM event_logs WHERE dagster_event_type = 'PIPELINE_STARTING'"
    ((run_id, start), *_) = deployment.query(f"SELECT * FROM ({started}) s WHERE at > {ended} ORDER BY at")
    ((free,),) = deployment.query(f"SELECT max(end_time) FROM runs WHERE end_time < {start}")
    wait = float(start) - float(free)
    print(
        f"{run_id} left the queue {wait:.1f} s after the run before it, {float(start) - float(ended):.1f} s after {dead}"
    )
    assert wait < QUEUE_SECONDS + WAIT_SECONDS


def assert_exact(deployment: Deployment, ui: Ui | None = None) -> None:
    """History, ledger and disk of each root agree, and contain nothing of the other one."""
    for name, root in deployment.roots.items():
        ids = {path.stem for path in root.approved.glob("*.jpg")}
        sets = deployment.column(
            f"SELECT partition FROM dynamic_partitions WHERE partitions_def_name = '{name}/images'"
        )
        assert sorted(sets) == sorted(ids)
        with Ledger(root.ledger, read_only=True) as ledger:
            for kind, folder in KINDS.items():
                assert materialized(deployment, name, kind) == ids, (name, kind)
                assert {path.stem for path in (root.derived / folder).glob("*.npy")} == ids
                assert ledger.ids_with_file(kind) == ids
            # A process that is killed after the last image of a kind leaves leases behind, which the next claim ignores.
            assert [o for (o,) in set(ledger.cells("leases", ["owner"])) if not is_dead_in(root.owners, o)] == []
        assert materialized(deployment, name, "approved_images") == ids
        records = [json.loads(line)["image_id"] for line in root.stage2_jsonl.read_text().splitlines()]
        assert sorted(records) == sorted(ids)
        packed = {path.parent.name.removeprefix("bucket_") for path in root.shards.glob("bucket_*/*.tar")}
        assert packed <= materialized(deployment, name, "bucket_shards")
        assert not list(root.path.rglob(".tmp-*"))
    own = "|".join(NAMES)
    foreign = deployment.query(
        "SELECT DISTINCT asset_key, partition FROM event_logs WHERE asset_key IS NOT NULL AND "
        f"asset_key !~ '^\\[\"({own})\", '"
    )
    assert foreign == []
    for name, other in zip(NAMES, reversed(NAMES), strict=True):
        key = f'["{name}", %'
        assert (
            deployment.query(
                f"SELECT partition FROM event_logs WHERE asset_key LIKE '{key}' AND partition LIKE '{other}%'"
            )
            == []
        )
        assert (
            deployment.query(
                "SELECT r.run_id FROM runs r JOIN run_tags n ON n.run_id = r.run_id AND n.key = 'imagemill/root' "
                f"JOIN run_tags t ON t.run_id = r.run_id WHERE n.value = '{name}' AND t.key LIKE 'dagster/%partition%' "
                f"AND t.value LIKE '{other}%'"
            )
            == []
        )
    untagged = deployment.query(
        "SELECT run_id FROM runs WHERE run_id NOT IN (SELECT run_id FROM run_tags WHERE key = 'imagemill/root')"
    )
    assert untagged == []
    assert set(deployment.column("SELECT DISTINCT partitions_def_name FROM dynamic_partitions")) == {
        f"{name}/images" for name in NAMES
    }
    assert deployment.query('SELECT concurrency_key, "limit" FROM concurrency_limits') == [["gpu", "1"]]
    assert deployment.query("SELECT * FROM pending_steps") == []
    if ui:
        assert_shown(deployment, ui)


def assert_shown(deployment: Deployment, ui: Ui) -> None:
    for name, root in deployment.roots.items():
        count = len(list(root.approved.glob("*.jpg")))
        nodes = ui.graphql(COUNTS, keys=[{"path": [name, kind]} for kind in (*KINDS, "approved_images")])["assetNodes"]
        shown = {node["assetKey"]["path"][-1]: node["partitionStats"] for node in nodes}
        exact = {"numMaterialized": count, "numPartitions": count, "numFailed": 0}
        assert shown == dict.fromkeys((*KINDS, "approved_images"), exact)


def materialized(deployment: Deployment, name: str, asset: str) -> set[str]:
    return set(
        deployment.column(
            "SELECT DISTINCT partition FROM event_logs WHERE dagster_event_type = 'ASSET_MATERIALIZATION' "
            f'AND asset_key = \'["{name}", "{asset}"]\' AND partition IS NOT NULL'
        )
    )


def settle(deployment: Deployment, ui: Ui, seconds: float) -> None:
    """Wait until the sensor of each root has found nothing new since now, and no run is left."""
    since = time.time()

    def idle() -> bool:
        newest = [last_tick(ui, name) for name in NAMES]
        return not deployment.unfinished() and all(
            tick and tick["timestamp"] > since and "nothing new among" in (tick["skipReason"] or "") for tick in newest
        )

    wait_until(idle, seconds, "both sensors find nothing new")


@can_unshare
@pytest.mark.soak
@pytest.mark.parametrize("count", [60, 2000])
def test_two_roots_work_at_the_same_time_and_one_is_killed(deployment, tmp_path, count):
    """Images arrive during runs of sensors and commands; a run of each kind is killed, and resumed under another host name."""
    wave, sleep, seconds = count // 4, 12 / count, 60 + count / 5
    clock = time.monotonic()

    def note(text):
        print(f"{time.monotonic() - clock:6.1f} s  {text}", flush=True)

    def of_service(name):
        return deployment.working(name, command=False)

    def of_command(name):
        return deployment.working(name, command=True)

    deployment.arrive(0, 2 * wave)
    roots = list(deployment.roots.values())
    variables = {"DAGSTER_HOME": deployment.home, "IMAGEMILL_STUB_SLEEP": sleep}
    with running_ui(*roots, log=tmp_path / "ui.log", **variables) as ui:
        note("the UI answers")
        for name in NAMES:
            switch_on(ui, name)
        first = wait_until(lambda: next(filter(of_service, NAMES), None), seconds, "a sensor's run")
        other = NAMES[1 - NAMES.index(first)]
        worker = of_service(first)
        assert worker
        note(f"run {worker} of the sensor of {first} works")
        deployment.arrive(2 * wave, wave)
        os.kill(deployment.process_of(first, worker), signal.SIGKILL)
        with deployment.started(first, host="another", sleep=sleep) as resuming:
            wait_until(lambda: of_service(other) or deployment.is_complete(other), seconds, "the run of the other root")
            note(f"run of the sensor of {other} works")
            with deployment.started(other, sleep=10 * sleep) as victim:
                command = wait_until(lambda: of_command(other) or victim.poll(), seconds, "a command works")
                note(f"command {command} of {other} works")
                os.killpg(victim.pid, signal.SIGKILL)
                output, _ = victim.communicate()
            assert victim.returncode == -signal.SIGKILL, output
            deployment.arrive(3 * wave, wave)
            with deployment.started(other, host="another", sleep=sleep) as again:
                output, _ = again.communicate(timeout=seconds)
                note("resumed command ended")
            assert again.returncode == 0, output
            assert_resumed(deployment, other, command, output)
            output, _ = resuming.communicate(timeout=seconds)
            note("first resumed command ended")
        assert resuming.returncode == 0, output
        assert_resumed(deployment, first, worker, output)
        assert_pool_was_free(deployment, worker)
        if count > 60:
            settle(deployment, ui, seconds)
            note("the sensors find nothing new")
        with deployment.started("animals") as one, deployment.started("cars") as two:
            outputs = [process.communicate(timeout=seconds)[0] for process in (one, two)]
        assert (one.returncode, two.returncode) == (0, 0), outputs
        note("last commands ended")
        wait_until(lambda: not deployment.unfinished(), seconds, "all runs end")
        note("all runs ended")
        assert_exact(deployment, ui)
    assert_exact(deployment)
    assert "Traceback" not in (tmp_path / "ui.log").read_text()


def test_refused_root_changes_no_table_of_the_history(deployment, tmp_path):
    """A second root without a name, a name in use, another name, and a copy: each is refused with one message."""
    deployment.arrive(0, 2)
    deployment.roots["plain"] = plain = DataRoot(tmp_path / "plain")
    photos(plain.approved, 1)
    for name in deployment.roots:
        with deployment.started(name) as process:
            output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
    animals = deployment.roots["animals"]
    second, third, copy = (DataRoot(tmp_path / name) for name in ("second", "third", "copy"))
    for root in (second, third):
        photos(root.approved, 1, prefix="other")
    third.config_file.write_text("name: animals\n")
    shutil.copytree(animals.path, copy.path)
    copy.config_file.write_text("name: copy\n")
    before = deployment.dump()
    assert "INSERT INTO public.event_logs" in before

    def refused(root: DataRoot, what: str) -> None:
        done = imagemill("run", "--data-root", root.path, stub=True, DAGSTER_HOME=deployment.home)
        assert done.returncode == 2, done.stdout + done.stderr
        assert done.stderr.startswith(f"imagemill: {what}\n  where: ")
        assert re.findall(r"^  (\w+):", done.stderr, re.MULTILINE) == ["where", "why", "do"]
        assert deployment.dump() == before, what

    refused(second, "a second data root without a name")
    refused(third, "the name animals is in use")
    refused(copy, "two data roots have the same id")
    animals.config_file.write_text("name: cats\n")
    refused(animals, "the name of the data root was animals, and is now cats")
    animals.config_file.unlink()
    refused(animals, "the name of the data root was animals, and is now no name")
