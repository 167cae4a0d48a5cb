"""npy files, compared with NumPy's own writer and reader."""

import dataclasses
import io
import math
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from imagemill.domain.embedding_specs import CLIP_TEXT, DINOV3, T5, VAE, check_specs
from imagemill.errors import InvalidNpy
from imagemill.formats import npy
from imagemill.formats.npy import (
    NpyStore,
    check_npy,
    check_npy_header,
    join_npy,
    npy_header,
    parse_npy,
    read_npy,
    split_npy,
    stage_npy,
)
from imagemill.fs.atomic import temporaries
from imagemill.fs.fingerprints import posix_signature
from tests.helpers.npy_files import write_npy

# The bytes of NumPy's own writer for a vector of three float32, as NEP 1 describes them.
THREE = b"\x93NUMPY\x01\x00v\x00" + b"{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }".ljust(117) + b"\n"

dtypes = st.sampled_from(["float32", "float16", "float64", "uint8", "int64", "bool", "complex64"])
shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6)
arrays = st.tuples(dtypes, shapes).flatmap(lambda both: hnp.arrays(*both))


def saved(array: np.ndarray, version: tuple[int, int] | None = None) -> bytes:
    """Return the bytes that NumPy writes."""
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, version=version)
    return buffer.getvalue()


def refusal(call, *arguments) -> InvalidNpy:
    with pytest.raises(InvalidNpy) as caught:
        call(*arguments)
    return caught.value


@pytest.fixture
def vector() -> np.ndarray:
    return np.linspace(-1, 1, 1024, dtype=np.float32)


# ---- writing


def test_header_is_what_the_format_prescribes():
    """Magic, version 1.0, length, the dictionary's text padded so that values begin at a multiple of 64."""
    assert npy_header((3,), "float32") == THREE
    assert len(THREE) == 128


@given(arrays)
@settings(max_examples=60, deadline=None)
def test_header_and_values_are_the_bytes_of_np_save(array):
    """Spec: docs/spec/conventions.md#completion"""
    assert npy_header(array.shape, array.dtype) + array.tobytes() == saved(array)


def test_header_of_numpy_integers_is_that_of_plain_ones():
    """A shape computed with NumPy would print as `np.int64(3)`, which no reader understands."""
    assert npy_header(tuple(np.array([3])), "float32") == THREE


def test_objects_are_never_written(tmp_path):
    """They would be pickled."""
    with pytest.raises(ValueError, match="pickling"):
        stage_npy(tmp_path, np.array([{}]))
    assert os.listdir(tmp_path) == []


@given(arrays, st.sampled_from(["C", "F", "reversed"]))
@settings(max_examples=60, deadline=None)
def test_array_of_any_layout_comes_back_equal(tmp_path_factory, array, layout):
    """The file is in C order for any layout in memory, and NumPy and we read equal values."""
    given_array = (
        array[::-1] if layout == "reversed" and array.ndim else np.asarray(array, order="F" if layout == "F" else "C")
    )
    path = tmp_path_factory.mktemp("npy") / "folder" / "abc.npy"
    write_npy(path, given_array)
    assert path.read_bytes() == saved(np.array(given_array, order="C"))
    for loaded in (np.load(path), read_npy(path)):
        assert loaded.dtype == array.dtype
        np.testing.assert_array_equal(loaded, given_array)


def test_staged_file_is_whole_under_a_temporary_name(tmp_path, vector):
    """The publisher renames it. Spec: docs/spec/conventions.md#atomic-names"""
    staged = stage_npy(tmp_path, vector)
    assert temporaries(tmp_path) == [staged]
    assert staged.read_bytes() == saved(vector)


def test_array_is_written_whole_where_the_system_takes_it_in_parts(tmp_path, vector, monkeypatch):
    """`writev` and `write` may stop anywhere: a signal, a limit of the system."""
    writev, write = os.writev, os.write
    monkeypatch.setattr(os, "writev", lambda handle, parts: writev(handle, [parts[0][:50]]))
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:777]))
    assert stage_npy(tmp_path, vector).read_bytes() == saved(vector)


