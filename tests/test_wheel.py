"""The installed wheel, used in a folder with packages of the same names, which every process has imported first.

Slow: about two minutes. One file, so that the wheel is built and installed once.
"""

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
import zipfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from imagemill.domain.layout import DataRoot
from imagemill.project import PACKAGES
from imagemill.store.public_data import PublicData
from tests.helpers.earlier_roots import DAGSTER_YAML
from tests.helpers.product import PROJECT, photos
from tests.helpers.public import raw_dataset
from tests.helpers.ui import READY_SECONDS, Ui, free_port, wait_until

pytestmark = pytest.mark.slow

SITECUSTOMIZE = """
import sys
sys.path.insert(0, {folder!r})
import assets, resources
from imagemill.domain.embedding_specs import EmbeddingSpec
from stub_encoders import StubEncoder
EmbeddingSpec.encoder_class = lambda self: StubEncoder
"""
RUN_SECONDS = 120
REEXECUTE = """mutation($run: String!) { launchRunReexecution(reexecutionParams: {parentRunId: $run, strategy: ALL_STEPS}) {
    __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }"""
RUNS = "{ runsOrError { ... on Runs { results { runId status jobName parentRunId } } } }"
TICKS = """{ sensorsOrError(repositorySelector: {repositoryName: "__repository__", repositoryLocationName: "imagemill"}) {
    ... on Sensors { results { name sensorState { ticks { status error { message } } } } } } }"""


