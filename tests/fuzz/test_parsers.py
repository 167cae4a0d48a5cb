"""Every parser on hostile bytes: an ImagemillError or findings, never a traceback, a hang, or a file elsewhere.

A parser is a row of `PARSERS`: good inputs, and a function that reads a changed one. The normal suite tries a few hundred per
parser; `pytest -m soak tests/fuzz` tries 10,000.
"""

import io
import json
import os
import signal
import tarfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from imagemill.adapters.convert import convert
from imagemill.config import read_config
from imagemill.domain.inputs import InputSettings
from imagemill.errors import ImagemillError
from imagemill.formats.jsonl import encode_line
from imagemill.formats.npy import check_npy, read_npy
from imagemill.formats.tar import read_shard
from imagemill.inputs.scan import scan_approved
from imagemill.inputs.sidecars import read_captions
from imagemill.inputs.survey import survey
from imagemill.pipeline.folder_report import report_folder
from imagemill.pipeline.presets.coords import transform
from imagemill.pipeline.presets.preset_config import read_presets
from imagemill.pipeline.presets.preset_images import INDEX as PRESET_INDEX
from imagemill.pipeline.presets.preset_images import read_known
from imagemill.pipeline.presets.rescale_plan import choose_parameters, plan_rescale
from imagemill.pipeline.shards.shard_sets import live_lines, read_manifest
from imagemill.pipeline.stage2.record_index import read_recorded
from imagemill.pipeline.stage2.stage1 import Unusable, read_vector
from imagemill.pipeline.stage_a.rank_files import RankLine, RankMark, mark_file, read_mark, read_rank_lines
from imagemill.pipeline.stage_a.summaries import SNAPSHOT, KnownSummaries, import_summaries
from imagemill.store.ledger import IN_MEMORY, FinishedSummary, Ledger
from imagemill.store.provenance import ModelIdentity, read_identity
from imagemill.store.public_data import Dataset, PresetDir
from imagemill.validation.findings import collect
from imagemill.validation.presets import preset_records
from imagemill.validation.shards import shard_set
from imagemill.validation.stage2 import stage2_records
from imagemill.validation.stage_a import stage_a_records
from imagemill.validation.validator import Options, validate_preset
from tests.fuzz.mutations import mutated
from tests.helpers.situations import GROUP, PRESET_RECORD, RESCALE, SQUARE, shards
from tests.helpers.stage2 import record_of

SECONDS = 5
SOAK, FEW = 10_000, 60

Read = Callable[[Path, bytes], object]


class Parser(NamedTuple):
    """Good inputs, and what reads a changed one below a folder of its own."""

    seeds: list[bytes]
    read: Read


def lines(*values) -> bytes:
    return b"".join(map(encode_line, values))


