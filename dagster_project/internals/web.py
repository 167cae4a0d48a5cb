"""Dagster's webserver as an ASGI application behind the guard.

The stock command `dagster-webserver` has no guard. Private names of Dagster's webserver are used only here.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import uvicorn
from dagster import DagsterInstance
from dagster._core.instance.ref import InstanceRef
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import WorkspaceFileTarget
from dagster._serdes import deserialize_value
from dagster._utils.interrupts import setup_interrupt_handlers
from dagster_webserver.app import create_app_from_workspace_process_context
from dagster_webserver.version import __version__

from imagemill.look.mount import MountedRoot, WithViewers
from imagemill.web_guard import WebGuard

# Values of the stock command.
STATEMENT_TIMEOUT_MS = 15_000
POOL_RECYCLE_SECONDS = 3_600
POOL_MAX_OVERFLOW = 20
POLL_MS = 2_000

# A page that keeps its connection open must not delay the shutdown.
SHUTDOWN_SECONDS = 2


def run_webserver(
    reference: str,
    workspace: str,
    *,
    host: str,
    port: int,
    allowed_hosts: Sequence[str],
    read_only: bool = False,
    roots: Sequence[MountedRoot] = (),
) -> None:
    """Serve the UI until SIGINT or SIGTERM.

    Args:
        reference: serialized reference of the instance.
        workspace: path of the workspace file that names the code servers.
        host: address to listen on.
        port: port to listen on.
        allowed_hosts: names permitted in Host and Origin besides those of this machine.
        read_only: whether runs, sensors and the history can be viewed but not changed.
        roots: data roots whose photographs are shown below `/imagemill/`.
    """
    setup_interrupt_handlers()
    with suppress(KeyboardInterrupt), DagsterInstance.from_ref(deserialize_value(reference, InstanceRef)) as instance:
        instance.optimize_for_webserver(STATEMENT_TIMEOUT_MS, POOL_RECYCLE_SECONDS, POOL_MAX_OVERFLOW)
        target = WorkspaceFileTarget([workspace])
        with WorkspaceProcessContext(instance, target, version=__version__, read_only=read_only) as context:
            application = create_app_from_workspace_process_context(context, "", POLL_MS, lifespan=_lifespan)
            uvicorn.run(
                WebGuard(WithViewers(application, roots, read_only=read_only), allowed_hosts),  # pyright: ignore[reportArgumentType]
                host=host,
                port=port,
                log_level="warning",
                timeout_graceful_shutdown=SHUTDOWN_SECONDS,
            )


@asynccontextmanager
async def _lifespan(_: object) -> AsyncIterator[None]:
    # uvicorn cancels the lifespan task when it is interrupted.
    with suppress(asyncio.CancelledError):
        yield
