"""The same partition is never worked on twice at once; others are. Spec: docs/spec/conventions.md#leases"""

import shutil
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from imagemill.pipeline import leases as claims
from imagemill.pipeline.leases import claimed, wait_for_claim
from imagemill.store.ledger import EVERY, LeaseLost, Ledger


def holder(path, items, after):
    """Run another process that claims, reports it, and then follows instructions."""
    script = f"""
        import os, signal, sys, time
        from pathlib import Path
        from imagemill.store.ledger import EVERY, Ledger
        ledger = Ledger(Path({str(path)!r}))
        assert not ledger.claim("dinov3_npy", {items!r}, "run-of-other")
        print("claimed", flush=True)
        {after}
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "claimed\n"
    return process


def holder_name(process):
    """As messages name the holder of a lease."""
    return f"run-of-other (process {process.pid} on {socket.gethostname()})"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.sqlite"


def test_partition_that_a_living_process_holds_is_not_claimed_and_others_are(path):
    process = holder(path, ["a", "b"], "time.sleep(60)")
    try:
        with Ledger(path) as ledger:
            assert ledger.claim("dinov3_npy", ["b", "c"], "mine") == {holder_name(process)}
            assert ledger.claim("dinov3_npy", ["c", "d"], "mine") == set()
            assert ledger.claim("vae_latents", ["a"], "mine") == set()
    finally:
        process.kill()
        process.wait()


def test_whole_asset_is_claimed_only_where_no_one_holds_a_part_and_keeps_every_part(path):
    """Replacing all files of a kind, and deleting them, must meet no run that makes some."""
    process = holder(path, ["a"], "time.sleep(60)")
    try:
        with Ledger(path) as ledger:
            assert ledger.claim("dinov3_npy", [EVERY], "mine") == {holder_name(process)}
            assert ledger.claim("vae_latents", [EVERY], "mine") == set()
    finally:
        process.kill()
        process.wait()
    process = holder(path, [EVERY], "time.sleep(60)")
    try:
        with Ledger(path) as ledger:
            assert ledger.claim("dinov3_npy", ["b"], "mine") == {holder_name(process)}
    finally:
        process.kill()
        process.wait()


def test_claim_of_a_killed_process_counts_for_nothing(path):
    process = holder(path, ["a"], "os.kill(os.getpid(), signal.SIGKILL)")
    process.wait()

    with Ledger(path) as ledger:
        assert ledger.claim("dinov3_npy", ["a"], "mine") == set()


def test_second_waits_names_the_first_and_goes_on_when_it_is_done(path, capfd):
    process = holder(path, ["a"], 'time.sleep(1.5); ledger.release("dinov3_npy", "run-of-other"); time.sleep(60)')
    try:
        began = time.monotonic()
        with Ledger(path) as ledger:
            wait_for_claim(ledger, "dinov3_npy", ["a"], "mine")
        assert time.monotonic() - began > 0.5
        assert "run-of-other" in capfd.readouterr().err
    finally:
        process.kill()
        process.wait()


def test_body_that_raises_leaves_no_claim(path):
    def fail(ledger):
        with claimed(ledger, "dinov3_npy", ["a"], "mine"):
            raise RuntimeError

    with Ledger(path) as ledger:
        with pytest.raises(RuntimeError):
            fail(ledger)
        assert ledger.cells("leases", ["item"]) == []


def test_claims_of_many_threads_are_all_or_nothing(path):
    """One transaction each: never half of what was asked for."""
    Ledger(path).close()

    def work(n):
        with Ledger(path) as ledger:
            ledger.claim("dinov3_npy", [f"{n}-{i}" for i in range(50)], f"run{n}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with Ledger(path) as ledger:
        assert len(ledger.cells("leases", ["item"])) == 400


def test_wait_is_bounded_and_names_the_holder(path, monkeypatch):
    process = holder(path, ["a"], "time.sleep(60)")
    monkeypatch.setattr(claims, "MOST_SECONDS", 0.5)
    try:
        with Ledger(path) as ledger, pytest.raises(claims.StillHeld, match=f"process {process.pid} on"):
            wait_for_claim(ledger, "dinov3_npy", ["a"], "mine")
    finally:
        process.kill()
        process.wait()


def test_publish_is_refused_where_the_lease_is_not_its_own_any_more(path):
    """A process that was taken for dead publishes nothing beside the one that took over."""
    with Ledger(path) as ledger:
        ledger.claim("dinov3_npy", ["a", "b"], "mine")
        ledger.check_lease("dinov3_npy", ["a", "b"], "mine")

        with pytest.raises(LeaseLost, match="run mine"):
            ledger.check_lease("dinov3_npy", ["a"], "another")
        ledger.release("dinov3_npy", "mine")
        with pytest.raises(LeaseLost, match="another run has taken over a"):
            ledger.check_lease("dinov3_npy", ["a"], "mine")


def test_lease_of_a_dead_process_counts_for_nothing_in_a_copy_of_the_data_root(tmp_path):
    """The copy has another folder of lock files; no process can ever give that lease back."""
    path = tmp_path / "one" / "ledger.sqlite"
    process = holder(path, ["a"], "os.kill(os.getpid(), signal.SIGKILL)")
    process.wait()
    shutil.copytree(tmp_path / "one", tmp_path / "copy")

    with Ledger(tmp_path / "copy" / "ledger.sqlite") as ledger:
        assert ledger.claim("dinov3_npy", ["a"], "mine") == set()
