"""Values of `--code`."""

import pytest

from dagster_project.cli.addresses import code_servers, shown
from dagster_project.code_server import reachable
from imagemill.errors import WrongUsage


@pytest.mark.parametrize(
    ("given", "entry"),
    [
        ("cars:4000", {"host": "cars", "port": 4000, "location_name": "imagemill"}),
        ("cars=10.0.0.7:4001", {"host": "10.0.0.7", "port": 4001, "location_name": "cars"}),
        ("cars=[::1]:4000", {"host": "::1", "port": 4000, "location_name": "cars"}),
    ],
)
def test_code_server_becomes_an_entry_of_a_workspace_file(given, entry):
    assert [server.entry() for server in code_servers([given])] == [{"grpc_server": entry}]


@pytest.mark.parametrize(
    "given", ["cars", ":4000", "cars:", "cars:70000", "http://cars:4000", "me@cars:4000", "cars:4000/x", ""]
)
def test_other_texts_are_refused(given):
    with pytest.raises(WrongUsage, match="not the address of a code server"):
        code_servers([given])


def test_two_servers_of_one_name_are_refused():
    with pytest.raises(WrongUsage, match="two code servers named cars"):
        code_servers(["cars=a:1", "cars=b:1"])


def test_server_on_all_addresses_is_reached_on_the_loopback_address():
    assert [reachable(host) for host in ("0.0.0.0", "::", "10.0.0.7")] == ["127.0.0.1", "::1", "10.0.0.7"]
    assert [shown(host) for host in ("::1", "cars")] == ["[::1]", "cars"]
