"""A data root with captions of every origin, whose images are moved and renamed.

Images are `NNNN.png`; the number modulo the number of origins gives that of its caption.
"""

import json

import numpy as np
from PIL import Image

from imagemill.domain.embedding_specs import embedding_specs
from imagemill.fs.fingerprints import fingerprint
from imagemill.reading import ShardSet
from imagemill.store.ledger import Ledger

ORIGINS = ("moved along", "left behind", "stage1", "edited", "captioner", "preview")
# As the ledger names them, after the caption file of the second one has lost its image.
IN_LEDGER = dict(zip(ORIGINS, ("sidecar", "record", "record", "record", "captioner", "preview captioner"), strict=True))
# Samples with a caption by a preview model are not packed.
PACKED = len(ORIGINS) - 1
SIZE = 24


def origin_of(number):
    return ORIGINS[number % len(ORIGINS)]


def numbers(count, *origins):
    return [n for n in range(count) if origin_of(n) in origins]


def write_image(path, number):
    noise = np.random.default_rng(number).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path, compress_level=0)


def fill(root, count, run):
    """Write images with captions of all origins, in the runs that make them. `run` executes a command and checks its success."""
    root.approved.mkdir(parents=True, exist_ok=True)
    # A data root that begins with records of Stage 1 reads only the top level by default.
    settings = {"inputs": {"recursive": True}}
    root.config_file.write_text(json.dumps(settings))
    for n in numbers(count, "moved along", "left behind", "stage1", "edited"):
        write_image(root.approved / f"{n:04}.png", n)
    for n in numbers(count, "moved along", "left behind", "edited"):
        (root.approved / f"{n:04}.txt").write_text(f"caption number {n}")
    root.derived.mkdir(exist_ok=True)
    lines = [
        {"image_path": f"data/approved/{n:04}.png", "caption": f"as  recorded {n} ", "source": f"list {n}", "score": n}
        for n in numbers(count, "stage1")
    ]
    root.stage2_jsonl.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    run("run")
    for n in numbers(count, "edited"):
        (root.approved / f"{n:04}.txt").unlink()
    edited = [json.loads(line) for line in root.stage2_jsonl.read_text().splitlines()]
    for record in edited:
        if origin_of(int(record["image_id"])) == "edited":
            record |= {"caption": f"edited {record['image_id']}", "note": "kept"}
    # As imagemill writes it: a line that an editor has spaced differently is written in this form under another id.
    lines = (json.dumps(record, separators=(",", ":")) for record in edited)
    root.stage2_jsonl.write_text("".join(f"{line}\n" for line in lines))
    for model, origin in (("real", "captioner"), ("preview", "preview")):
        root.config_file.write_text(json.dumps({**settings, "captioner": {"enabled": True, "model": model}}))
        for n in numbers(count, origin):
            write_image(root.approved / f"{n:04}.png", n)
        run("run")


def move(root, count, *, back=False):
    """Move each image into a sub-folder, or back; each third one gets another file name too. Caption files of one origin stay."""
    for n in range(count):
        old, new = root.approved / f"{n:04}", root.approved / place(n)
        if back:
            old, new = new, old
        new.parent.mkdir(parents=True, exist_ok=True)
        old.with_name(f"{old.name}.png").rename(new.with_name(f"{new.name}.png"))
        if origin_of(n) == "moved along":
            old.with_name(f"{old.name}.txt").rename(new.with_name(f"{new.name}.txt"))


def place(number):
    """Return the new path of an image without its extension."""
    name = f"{number:04}" if number % 3 else f"renamed {number:04}"
    return f"set {number % 7}/deep/{name}" if number % 2 else f"set {number % 7}/{name}"


def new_id(number):
    return place(number).replace("/", "%2F")


class State:
    """Record, arrays and sample of each image of a data root, by the number of the image.

    Attributes:
        records: fields except the two with the name, with the origin of the caption.
        arrays: fingerprint of each array, by kind.
        samples: members of the sample, without the name in the JSON.
    """

    def __init__(self, root, count, *, moved=False):
        ids = {new_id(n) if moved else f"{n:04}": n for n in range(count)}
        lines = [json.loads(line) for line in root.stage2_jsonl.read_text().splitlines()]
        self.ids = [line["image_id"] for line in lines]
        with Ledger(root.ledger) as ledger:
            origins = {i: row.origin for i, row in ledger.captions().items()}
            self.models = {row.model_key for spec in embedding_specs() for row in ledger.files(spec.kind).values()}
            self.leftover = ledger.ids("sources") - ids.keys()
        self.records = {ids[line["image_id"]]: (_nameless(line), origins.get(line["image_id"])) for line in lines}
        self.arrays = {
            n: {spec.kind: _content(root.derived / spec.folder / f"{image_id}.npy") for spec in embedding_specs()}
            for image_id, n in ids.items()
        }
        shards = ShardSet.open(root.shards, allow_preview=True)
        self.samples = {ids[image_id]: _members(shards[image_id]) for image_id in shards}


def _nameless(record):
    return {key: value for key, value in record.items() if key not in ("image_id", "image_path")}


def _content(path):
    return fingerprint(path.read_bytes())


def _members(sample):
    members = {key: value.tobytes() if isinstance(value, np.ndarray) else value for key, value in sample.items()}
    return _nameless(members) | {"json": _nameless(sample["json"])}
