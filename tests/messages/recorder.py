"""Records which test produces which message of the product.

    IMAGEMILL_MESSAGES=/tmp/recorded pytest tests/…        appends `file:line:column<TAB>test` to that file
    python -m tests.messages.table /tmp/recorded           writes docs/reference/messages.csv

Every call that makes a message (sites.py) is wrapped when its module is imported, in the process of pytest and in each process
that the tests start. Nothing is imported here but the standard library, and nothing changes unless the variable is set.
"""

import ast
import importlib.machinery
import json
import os
import sys
from pathlib import Path

VARIABLE = "IMAGEMILL_MESSAGES"
_ROOT = Path(__file__).parents[2]
_STARTUP = Path(__file__).with_name("startup")
_WRAPPER = "__message__"
_seen: set[tuple[str, str]] = set()


def begin() -> None:
    """List the places for all processes of this session, and record in this one. Nothing unless the variable is set."""
    if VARIABLE not in os.environ:
        return
    from tests.messages.sites import sites

    places = [[site.file, site.line, site.column] for site in sites()]
    _places_file().write_text(json.dumps(places))
    os.environ.update(environment())
    start()


def environment() -> dict[str, str]:
    """Return the variables with which a process of the product records too; none if this process does not."""
    if VARIABLE not in os.environ:
        return {}
    path = [str(_STARTUP), str(_ROOT)]
    return {"PYTHONPATH": os.pathsep.join(path), VARIABLE: os.path.abspath(os.environ[VARIABLE])}


def start() -> None:
    """Wrap the messages of modules that are imported from now on."""
    if VARIABLE not in os.environ or not _places_file().exists():
        return
    places: dict[str, set[tuple[int, int]]] = {}
    for file, line, column in json.loads(_places_file().read_text()):
        places.setdefault(str(_ROOT / file), set()).add((line, column))
    loader = importlib.machinery.SourceFileLoader
    usual = loader.get_code

    def get_code(self, name):  # bytecode in the cache has no wrapped calls
        path = self.get_filename(name)
        if path not in places:
            return usual(self, name)
        tree = _Wrap(path, places[path]).visit(ast.parse(self.get_data(path)))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)

    loader.get_code = get_code
    sys.modules["builtins"].__dict__[_WRAPPER] = _record


class _Wrap(ast.NodeTransformer):
    def __init__(self, path: str, places: set[tuple[int, int]]) -> None:
        self.file, self.places = str(Path(path).relative_to(_ROOT)), places

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        return self._wrapped(node, node)

    def visit_Yield(self, node: ast.Yield) -> ast.AST:
        self.generic_visit(node)
        if node.value is not None:
            node.value = self._wrapped(node, node.value)
        return node

    def _wrapped(self, at: ast.expr, value: ast.expr) -> ast.expr:
        if (at.lineno, at.col_offset) not in self.places:
            return value
        # Recorded before the call, which may raise: `(__message__(place), call)[1]`.
        place = ast.Constant(f"{self.file}:{at.lineno}:{at.col_offset}")
        recorded = ast.Call(ast.Name(_WRAPPER, ast.Load()), [place], [])
        both = ast.Tuple([recorded, value], ast.Load())
        return ast.copy_location(ast.Subscript(both, ast.Constant(1), ast.Load()), at)


def _record(place):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    if test and (place, test) not in _seen:
        _seen.add((place, test))
        handle = os.open(os.environ[VARIABLE], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(handle, f"{place}\t{test}\n".encode())
        finally:
            os.close(handle)


def _places_file() -> Path:
    return Path(os.environ[VARIABLE] + ".places")
