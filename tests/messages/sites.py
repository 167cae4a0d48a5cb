"""Every place in the product that makes a message for its users, found in the source.

A message is made by calling an exception class of the product, a value with a `detail`, `message` or `remedy`, an error of click
or Dagster, or a function that passes text of its own arguments on to one of them. Calls without literal text are left out: they
forward another message.

Standard library only: the recorder (recorder.py) imports this in every process of the product.
"""

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PRODUCT = ("imagemill", "resources", "io_managers", "assets", "checks", "dagster_project")

# Classes of other packages whose first argument users read.
_FOREIGN = {name: ["message"] for name in ("BadParameter", "UsageError", "Failure", "fail", "echo")}

# Modules whose generators yield lines that a command prints.
_PRINTED = ("dagster_project/cli/", "dagster_project/summary.py")
_ROOT_ERROR = "ImagemillError"
_MESSAGE = ("what", "detail", "message", "text", "problem", "description", "why_not")
_REMEDY = ("do", "remedy")
_REASON = ("reason", "rule", "code")
_TELLING_FIELDS = {"detail", "remedy", "message"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


# A table of messages, which no call makes.
# Files of rules, and their tables.
RULES = {"imagemill/validation/rules.toml": (), "imagemill/domain/preset_rules.toml": ("rules", "warnings")}


class Site(NamedTuple):
    """One call that makes a message. Texts are as in the source, with `{expression}` for what is filled in."""

    file: str
    function: str
    line: int
    column: int
    made_by: str
    reason: str
    message: str
    why: str
    do: str

    @property
    def key(self) -> tuple[str, ...]:
        """The fields that identify a message. Lines and columns move with every edit."""
        return self.file, self.function, self.made_by, self.reason, self.message, self.why, self.do

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


class _Maker(NamedTuple):
    """Something that makes messages when called: the names of its arguments in order."""

    arguments: list[str]


@cache
def modules() -> dict[str, ast.Module]:
    """The product's modules, parsed, by their path relative to the repository."""
    paths = (path for package in PRODUCT for path in sorted((ROOT / package).rglob("*.py")))
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text("utf-8")) for path in paths}


@cache
def sites() -> tuple[Site, ...]:
    """All messages, by file and line."""
    makers = _all_makers()
    found = [site for file, tree in modules().items() for site in _sites_of(file, tree, makers)]
    for file, parts in RULES.items():
        document = tomllib.loads((ROOT / file).read_text("utf-8"))
        rules = [row for part in parts for row in document[part].items()] if parts else list(document.items())
        found += [
            Site(file, name, number, 0, "Rule", "", row["description"], "", row["remedy"])
            for number, (name, row) in enumerate(rules)
        ]
    return tuple(sorted(found, key=lambda site: (site.file, site.line, site.column)))


def _all_makers() -> dict[str, _Maker]:
    """Classes, then functions that pass text on to a maker and are given text, until no more are found."""
    makers = {name: _Maker(arguments) for name, arguments in _FOREIGN.items()} | _message_classes()
    while more := _forwarders(makers):
        makers |= more
    return makers


