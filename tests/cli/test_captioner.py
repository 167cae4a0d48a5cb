"""The captioner on the command line. Spec: docs/spec/stage2.md#caption-sources, docs/spec/shards.md#preview-captions"""

import json
import os
import signal
import time

import pytest
from PIL import Image

from imagemill.pipeline.session import open_session
from imagemill.store.ledger import Ledger
from resources.captioner import CaptionerResource
from resources.data_root import DataRootResource
from tests.helpers.product import photos, product, start


def configure(root, **captioner):
    root.config_file.write_text(json.dumps({"captioner": {"enabled": True, **captioner}}))


def captions(root):
    with Ledger(root.ledger) as ledger:
        return {image_id: (row.text, row.origin) for image_id, row in ledger.captions().items()}


def records(root):
    lines = root.stage2_jsonl.read_text().splitlines()
    return {record["image_id"]: record["caption"] for record in map(json.loads, lines)}


@pytest.fixture
def root(data_root):
    """Five images, the first with a caption, and a captioner that counts as a real model."""
    photos(data_root.approved, 5)
    for n in range(1, 5):
        (data_root.approved / f"photo{n:04d}.txt").unlink()
    (data_root.path / "prompt.txt").write_text("seen:")
    configure(data_root, model="real", prompt="prompt.txt")
    return data_root


def test_images_without_a_caption_are_captioned_and_packed(root):
    said = product(root, "run")

    assert "captions   4 captioned by real" in said
    assert "5 samples in 1 shard" in said
    made = records(root)
    assert made["photo0000"] == "noise number 0"
    assert all(made[f"photo{n:04d}"].startswith("seen: ") for n in range(1, 5))
    assert len(set(made.values())) == 5, "each caption is of its own image"
    assert captions(root)["photo0001"] == (made["photo0001"], "captioner")
    assert "nothing to do" in product(root, "run")


def test_captions_that_the_model_did_not_finish_are_counted_and_named(root):
    said = product(root, "run", IMAGEMILL_STUB_CUT_OFF="1")

    assert "4 captions not finished: raise captioner.max_new_tokens, or ask for a shorter one" in said
    assert "4 with a caption that the captioner did not finish" in product(root, "status")
    assert "cut off at captioner.max_new_tokens" in product(root, "explain", "photo0001")
    assert "cut off" not in product(root, "explain", "photo0000")
    (root.approved / "photo0001.txt").write_text("a whole caption")
    configure(root, model="another", prompt="prompt.txt")
    product(root, "stage2", "--regenerate", "captions")
    assert "did not finish" not in product(root, "status")


def test_prompt_and_length_of_captions_follow_the_tokens_of_the_text_encoder(root):
    settings = {"captioner": {"enabled": True, "model": "real"}, "encoders": {"t5_hidden": {"tokens": 240}}}
    root.config_file.write_text(json.dumps(settings))
    with open_session(str(root.path)):
        resource = DataRootResource(path=str(root.path), config_file="", output_base_dir="")
        assert CaptionerResource(data_root=resource).settings().max_new_tokens == 480

    product(root, "stage2")

    assert all("of at most 160 words" in text for text, origin in captions(root).values() if origin == "captioner")


def test_without_a_captioner_images_without_a_caption_are_refused(root):
    root.config_file.unlink()

    assert "missing_caption  photo0001" in product(root, "run")


def test_preview_captions_are_packed_only_on_request(root):
    configure(root)

    said = product(root, "run")

    assert "made by a preview model: they do not describe the images" in said
    assert "preview_caption  photo0001" in said
    assert "1 sample in 1 shard" in said
    assert "ready_records=1 skipped_incomplete=4" in product(root, "shards", "--overwrite", "--dry-run")
    assert "ready_records=5 skipped_incomplete=0" in product(root, "shards", "--overwrite", "--allow-preview")


def test_real_captioner_replaces_captions_of_the_preview_model(root):
    configure(root)
    product(root, "run")
    configure(root, model="real", prompt="prompt.txt")

    said = product(root, "run")

    assert "captions   4 captioned by real" in said
    assert "t5_hidden  4 made" in said
    assert "dinov3_npy 0 made" in said
    assert "5 samples in 1 shard" in said


