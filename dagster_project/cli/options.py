"""Click options: those that every command accepts, and those derived from the models in imagemill/options.py."""

import os
from collections.abc import Callable, Iterable
from enum import StrEnum
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import click

from imagemill.config import CONFIG_VARIABLE, use_configured_kinds
from imagemill.domain.layout import ROOT_VARIABLE, DataRoot, local_path
from imagemill.errors import WrongUsage
from imagemill.pipeline.session import open_session

if TYPE_CHECKING:
    from imagemill.options import OptionSet

Command = Callable[..., Any]

fail_on_skip = click.option("--fail-on-skip", is_flag=True, help="Exit 1 if any input was refused.")

accept_node = click.option(
    "--accept-node",
    metavar="NODE",
    help="With engine.kind ray, if nodes would not make the same files: the node that is right.",
)


def _note(context: click.Context, option: click.Parameter, given: str | None) -> str | None:
    """Put the data root and the configuration file into the environment, then the configured embedding kinds into use.

    Both options are eager: the choices of the others depend on the kinds.
    """
    noted = context.meta.setdefault(__name__, {})
    noted[option.name] = given
    if noted.keys() == {"data_root", "config"} and not context.resilient_parsing:
        _use(DataRoot.resolve(noted["data_root"]), noted["config"])
    return given


def _use(root: DataRoot, config: str | None) -> None:
    _set_variables(root, config)
    use_configured_kinds(root)


def _set_variables(root: DataRoot, config: str | None) -> None:
    os.environ[ROOT_VARIABLE] = str(root.path)
    if config:
        os.environ[CONFIG_VARIABLE] = str(local_path(config, "--config"))


def root_options(command: Command, *, opens: bool = True) -> Command:
    """Add `--data-root` and `--config` to a command, which gets `session: Session`, open while it runs.

    Both are also put into the environment, where the code location and its child processes find them.

    Args:
        command: the command.
        opens: whether the command gets a session; otherwise it gets `root: DataRoot`, and nothing is read.
    """

    @click.option(
        "--data-root", metavar="DIR", is_eager=True, callback=_note,
        help="Data root (default: $IMAGEMILL_DATA_ROOT, else data/).",
    )  # fmt: skip
    @click.option(
        "--config", metavar="FILE", is_eager=True, callback=_note,
        help="Configuration (default: imagemill.yaml in the data root).",
    )  # fmt: skip
    @wraps(command)
    def with_root(data_root: str | None, config: str | None, **given: Any) -> Any:
        if not opens:
            return command(root=DataRoot.resolve(), **given)
        with open_session() as session:
            return command(session=session, **given)

    return with_root


def all_roots(command: Command) -> Command:
    """Add `--data-root`, which may repeat, and `--config` to a command, which gets `given: list[DataRoot]`.

    The first root and the configuration file are also put into the environment, as by `root_options`; kinds are not put into use,
    because the roots may have different ones.
    """

    @click.option(
        "--data-root", multiple=True, metavar="DIR",
        help="Data root (default: $IMAGEMILL_DATA_ROOT, else data/); may repeat for roots that share $DAGSTER_HOME.",
    )  # fmt: skip
    @click.option("--config", metavar="FILE", help="Configuration (default: imagemill.yaml in the data root).")
    @wraps(command)
    def with_roots(data_root: tuple[str, ...], config: str | None, **given: Any) -> Any:
        roots = list(dict.fromkeys(DataRoot.resolve(each) for each in data_root or [None]))
        if config and len(roots) > 1:
            raise WrongUsage(
                "--config with several data roots",
                why="they would all have the same name and kinds",
                do="write an imagemill.yaml into each data root",
            )
        _set_variables(roots[0], config)
        return command(given=roots, **given)

    return with_roots


class OneOf(click.ParamType):
    """A choice of values. click.Choice would replace the `_` of a value by `-`, as in the names of options.

    `values`: the values, or a function that returns them when they are needed.
    """

    name = "choice"

    def __init__(self, values: Iterable[str] | Callable[[], Iterable[str]]) -> None:
        self._values = values

    @property
    def values(self) -> list[str]:
        """The permitted values."""
        return [str(value) for value in (self._values() if callable(self._values) else self._values)]

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return a permitted value; fail for any other."""
        if value not in self.values:
            self.fail(f"{value!r} is not one of {', '.join(self.values)}", param, ctx)
        return value

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Return the values for the help text."""
        return f"[{'|'.join(self.values)}]"


def options(model: "type[OptionSet]", **changes: dict[str, Any]) -> Callable[[Command], Command]:
    """Add an option per field of a model to a command; the command gets `options`, an instance of the model.

    Args:
        model: the model.
        changes: by field, arguments of click.option that differ from the derived ones.
    """
    fields: dict[str, Any] = model.model_fields
    offered = {name: field for name, field in fields.items() if field.json_schema_extra["flag"] is not None}

    def decorate(command: Command) -> Command:
        @wraps(command)
        def with_options(**given: Any) -> Any:
            values = {name: given.pop(name) for name in offered}
            return command(options=model(**{k: v for k, v in values.items() if v not in (None, ())}), **given)

        with_options.__dict__["options_model"] = model
        for name, field in reversed(offered.items()):
            extra = field.json_schema_extra
            how = {"help": extra["help"], "metavar": extra["metavar"], **_type(field.annotation, field)}
            click.option(extra["flag"] or f"--{name.replace('_', '-')}", name, **how | changes.get(name, {}))(
                with_options
            )
        return with_options

    return decorate


def _type(annotation: Any, field: Any) -> dict[str, Any]:
    """Return the arguments of click.option for values of a type, or of that type or None."""
    if get_origin(annotation) is Literal:
        return {"type": OneOf(get_args(annotation))}
    kind = (get_args(annotation) or [annotation])[0]
    if get_origin(kind) is list:
        return {**_type(get_args(kind)[0], field), "multiple": True}
    if kind is int and (least := next((one.ge for one in field.metadata if hasattr(one, "ge")), None)) is not None:
        return {"type": click.IntRange(min=least)}
    if issubclass(kind, StrEnum):
        values = [value for value in kind if value != field.default]
        return _FLAG | {"flag_value": "yes"} if values == ["yes", "no"] else {"type": OneOf(values)}
    return _FLAG if kind is bool else {"type": kind}


# None distinguishes an option that is not given from one that is.
_FLAG = {"is_flag": True, "default": None}