def test_nothing_is_left_behind_when_the_disk_is_full(tmp_path, vector, monkeypatch):
    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(OSError, match="No space"):
        stage_npy(tmp_path, vector)
    assert os.listdir(tmp_path) == []


# ---- checking

SHAPE, DTYPE = (2, 3), "float16"
GOOD = np.arange(6, dtype=DTYPE).reshape(SHAPE)


def check_bytes(folder, data: bytes) -> str:
    path = folder / "abc.npy"
    path.write_bytes(data)
    return check_npy(path, SHAPE, DTYPE)


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_file_of_any_header_version_is_valid(tmp_path, version):
    """Written by another program. Spec: docs/spec/conventions.md#adoption"""
    data = saved(GOOD, version)
    assert check_bytes(tmp_path, data) == f"xxh3:{xxhash.xxh3_128_hexdigest(data)}"
    check_npy_header(tmp_path / "abc.npy", SHAPE, DTYPE)


@pytest.mark.parametrize(
    "text",
    [
        "{'descr': '<f2', 'fortran_order': False, 'shape': (2, 3)}",
        '{"shape":(2,3),"descr":"=f2","fortran_order":False}\n',
        "{'descr': '<f2', 'fortran_order': False, 'shape': (2L, 3L), }",
        "{'descr': '<f2', 'fortran_order': False, 'shape': (2, 3), }" + " " * 9000 + "\n",
    ],
)
@pytest.mark.filterwarnings("ignore:Reading `.npy`")
def test_header_spelt_otherwise_is_valid(tmp_path, text):
    """Unpadded, reordered, by Python 2, or padded to a large block: NumPy reads all of them."""
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode() + GOOD.tobytes()
    np.testing.assert_array_equal(np.load(io.BytesIO(data)), GOOD)
    check_bytes(tmp_path, data)
    check_npy_header(tmp_path / "abc.npy", SHAPE, DTYPE)


INVALID = [
    pytest.param(b"", "truncated", id="empty"),
    pytest.param(saved(GOOD)[:5], "truncated", id="cut in the magic"),
    pytest.param(saved(GOOD)[:60], "truncated", id="cut in the header"),
    pytest.param(saved(GOOD)[:128], "truncated", id="cut behind the header"),
    pytest.param(saved(GOOD)[:-1], "truncated", id="cut by one byte"),
    pytest.param(saved(GOOD) + b"\0", "trailing_bytes", id="one byte more"),
    pytest.param(saved(GOOD) * 2, "trailing_bytes", id="twice"),
    pytest.param(bytes(140), "unreadable", id="zeros, as a crash may leave them"),
    pytest.param(b"{'descr': '<f2', 'shape': (2, 3)}", "unreadable", id="text"),
    pytest.param(b"\x93NUMPY\x09\x00" + saved(GOOD)[8:], "unreadable", id="unknown version"),
    pytest.param(saved(GOOD).replace(b"'shape'", b"'sharp'"), "unreadable", id="a key missing"),
    pytest.param(saved(GOOD).replace(b"(2, 3)", b"(2, -3)"), "unreadable", id="negative side"),
    pytest.param(saved(GOOD).replace(b"(2, 3)", b"(2, x)"), "unreadable", id="no literal"),
    pytest.param(saved(GOOD.T), "wrong_shape", id="transposed"),
    pytest.param(saved(GOOD.reshape(6)), "wrong_shape", id="flat"),
    pytest.param(saved(GOOD[None]), "wrong_shape", id="one dimension more"),
    pytest.param(saved(GOOD.astype("float32")), "wrong_dtype", id="float32"),
    pytest.param(saved(GOOD.astype(">f2")), "wrong_dtype", id="other byte order"),
    pytest.param(saved(GOOD.view("int16")), "wrong_dtype", id="ints of the same size"),
    pytest.param(saved(np.asfortranarray(GOOD)), "fortran_order", id="columns first"),
    pytest.param(saved(GOOD + np.array([[0, 0, 0], [0, 0, np.nan]], DTYPE)), "non_finite", id="NaN"),
    pytest.param(saved(np.full(SHAPE, np.inf, DTYPE)), "non_finite", id="infinity"),
    pytest.param(saved(np.full(SHAPE, -np.inf, DTYPE)), "non_finite", id="minus infinity"),
]


