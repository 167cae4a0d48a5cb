"""Runs on a Ray cluster of which each node sees an empty folder instead of the data root, with stub encoders."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from random import Random

import dagster as dg
import psutil
import pytest

from imagemill.domain.layout import DataRoot
from imagemill.pipeline.stage_a.rank_files import output_file
from imagemill.store.ledger import Ledger
from tests.helpers.product import PROJECT, STUBS, built_plugin, coco_photos, contents, photos
from tests.helpers.ray_nodes import ADDRESS, RayNodes, can_make_nodes
from tests.helpers.stage_a import MISSION, ticket
from tests.helpers.summarizers import MODULE

pytestmark = pytest.mark.skipif(not can_make_nodes(), reason="nodes need root, unshare and nsenter")

STUBBED = os.pathsep.join([str(STUBS.with_name("stubbed")), str(PROJECT)])
KINDS = ("dinov3_npy", "vae_latents", "t5_hidden")


@pytest.fixture(scope="module")
def hidden(tmp_path_factory):
    """The folder of all data roots, which is empty on the nodes."""
    return tmp_path_factory.mktemp("hidden")


@pytest.fixture(scope="module")
def pause(tmp_path_factory):
    """The file with the seconds that each model call takes."""
    file = tmp_path_factory.mktemp("pause") / "seconds"
    file.write_text("0")
    return file


@pytest.fixture(scope="module")
def cluster(hidden, pause):
    """Nodes `one` and `two` with one processor each, and a head without."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        nodes = RayNodes(
            folder, [hidden], PYTHONPATH=STUBBED, IMAGEMILL_STUB_SLEEP=str(pause), IMAGEMILL_STUB_DEADLY="deadly"
        )
        try:
            for name in ("one", "two"):
                nodes.start(name)
            yield nodes
        finally:
            nodes.close()


@pytest.fixture
def root(hidden, request, pause):
    pause.write_text("0")
    root = DataRoot(hidden / re.sub(r"\W+", "_", request.node.name) / "data")
    photos(root.approved, 24)
    return root


def words(root, *arguments):
    return [sys.executable, str(STUBS), *arguments, "--data-root", str(root.path)]


def configure(root, **engine):
    """Choose the cluster, and consent to its address."""
    settings = {"kind": "ray", "address": ADDRESS, "insecure": True, **engine}
    root.config_file.write_text(f"engine: {settings}\nencoders: {{}}\n".replace("'", '"'))