def written(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


# ---- Stage 2


def caption(folder: Path, data: bytes) -> None:
    written(folder, "approved/a.jpg", b"x")
    written(folder, "approved/a.txt", data)
    scan = scan_approved(folder / "approved")
    read_captions(folder / "approved", scan.sources.values(), {})


def rows_of(name: str) -> Read:
    def read(folder: Path, data: bytes) -> None:
        for image in ("a.jpg", "dog/b.png", "é.jpg"):
            written(folder, f"approved/{image}", b"x")
        written(folder, f"approved/{name}", data)
        with Ledger(IN_MEMORY) as ledger:
            scan = survey(folder / "approved", ledger, inputs=InputSettings(strip_prefix="/x"))
            assert scan.metadata
            unread = ledger.verified(Path("metadata", name)) is None
            assert unread or all(row.text.strip() for row in ledger.captions().values())
        report_folder(folder / "approved", InputSettings(metadata="off"))

    return read


ROWS = [
    {"file_name": "a.jpg", "text": "a dog"},
    {"file_name": "dog/b.png", "text": ["b", "c"]},
    {"file_name": "/x/e\u0301.JPG", "text": "é"},
]
CSV_ROWS = [
    b'file_name,text\r\na.jpg,a dog\r\ndog/b.png,"b, ""c""\r\nd"\r\n',
    "file_name,text\na.jpg,é\n".encode("utf-16"),
]
BY_PATH = [
    json.dumps({"a.jpg": ["a", "b"], "dog/b.png": "c"}).encode(),
    json.dumps({"/x/a.jpg": {"caption": "a", "tags": "t"}, "b": {"tags": "u"}}).encode(),
    json.dumps(ROWS).encode(),
]


def parquet_rows() -> list[bytes]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    found = []
    for text in (["a", None], [["a", "b"], []]):
        stream = io.BytesIO()
        pq.write_table(pa.table({"image": ["a.jpg", "dog/b.png"], "caption": text, "n": [1, 2]}), stream)
        found.append(stream.getvalue())
    return found


def stage1_lines(folder: Path, data: bytes) -> None:
    path = written(folder, "approved_image_dataset.jsonl", data)
    for image_id, span in read_recorded(path).vectors.items():
        with suppress(Unusable):
            read_vector(span, image_id)
    collect("x", "stage2", stage2_records(path, migrating=True))


def stage2_lines(folder: Path, data: bytes) -> None:
    path = written(folder, "approved_image_dataset.jsonl", data)
    read_recorded(path)
    collect("x", "stage2", stage2_records(path))


STAGE1 = {
    "image_path": "data/approved/a.jpg", "dinov3_embedding": [0.25] * 1024, "caption": "c", "t5_attention_mask": [1] * 77,
    "height": 8, "width": 8,
}  # fmt: skip
STAGE1_LINES = [
    json.dumps({**STAGE1, "dinov3_embedding": vector}).encode() + b"\n" for vector in ([0.25] * 1024, [float("nan")])
]
STAGE2_LINES = lines(record_of("a"), record_of("b", score=[{"x": 1}]))

# ---- public data


def converted(adapter: str) -> Read:
    def read(folder: Path, data: bytes) -> None:
        written(folder, "photos/a.jpg", b"x")
        written(
            folder,
            "image_data.json",
            json.dumps([{"image_id": 7, "width": 99, "height": 50, "url": "x/a.jpg"}]).encode(),
        )
        geometry = "polygons" if adapter == "coco" and len(data) % 2 else "boxes"
        annotations = written(folder, "annotations.json", data)
        dataset = Dataset(folder / "public" / "d")
        convert(dataset, adapter, annotations, folder / "photos", geometry=geometry)
        report = collect("x", "preset", preset_records(dataset.raw_jsonl("train")))
        assert report.passed, f"what convert writes is valid: {report.findings[:1]}"

    return read


def sizes_of_visual_genome(folder: Path, data: bytes) -> None:
    written(folder, "photos/a.jpg", b"x")
    written(folder, "image_data.json", data)
    convert(Dataset(folder / "d"), "visual_genome", written(folder, "objects.json", OBJECTS), folder / "photos")


COCO = json.dumps({
    "images": [{"id": 7, "file_name": "a.jpg", "coco_url": "http://x/y/a.jpg", "width": 99, "height": 50}],
    "annotations": [
        {"image_id": 7, "category_id": 1, "bbox": [1.5, 2, 30, 40.25], "iscrowd": 0, "segmentation": [[1, 2, 30, 2, 30, 40]]},
        {"image_id": 7, "category_id": 2, "bbox": [0, 0, 9, 9], "segmentation": {"counts": "x", "size": [1, 1]}},
    ],
    "categories": [{"id": 1, "name": "cup"}, {"id": 2, "name": "bowl_(big)"}],
}).encode()  # fmt: skip
OBJECTS = json.dumps([{"image_id": 7, "objects": [{"x": 1, "y": 2, "w": 3, "h": 4, "names": ["a"]}] * 2}]).encode()
SIZES = json.dumps([{"image_id": 7, "width": 99, "height": 50, "url": "https://x/y/a.jpg"}]).encode()


def preset_lines(space: str) -> Read:
    def read(folder: Path, data: bytes) -> None:
        path = written(folder, f"train{space}.jsonl", data)
        collect("x", "preset", preset_records(path))
        if not space:
            transform(1, data.splitlines(keepends=True), 60)

    return read


def raw_lines(folder: Path, data: bytes) -> None:
    dataset = Dataset(folder / "d")
    written(dataset.raw, "train.jsonl", data)
    plan_rescale(dataset, "p", choose_parameters(dataset.preset("p"), library="pillow"))


def preset_manifest(folder: Path, data: bytes) -> None:
    (folder / "images").mkdir(exist_ok=True)
    written(folder, "pipeline_manifest.json", data)
    written(folder, "train.jsonl", lines(PRESET_RECORD))
    written(folder, "train.norm.jsonl", lines({**PRESET_RECORD, "objects": []}))
    list(validate_preset(folder, Options(image_mode="none")))


def preset_index(folder: Path, data: bytes) -> None:
    written(folder, PRESET_INDEX, data)
    read_known(PresetDir(folder))


BOX, POLY = {"desc": "a", "bbox_2d": [0, 1, 998, 999]}, {"desc": "b", "poly": [0, 0, 9, 0, 9, 999], "poly_points": 3}
NORM = {**PRESET_RECORD, "objects": [BOX, POLY]}
COORD = {
    **PRESET_RECORD,
    "objects": [{"desc": "a", "bbox_2d": [f"<|coord_{n}|>" for n in BOX["bbox_2d"]]}],
}
MANIFEST = {
    "stage_stats": {"rescale": RESCALE, "coord": {"splits": {"train": {"source": "sha256:0"}}}}, "base": {"preset": "small"}
}  # fmt: skip

# ---- Stage-A


def rank_lines(folder: Path, data: bytes) -> None:
    list(read_rank_lines(written(folder, "m_stage_a.images.rank0.jsonl", data)))
    with Ledger(IN_MEMORY) as ledger:
        import_summaries(ledger, "m", folder, folder / "none")


def summaries(folder: Path, data: bytes) -> None:
    written(folder, SNAPSHOT, data)
    with Ledger(IN_MEMORY) as ledger:
        import_summaries(ledger, "m", folder / "none", folder)
    KnownSummaries([folder / SNAPSHOT]).close()


def rank_mark(folder: Path, data: bytes) -> None:
    mark_file(folder, "m", 0).write_bytes(data)
    read_mark(folder, "m", 0)


def stage_a_output(folder: Path, data: bytes) -> None:
    collect("x", "stage-a", stage_a_records(written(folder, "m_stage_a.jsonl", data)))


SUMMARY = FinishedSummary(fingerprint="xxh3:0", summary="甲", image="a/1.jpg", stat="posix:1:2:3", content="c", at=5)
RANK_LINE = RankLine(
    group_seq=0, group_id="g", label="pass", image_index=1, image_name="1.jpg", ok=True, summary="s", fingerprint="f"
)

# ---- files of arrays and shards


def npy(folder: Path, data: bytes) -> None:
    path = written(folder, "a.npy", data)
    for read in (read_npy, lambda path: check_npy(path, (16, 3, 3), "float16")):
        with suppress(ImagemillError):
            read(path)


def npy_bytes(array) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def tar_bytes() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in ("a.json", "a.dinov3.npy", f"{'b' * 120}.json", "b.vae.npy"):
            info = tarfile.TarInfo(name)
            info.size = 5
            tar.addfile(info, io.BytesIO(b"{}   "))
    return stream.getvalue()


def tar(folder: Path, data: bytes) -> None:
    list(read_shard(written(folder, "shard-000000.tar", data)))


def settings_file(read_file: Callable[[Path], object]) -> Read:
    return lambda folder, data: read_file(written(folder, "settings.yaml", data))


def provenance(folder: Path, data: bytes) -> None:
    with Ledger(folder / "ledger.sqlite") as ledger:
        ledger.record_setting("identity.vae_latents", data.decode("utf-8", "replace"))
        read_identity(ledger, "vae_latents")


IDENTITY = ModelIdentity(kind="vae_latents", model="m", facts={"weights": "x", "shift": 0.5})

CONFIG = [
    b"encoders:\n  vae_latents: {model: a/b, batch_size: 2}\nthreads: 2\nlicence: cc-by-4.0\n",
    b"summarizer: &m {model: x, prompts: {default: p.txt}}\ncaptioner: {<<: {enabled: true}, temperature: 0.5}\n",
    b'{"near_duplicates": {"threshold": 0.9, "exclude": true}, "shard_size": 10}',
]
PRESETS = [
    b"datasets:\n  coco: {adapter: coco, annotations: {train: a.json}, images: /d, geometry: boxes}\n"
    b"presets:\n  coco/p: &p {image_factor: 32, max_pixels: 786432, max_objects: 60, splits: [train]}\n  coco/q: *p\n",
]

PARSERS = {
    "caption": Parser([b"a red ball\n", "ein Bild\r\nmit „Text“".encode(), b"\xef\xbb\xbfx"], caption),
    "metadata.jsonl": Parser([lines(*ROWS)], rows_of("metadata.jsonl")),
    "metadata.csv": Parser(CSV_ROWS, rows_of("metadata.csv")),
    "captions.json": Parser(BY_PATH, rows_of("captions.json")),
    "metadata.parquet": Parser(parquet_rows(), rows_of("metadata.parquet")),
    "Stage 1 lines": Parser(STAGE1_LINES, stage1_lines),
    "Stage 2 lines": Parser([STAGE2_LINES, STAGE1_LINES[0]], stage2_lines),
    "imagemill.yaml": Parser(CONFIG, settings_file(read_config)),
    "presets.yaml": Parser(PRESETS, settings_file(lambda path: read_presets(path).keys())),
    "COCO": Parser([COCO], converted("coco")),
    "LVIS": Parser([COCO], converted("lvis")),
    "Visual Genome": Parser([OBJECTS], converted("visual_genome")),
    "Visual Genome sizes": Parser([SIZES], sizes_of_visual_genome),
    "raw lines": Parser([lines(PRESET_RECORD, PRESET_RECORD)], raw_lines),
    "pixel lines": Parser([lines(PRESET_RECORD, NORM)], preset_lines("")),
    "norm lines": Parser([lines(NORM)], preset_lines(".norm")),
    "coord lines": Parser([lines(COORD)], preset_lines(".coord")),
    "preset manifest": Parser([encode_line(MANIFEST)], preset_manifest),
    "preset index": Parser([lines({"image": "images/a.jpg", "raw": [1, 2, 3]})], preset_index),
    "rank lines": Parser([lines(RANK_LINE, RANK_LINE)], rank_lines),
    "summaries": Parser([lines(SUMMARY, SUMMARY)], summaries),
    "rank mark": Parser([encode_line(RankMark("p", "l", True))], rank_mark),
    "Stage-A output": Parser([lines(GROUP, {**GROUP, "label": "fail"})], stage_a_output),
    "npy": Parser([npy_bytes(np.zeros((16, 3, 3), "<f2")), npy_bytes(np.zeros(1024, "<f4"))], npy),
    "tar": Parser([tar_bytes()], tar),
    "provenance": Parser([encode_line(IDENTITY)], provenance),
}


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in this block after so many seconds."""

    def ring(*_):
        raise TimeoutError(f"no end after {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def named(name: str, seed: int) -> Iterator[None]:
    """Name the seed of a failure and where it happened; pytest cannot print every traceback of a deep recursion."""
    try:
        yield
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename}:{last.lineno}"
        pytest.fail(f"{name}, SEED={seed}: {type(error).__name__} in {where}: {str(error)[:300]}", pytrace=False)


def everything_below(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*") if "work" not in path.relative_to(folder).parts[:1]}


def attack(tmp: Path, parser: Parser, seed: int) -> None:
    """One changed input; every error but ours goes on."""
    folder = tmp / "work" / "deep" / "inside"
    folder.mkdir(parents=True, exist_ok=True)
    data = mutated(Random(seed), parser.seeds)
    with within(SECONDS):
        try:
            parser.read(folder, data)
        except ImagemillError as error:
            assert str(error)


@pytest.mark.parametrize("name", PARSERS)
def test_good_input_is_read(tmp_path, name):
    """A parser that refuses everything would pass the rest."""
    parser = PARSERS[name]
    for data in parser.seeds:
        parser.read(tmp_path, data)


@pytest.mark.parametrize("name", PARSERS)
@settings(deadline=None, max_examples=FEW, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_hostile_input_gives_an_error_of_ours_or_findings(tmp_path, name, seed):
    attack(tmp_path, PARSERS[name], seed)
    assert everything_below(tmp_path) == set()


@pytest.mark.soak
@pytest.mark.parametrize("name", PARSERS)
def test_ten_thousand_hostile_inputs_give_errors_of_ours_or_findings(tmp_path, name):
    first = int(os.environ.get("SEED", "0"))
    for seed in range(first, first + SOAK):
        with named(name, seed):
            attack(tmp_path, PARSERS[name], seed)
    assert everything_below(tmp_path) == set()


# ---- a whole set of shards


@pytest.fixture(scope="module")
def shard_folder(tmp_path_factory):
    root = shards(tmp_path_factory.mktemp("fuzz"))
    return root.shards / f"bucket_{SQUARE}"


def attack_set(folder: Path, name: str, seed: int) -> None:
    path = folder / name
    good = path.read_bytes()
    try:
        path.write_bytes(mutated(Random(seed), [good]))
        with within(SECONDS):
            collect("set", "shards", shard_set(folder))
            read_manifest(folder)
            with suppress(ImagemillError):
                live_lines(folder)
    finally:
        path.write_bytes(good)


SET_FILES = ("manifest.json", "index.jsonl", "shard-000000.tar")


@pytest.mark.parametrize("name", SET_FILES)
@settings(deadline=None, max_examples=FEW // 2, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_hostile_file_in_a_set_of_shards_gives_findings(shard_folder, name, seed):
    attack_set(shard_folder, name, seed)


@pytest.mark.soak
@pytest.mark.parametrize("name", SET_FILES)
def test_ten_thousand_hostile_files_in_a_set_of_shards_give_findings(shard_folder, name):
    for seed in range(SOAK):
        with named(name, seed):
            attack_set(shard_folder, name, seed)
