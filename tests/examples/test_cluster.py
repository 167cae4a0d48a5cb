"""Files of `examples/cluster`: no cluster runs them here, so they are parsed, and run with stand-ins for its programs."""

import os
import re
import shutil
import subprocess

import pytest
import yaml

from tests.docs.console import ROOT

CLUSTER = ROOT / "examples" / "cluster"
SBATCH = CLUSTER / "slurm-array.sbatch"


@pytest.mark.parametrize("path", sorted(CLUSTER.iterdir()), ids=lambda path: path.name)
def test_first_comment_says_that_it_was_not_run(path):
    first = next(line for line in path.read_text().splitlines() if not line.startswith("#!"))

    assert first.startswith("# Not run here: ")


PROGRAMS = {
    "srun": 'exec "$@"',
    "imagemill": 'echo "$IMAGEMILL_DATA_ROOT $IMAGEMILL_CONFIG" "$@"; echo "$1" >> "$IMAGEMILL_DATA_ROOT/work"; exit ${FAIL:-0}',
    "rsync": '[ "$2" = --delete ] && shift && rm -rf "$3"; mkdir -p "$3" && cp -a "$2." "$3"',
}


def run(*arguments, task, tmp_path, **environment):
    """Run the script of a task where `srun` runs its arguments, the program prints its own, and `rsync` copies."""
    programs = tmp_path / "bin"
    programs.mkdir(exist_ok=True)
    for name, text in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    given = {"PATH": f"{programs}:{os.environ['PATH']}", **({"SLURM_ARRAY_TASK_ID": task} if task else {})}
    command = ["bash", SBATCH, *map(str, arguments)]
    given |= {name: str(value) for name, value in environment.items()}
    return subprocess.run(command, env=given, cwd=tmp_path, capture_output=True, text=True, check=False)


def test_task_runs_its_share_and_publishes_it(tmp_path):
    roots = tmp_path / "roots"

    done = run(16, "/photographs", roots, "s3://training/cats", task="5", tmp_path=tmp_path)

    assert done.returncode == 0, done.stderr
    place = f"{roots}/share-5-of-16 {tmp_path}/imagemill.yaml"
    assert done.stdout.splitlines() == [
        f"{place} run --approved /photographs --share 5/16",
        f"{place} push s3://training/cats/share-5-of-16",
    ]


def test_task_without_a_url_publishes_nothing(tmp_path):
    done = run(2, "/photographs", tmp_path / "roots", task="1", tmp_path=tmp_path)

    assert [line.split()[2] for line in done.stdout.splitlines()] == ["run"]


def test_data_root_of_a_task_that_failed_is_saved_and_restored(tmp_path):
    """On a node whose disk was emptied, and not over a data root that is still there."""
    roots, saved = tmp_path / "roots", tmp_path / "saved"
    work = roots / "share-1-of-2" / "work"

    done = run(2, "/photographs", roots, "s3://a/b", task="1", tmp_path=tmp_path, SAVE=saved, FAIL=143)

    assert done.returncode == 143
    assert (saved / "share-1-of-2" / "work").read_text() == "run\n"
    shutil.rmtree(roots)
    assert run(2, "/photographs", roots, "s3://a/b", task="1", tmp_path=tmp_path, SAVE=saved).returncode == 0
    assert work.read_text() == (saved / "share-1-of-2" / "work").read_text() == "run\nrun\npush\n"
    work.write_text("newer\n")
    run(2, "/photographs", roots, task="1", tmp_path=tmp_path, SAVE=saved)
    assert work.read_text() == (saved / "share-1-of-2" / "work").read_text() == "newer\nrun\n"


def test_wrong_use_of_the_script(tmp_path):
    assert "sbatch --array=0-LAST" in run(2, "/photographs", task="1", tmp_path=tmp_path).stderr
    assert "start it with sbatch --array" in run(2, "/a", tmp_path, task=None, tmp_path=tmp_path).stderr


def test_options_of_slurm_precede_the_first_command():
    lines = SBATCH.read_text().splitlines()
    first = next(n for n, line in enumerate(lines) if line and not line.startswith("#"))

    options = [line for line in lines[:first] if line.startswith("#SBATCH")]
    assert [line for line in lines if line.startswith("#SBATCH")] == options
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)?", line) for line in options)


def test_cluster_on_kubernetes_keeps_workers_from_the_head_and_the_data_from_workers():
    volume, cluster = yaml.safe_load_all((CLUSTER / "kuberay.yaml").read_text())
    head, (group,) = cluster["spec"]["headGroupSpec"], cluster["spec"]["workerGroupSpecs"]
    pods = [each["template"]["spec"] for each in (head, group)]
    (on_head,), (on_worker,) = (pod["containers"] for pod in pods)

    assert volume["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert [mount["mountPath"] for mount in on_head["volumeMounts"]] == ["/data", "/dev/shm"]
    assert [mount["mountPath"] for mount in on_worker["volumeMounts"]] == ["/dev/shm"]
    for pod in pods:
        assert {"name": "shared-memory"}.items() <= pod["volumes"][-1].items()
        assert pod["volumes"][-1]["emptyDir"]["medium"] == "Memory"
    for container in (on_head, on_worker):
        given = {each["name"]: each for each in container["env"]}
        assert given["RAY_AUTH_MODE"]["value"] == "token"
        assert given["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "ray-token", "key": "auth_token"}
