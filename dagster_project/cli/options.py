"""Options that every command takes, and what they resolve to."""

import os
from collections.abc import Callable
from typing import Any

import click

from imagemill.config import CONFIG_VARIABLE
from imagemill.domain.layout import ROOT_VARIABLE, DataRoot, local_path
from imagemill.pipeline.session import open_session


def root_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--data-root` and `--config`; the command gets `session: Session`, which is open while it runs.

    Both go into the environment too, where the code location and its child processes find them.
    """

    @click.option("--data-root", metavar="DIR", help="Data root (default: $IMAGEMILL_DATA_ROOT, else data/).")
    @click.option("--config", metavar="FILE", help="Configuration (default: imagemill.yaml in the data root).")
    def with_root(data_root: str | None, config: str | None, **given: Any) -> Any:
        os.environ[ROOT_VARIABLE] = str(DataRoot.resolve(data_root).path)
        if config:
            os.environ[CONFIG_VARIABLE] = str(local_path(config, "--config"))
        with open_session() as session:
            return command(session=session, **given)

    with_root.__name__, with_root.__doc__ = command.__name__, command.__doc__
    with_root.__click_params__ = [*with_root.__click_params__, *getattr(command, "__click_params__", [])]  # type: ignore[attr-defined]
    return with_root
