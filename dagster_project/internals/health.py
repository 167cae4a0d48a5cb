"""Health of a running service. Imports Dagster only for the daemon, because health checks are executed every minute."""

import http.client

from dagster_project.code_server import CodeServer, reachable, shown
from imagemill.domain.layout import DataRoot
from imagemill.errors import ImagemillError

ANSWER_SECONDS = 5.0

# Each of the daemon's threads writes a heartbeat every 30 s; a large backfill may delay it for minutes.
HEARTBEAT_SECONDS = 300.0

# Name under which Dagster's gRPC server reports its status.
_API = "DagsterApi"


class Unhealthy(ImagemillError, RuntimeError):
    """A service does not answer, or does not work."""


def check_webserver(host: str, port: int) -> None:
    """Request the webserver's versions. Raises Unhealthy."""
    connection = http.client.HTTPConnection(reachable(host), port, timeout=ANSWER_SECONDS)
    try:
        connection.request("GET", "/server_info")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        raise _unhealthy("webserver", str(error)) from error
    finally:
        connection.close()
    if status != http.client.OK:
        raise _unhealthy("webserver", f"HTTP status {status}")


def check_code_server(server: CodeServer) -> None:
    """Request the server's status by the gRPC health protocol. Raises Unhealthy."""
    import grpc
    from grpc_health.v1 import health_pb2

    address = f"unix:{server.socket_path}" if server.socket_path else f"{shown(reachable(server.host))}:{server.port}"
    # Otherwise gRPC would send the request to the proxy of `http_proxy`.
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            answer = check(health_pb2.HealthCheckRequest(service=_API), timeout=ANSWER_SECONDS)
        except grpc.RpcError as error:
            # The exceptions of a channel are also calls, which have the status.
            raise _unhealthy("code", error.code().name if isinstance(error, grpc.Call) else str(error)) from error
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise _unhealthy("code", f"status {answer.status}")


def check_daemon(root: DataRoot) -> None:
    """Read the heartbeats of the daemon's threads from the history. Raises Unhealthy if one is missing or old."""
    from dagster._daemon.controller import get_daemon_statuses

    from dagster_project.internals.instance import read_instance

    with read_instance(root) as instance:
        required = instance.get_required_daemon_types()
        statuses = get_daemon_statuses(
            instance, required, ignore_errors=True, heartbeat_tolerance_seconds=HEARTBEAT_SECONDS
        )
    if late := sorted(name for name, status in statuses.items() if not status.healthy):
        raise _unhealthy("daemon", f"no heartbeat for {HEARTBEAT_SECONDS:.0f} s: {', '.join(late)}")


def _unhealthy(name: str, why: str) -> Unhealthy:
    return Unhealthy(f"the {name} service does not work", why=why, do="see its log, then start it again")