class Installation:
    """A virtual environment with the wheel; everything else comes from the environment of this test run."""

    def __init__(self, folder):
        self.wheel = build(folder / "dist")
        self.root, self.current = DataRoot(folder / "data"), folder / "current"
        venv.create(folder / "venv", with_pip=False)
        self.bin = folder / "venv" / "bin"
        self.packages = Path(self._ask("import sysconfig; print(sysconfig.get_path('purelib'))"))
        uv = [Path(sys.executable).with_name("uv"), "pip", "install", "--offline", "--no-deps", "--python", self.python]
        subprocess.run([*uv, self.wheel], check=True, capture_output=True)
        # .pth files in this folder are not read, so the checkout, which is installed there by one, is not found.
        (self.packages / "locked.pth").write_text(sysconfig.get_path("purelib"))
        for name in ("assets", "resources"):
            (self.current / name).mkdir(parents=True)
            (self.current / name / "__init__.py").write_text("MINE = True\n")
        self.root.dagster_home.mkdir(parents=True)
        (self.root.dagster_home / "dagster.yaml").write_text(DAGSTER_YAML)
        shutil.copy(PROJECT / "tests/helpers/stubs.py", self.packages / "stub_encoders.py")
        (self.packages / "sitecustomize.py").write_text(SITECUSTOMIZE.format(folder=str(self.current)))

    @property
    def python(self):
        return self.bin / "python"

    @property
    def environment(self):
        changed = {"PYTHONPATH", "DAGSTER_HOME", "IMAGEMILL_DATA_ROOT"}
        return {name: value for name, value in os.environ.items() if name not in changed}

    def _ask(self, program):
        command = [self.python, "-c", program]
        return subprocess.run(command, check=True, capture_output=True, text=True, cwd="/").stdout.strip()

    def ask(self, program):
        """Run a program in the current folder and return its output."""
        command = [self.python, "-c", program]
        return subprocess.run(
            command, check=True, capture_output=True, text=True, cwd=self.current, env=self.environment
        ).stdout.strip()

    def imagemill(self, *arguments, start=("imagemill",)):
        command = [self.bin / start[0], *start[1:], *arguments, "--data-root", self.root.path]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=self.current, env=self.environment, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    @contextmanager
    def serving(self, *command, port, **environment):
        """A server over the data root in a session of its own, until the block ends."""
        log = self.current / "server.log"
        with open(log, "w") as output:
            server = subprocess.Popen(
                command, cwd=self.current, env={**self.environment, **environment}, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        try:
            ui = Ui(f"http://127.0.0.1:{port}")
            wait_until(lambda: server.poll() is not None or ui.loaded(), READY_SECONDS, log.read_text())
            assert server.poll() is None, log.read_text()
            yield ui
        except AssertionError as error:
            raise AssertionError(f"{error}\n{log.read_text()}") from error
        finally:
            server.send_signal(signal.SIGINT)
            try:
                server.wait(30)
            finally:
                if server.poll() is None:
                    os.killpg(server.pid, signal.SIGKILL)


def build(folder):
    """The wheel of this checkout, built without an index."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    subprocess.run(command, check=True, capture_output=True, cwd=PROJECT)
    return next(folder.glob("*.whl"))


def runs(ui):
    return ui.graphql(RUNS)["runsOrError"]["results"]


def reexecute(ui, run_id):
    """Execute a run again through the daemon's queue, and return its status at the end."""
    launched = ui.graphql(REEXECUTE, run=run_id)["launchRunReexecution"]
    assert launched["__typename"] == "LaunchRunSuccess", launched
    new = launched["run"]["runId"]

    def ended():
        status = next(run["status"] for run in runs(ui) if run["runId"] == new)
        return status if status in {"SUCCESS", "FAILURE", "CANCELED"} else None

    return wait_until(ended, RUN_SECONDS, "the run has ended")


def run_of_the_command_line(ui):
    return next(run["runId"] for run in reversed(runs(ui)) if run["parentRunId"] is None)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The installation, and a data root of an earlier release on which its command has run."""
    installation = Installation(tmp_path_factory.mktemp("wheel"))
    photos(installation.root.approved, 3)
    installation.imagemill("run")
    return installation


def test_only_one_package_is_at_the_top_of_site_packages(installed):
    """"""
    top = {name.partition("/")[0] for name in zipfile.ZipFile(installed.wheel).namelist()}

    assert {name for name in top if not name.endswith(".dist-info")} == {"imagemill"}
    for name in PACKAGES:
        assert not (installed.packages / name).exists()
        assert not (installed.packages / f"{name}.py").exists()


def test_packages_of_the_current_folder_stay_its_own(installed):
    """Importing the domain, as a training script does, does not affect the script's own packages."""
    program = "import imagemill.reading, imagemill.validation, assets, resources; print(assets.MINE and resources.MINE)"

    assert installed.ask(program) == "True"


def test_command_and_module_run_beside_packages_of_the_same_names(installed):
    """The console script ran in the fixture; launchers such as torchrun start modules."""
    said = installed.imagemill("run", start=("python", "-m", "imagemill")).stderr

    assert "Traceback" not in said
    assert len(list(installed.root.derived.glob("*/*.npy"))) == 9


@pytest.mark.parametrize("start", [("imagemill",), ("python", "-m", "imagemill")], ids=["script", "module"])
def test_worker_processes_import_the_products_packages(installed, start):
    """Workers are spawned: each has imported the packages of the current folder before it gets work."""
    name = f"coco{len(start)}"
    raw_dataset(PublicData(installed.root.public_data).dataset(name).path, [(96, 64), (42, 41), (101, 67), (64, 64)])

    installed.imagemill("preset", "rescale", name, "--preset", "p", "--workers", "2", start=start)

    images = PublicData(installed.root.public_data).dataset(name).preset("p").images
    assert len(list(images.rglob("*.jpg"))) == 4


def test_run_of_the_command_line_is_executed_again_in_the_ui(installed):
    """Code server, daemon and the run's process find the product's packages, and sensors are evaluated."""
    port = free_port()
    command = [installed.bin / "imagemill", "ui", "--data-root", installed.root.path, "--port", str(port)]
    with installed.serving(*command, port=port) as ui:
        assert reexecute(ui, run_of_the_command_line(ui)) == "SUCCESS"
        wait_until(lambda: any(evaluated(ui)), RUN_SECONDS, "a sensor was evaluated")
        assert set(evaluated(ui)) == {"SKIPPED"}


def evaluated(ui):
    """Return the statuses of the ticks of all sensors; an error is its text."""
    sensors = ui.graphql(TICKS)["sensorsOrError"]["results"]
    ticks = [tick for sensor in sensors for tick in sensor["sensorState"]["ticks"] if tick["status"] != "STARTED"]
    return [tick["error"]["message"] if tick["error"] else tick["status"] for tick in ticks]


def test_shipped_workspace_is_valid_and_served_by_dagsters_own_commands(installed):
    """Their processes find the classes of dagster.yaml on PYTHONPATH."""
    port, project = free_port(), installed.packages / "imagemill" / "_project"
    workspace = project / "dagster_project" / "workspace.yaml"
    environment = {"DAGSTER_HOME": installed.root.dagster_home, "IMAGEMILL_DATA_ROOT": installed.root.path}
    given = {name: str(path) for name, path in {**environment, "PYTHONPATH": project}.items()}
    valid = subprocess.run(
        [installed.python, "-m", "dagster", "definitions", "validate", "-w", workspace],
        capture_output=True, text=True, cwd=installed.current, env={**installed.environment, **given}, check=False,
    )  # fmt: skip
    assert valid.returncode == 0, valid.stdout + valid.stderr

    command = [installed.python, "-m", "dagster", "dev", "-w", workspace, "-p", str(port)]
    with installed.serving(*command, port=port, **given) as ui:
        assert reexecute(ui, run_of_the_command_line(ui)) == "SUCCESS"
