"""Hostile YAML is refused quickly, with a line number if there is one."""

import time

import pytest

from imagemill.config import read_config
from imagemill.errors import WrongUsage
from imagemill.pipeline.presets.preset_config import read_presets
from imagemill.text.safe_yaml import MAX_BYTES, read_yaml

LAUGHS = "a0: &a0 [1, 1]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 12))
CHAIN = (
    "a0: &a0 "
    + "[" * 45
    + "]" * 45
    + "\n"
    + "".join(f"a{n}: &a{n} {'[' * 40}*a{n - 1}{']' * 40}\n" for n in range(1, 40))
)

# what is wrong → the text, and what the message says
HOSTILE = {
    "alias bomb": (LAUGHS, "once aliases are resolved"),
    "merge bomb": (MERGES, "once aliases are resolved"),
    "deep by aliases": (CHAIN, "nested deeper"),
    "self-reference": ("a: &a [*a]", "line 1: an alias that refers to the value containing it"),
    "self-reference in a mapping": ("x: 1\na: &a\n  b: *a\n", "line 2: an alias"),
    "whole document": ("&a {presets: *a}", "an alias that refers to the value"),
    "deep list": ("[" * 60_000, "nested too deeply"),
    "deep list that ends": ("[" * 60 + "]" * 60, "nested too deeply"),
    "deep mapping": ("{a: " * 60 + "1" + "}" * 60, "nested too deeply"),
    "deep block": ("- " * 20_000, "nested too deeply"),
    "deep block that ends": ("- " * 60, "nested deeper"),
    "surrogate": ('captioner: {model: "\\ud800"}', "lone surrogate"),
    "surrogate in a name": ('"\\udfff": 1', "lone surrogate"),
    "NUL": ('captioner: {model: "a\\0b"}', "NUL"),
    "long": ("#" * (MAX_BYTES + 1), "longer than"),
    "not UTF-8": (b"\xff\xfe", "not UTF-8"),
    "name twice": ("threads: 1\nthreads: 2", "line 2: 'threads' already occurs in line 1"),
    "name is a list": ("? [a, b]\n: 1", "a name that is not text"),
    "huge number": ("threads: 0x" + "f" * 1000, "beyond 64 bits"),
    "huge decimal": ("threads: " + "9" * 5000, "not YAML"),
    "infinity": ("threads: .inf", "not finite"),
    "NaN": ("threads: .nan", "not finite"),
    "tag without a value": ('threads: !!int ""', "not YAML"),
    "tag of another kind": ("threads: !!bool maybe", "not YAML"),
    "timestamp": ("threads: !!timestamp x", "not YAML"),
    "Python object": ("threads: !!python/object/apply:os.getcwd []", "not YAML"),
    "two documents": ("a: 1\n---\nb: 2", "not YAML"),
}


@pytest.mark.parametrize("read", [read_config, read_presets])
@pytest.mark.parametrize("fault", HOSTILE)
def test_hostile_file_is_refused_in_a_moment(tmp_path, read, fault):
    text, says = HOSTILE[fault]
    path = tmp_path / "settings.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    began = time.monotonic()

    with pytest.raises(WrongUsage, match=says):
        read(path)

    assert time.monotonic() - began < 5


def test_folder_in_place_of_the_file_is_refused(tmp_path):
    with pytest.raises(WrongUsage, match="cannot be read"):
        read_config(tmp_path)


def test_aliases_and_merges_of_usual_size_are_resolved(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("\ufeffa: &a {x: 1, y: [2]}\nb: {<<: *a, x: 3}\nc: *a\n", "utf-8")

    document = read_yaml(path)

    assert document.value == {"a": {"x": 1, "y": [2]}, "b": {"x": 3, "y": [2]}, "c": {"x": 1, "y": [2]}}
    assert (document.line(["b", "x"]), document.line(["c"]), document.line(["absent"])) == (2, 3, 1)


def test_empty_file_has_no_value(tmp_path):
    (tmp_path / "empty.yaml").touch()
    assert read_yaml(tmp_path / "empty.yaml").value is None


@pytest.mark.parametrize(
    "section", ["summarizer: {prompts: {default: ~unknown_user/x}}", "captioner: {prompt: ~unknown_user/x}"]
)
def test_home_of_an_unknown_user_is_a_plain_name(tmp_path, section):
    (tmp_path / "imagemill.yaml").write_text(section)
    config = read_config(tmp_path / "imagemill.yaml")

    assert str(tmp_path / "~unknown_user/x") in {config.captioner.prompt, *config.summarizer.prompts.values()}