@pytest.mark.parametrize(("data", "reason"), INVALID)
def test_file_that_breaks_its_contract_is_named_by_what_is_wrong(tmp_path, data, reason):
    """Spec: docs/spec/conventions.md#completion"""
    error = refusal(check_bytes, tmp_path, data)
    assert error.reason == reason
    assert error.where == tmp_path / "abc.npy"
    assert error.do


@pytest.mark.parametrize(("data", "reason"), INVALID)
def test_header_check_finds_all_but_bad_values(tmp_path, data, reason):
    """It reads the header and the file's size, so only bad values such as NaN stay undetected."""
    path = tmp_path / "abc.npy"
    path.write_bytes(data)
    if reason == "non_finite":
        check_npy_header(path, SHAPE, DTYPE)
    else:
        assert refusal(check_npy_header, path, SHAPE, DTYPE).reason == reason


@pytest.mark.parametrize("shape", [(3,), (1, 3), (3, 1), (1, 1)])
def test_order_means_nothing_where_at_most_one_side_is_longer_than_one(tmp_path, shape):
    """Some writers mark vectors as Fortran-ordered; the bytes are the same."""
    data = saved(np.ones(shape, DTYPE)).replace(b"'fortran_order': False", b"'fortran_order': True ")
    path = tmp_path / "abc.npy"
    path.write_bytes(data)
    check_npy(path, shape, DTYPE)


@given(hnp.arrays("uint16", 64))
@settings(max_examples=100)
def test_half_floats_are_judged_as_numpy_judges_them(bits):
    """The fast check of the bits agrees with `isfinite`."""
    halves = bits.view(np.float16)
    assert npy.all_finite(halves) == bool(np.isfinite(halves).all())


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_every_finite_extreme_passes(tmp_path, dtype):
    """Largest, smallest, subnormal and negative zero are values."""
    info = np.finfo(dtype)
    array = np.array([info.max, info.min, info.tiny, info.smallest_subnormal, -0.0, 0.0], dtype)
    write_npy(tmp_path / "abc.npy", array)
    check_npy(tmp_path / "abc.npy", (6,), dtype)


def test_missing_file_is_a_missing_file(tmp_path):
    """It is not an invalid file: callers distinguish the two."""
    for check in (check_npy, check_npy_header):
        with pytest.raises(FileNotFoundError):
            check(tmp_path / "abc.npy", SHAPE, DTYPE)


def test_disk_error_is_not_the_file_s_fault(tmp_path):
    """A folder under the name represents any read error: it is retried, and the file is not called invalid."""
    (tmp_path / "abc.npy").mkdir()
    with pytest.raises(OSError, match="directory"):
        check_npy(tmp_path / "abc.npy", SHAPE, DTYPE)


# ---- parsing


@given(arrays, st.booleans())
@settings(max_examples=60, deadline=None)
def test_bytes_in_memory_parse_as_numpy_loads_them(array, fortran):
    data = saved(np.asfortranarray(array) if fortran else array)
    parsed, loaded = parse_npy(data), np.load(io.BytesIO(data))
    assert (parsed.dtype, parsed.shape) == (loaded.dtype, loaded.shape)
    np.testing.assert_array_equal(parsed, loaded)


def test_known_header_is_checked_against_the_bytes_of_each_file():
    """Headers are parsed once; the length and the path in the message are those of the present bytes."""
    data = saved(GOOD)
    for path in (Path("one.npy"), Path("other.npy")):
        np.testing.assert_array_equal(parse_npy(memoryview(data), path), GOOD)
        with pytest.raises(InvalidNpy, match=str(path)) as caught:
            parse_npy(memoryview(data)[:-1], path)
        assert caught.value.reason == "truncated"


