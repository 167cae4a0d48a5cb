"""Disk faults in large numbers: `make soak SEED=1 N=1000` tries this many kills, and a fifth as many of each other fault.

    ${XDG_CACHE_HOME:-~/.cache}/imagemill-soak/<seed>/trials.jsonl    one line per trial; passed ones are not repeated

`make soak SEED=1 TRIAL=kill-17` repeats one trial at the change of its last attempt.
"""

import argparse
import collections
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.helpers.disk_faults import Fault
from tests.helpers.fault_trials import Workshop
from tests.helpers.writing_commands import COMMANDS


def keys_of(count):
    """Return trials with their commands: kills, then a fifth as many of each other fault; all commands in turn."""
    names = list(COMMANDS)
    counts = {"kill": count, "enospc": count // 5, "eio": count // 5}
    keys = {f"{mode}-{n}": (mode, names[n % len(names)]) for mode, many in counts.items() for n in range(many)}
    # A part of the trials has all kinds of faults.
    return dict(sorted(keys.items(), key=lambda item: int(item[0].rpartition("-")[2]) * count / counts[item[1][0]]))


def work(keys, seed, results, recorded):
    """Run these trials one by one; the last line of a key counts."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the folder is removed
    folder = Path(tempfile.mkdtemp(prefix="imagemill-soak-", dir=_fast_folder()))
    shop = Workshop(folder)
    try:
        for key, (mode, command) in keys.items():
            began = time.monotonic()
            known = recorded.get(key)
            fault = Fault(mode, known["number"], known["scope"]) if known else None
            trial = shop.try_fault(command, fault or shop.choose(command, mode, f"{seed}-{key}"))
            line = {"key": key, "command": command, **trial.fault._asdict(), "at": trial.at, "failure": trial.failure}
            with open(results, "a") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{key} {trial} {time.monotonic() - began:.1f} s", flush=True)
            if trial.failure:
                print(f"{trial.failure}\nrepeat: make soak SEED={seed} TRIAL={key}", flush=True)
    finally:
        shop.close()
        shutil.rmtree(folder, ignore_errors=True)


def _fast_folder():
    """Return a folder in memory if the system has one, because fsync costs nothing there."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 1 << 30 else None


def read_results(path):
    """Return the last result of each key."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {line["key"]: line for line in map(json.loads, lines)}


def untried(keys, recorded):
    """Return trials without a result, and failed ones, which may pass now."""
    return {key: value for key, value in keys.items() if key not in recorded or recorded[key]["failure"]}


def show(results):
    """Print how many trials of each command passed, by fault."""
    modes = ("kill", "enospc", "eio")
    counts = collections.Counter((r["command"], r["mode"], not r["failure"]) for r in results.values())
    print(f"{'command':32}" + "".join(f"{mode:>14}" for mode in modes))
    for name in [*COMMANDS, "total"]:
        cells = []
        for mode in modes:
            passed, failed = (
                sum(n for (c, m, ok), n in counts.items() if m == mode and ok is state and name in {c, "total"})
                for state in (True, False)
            )
            cells.append(f"{passed}" + (f" ({failed} failed)" if failed else ""))
        print(f"{name:32}" + "".join(f"{cell:>14}" for cell in cells))


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--count", type=int, default=1000, help="kills; a fifth as many of each other fault")
    options.add_argument("--trial", help="only this one, such as kill-17")
    options.add_argument("--processes", type=int, default=1)
    asked = options.parse_args()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "imagemill-soak" / str(asked.seed)
    cache.mkdir(parents=True, exist_ok=True)
    results = cache / "trials.jsonl"
    recorded = read_results(results)
    keys = keys_of(asked.count)
    if asked.trial:
        mode, _, number = asked.trial.rpartition("-")
        keys = {asked.trial: (mode, list(COMMANDS)[int(number) % len(COMMANDS)])}
    else:
        keys = untried(keys, recorded)
    parts = [dict(list(keys.items())[n :: asked.processes]) for n in range(asked.processes)]
    processes = [
        multiprocessing.get_context("spawn").Process(
            target=work, args=(part, asked.seed, results, recorded), daemon=True
        )
        for part in parts
    ]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    final = read_results(results)
    show(final)
    unfinished = [key for key in keys if key not in final]
    failed = [key for key, result in final.items() if result["failure"]]
    for key in failed:
        print(f"failed: make soak SEED={asked.seed} TRIAL={key}")
    if unfinished:
        print(f"not tried: {len(unfinished)}")
    sys.exit(1 if failed or unfinished else 0)


if __name__ == "__main__":
    main()
