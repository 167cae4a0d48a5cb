"""One identity per set of tensors, which only the first process reads.

Spec: docs/spec/conventions.md#provenance
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from imagemill.encoders import weight_digests as module
from imagemill.encoders.weight_digests import read_weights, weight_digests

PROJECT = Path(__file__).parents[2]
DTYPES = ["float32", "float16", "uint8", "int64"]

tensors = st.dictionaries(
    st.text("abc.é", min_size=1, max_size=6),
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3), st.integers(0, 100)),
    min_size=1,
    max_size=6,
)


@pytest.fixture(autouse=True)
def forget():
    """Each call acts as one of a new process."""
    module._known_or_read.cache_clear()


def array(dtype, shape, first):
    return np.asarray(np.arange(int(np.prod(shape))).reshape(shape) + first, dtype)


def write(path, arrays):
    """Write a file as the safetensors format describes it, with the tensors in the given order."""
    names = {"float32": "F32", "float16": "F16", "uint8": "U8", "int64": "I64"}
    header, data = {"__metadata__": {"format": str(path)}}, b""
    for key, values in arrays:
        offsets = [len(data), len(data) + values.nbytes]
        header[key] = {"dtype": names[values.dtype.name], "shape": list(values.shape), "data_offsets": offsets}
        data += values.tobytes()
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + data)
    return path


def digest(folder, *parts):
    found = []
    for number, part in enumerate(parts):
        read_weights(write(folder / f"{number}.safetensors", part), found)
    return module.digest_tensors(found)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), tensors)
def test_split_and_order_do_not_change_the_digest(tmp_path, data, chosen):
    items = [(key, array(*value)) for key, value in chosen.items()]
    shuffled = data.draw(st.permutations(items))
    parts = [[] for _ in range(data.draw(st.integers(1, 3)))]
    for item in shuffled:
        data.draw(st.sampled_from(parts)).append(item)

    assert digest(tmp_path, items) == digest(tmp_path, *parts)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), tensors)
def test_byte_name_and_shape_change_the_digest(tmp_path, data, chosen):
    items = {key: array(*value) for key, value in chosen.items()}
    before, key = digest(tmp_path, items.items()), data.draw(st.sampled_from(sorted(items)))
    values = items[key]
    others = [{**{k: v for k, v in items.items() if k != key}, f"{key}x": values}, {**items, key: values[None]}]
    if values.nbytes:
        changed = bytearray(values.tobytes())
        changed[data.draw(st.integers(0, len(changed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        others.append({**items, key: np.frombuffer(bytes(changed), values.dtype).reshape(values.shape)})

    assert before not in [digest(tmp_path, other.items()) for other in others]


def test_dtype_alone_changes_the_digest(tmp_path):
    """Bytes, keys and shapes are equal."""
    halves = array("float16", (2, 3), 1)
    found = []
    for dtype in (b"F16", b"I16", b"U16"):
        path = write(tmp_path / "model.safetensors", [("a", halves)])
        path.write_bytes(path.read_bytes().replace(b"F16", dtype))
        read_weights(path, tensors := [])
        found.append(module.digest_tensors(tensors))

    assert len(set(found)) == 3


def test_file_of_the_library_gives_the_same_digest(tmp_path):
    items = {"b": array("float16", (3, 2), 1), "a": array("float32", (5,), 2), "c": array("int64", (), 3)}
    save_file(items, tmp_path / "model.safetensors", metadata={"format": "pt"})

    found = weight_digests([tmp_path / "model.safetensors"], tmp_path / "cache")

    assert digest(tmp_path, items.items()) == found.tensors


def reads(path, cache):
    """Return the bytes that a new process reads of a weight file, and the digest that it finds."""
    code = (
        "import sys; from pathlib import Path\n"
        "from imagemill.encoders import weight_digests as m\n"
        "path, cache = map(Path, sys.argv[1:])\n"
        "chunks, count = m._chunks, []\n"
        "m._chunks = lambda file, size: (count.append(size), chunks(file, size))[1]\n"
        "print(m.weight_digests([path], cache).tensors, sum(count))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, path, cache], cwd=PROJECT, capture_output=True, check=True, text=True
    )
    tensors, count = done.stdout.split()
    return tensors, int(count)


def test_second_process_does_not_read_the_weights(tmp_path):
    path = write(tmp_path / "model.safetensors", [("a", array("float32", (9, 9), 0))])
    cache = tmp_path / "cache"

    first, again = reads(path, cache), reads(path, cache)

    assert (first[0], path.stat().st_size) == first, "in one pass"
    assert (first[0], 0) == again


@pytest.mark.parametrize(
    "damage", [lambda data: b"", lambda data: b"{", lambda data: data.replace(b'"tensors": "', b'"tensors": "0')]
)
def test_deleted_or_damaged_memory_is_written_again(tmp_path, damage):
    path = write(tmp_path / "model.safetensors", [("a", array("float32", (9, 9), 0))])
    cache = tmp_path / "cache"
    expected = weight_digests([path], cache)
    [stored] = cache.iterdir()
    whole = stored.read_bytes()

    for change in (lambda: stored.write_bytes(damage(whole)), stored.unlink):
        change()
        module._known_or_read.cache_clear()
        assert expected == weight_digests([path], cache)
        assert whole == stored.read_bytes()


def test_changed_file_is_read_again_and_replaces_the_memory(tmp_path):
    path = write(tmp_path / "model.safetensors", [("a", array("float32", (9, 9), 0))])
    cache = tmp_path / "cache"
    before = weight_digests([path], cache)
    write(path, [("a", array("float32", (9, 9), 1))])
    os.utime(path, ns=(1, 1))

    assert before != weight_digests([path], cache)
    assert len(list(cache.iterdir())) == 1


def test_memory_that_cannot_be_written_changes_nothing(tmp_path):
    path = write(tmp_path / "model.safetensors", [("a", array("float32", (2,), 0))])
    (tmp_path / "file").write_text("")

    found = weight_digests([path], tmp_path / "file" / "cache")

    assert found == weight_digests([path], tmp_path / "cache")


@pytest.mark.parametrize(
    "damage",
    [lambda data: b"", lambda data: data[:5], lambda data: data[:-1], lambda data: data + b"x",
     lambda data: b"\xff" * 8 + data, lambda data: data[:8] + b"[" + data[9:],
     lambda data: data.replace(b'"data_offsets": [0', b'"data_offsets": [4')],
)  # fmt: skip
def test_file_in_another_format_is_refused(tmp_path, damage):
    path = write(tmp_path / "model.safetensors", [("a", array("float32", (9, 9), 0))])
    path.write_bytes(damage(path.read_bytes()))

    with pytest.raises(ValueError, match=r"model\.safetensors"):
        weight_digests([path], tmp_path / "cache")