def _message_classes() -> dict[str, _Maker]:
    classes = [node for tree in modules().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    errors, names = {_ROOT_ERROR}, {name for node in classes for name in _bases(node)}
    while True:
        more = {node.name for node in classes if set(_bases(node)) & errors} - errors
        if not more:
            break
        errors |= more
    by_name = {node.name: node for node in classes}
    values = {node.name for node in classes if _TELLING_FIELDS & set(_fields(node)) and node.name not in names}
    return {name: _Maker(_arguments_of_class(by_name[name], by_name)) for name in errors | values}


def _bases(node: ast.ClassDef) -> list[str]:
    return [_name(base) for base in node.bases]


def _fields(node: ast.ClassDef) -> list[str]:
    return [
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    ]


def _arguments_of_class(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> list[str]:
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            return _arguments(each)
    inherited = [_arguments_of_class(classes[base], classes) for base in _bases(node) if base in classes]
    return _fields(node) or next(iter(inherited), ["message"])


def _arguments(function: Function) -> list[str]:
    given = [*function.args.posonlyargs, *function.args.args]
    return [each.arg for each in given if each.arg not in {"self", "cls"}]


def _all_arguments(function: Function) -> set[str]:
    return {*_arguments(function), *(each.arg for each in function.args.kwonlyargs)}


def _forwarders(makers: dict[str, _Maker]) -> dict[str, _Maker]:
    """Functions that are not makers yet, put an argument of theirs into a message, and are called with literal text."""
    candidates: dict[str, Function] = {}
    for file, tree in modules().items():
        for function in (node for node in ast.walk(tree) if isinstance(node, Function)):
            name = _scoped(file, function.name)
            if name in makers or function.name.startswith("__"):
                continue
            arguments = _all_arguments(function)
            classes = _class_arguments(function)
            for call in _calls(function):
                called = _name(call.func)
                texts = _texts(call, makers.get(_scoped(file, classes.get(called, called))))
                if any(_names_in(text) & arguments for text in texts.values()):
                    candidates[name] = function
    given_text = {
        name
        for file, tree in modules().items()
        for call in _calls(tree)
        if (name := _scoped(file, _name(call.func))) in candidates and any(map(_is_sentence, _given(call)))
    }
    return {name: _Maker(_arguments(candidates[name])) for name in given_text}


def _class_arguments(function: Function) -> dict[str, str]:
    """Arguments that are classes, `error: type[ModelUnusable]`: the name of the class by the argument's."""
    given = [*function.args.args, *function.args.kwonlyargs]
    annotated = ((each.arg, each.annotation) for each in given)
    return {
        name: _name(kind.slice)
        for name, kind in annotated
        if isinstance(kind, ast.Subscript) and _name(kind.value) == "type"
    }


def _scoped(file: str, name: str) -> str:
    """The key of a maker: private functions of two modules may share a name."""
    return f"{file}:{name}" if name.startswith("_") else name


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    return (each for each in ast.walk(node) if isinstance(each, ast.Call))


def _given(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _names_in(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _is_sentence(node: ast.AST) -> bool:
    """Whether an argument contains literal text of more than one word."""
    return any(" " in text.strip() for text in _literals(node))


def _literals(node: ast.AST) -> Iterator[str]:
    """The literal text of an expression; text inside the calls that it makes does not count."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif not isinstance(node, ast.Call | ast.Compare | ast.Subscript | ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from _literals(child)


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _texts(call: ast.Call, maker: _Maker | None) -> dict[str, ast.expr]:
    """The arguments of a call that are texts of the message, by name."""
    if maker is None:
        return {}
    named = dict(zip(maker.arguments, call.args, strict=False))
    named |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    return {name: value for name, value in named.items() if name in (*_MESSAGE, *_REMEDY, *_REASON, "why")}


def _texts_by_name(node: ast.AST, *, deep: bool) -> dict[str, ast.expr]:
    """Variables of a module or function that are assigned once, literal text among their parts."""
    found: dict[str, list[ast.expr]] = {}
    for each in ast.walk(node) if deep else ast.iter_child_nodes(node):
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name):
            found.setdefault(each.targets[0].id, []).append(each.value)
        elif (
            isinstance(each, ast.Assign)
            and isinstance(each.targets[0], ast.Tuple)
            and isinstance(each.value, ast.Tuple)
        ):
            for name, value in zip(each.targets[0].elts, each.value.elts, strict=False):
                found.setdefault(_name(name), []).append(value)
    return {name: values[0] for name, values in found.items() if len(values) == 1 and any(_literals(values[0]))}


class _Finder(ast.NodeVisitor):
    """Walks one module and remembers in which function it is."""

    def __init__(self, file: str, tree: ast.Module, makers: dict[str, _Maker]) -> None:
        self.file, self.makers, self.found = file, makers, list[Site]()
        self._inside: list[str] = []
        self._variables = [_texts_by_name(tree, deep=False)]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._variables.append({**self._variables[-1], **_texts_by_name(node, deep=True)})
        self._enter(node)
        self._variables.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._enter(node)

    def _enter(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        self._inside.append(node.name)
        self.generic_visit(node)
        self._inside.pop()

    def visit_Yield(self, node: ast.Yield) -> None:
        """Lines that commands print."""
        if self.file.startswith(_PRINTED) and isinstance(node.value, ast.Constant | ast.JoinedStr):
            message = render(node.value, self._variables[-1]).strip()
            function = ".".join(self._inside)
            if any(map(str.isalpha, "".join(_literals(node.value)))):
                self.found.append(Site(self.file, function, node.lineno, node.col_offset, "yield", "", message, "", ""))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        maker = self.makers.get(_scoped(self.file, _name(node.func)))
        if maker and (site := self._site(node, maker)):
            self.found.append(site)
        self.generic_visit(node)

    def _site(self, call: ast.Call, maker: _Maker) -> Site | None:
        texts = _texts(call, maker)
        message, why, do, reason = (
            " ".join(render(texts[each], self._variables[-1]) for each in names if each in texts)
            for names in (_MESSAGE, ("why",), _REMEDY, _REASON)
        )
        if "reason" in texts and _is_sentence(self._value(texts["reason"])):  # some functions call the message so
            message, reason = f"{message} {reason}".strip(), ""
        literal = [value for each, value in texts.items() if each not in _REASON or _is_sentence(self._value(value))]
        spoken = [text for value in literal for text in _literals(self._value(value))]
        if not any(sum(map(str.isalpha, text)) > 2 for text in spoken):
            return None
        function = ".".join(self._inside) or "<module>"
        return Site(self.file, function, call.lineno, call.col_offset, _name(call.func), reason, message, why, do)

    def _value(self, node: ast.expr) -> ast.expr:
        return self._variables[-1].get(node.id, node) if isinstance(node, ast.Name) else node


def render(node: ast.expr, variables: dict[str, ast.expr] | None = None) -> str:  # noqa: PLR0911
    """An expression as text: literals as they are, everything else in braces; alternatives separated by ` | `.

    Args:
        variables: texts of names that are assigned once; a text that contains its own name is replaced once.
    """
    known = variables or {}

    def text(part: ast.expr) -> str:
        return render(part, known)

    if isinstance(node, ast.Name) and node.id in known:
        return render(known[node.id], {name: value for name, value in known.items() if name != node.id})
    if isinstance(node, ast.Constant):
        return str(node.value) if node.value is not None else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text, node.values))
    if isinstance(node, ast.FormattedValue):
        inner = node.value
        return text(inner) if isinstance(inner, ast.Name | ast.IfExp) else f"{{{ast.unparse(inner)}}}"
    if isinstance(node, ast.IfExp):
        return " | ".join(filter(None, (text(node.body), text(node.orelse))))
    if isinstance(node, ast.BoolOp):
        return " | ".join(map(text, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text(node.left) + text(node.right)
    return f"{{{ast.unparse(node)}}}"


def _sites_of(file: str, tree: ast.Module, makers: dict[str, _Maker]) -> list[Site]:
    finder = _Finder(file, tree, makers)
    finder.visit(tree)
    return finder.found
