"""Pages of the documentation that are generated from the code: the builder of the site runs this file (mkdocs.yml).

index.md                    README.md
reference/command-line.md   help of every command
reference/configuration.md  fields of imagemill.yaml and options of assets
reference/python.md         docstrings of the public Python interface
reference/dagster.md        assets, checks, jobs, and sensors with their descriptions
reference/modules.md        first sentence of every module
decisions/index.md          titles of all decisions
"""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import mkdocs_gen_files
import msgspec

ROOT = Path(__file__).parents[1]
PACKAGES = ("imagemill", "resources", "io_managers", "assets", "checks", "dagster_project")
PYTHON = (
    "imagemill.reading",
    "imagemill.models",
    "imagemill.domain.embedding_specs",
    "imagemill.errors",
)
# Documents outside of docs/ that pages link to, and their pages in the site.
OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def write(page: str, text: str) -> None:
    """Add a page to the site."""
    with mkdocs_gen_files.open(page, "w") as file:
        file.write(text)


def copy_documents() -> None:
    """Copy the documents of the repository's root, and make links between them and docs/ relative to the site."""
    for name, page in OUTSIDE.items():
        text = re.sub(r"\]\(docs/", "](", (ROOT / name).read_text(encoding="utf-8"))
        for other, its_page in OUTSIDE.items():
            text = text.replace(f"]({other}", f"]({its_page}")
        write(page, re.sub(r"\]\((LICENSE|examples/[^)]*|decisions/)\)", _outside, text))
    for path in sorted((ROOT / "docs").rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        linked = text.replace("](decisions/)", "](decisions/index.md)")
        for other, its_page in OUTSIDE.items():
            linked = linked.replace(f"](../{other}", f"]({its_page}")
        if linked != text:
            write(path.relative_to(ROOT / "docs").as_posix(), linked)


def _outside(link: re.Match[str]) -> str:
    return "](decisions/index.md)" if link[1] == "decisions/" else f'](contributing.md "{link[1]} in the repository")'


def modules() -> Iterator[tuple[str, str]]:
    """Yield path and first sentence of every module that has code or a docstring."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            if first := " ".join(text.partition("\n\n")[0].split()):
                yield path.relative_to(ROOT).as_posix(), first


def write_modules() -> None:
    """Write the table of modules."""
    rows, folder = ["# Modules", "", "The first sentence of every module, from its docstring."], ""
    for path, text in modules():
        if (parent := path.rpartition("/")[0]) != folder:
            folder = parent
            rows += ["", f"## {folder}", "", "| Module | Purpose |", "| --- | --- |"]
        rows.append(f"| `{path.removeprefix(folder + '/')}` | {text.replace('|', chr(92) + '|')} |")
    write("reference/modules.md", "\n".join([*rows, ""]))


def _attributes(kind: type[Any]) -> dict[str, str]:
    """Return the descriptions below `Attributes:` of a class and its bases, by field."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        section = re.search(r"Attributes:\n(.*)", inspect.getdoc(base) or "", re.DOTALL)
        for name, text in re.findall(r"^ {4}(\w+): (.*?)(?=\n {4}\w+:|\Z)", section[1] if section else "", re.M | re.S):
            found[name] = " ".join(text.split())
    return found


def _struct_table(kind: type[Any]) -> list[str]:
    texts, types = _attributes(kind), get_type_hints(kind)
    rows = ["| Field | Type | Default | Meaning |", "| --- | --- | --- | --- |"]
    for field in msgspec.structs.fields(kind):
        default = field.default
        if default is msgspec.NODEFAULT:
            default = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else "required"  # type: ignore[operator]
        shown = msgspec.to_builtins(default)
        known = types[field.name]
        known = known.__name__ if isinstance(known, type) and not hasattr(known, "__args__") else str(known)
        known = re.sub(r"typing\.|imagemill\.config\.", "", known).replace("|", "\\|")
        rows.append(f"| `{field.name}` | `{known}` | `{shown}` | {texts.get(field.name, '')} |")
    return rows


def write_configuration() -> None:
    """Write the fields of imagemill.yaml, and the options of assets with their launchpad descriptions."""
    from imagemill import config, options

    rows = ["# Configuration", "", "## imagemill.yaml", "", *_struct_table(config.Config)]
    for name, kind in inspect.getmembers(config, inspect.isclass):
        if issubclass(kind, msgspec.Struct) and kind is not config.Config and kind.__module__ == config.__name__:
            rows += ["", f"## {name}", "", (inspect.getdoc(kind) or "").partition("\n")[0], "", *_struct_table(kind)]
    rows += ["", "## Options of assets", "", "Each is an option of a command and a field of the launchpad."]
    for name, kind in inspect.getmembers(options, inspect.isclass):
        if issubclass(kind, options.OptionSet) and kind is not options.OptionSet:
            rows += ["", f"### {name}", "", inspect.getdoc(kind) or "", "", "| Option | Meaning |", "| --- | --- |"]
            rows += [f"| `{field}` | {info.description} |" for field, info in kind.model_fields.items()]
    write("reference/configuration.md", "\n".join([*rows, ""]))


def write_dagster() -> None:
    """Write the assets, checks, jobs, and sensors."""
    from dagster_project.definitions import build_definitions
    from dagster_project.deployments import local_resources

    defs = build_definitions(local_resources("unused"))
    graph = defs.resolve_asset_graph()
    nodes = sorted(
        (graph.get(key) for key in graph.get_all_asset_keys()), key=lambda node: (node.group_name or "", str(node.key))
    )
    checks = sorted(graph.asset_check_keys, key=lambda key: (key.asset_key.to_user_string(), key.name))
    jobs = sorted(job.name for job in defs.resolve_all_job_defs() if not job.name.startswith("__"))
    sensors = sorted(defs.sensors or [], key=lambda sensor: sensor.name)
    groups = {node.group_name for node in nodes}
    counts = f"{len(nodes)} assets in {len(groups)} groups, {len(checks)} asset checks, {len(jobs)} jobs, {len(sensors)} sensors."
    rows = ["# Assets, checks, and jobs", "", counts, "", "| Asset | Group | Purpose |", "| --- | --- | --- |"]
    for node in nodes:
        purpose = " ".join((node.description or "").partition("\n\n")[0].split())
        rows.append(f"| `{node.key.to_user_string()}` | {node.group_name} | {purpose} |")
    rows += ["", "## Checks", "", "| Asset | Check |", "| --- | --- |"]
    rows += [f"| `{key.asset_key.to_user_string()}` | `{key.name}` |" for key in checks]
    rows += ["", "## Jobs", "", *[f"- `{name}`" for name in jobs]]
    rows += ["", "## Sensors", "", *[f"- `{sensor.name}`: {sensor.description or ''}" for sensor in sensors]]
    write("reference/dagster.md", "\n".join([*rows, ""]))


def write_decisions() -> None:
    """Write the list of decisions."""
    rows = ["# Decisions", "", "Points on which the specification is silent, one paragraph each.", ""]
    for path in sorted((ROOT / "docs" / "decisions").glob("0*.md")):
        title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        number, _, text = title.partition(". ")
        rows.append(f"- {number}: [{text}]({path.name})")
    write("decisions/index.md", "\n".join([*rows, ""]))


def write_references() -> None:
    """Write the pages whose contents extensions of the builder insert."""
    click = [
        "::: mkdocs-click",
        "    :module: dagster_project.cli.main",
        "    :command: cli",
        "    :prog_name: imagemill",
    ]
    click += ["    :depth: 1", "    :style: plain", "    :list_subcommands: true", ""]
    write("reference/command-line.md", "\n".join(["# Command line", "", *click]))
    write("reference/python.md", "\n".join(["# Python interface", "", *(f"::: {name}\n" for name in PYTHON)]))


copy_documents()
write_modules()
write_configuration()
write_dagster()
write_decisions()
write_references()