def run(cluster, root, *arguments, code=0, **environment):
    configured = root.config_file.read_text() if root.config_file.exists() else ""
    if "address" in configured:
        cluster.inside([sys.executable, str(STUBS), "trust", str(root.path)], cwd=PROJECT)
    done = cluster.inside(words(root, *(arguments or ("run",))), cwd=PROJECT, environment=environment)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def begin(cluster, root, *arguments, **environment):
    """Start a run; wait until files have their names."""
    cluster.inside([sys.executable, str(STUBS), "trust", str(root.path)], cwd=PROJECT)
    started = subprocess.Popen(
        [*cluster.prefix, *words(root, *(arguments or ("run",)))],
        cwd=PROJECT, env={**os.environ, **cluster.environment, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    until = time.monotonic() + 120
    while not any(root.derived.glob("*/photo*.npy")):
        assert started.poll() is None, started.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.05)
    return started


def workers(cluster):
    """Return the processes of actors, on any node."""
    found = []
    for process in cluster.processes():
        with suppress(psutil.Error):
            if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::NodeWorker"):
                found.append(process.pid)
    return found


def ends(check, seconds):
    until = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < until
        time.sleep(0.1)


def check_complete(root, count=24):
    """Every image has each file, and one row and one materialization for it."""
    for kind in KINDS:
        with Ledger(root.ledger) as ledger:
            assert len(ledger.ids_with_file(kind)) == count
    made = Counter(path.parent.name for path in root.derived.glob("*/photo*.npy"))
    assert set(made.values()) == {count}
    assert not list(root.derived.glob("*/.tmp-*"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DAGSTER_HOME", str(root.path / ".dagster"))
        with dg.DagsterInstance.get() as instance:
            for kind in KINDS:
                records = instance.fetch_materializations(dg.AssetKey(kind), limit=10 * count).records
                assert Counter(Counter(record.partition_key for record in records).values()) == {1: count}


def end_complete(started, root):
    """Wait for the end of a run, which has made everything."""
    shown, _ = started.communicate(timeout=180)
    assert started.returncode == 0, shown
    check_complete(root)


def test_files_are_those_of_this_machine(cluster, root, tmp_path):
    """Every output has the bytes of a run in this process, and the nodes have seen no folder of it.

    Spec: docs/spec/engines.md#what-travels
    """
    here = DataRoot(tmp_path / "data")
    photos(here.approved, 24)
    configure(root)

    shown = run(cluster, root)
    run(cluster, here)

    assert contents(root) == contents(here)
    assert "Traceback" not in shown
    assert "nothing to do" in run(cluster, root)
    (root.approved / "photo0003.txt").write_text("another caption")
    assert "t5_hidden  1 made in 1 model call," in run(cluster, root)
    assert workers(cluster) == []


@pytest.mark.soak
def test_caption_that_kills_its_worker_costs_itself(cluster, root):
    """Spec: docs/spec/engines.md#deaths"""
    (root.approved / "photo0007.txt").write_text("deadly")
    configure(root)

    shown = run(cluster, root, code=1)

    assert "photo0007: its worker process was killed each time" in shown
    with Ledger(root.ledger) as ledger:
        assert len(ledger.ids_with_file("t5_hidden")) == 23
        assert len(ledger.ids_with_file("vae_latents")) == 24


def test_run_goes_on_without_a_killed_worker_and_a_lost_node(cluster, root, pause):
    """Spec: docs/spec/engines.md#deaths"""
    pause.write_text("0.5")
    configure(root)
    started = begin(cluster, root)

    found = []  # after the last file of a kind there is no worker for a moment
    ends(lambda: found.extend(workers(cluster)) or found, 60)
    os.kill(found[0], signal.SIGKILL)
    time.sleep(1)
    cluster.kill("two")
    pause.write_text("0")

    end_complete(started, root)
    cluster.start("two")


def moments(count, seed, *more):
    """Return parameters with different seconds after the first file, for soak trials; with further values."""
    random = Random(seed)
    names = [f"{seed}{trial}" for trial in range(count)]
    return [pytest.param(random.uniform(0, 6), *more, marks=pytest.mark.soak, id=name) for name in names]


@pytest.mark.parametrize("moment", moments(20, "worker"))
def test_killed_worker_costs_nothing(cluster, root, pause, moment):
    """Spec: docs/spec/engines.md#deaths"""
    pause.write_text("0.5")
    configure(root)
    started = begin(cluster, root)

    time.sleep(moment)
    for pid in workers(cluster)[:1]:
        os.kill(pid, signal.SIGKILL)
    pause.write_text("0.1")

    end_complete(started, root)


@pytest.mark.parametrize(("moment", "replaced"), [*moments(10, "replaced", True), *moments(5, "lost", False)])
def test_lost_node_costs_nothing(cluster, root, pause, moment, replaced):
    """Spec: docs/spec/engines.md#deaths"""
    pause.write_text("0.5")
    configure(root)
    started = begin(cluster, root)

    time.sleep(moment)
    cluster.kill("two")
    try:
        if replaced:
            cluster.start("two")
        pause.write_text("0.1")
        shown, _ = started.communicate(timeout=180)
    finally:
        if not replaced:
            cluster.start("two")
    assert started.returncode == 0, shown
    check_complete(root)


@pytest.mark.parametrize("moment", moments(10, "caption"))
def test_caption_that_kills_its_worker_costs_itself_while_a_node_is_lost(cluster, root, pause, moment):
    """Spec: docs/spec/engines.md#deaths"""
    (root.approved / "photo0007.txt").write_text("deadly")
    pause.write_text("0.2")
    configure(root)
    started = begin(cluster, root)

    time.sleep(moment)
    cluster.kill("two")
    try:
        pause.write_text("0")
        shown, _ = started.communicate(timeout=180)
    finally:
        cluster.start("two")
    assert started.returncode == 1, shown
    assert "photo0007: its worker process was killed each time" in shown
    with Ledger(root.ledger) as ledger:
        assert [len(ledger.ids_with_file(kind)) for kind in KINDS] == [24, 24, 23]


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_keeps_what_was_delivered(cluster, root, pause, number):
    """Spec: docs/spec/engines.md#deaths"""
    pause.write_text("0.5")
    configure(root)
    started = begin(cluster, root)

    began = time.monotonic()
    started.send_signal(number)
    shown, _ = started.communicate(timeout=60)

    assert started.returncode == 128 + number, shown
    assert "t5_hidden  0 made" in shown
    assert time.monotonic() - began < 15
    kept = {path.name for path in (root.derived / "dinov3").glob("photo*.npy")}
    with Ledger(root.ledger) as ledger:
        assert {f"{image_id}.npy" for image_id in ledger.ids_with_file("dinov3_npy")} == kept
    pause.write_text("0")
    run(cluster, root)
    check_complete(root)


@pytest.mark.parametrize("moment", moments(10, "driver"))
def test_workers_of_a_killed_run_end_and_the_next_run_completes_it(cluster, root, pause, moment):
    """Spec: docs/spec/engines.md#deaths"""
    pause.write_text("0.5")
    configure(root)
    started = begin(cluster, root)

    time.sleep(moment)
    os.killpg(started.pid, signal.SIGKILL)
    started.wait()

    ends(lambda: not workers(cluster), 10)
    pause.write_text("0")
    run(cluster, root)
    check_complete(root)


@pytest.mark.soak
def test_node_that_differs_gets_no_work(cluster, root, tmp_path):
    """Other weights, for the first files and for later ones. Spec: docs/spec/engines.md#reference"""
    configure(root)
    cluster.kill("two")
    cluster.start("two", IMAGEMILL_STUB_WEIGHTS="others")
    try:
        refused = run(cluster, root, code=1)

        assert "the nodes one and two would not make the same files" in refused or (
            "the nodes two and one would not make the same files" in refused
        )
        assert "weights_sha256 is" in refused
        assert "--accept-node" in refused
        assert not list(root.derived.glob("*/photo*.npy"))

        accepted = run(cluster, root, "run", "--accept-node", "one")

        assert "node two gets no work: weights_sha256 is others, not missing" in accepted
        check_complete(root)

        (root.approved / "photo0003.txt").write_text("another caption")
        later = run(cluster, root)

        assert "node two gets no work: weights_sha256 is others, not missing" in later
        assert "t5_hidden  1 made" in later
    finally:
        cluster.kill("two")
        cluster.start("two")


ODD = {
    "weights": ("weights_sha256 is others, not missing", {"IMAGEMILL_STUB_WEIGHTS": "others"}),
    "device": ("device is cuda, not cpu", {"IMAGEMILL_STUB_DEVICE": "cuda"}),
    "package": ("source of imagemill is", {"PYTHONPATH": "{other}"}),
    "plug-in": ("source of imagemill_patch_tokens is", {"PYTHONPATH": "{other}"}),
}


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    """The folder of the package of another kind."""
    return built_plugin(tmp_path_factory.mktemp("plugin"))


@pytest.mark.soak
@pytest.mark.parametrize("place", ["first", "second", "late"])
@pytest.mark.parametrize("fact", ODD)
def test_odd_node_makes_no_file(cluster, root, plugin, tmp_path, pause, fact, place):
    """Its rows would have other values. Without a recorded model, nodes of different models end the run.

    Spec: docs/spec/engines.md#reference
    """
    said, changes = ODD[fact]
    folder, package = (plugin, "imagemill_patch_tokens") if fact == "plug-in" else (PROJECT, "imagemill")
    shutil.copytree(folder / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / package / "__init__.py").open("a") as file:
        file.write("# another release\n")
    usual = os.pathsep.join([STUBBED, str(plugin)])
    odd = {name: value.format(other=os.pathsep.join([str(tmp_path), usual])) for name, value in changes.items()}
    odd = {"PYTHONPATH": usual, "IMAGEMILL_STUB_ADDED": "1", **odd}
    kind = "patch_tokens" if fact == "plug-in" else "dinov3_npy"
    here = DataRoot(tmp_path / "data")
    photos(here.approved, 24)
    settings = f"kinds: [vae_latents, t5_hidden, {kind}]\nencoders: {{{kind}: {{batch_size: 2}}}}\n"  # many calls
    here.config_file.write_text(settings)
    configure(root, ready_timeout=20)
    root.config_file.write_text(root.config_file.read_text().replace("encoders: {}\n", settings))
    command = ["stage2", "--pass", "patch-tokens" if fact == "plug-in" else "dinov3"]
    for name in list(cluster.nodes):
        cluster.kill(name)
    try:
        for name in {"first": ["odd", "usual"], "second": ["usual", "odd"], "late": ["usual"]}[place]:
            cluster.start(name, **(odd if name == "odd" else {"PYTHONPATH": usual}))
        if place == "late":
            pause.write_text("1")
            started = begin(cluster, root, *command, PYTHONPATH=usual)
            cluster.start("odd", **odd)
            pause.write_text("3")  # until its worker is ready
            shown, _ = started.communicate(timeout=180)
            assert started.returncode == 0, shown
        else:
            disagree = fact in {"weights", "device"}
            shown = run(cluster, root, *command, code=int(disagree), PYTHONPATH=usual)
            if disagree:
                assert "usual and odd would not" in shown or "odd and usual would not" in shown
                assert said.partition(" is ")[0] in shown
                assert not list(root.derived.rglob("photo*.npy"))
                return
    finally:
        for name in list(cluster.nodes):
            cluster.kill(name)
        for name in ("one", "two"):
            cluster.start(name)

    run(cluster, here, *command, PYTHONPATH=usual)

    assert f"node odd gets no work: {said}" in shown
    made, wanted = ({path.name: path.read_bytes() for path in each.derived.rglob("*.npy")} for each in (root, here))
    assert len(wanted) == 24
    assert made == wanted


def test_too_large_a_demand_is_refused_with_what_the_cluster_has(cluster, root):
    """Spec: docs/spec/engines.md#refused"""
    configure(root, cpus=64, ready_timeout=2)

    shown = run(cluster, root, code=1)

    assert "no worker was ready within 2 s; each asks for 64 CPU" in shown
    assert "one has 1 CPU" in shown
    assert not list(root.derived.glob("*/photo*.npy"))


def test_summaries_are_those_of_this_machine_but_for_a_deadly_image(cluster, root):
    """Spec: docs/spec/engines.md#stage-a, docs/spec/engines.md#deaths"""
    for number in range(6):
        ticket(root.stage_a_input, "pass", f"group{number}", *[f"{number}-{image}.jpg" for image in range(5)])
    ticket(root.stage_a_input, "fail", "with a deadly one", "x-1.jpg", "x-deadly.jpg", "x-3.jpg")
    configure(root)
    command = ["stage-a", "--mission", MISSION, "--summarizer", f"{MODULE}:Deadly", "--world-size", "2"]

    for mode, inferred in (("per_group", 32), ("per_image", 0)):
        shown = run(cluster, root, *command, "--sharding-mode", mode, "--keep-intermediate-outputs")

        assert "x-deadly.jpg: worker_died (its worker process was killed each time)" in shown
        assert f"inferred={inferred} " in shown
        records = [json.loads(line) for line in output_file(root.stage_a_output, MISSION).read_bytes().splitlines()]
        assert len(records) == 6
        for record in records:
            names = [f"{MISSION} {name}" for name in record["images"]]
            assert list(record["per_image"].values()) == names
    assert workers(cluster) == []


@pytest.mark.soak
def test_bench_says_what_limits_a_cluster(cluster, root):
    """Spec: docs/spec/engines.md#speed"""
    configure(root)
    before = contents(root)

    shown = run(cluster, root, "bench", "--engine", "ray", "--pass", "dinov3", "--json")
    ((speed,), _) = json.JSONDecoder().raw_decode(shown, shown.index("[\n"))

    assert speed["kind"] == "dinov3_npy"
    assert set(speed["nodes"]) <= {"one", "two"}
    assert speed["ceilings"]["nodes"] == sum(speed["nodes"].values()) > 0
    assert speed["ceilings"]["driver"] == 1 / speed["driver_cpu"]
    assert speed["limit"] == min(speed["ceilings"], key=speed["ceilings"].get)
    assert speed["shares"] == (speed["limit"] != "nodes")
    assert speed["sent"] > 0
    assert speed["returned"] == 4 * 1024  # float32 (1024,)
    assert (speed["images"], speed["remaining"]) == (24, 24)
    assert contents(root) == before
    text = run(cluster, root, "bench", "--engine", "ray", "--pass", "vae", "--images", "8")
    assert "ms of CPU time per image" in text
    assert "limits     nodes " in text
    assert workers(cluster) == []


@pytest.mark.soak
@pytest.mark.parametrize("count", [12, 128])
def test_real_models_and_captions_give_the_bytes_of_this_machine(hidden, tmp_path, coco128, count):
    """Preview weights in float32, a kind of another package, captions of half of the photographs, and Stage-A in both modes.

    Spec: docs/spec/engines.md#what-travels, docs/spec/engines.md#stage-a
    """
    roots = [DataRoot(folder / "data") for folder in (hidden / f"real_{count}", tmp_path)]
    kinds = ["dinov3_npy", "vae_latents", "t5_hidden", "patch_tokens"]
    settings = f"captioner: {{enabled: true}}\nthreads: 1\nkinds: {json.dumps(kinds)}\n"
    search = os.pathsep.join(map(str, (PROJECT, built_plugin(tmp_path))))
    summaries = {}
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        cluster = RayNodes(folder, [hidden], PYTHONPATH=search)

        def imagemill(root, *arguments):
            command = [sys.executable, "-m", "dagster_project.cli.main", *arguments]
            done = cluster.inside(
                [*command, *([] if arguments[0] == "trust" else ["--data-root", root.path])], cwd=PROJECT
            )
            assert done.returncode == 0, done.stdout + done.stderr

        try:
            for name in ("one", "two"):
                cluster.start(name)
            for number, root in enumerate(roots):
                coco_photos(coco128, root.approved)
                for each in sorted(root.approved.glob("*.jpg"))[count:]:
                    each.unlink()
                    each.with_suffix(".txt").unlink(missing_ok=True)
                for text in sorted(root.approved.glob("*.txt"))[::2]:
                    text.unlink()
                engine = "" if number else f"engine: {{kind: ray, address: '{ADDRESS}', insecure: true}}\n"
                root.config_file.write_text(settings + engine)
                imagemill(root, "trust", root.path)
                imagemill(root, "run")
                for place, photo in enumerate(sorted(root.approved.glob("*.jpg"))):
                    group = root.stage_a_input / MISSION / "审核通过" / f"group {place // 9}"
                    group.mkdir(parents=True, exist_ok=True)
                    os.link(photo, group / photo.name)
                for mode in ("per_group", "per_image"):
                    asked = ["--mission", MISSION, "--sharding-mode", mode, "--world-size", "2", "--fresh"]
                    imagemill(root, "stage-a", *asked)
                    summaries[number, mode] = output_file(root.stage_a_output, MISSION).read_bytes()
        finally:
            cluster.close()

    assert contents(roots[0]) == contents(roots[1])
    assert len(list((roots[0].derived / "patch_tokens").glob("*.npy"))) == count
    assert summaries[0, "per_group"] == summaries[1, "per_group"]
    assert summaries[0, "per_image"] == summaries[1, "per_image"]
    assert summaries[0, "per_group"].count(b"\n") == -(-count // 9)
