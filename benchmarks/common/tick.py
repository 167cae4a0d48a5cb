"""CPU seconds of one tick of the sensor `new_images`, without start-up: `python -m benchmarks.common.tick DATA_ROOT [--idle]`.

With `--idle`, the cursor of the tick says that nothing is left to do, as after the tick that has found that.
"""

import json
import sys
import time

import dagster as dg

from benchmarks.common.encoders import use_free_encoders
from imagemill.config import use_configured_kinds
from imagemill.domain.layout import DataRoot
from imagemill.processes import collect_rarely


def tick(path: str, *, idle: bool) -> float:
    """Evaluate the sensor twice; return the CPU seconds of the second time. Raises RuntimeError if it requests a run."""
    use_configured_kinds(DataRoot.resolve(path))
    from dagster_project.internals.instance import open_instance
    from dagster_project.sensors import idle_state, new_images
    from imagemill.pipeline.session import open_session
    from resources.data_root import DataRootResource

    resources = {"data_root": DataRootResource(path=path, config_file=None, output_base_dir=None)}
    cursor, seconds = None, 0.0
    with open_instance(DataRoot.resolve(path)) as instance:
        if idle:
            with open_session(path) as session:
                _ = session.ledger  # created, and closed before its state is read
            with open_session(path) as session:
                cursor = json.dumps({"idle": idle_state(session, session.look())})
        for _ in range(2):
            began = time.process_time()
            with dg.build_sensor_context(instance=instance, resources=resources, cursor=cursor) as context:
                data = new_images.evaluate_tick(context)
            seconds, cursor = time.process_time() - began, data.cursor
            if data.run_requests:
                raise RuntimeError(f"a tick without news requested runs: {data.run_requests}")
    return seconds


if __name__ == "__main__":
    collect_rarely()  # as the service that evaluates ticks
    use_free_encoders()
    print(tick(sys.argv[1], idle="--idle" in sys.argv))
