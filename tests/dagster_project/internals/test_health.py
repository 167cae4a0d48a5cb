"""Health of services: answers that are errors. tests/cli/test_serve.py checks running services."""

import http.server
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from dagster_project.code_server import CodeServer
from dagster_project.internals.health import Unhealthy, check_code_server, check_daemon, check_webserver
from tests.helpers.ui import free_port

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize("status", [200, 403, 503])
def test_webserver_is_healthy_if_it_answers_with_200(status):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status if self.path == "/server_info" else 200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            if status == 200:
                check_webserver("0.0.0.0", server.server_port)
            else:
                with pytest.raises(Unhealthy) as raised:
                    check_webserver("127.0.0.1", server.server_port)
                assert raised.value.why == f"HTTP status {status}"
        finally:
            server.shutdown()


@pytest.mark.parametrize("status", [SERVING, NOT_SERVING])
def test_code_server_is_healthy_if_it_is_serving(status, monkeypatch):
    """A proxy for other connections is not used."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    server, port = grpc.server(ThreadPoolExecutor(1)), free_port()
    servicer = health.HealthServicer()
    servicer.set("DagsterApi", status)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        if status == SERVING:
            check_code_server(CodeServer(location="imagemill", host="0.0.0.0", port=port))
        else:
            with pytest.raises(Unhealthy, match="code service") as raised:
                check_code_server(CodeServer(location="imagemill", host="127.0.0.1", port=port))
            assert raised.value.why == f"status {NOT_SERVING}"
    finally:
        server.stop(0)


def test_code_server_that_does_not_listen_is_unhealthy(tmp_path):
    with pytest.raises(Unhealthy) as raised:
        check_code_server(CodeServer(location="imagemill", socket_path=str(tmp_path / "none.sock")))
    assert raised.value.why == "UNAVAILABLE"


def test_daemon_without_heartbeats_is_unhealthy_and_its_threads_are_named(data_root):
    with pytest.raises(Unhealthy) as raised:
        check_daemon(data_root)
    assert "no heartbeat for 300 s: " in raised.value.why
    assert "SENSOR" in raised.value.why
