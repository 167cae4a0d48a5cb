"""`imagemill` with encoders without cost: `python -m benchmarks.common.ours ARGUMENTS`."""

from benchmarks.common.encoders import use_free_encoders
from dagster_project.cli.main import main
from imagemill.processes import run_process

if __name__ == "__main__":
    use_free_encoders()
    run_process(main)
