"""A backup in the order of docs/how-to/production.md, of a data root that changes meanwhile, and its restore."""

import shutil

from dagster import AssetKey

from dagster_project.internals.instance import open_instance
from imagemill.domain.embedding_specs import embedding_specs
from imagemill.domain.layout import DataRoot
from tests.helpers.product import contents, imagemill, photos


def run(root, count):
    """Embed so many images."""
    photos(root.approved, count)
    done = imagemill("run", "--data-root", root.path, stub=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_restored_copies_of_three_times_complete_each_other_without_the_models(tmp_path):
    """The history is the oldest copy, the ledger is newer, and the files are the newest."""
    root, copy = DataRoot(tmp_path / "data"), tmp_path / "copy"
    run(root, 2)
    shutil.copytree(root.dagster_home, copy / ".dagster")
    run(root, 4)
    shutil.copytree(root.state, copy / ".imagemill")
    run(root, 6)
    for name in ("approved", "derived", "shards"):
        shutil.copytree(root.path / name, copy / name)
    before = contents(root)
    shutil.rmtree(root.path)
    shutil.copytree(copy, root.path)

    printed = run(root, 6)

    for spec in embedding_specs():
        assert f"{spec.kind} 0 made in 0 model calls" in " ".join(printed.split()), printed
    arrays = {path: data for path, data in before.items() if path.endswith(".npy")}
    assert {path: data for path, data in contents(root).items() if path.endswith(".npy")} == arrays
    with open_instance(root) as instance:
        for spec in embedding_specs():
            assert len(instance.get_materialized_partitions(AssetKey(spec.kind))) == 6