def test_changed_prompt_replaces_captions_only_on_request(root):
    product(root, "run")
    (root.path / "prompt.txt").write_text("now:")
    assert "nothing to do" in product(root, "run")

    said = product(root, "stage2", "--regenerate", "captions")

    assert "captions   4 captioned by real" in said
    assert all(text.startswith("now: ") for image_id, text in records(root).items() if image_id != "photo0000")
    assert "t5_hidden  0 made" in product(root, "stage2", "--regenerate", "captions")


def test_captions_belong_to_the_pass_of_t5(root):
    """Passes in any order give the result of `all`. The other passes need no captioner."""
    assert "captioned" not in product(root, "stage2", "--pass", "dinov3")
    assert "captions   2 captioned" in product(root, "stage2", "--pass", "t5", "--limit", "3")
    assert "captions   2 captioned" in product(root, "stage2", "--pass", "t5")
    assert "--regenerate captions needs its pass" in product(
        root, "stage2", "--pass", "vae", "--regenerate", "captions", code=2
    )


def test_replaced_image_gets_a_new_caption(root):
    product(root, "run")
    before = records(root)
    Image.new("RGB", (48, 32), "red").save(root.approved / "photo0001.jpg")

    assert "captions   1 captioned" in product(root, "run")

    after = records(root)
    assert {image_id for image_id in after if after[image_id] != before[image_id]} == {"photo0001"}


@pytest.mark.parametrize("passes", [("run",), pytest.param(("stage2", "--pass", "t5"), marks=pytest.mark.soak)])
def test_caption_of_the_earlier_image_is_not_packed(root, passes):
    """The captioner is off in the second run. Spec: docs/spec/conventions.md#staleness"""
    product(root, "run")
    image, before = root.approved / "photo0001.jpg", records(root)
    old = image.read_bytes()
    configure(root, enabled=False)
    Image.new("RGB", (32, 48), "red").save(image)

    said = product(root, *passes) + product(root, "run")

    assert "missing_caption  photo0001: " in said
    assert "for an earlier image of this name" in said
    assert "4 samples in 1 shard" in said
    assert "ready_records=4 skipped_incomplete=1" in product(
        root, "shards", "--overwrite", "--allow-preview", "--dry-run"
    )
    assert "missing_caption" in product(root, "explain", "photo0001")
    assert product(root, "verify"), "the record has the size of the latent that is there"

    image.write_bytes(old)
    assert "5 samples in 1 shard" in product(root, "run")
    assert records(root) == before


def test_killed_captioner_resumes_with_the_unfinished_batch(root, tmp_path):
    """Only images of the current batch are captioned twice. The test tries some of the possible moments of kill -9."""
    log = tmp_path / "captioned"
    photos(root.approved, 12)
    for sidecar in root.approved.glob("*.txt"):
        sidecar.unlink()
    configure(root, model="real", prompt="prompt.txt", batch_size=2)
    for seen in (1, 5):
        log.touch()
        process = start("run", "--data-root", root.path, IMAGEMILL_STUB_SLEEP=0.2, IMAGEMILL_STUB_CAPTIONED=log)
        while len(log.read_text().splitlines()) < seen and process.poll() is None:
            time.sleep(0.02)
        assert process.poll() is None
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()

    said = product(root, "run", IMAGEMILL_STUB_CAPTIONED=log)

    assert "12 samples in 1 shard" in said
    lines = log.read_text().splitlines()
    assert set(lines) == set(records(root).values())
    assert len(lines) <= 12 + 2 * 2


def test_missing_model_is_reported_before_any_file_is_written(root):
    """This runs the real loading code, without a hub and without the configured folder."""
    configure(root, model="nowhere/at-all")

    said = product(root, "run", stub=False, code=1, HF_HUB_OFFLINE=1)

    assert "captioner" in said
    assert "nowhere/at-all" in said
    assert not list(root.path.rglob("*.npy"))


def test_preview_model_captions_real_images(data_root):
    """The real class with preview weights, which generate meaningless words.

    Spec: docs/spec/stage2.md#preview-models
    """
    photos(data_root.approved, 2)
    (data_root.approved / "photo0001.txt").unlink()
    configure(data_root, max_new_tokens=8)

    said = product(data_root, "stage2", "--pass", "t5", stub=False)

    assert "captions   1 captioned by preview" in said
    text, origin = captions(data_root)["photo0001"]
    assert origin == "preview captioner"
    assert text.split()
    assert "preview captioner" in product(data_root, "explain", "photo0001", stub=False)