@pytest.mark.parametrize(
    "fields",
    [
        "{'descr': '|O', 'fortran_order': False, 'shape': (1,), }",
        "{'descr': '<U0', 'fortran_order': False, 'shape': (3,), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (0, 99999999999999999999999999), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': " + repr((1,) * 70) + ", }",
    ],
)
def test_header_of_no_plain_array_is_refused(fields):
    """Pickled objects, items of size zero, impossible shapes."""
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(fields)) + fields.encode() + bytes(4)
    assert refusal(parse_npy, data).reason in {"wrong_dtype", "unreadable", "trailing_bytes"}
    assert refusal(parse_npy, data[:-4]).reason in {"wrong_dtype", "unreadable", "truncated"}


@given(st.data())
@settings(max_examples=150, deadline=None)
@pytest.mark.filterwarnings("ignore")
def test_any_bytes_are_an_array_or_refused(data):
    """For any bytes the caller gets an array or InvalidNpy."""
    whole = saved(GOOD)
    at = data.draw(st.integers(0, len(whole)))
    patch = data.draw(
        st.one_of(st.binary(max_size=20), st.text("(){}[],'\":LxfO0123456789 \n", max_size=20).map(str.encode))
    )
    candidate = data.draw(st.sampled_from([whole[:at] + patch + whole[at + len(patch) :], patch, whole[:at] + patch]))
    try:
        array = parse_npy(candidate)
    except InvalidNpy as invalid:
        assert invalid.reason in {"unreadable", "truncated", "trailing_bytes", "wrong_dtype"}
    else:
        np.testing.assert_array_equal(array, np.load(io.BytesIO(candidate)))


# ---- a folder of files


def test_store_lists_whole_files_by_image_id(tmp_path):
    """One pass returns names and signatures, without staged files, other suffixes, folders and dead links."""
    for name in ("abc.npy", "a.b.npy", "äöü.npy", ".tmp-x-1-1-000001", "notes.txt"):
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "folder.npy").mkdir()
    (tmp_path / "gone.npy").symlink_to(tmp_path / "nowhere")
    (tmp_path / "link.npy").symlink_to(tmp_path / "notes.txt")
    listing = NpyStore(tmp_path, DINOV3).listing()
    assert set(listing) == {"abc", "a.b", "äöü", "link"}
    stat = os.stat(tmp_path / "abc.npy")
    assert listing["abc"] == posix_signature(7, stat.st_mtime_ns, stat.st_ino) == NpyStore(tmp_path, DINOV3).stat("abc")


def test_store_of_a_missing_folder_is_empty(tmp_path):
    store = NpyStore(tmp_path / "dinov3", DINOV3)
    assert store.listing() == {}
    assert store.sweep() == 0


