"""`imagemill bench`: speeds of the kinds and a forecast; the data root stays as it is."""

import json

from imagemill.domain.embedding_specs import embedding_specs
from tests.helpers.product import imagemill, photos, snapshot

KINDS = [spec.kind for spec in embedding_specs()]


def bench(root, *arguments, code=0):
    done = imagemill("bench", *arguments, "--data-root", root.path, stub=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def speeds(root, *arguments):
    return {speed["kind"]: speed for speed in json.loads(bench(root, "--json", *arguments))}


def test_every_kind_is_measured_and_the_slowest_stage_limits_it(data_root):
    photos(data_root.approved, 6)

    found = speeds(data_root, "--images", 4)

    assert list(found) == KINDS
    for speed in found.values():
        stages = {"prepare": speed["prepare"], "model": speed["model_alone"], "write": speed["write"]}
        assert speed["limit"] == min(stages, key=stages.get)
        assert min(*stages.values(), speed["stream"]) > 0
        assert 0 <= speed["busy"] <= 1
        assert (speed["images"], speed["remaining"]) == (4, 6)
        assert speed["hours"] == 6 / speed["stream"] / 3600


def test_forecast_is_of_the_images_without_a_file(data_root):
    photos(data_root.approved, 2)
    assert imagemill("run", "--data-root", data_root.path, stub=True).returncode == 0
    photos(data_root.approved, 5)
    size = sum(path.stat().st_size - 128 for path in (data_root.derived / "dinov3").iterdir()) / 2

    (speed,) = speeds(data_root, "--pass", "dinov3").values()

    assert speed["remaining"] == 3
    assert speed["gigabytes"] == 3 * size / 1e9
    text = bench(data_root, "--pass", "dinov3")
    assert "dinov3_npy: preview on cpu, 5 images measured" in text
    assert "3 images without a file: 1 s, 12.3 kB" in text
    assert text.splitlines()[-1].startswith("all kinds: ")


def test_nothing_of_the_data_root_changes(data_root):
    photos(data_root.approved, 3)
    assert imagemill("run", "--data-root", data_root.path, stub=True).returncode == 0
    before = snapshot(data_root.approved, data_root.derived, data_root.shards)

    bench(data_root)

    assert snapshot(data_root.approved, data_root.derived, data_root.shards) == before
    assert "nothing to do" in imagemill("run", "--data-root", data_root.path, stub=True).stdout


def test_unreadable_images_are_left_out_of_the_measurement(data_root):
    photos(data_root.approved, 2)
    (data_root.approved / "broken.jpg").write_bytes(b"no image")

    assert speeds(data_root, "--pass", "vae")["vae_latents"]["images"] == 2
    for path in data_root.approved.glob("photo*"):
        path.unlink()
    assert "none of 1 images can be read" in bench(data_root, "--pass", "vae", code=1)


def test_kind_made_from_captions_needs_one(data_root):
    photos(data_root.approved, 2)
    for path in data_root.approved.glob("*.txt"):
        path.unlink()

    assert "no captions to measure t5_hidden with" in bench(data_root, "--pass", "t5", code=1)


def test_cluster_is_measured_only_if_there_is_one(data_root):
    photos(data_root.approved, 2)

    assert "--engine ray needs the settings of a cluster" in bench(data_root, "--engine", "ray", code=2)
