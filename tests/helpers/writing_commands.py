"""The commands that write, each with a small data root on which it has work."""

import json
import shutil
from collections.abc import Callable
from typing import NamedTuple

from imagemill.pipeline.stage2.regenerate import regenerate
from imagemill.store.ledger import Ledger
from tests.helpers.archives import img2dataset, tar_of
from tests.helpers.earlier_roots import unpacked
from tests.helpers.presets import coco_annotations
from tests.helpers.stage1 import stage1_record, write_stage1
from tests.helpers.stage2 import picture
from tests.helpers.stage_a import MISSION, ticket
from tests.helpers.summarizers import MODULE

SQUARE, WIDE = (32, 32), (48, 32)


class Command(NamedTuple):
    """A command, its initial root, and the conditions at its end.

    Attributes:
        name: name of the trial.
        arguments: the command; `{root}` is the data root.
        prepare: fills an empty root; `run(*arguments)` runs commands on it.
        then: a command that must also succeed at the end, before the outputs are compared.
        check: a reading command that must pass at the end.
        done: output of the command with an exit code other than 0 if there is nothing left to do.
        copied: whether a prepared root can be copied; otherwise it is prepared for each trial.
    """

    name: str
    arguments: tuple[str, ...]
    prepare: Callable
    then: tuple[str, ...] = ()
    check: tuple[str, ...] = ("verify",)
    done: str = ""
    copied: bool = True


def photographs(root, first, last):
    """Photographs of two buckets, with captions."""
    root.approved.mkdir(parents=True, exist_ok=True)
    for n in range(first, last):
        picture(root.approved / f"photo{n:04d}.png", size=SQUARE if n % 2 else WIDE, seed=n)
        (root.approved / f"photo{n:04d}.txt").write_text(f"noise number {n}\n")


def fresh(root, run):
    photographs(root, 0, 5)


def embedded(root, run):
    photographs(root, 0, 5)
    run("stage2")


def half_embedded(root, run):
    photographs(root, 0, 5)
    run("stage2", "--limit", "2")


def finished(root, run):
    photographs(root, 0, 5)
    run("run")


def changed(root, run):
    """One photograph replaced, one caption edited, one photograph added."""
    finished(root, run)
    photographs(root, 5, 6)
    picture(root.approved / "photo0001.png", size=SQUARE, seed=100)
    (root.approved / "photo0002.txt").write_text("another caption")


def stage1(root, run):
    write_stage1(root, [stage1_record(n) for n in range(5)], images=4)


def migrated(root, run):
    stage1(root, run)
    run("stage2")


def newer_model(root, run):
    finished(root, run)
    root.config_file.write_text(json.dumps({"encoders": {"vae_latents": {"model": "newer"}}}))


def marked(root, run):
    """A regeneration that was killed before it replaced a file."""
    finished(root, run)
    with Ledger(root.ledger) as ledger:
        regenerate(ledger, "vae_latents", "killed")


def renamed(root, run):
    """One photograph moved with its caption, one renamed without it."""
    finished(root, run)
    (root.approved / "set").mkdir()
    for old, new in (("0001.png", "set/photo0001.png"), ("0001.txt", "set/photo0001.txt"), ("0002.png", "renamed.png")):
        (root.approved / f"photo{old}").rename(root.approved / new)
    (root.approved / "photo0002.txt").unlink()


def grown(root, run):
    finished(root, run)
    photographs(root, 5, 8)
    run("stage2")


def appended(root, run):
    grown(root, run)
    run("shards", "--append")
    run("withdraw", "photo0001")


def withdrawn(root, run):
    finished(root, run)
    run("withdraw", "photo0001")


def annotated(root, run):
    """Annotations and images of a public dataset."""
    coco_annotations(root.path / "source")


def converted(root, run):
    annotated(root, run)
    run(*CONVERT)


def rescaled(root, run):
    converted(root, run)
    run(*_preset("rescale", "--workers", "1"))


def tickets(root, run):
    for number, name in enumerate(("a", "b", "c")):
        ticket(root.stage_a_input, "pass" if number % 2 else "fail", name, *(f"{name}{n}.jpg" for n in range(2)))


def damaged(root, run):
    """Garbage in the ledger, one image withdrawn."""
    withdrawn(root, run)
    for suffix in ("-wal", "-shm"):
        root.ledger.with_name(root.ledger.name + suffix).unlink(missing_ok=True)
    root.ledger.write_bytes(b"garbage " * 1000)


def without_state(root, run):
    finished(root, run)
    shutil.rmtree(root.state)


def of_earlier_schema(root, run):
    unpacked(root.path.parent, "schema2")


def archived(root, run):
    """An archive as img2dataset writes it, with a folder in it."""
    root.approved.mkdir(parents=True, exist_ok=True)
    (root.path / "00000.tar").write_bytes(tar_of(*img2dataset(4), ("more/a.txt", b"a")))


CONVERT = ("preset", "convert", "coco", "--adapter", "coco", "--annotations", "{root}/source/instances_train.json",
           "--images", "{root}/source/images")  # fmt: skip


def _preset(command, *options):
    return ("preset", command, "coco", "--preset", "p", *options)


COMMANDS = {
    command.name: command
    for command in (
        Command("run", ("run",), fresh),
        Command("run, changed inputs", ("run",), changed),
        Command("run, earlier schema", ("run",), of_earlier_schema, copied=False),
        Command("run, state lost", ("run",), without_state),
        Command("stage2", ("stage2",), fresh, check=()),
        Command("stage2, resumed", ("stage2",), half_embedded, check=()),
        Command("stage2, migration", ("stage2",), stage1, check=()),
        Command("stage2 --rollback", ("stage2", "--rollback"), migrated, check=()),
        Command("stage2 --regenerate", ("stage2", "--regenerate", "vae"), newer_model, then=("run",)),
        Command(
            "stage2 --regenerate --cancel", ("stage2", "--regenerate", "vae", "--cancel"), marked, then=("run",),
            done="is not being regenerated",
        ),
        Command("shards", ("shards",), embedded),
        Command("shards --overwrite", ("shards", "--overwrite", "--shard-size", "2"), finished),
        Command("shards --append", ("shards", "--append"), grown),
        Command("shards --repack", ("shards", "--repack"), appended),
        Command("withdraw", ("withdraw", "photo0001", "photo0002"), finished),
        Command("withdraw --restore", ("withdraw", "photo0001", "--restore"), withdrawn),
        Command("import", ("import", "{root}/00000.tar"), archived, then=("run",)),
        Command("preset convert", CONVERT, annotated, check=()),
        Command("preset rescale", _preset("rescale", "--workers", "1"), converted, check=()),
        Command("preset coord", _preset("coord", "--max-objects", "2"), rescaled, check=_preset("validate")),
        Command("preset all", _preset("all", "--workers", "1"), converted, check=_preset("validate")),
        Command("stage-a", ("stage-a", "--mission", MISSION, "--summarizer", f"{MODULE}:Named"), tickets, check=()),
        Command("run --accept-renames", ("run", "--accept-renames"), renamed),
        Command("repair --apply", ("repair", "--apply"), damaged, then=("run",)),
    )
}  # fmt: skip