@pytest.mark.parametrize(
    ("spec", "shape"),
    [(DINOV3, (1024,)), (VAE, (16, 96, 128)), (T5, (77, 1024))],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_store_checks_a_file_by_the_shape_of_its_image(tmp_path, spec, shape):
    """An image 1024 wide and 768 high. Spec: docs/spec/stage2.md#embeddings"""
    store = NpyStore(tmp_path, spec)
    array = np.zeros(shape, spec.dtype)
    os.replace(store.stage(array), store.path("abc"))
    assert store.path("abc") == tmp_path / "abc.npy" == Path(store.path_text("abc"))
    assert store.check("abc", 768, 1024) == f"xxh3:{xxhash.xxh3_128_hexdigest(saved(array))}"
    if spec is VAE:
        # Swapped sides keep the file's size; only the header differs.
        assert refusal(store.check, "abc", 1024, 768).reason == "wrong_shape"


def test_store_sweeps_what_dead_processes_staged(tmp_path, vector):
    store = NpyStore(tmp_path, DINOV3)
    living = store.stage(vector)
    folder = living.name.removeprefix(".tmp-").partition("-")[0]
    dead = tmp_path / f".tmp-{folder}-0123456789ab-000001"
    dead.write_bytes(b"half")
    assert store.sweep() == 1
    assert os.listdir(tmp_path) == [living.name]


@pytest.mark.parametrize("spec", [DINOV3, VAE, T5], ids=lambda spec: spec.kind)
def test_store_travels_to_a_worker_process(tmp_path, spec):
    """A shape rule may be a lambda, which cannot be pickled: the kind's name is sent."""
    assert pickle.loads(pickle.dumps(NpyStore(tmp_path, spec))) == NpyStore(tmp_path, spec)


def test_largest_latent_is_reported_by_length_alone(tmp_path):
    """The header check never reads values: a sparse file of the right length passes."""
    shape = (16, 512, 512)
    path = tmp_path / "abc.npy"
    path.write_bytes(npy_header(shape, "float16"))
    os.truncate(path, len(npy_header(shape, "float16")) + 2 * math.prod(shape))
    check_npy_header(path, shape, "float16")


# ---- files with several arrays

clip_values = st.tuples(
    hnp.arrays("float16", (3, 2), elements=st.floats(-8, 8, width=16)),
    hnp.arrays("float16", (4,), elements=st.floats(-8, 8, width=16)),
)
CLIP = dataclasses.replace(CLIP_TEXT, contract={"tokens": 3, "width": 2, "pooled_width": 4})


def clip_file(hidden, pooled):
    state = np.zeros((), CLIP.layout(0, 0)[1])
    state["hidden"], state["pooled"] = hidden, pooled
    return state


@given(clip_values, st.booleans())
def test_parts_are_members_of_their_own_from_which_the_file_is_restored(values, preview):
    state = clip_file(*values)
    data = npy_header((), state.dtype, preview=preview) + state.tobytes()

    members = dict(split_npy(data, CLIP))

    assert list(members) == ["clip.npy", "clip_pooled.npy"]
    for member, value in zip(members.values(), values, strict=True):
        assert np.array_equal(np.load(io.BytesIO(member)), value)
        assert (b"imagemill-preview" in member) == preview
    assert join_npy(members, CLIP) == data
    assert join_npy({"clip.npy": members["clip.npy"]}, CLIP) is None


@given(clip_values)
def test_structured_file_is_what_numpy_saves(tmp_path_factory, values):
    store = NpyStore(tmp_path_factory.mktemp("clip"), CLIP)
    expected = io.BytesIO()
    np.save(expected, clip_file(*values))

    staged = store.stage(clip_file(*values))

    assert staged.read_bytes() == expected.getvalue()
    staged.rename(store.path("a"))
    store.check("a", 0, 0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data[:-1], "truncated"),
        (lambda data: data[:-2] + b"\x00\x7c", "non_finite"),
        (lambda data: data.replace(b"'pooled'", b"'looped'"), "wrong_dtype"),
        (lambda data: data.replace(b"(3, 2)", b"(2, 3)"), "wrong_dtype"),
        (lambda data: data.replace(b"'fortran_order': False, 'shape'", b"'fortran_order':False,  'shape'"), "wrong_dtype"),
    ],
)  # fmt: skip
def test_structured_file_that_breaks_its_contract_is_refused(tmp_path, change, reason):
    store = NpyStore(tmp_path, CLIP)
    store.stage(clip_file(np.ones((3, 2)), np.ones(4))).rename(store.path("a"))
    store.path("a").write_bytes(change(store.path("a").read_bytes()))

    with pytest.raises(InvalidNpy) as refused:
        store.check("a", 0, 0)

    assert refused.value.reason == reason


def test_file_without_a_part_has_no_members():
    state = np.zeros((), [("hidden", "float16", (3, 2))])

    with pytest.raises(InvalidNpy, match="expected fields for each part"):
        split_npy(npy_header((), state.dtype) + state.tobytes(), CLIP)


def test_names_of_all_members_are_checked():
    one, other = CLIP_TEXT.named("clip_l"), dataclasses.replace(T5, member="clip_l_pooled.npy")

    with pytest.raises(ValueError, match="npy' belongs to clip_l"):
        check_specs([one, other])
