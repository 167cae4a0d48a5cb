"""Every scenario, decision, mitigation, phase, invariant and acceptance check of the original specification has a test
named after it.


"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spec.table import (
    MIGRATION_TESTS,
    PRESETS_TESTS,
    SCENARIOS,
    SHARD_SCENARIOS,
    SHARDS,
    STAGE2,
    STAGE_A,
    STAGE_A_SCENARIOS,
    TESTS,
)

HERE = Path(__file__).parent


def docstrings_in(file):
    """Names of the tests of a file, each with its docstring in one line."""
    functions = [node for node in ast.parse((HERE / file).read_text()).body if isinstance(node, ast.FunctionDef)]
    tests = [function for function in functions if function.name.startswith("test_")]
    assert len({test.name for test in tests}) == len(tests), "a second one of a name hides the first"
    return {test.name: " ".join((ast.get_docstring(test) or "").split()) for test in tests}


@pytest.mark.parametrize("file", TESTS)
def test_every_title_has_its_test_and_every_test_its_title(file):
    assert sorted(docstrings_in(file)) == sorted(TESTS[file].values())


@pytest.mark.parametrize("file", TESTS)
def test_every_test_names_its_title(file):
    found = docstrings_in(file)

    assert [title for title, name in TESTS[file].items() if title.rstrip(".?") not in found[name]] == []


def test_names_of_scenarios_are_their_titles():
    assert TESTS[STAGE2]["DINOv3 file size is approximately 4KB"] == "test_dinov3_file_size_is_approximately_4kb"
    assert TESTS[SHARDS]["NPY files are copied as-is"] == "test_npy_files_are_copied_as_is"
    assert len(SCENARIOS) == len(set(TESTS[STAGE2].values())) == 22
    assert len(SHARD_SCENARIOS) == len(set(TESTS[SHARDS].values())) == 23
    assert len(STAGE_A_SCENARIOS) == len(set(TESTS[STAGE_A].values())) == 12


def test_every_numbered_part_of_the_migration_is_there():
    """Eight decisions, five phases, four open questions; twelve mitigations, three of each risk."""
    heads = [title.partition(":")[0] for title in TESTS[MIGRATION_TESTS]]

    for what, count in {"Decision": 8, "Phase": 5, "Open question": 4}.items():
        assert [head for head in heads if re.fullmatch(rf"{what} \d", head)] == [
            f"{what} {n + 1}" for n in range(count)
        ]
    mitigations = [
        title.partition(":")[0] for title, name in TESTS[MIGRATION_TESTS].items() if "test_mitigation_" in name
    ]
    assert sorted(mitigations.count(risk) for risk in set(mitigations)) == [3, 3, 3, 3]
    assert len(set(TESTS[MIGRATION_TESTS].values())) == len(TESTS[MIGRATION_TESTS])


def test_every_numbered_part_of_the_presets_is_there():
    """Six decisions; the three steps of materialisation and two demands on links; three acceptance checks."""
    heads = [title.partition(":")[0] for title in TESTS[PRESETS_TESTS]]

    assert sorted({head for head in heads if head.startswith("Decision")}) == [f"Decision {n + 1}" for n in range(6)]
    assert heads.count("Hardlink contract") == 5
    assert heads.count("Acceptance") == 3
    assert len(set(TESTS[PRESETS_TESTS].values())) == len(TESTS[PRESETS_TESTS])


def test_table_is_printed_as_markdown():
    done = subprocess.run([sys.executable, HERE / "table.py"], capture_output=True, text=True, check=True)

    for tests in TESTS.values():
        for title, name in tests.items():
            assert f"| {title} | `{name}` |" in done.stdout.splitlines()
