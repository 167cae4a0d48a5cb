"""`imagemill`: imports a command's module when it is called, so that `validate` and `explain` never load Dagster or torch.

Exit codes: 0 success; 1 the work or a validation failed; 2 wrong usage; 130 and 143 interrupted by SIGINT and SIGTERM.
`imagemill serve` gives 0 after SIGTERM.
"""

import importlib
import keyword
import os
import signal
import sys
import tomllib
import warnings
from importlib.metadata import version
from pathlib import Path

import click

from dagster_project.command_line import note_arguments
from imagemill.errors import FAILED_DISK, FULL_DISK, ImagemillError, WrongUsage, is_disk_full
from imagemill.processes import run_process

# In the order of the help.
COMMANDS = (
    "run", "stage2", "shards", "push", "withdraw", "marks", "preset", "stage-a", "validate", "verify", "scan", "import",
    "explain", "status", "problems", "look", "repair", "trust", "bench", "ui", "serve",
)  # fmt: skip

_PERMISSIONS = "make the file or folder accessible to this user, or give another --data-root"


def module_of(command: str) -> str:
    """Return the name of a command's module: that of the command with `_` for `-`, and after a name that Python reserves."""
    name = command.replace("-", "_")
    return f"dagster_project.cli.{name}{'_' if keyword.iskeyword(name) else ''}"


class _Commands(click.Group):
    """Commands by name, imported on demand."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        note_arguments(ctx, args)
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        found: click.Command = importlib.import_module(module_of(cmd_name)).command
        examples = tomllib.loads(Path(__file__).with_name("examples.toml").read_text(encoding="utf-8"))
        found.epilog = _shown(examples[cmd_name])
        for name, subcommand in getattr(found, "commands", {}).items():
            subcommand.epilog = _shown(examples[f"{cmd_name} {name}"])
        return found

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.epilog = _shown(["imagemill run --data-root data", "imagemill status --data-root data"])
        super().format_epilog(ctx, formatter)


def _shown(examples: list[str]) -> str:
    """Return examples as the end of a help page."""
    # The backspace keeps click from joining the lines.
    return "\b\n" + "\n".join(["Examples:", *(f"  {example}" for example in examples)])


@click.group(
    cls=_Commands,
    # Every multi-word option takes `-` and `_`.
    context_settings={
        "token_normalize_func": lambda name: name.replace("_", "-"),
        "help_option_names": ["-h", "--help"],
    },
)
@click.version_option(package_name="imagemill")
def cli() -> None:
    """Folders of approved images in, training-ready datasets out."""


def _leave_out_current_folder() -> None:
    """Remove the current folder, which `python -m` puts at the front of sys.path, unless PYTHONPATH names it."""
    current = os.getcwd()
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if sys.path[1:2] in ([""], [current]) and current not in [os.path.abspath(path) for path in given if path]:
        del sys.path[1]


def main() -> None:
    """Run the command of this process, and raise SystemExit if its code is not 0."""
    _leave_out_current_folder()
    # Pillow warns of broken files once per process and without the file's name; our refusal contains it.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A script's `&` starts commands with SIGINT ignored, and Dagster gives SIGTERM the handler of SIGINT.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        cli.main(standalone_mode=False)
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except ImagemillError as error:
        click.echo(f"imagemill: {error}", err=True)
        sys.exit(2 if isinstance(error, WrongUsage) else 1)
    except BrokenPipeError:
        # `imagemill explain … | head` is not an error.
        sys.stderr.close()
        sys.exit(0)
    except ImportError as error:
        if not (error.name or "").startswith("dagster"):
            raise
        click.echo(f"imagemill: {_unsupported_dagster(error)}", err=True)
        sys.exit(1)
    except OSError as error:
        click.echo(f"imagemill: {_disk_error(error)}", err=True)
        sys.exit(1)


def _disk_error(error: OSError) -> ImagemillError:
    """Return the message of an error that the system reported for a file."""
    remedy = FULL_DISK if is_disk_full(error) else _PERMISSIONS if isinstance(error, PermissionError) else FAILED_DISK
    return ImagemillError(f"cannot write or read: {error.strerror or error}", where=error.filename, do=remedy)


def _unsupported_dagster(error: ImportError) -> ImagemillError:
    """Return the message for a missing private name of Dagster that has no slower replacement."""
    return ImagemillError(
        f"Dagster {version('dagster')} lacks a name without which imagemill cannot run",
        why=str(error),
        do="install dagster>=1.13.13,<1.14 and the same release of dagster-webserver",
    )


if __name__ == "__main__":
    run_process(main)
