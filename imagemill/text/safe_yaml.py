"""YAML files written by people: one loader for imagemill.yaml and presets.yaml, safe on any bytes.

A document is refused, with the line if there is one, if it is longer than 64 KiB, not UTF-8, nested deeper than 50 levels,
larger than 20,000 values once its aliases are resolved, or contains itself. It is also refused if a name occurs twice or is
not plain text, and if a value is one that no setting has (a lone surrogate, a NUL, a number beyond 64 bits, NaN, infinity).

The values are interpreted in config.py and pipeline/presets/preset_config.py.
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from imagemill.errors import WrongUsage

MAX_BYTES = 64 * 1024
MAX_DEPTH = 50
MAX_VALUES = 20_000
_LARGEST = 2**63

# Exceptions of PyYAML: its own, and those of a text that does not have the type of its tag (`!!int ""`).
_NOT_YAML = (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError)


class _Loader(yaml.SafeLoader):
    """SafeLoader that stops at the first bracket nested too deeply: its scanner takes seconds for a thousand open brackets."""

    def fetch_flow_collection_start(self, *token: Any) -> None:  # type: ignore[override]
        """Raise MarkedYAMLError if more than `MAX_DEPTH` brackets are open."""
        if self.flow_level > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem="nested too deeply", problem_mark=self.get_mark())
        super().fetch_flow_collection_start(*token)


class YamlDocument(NamedTuple):
    """A document: its value, and its node tree, which contains the line numbers."""

    path: Path
    value: Any
    node: yaml.Node | None

    def line(self, place: Sequence[str]) -> int:
        """Return the line, from 1, of the deepest of these nested names that exists."""
        node, line = self.node, 1
        for name in place:
            pairs = node.value if isinstance(node, yaml.MappingNode) else []
            # Merged pairs (`<<`) come before the mapping's own.
            found = next(((key, value) for key, value in reversed(pairs) if key.value == name), None)
            if found is None:
                break
            line, node = found[0].start_mark.line + 1, found[1]
        return line


def read_yaml(path: Path) -> YamlDocument:
    """Read an existing file; an empty one has the value None. Raises WrongUsage if it is refused."""
    text = _text(path)
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is not None:
            _check_nodes(path, node)
        value = None if node is None else loader.construct_document(node)
        _check_values(path, value)
    except WrongUsage:
        raise
    except _NOT_YAML as error:
        message = "nested too deeply" if isinstance(error, RecursionError) else error
        raise _refused(path, None, f"not YAML: {message}", "correct the file") from error
    return YamlDocument(path, value, node)


def _text(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise _refused(path, None, f"cannot be read: {error.strerror}", "make it a readable file") from error
    if len(data) > MAX_BYTES:
        raise _refused(path, None, f"longer than {MAX_BYTES} bytes", "shorten the file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _refused(path, None, f"not UTF-8: {error.reason}", "save the file as UTF-8") from error


def _refused(path: Path, node: yaml.Node | None, what: str, do: str) -> WrongUsage:
    line = f" line {node.start_mark.line + 1}" if node else ""
    return WrongUsage(f"{path.name}{line}: {what}", where=path, do=do)


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [each for pair in node.value for each in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


def _check_nodes(path: Path, root: yaml.Node) -> None:
    """Refuse a document that is too deep or too large with its aliases resolved, contains itself, or has unusable names."""
    known: dict[int, tuple[int, int]] = {}
    open_nodes: set[int] = set()

    def extent(node: yaml.Node, depth: int) -> tuple[int, int]:
        """Return the number of values of a node with its aliases resolved, and the number of its levels."""
        if id(node) in open_nodes:
            raise _refused(path, node, "an alias that refers to the value containing it", "write the value out")
        if id(node) not in known and depth <= MAX_DEPTH:
            if isinstance(node, yaml.MappingNode):
                _check_names(path, node)
            elif isinstance(node, yaml.ScalarNode) and re.search("[\ud800-\udfff\0]", node.value):
                raise _refused(
                    path, node, "a character that is not valid in text: a lone surrogate or NUL", "remove it"
                )
            open_nodes.add(id(node))
            inner = [extent(child, depth + 1) for child in _children(node)]
            open_nodes.discard(id(node))
            known[id(node)] = 1 + sum(size for size, _ in inner), 1 + max((height for _, height in inner), default=0)
        size, height = known.get(id(node), (1, MAX_DEPTH + 1))
        if height > MAX_DEPTH:
            raise _refused(path, node, f"nested deeper than {MAX_DEPTH} levels", "reduce the nesting")
        if size > MAX_VALUES:
            raise _refused(path, node, f"more than {MAX_VALUES} values once aliases are resolved", "write fewer")
        return size, height

    extent(root, 1)


def _check_names(path: Path, node: yaml.MappingNode) -> None:
    """Refuse names that are lists or mappings, and names that occur twice, of which PyYAML would use the last."""
    seen: dict[str, int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _refused(path, key, "a name that is not text", "write `name: value`")
        line = key.start_mark.line + 1
        if key.value in seen:
            raise _refused(path, key, f"{key.value!r} already occurs in line {seen[key.value]}", "keep one of them")
        seen[key.value] = line


def _check_values(path: Path, value: Any) -> None:
    """Refuse numbers that no setting has. Aliases are bounded by `_check_nodes`."""
    if isinstance(value, dict):
        for each in (*value.keys(), *value.values()):
            _check_values(path, each)
    elif isinstance(value, list | set | tuple):
        for each in value:
            _check_values(path, each)
    elif isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
        raise _refused(path, None, "a number beyond 64 bits", "write a smaller number")
    elif isinstance(value, float) and not math.isfinite(value):
        raise _refused(path, None, f"a number that is not finite: {value}", "write a finite number")
