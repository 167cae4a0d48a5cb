"""CPU seconds of one tick of the sensor `new_images`, without start-up: `python -m benchmarks.common.tick DATA_ROOT`."""

import sys
import time

import dagster as dg

from benchmarks.common.encoders import use_free_encoders
from dagster_project.internals.instance import open_instance
from dagster_project.sensors import new_images
from imagemill.domain.layout import DataRoot
from resources.data_root import DataRootResource


def tick(path: str) -> float:
    """Evaluate the sensor once; return its CPU seconds. Raises RuntimeError if it requests a run."""
    resources = {"data_root": DataRootResource(path=path, config_file=None, output_base_dir=None)}
    with open_instance(DataRoot.resolve(path)) as instance:
        began = time.process_time()
        with dg.build_sensor_context(instance=instance, resources=resources) as context:
            data = new_images.evaluate_tick(context)
        seconds = time.process_time() - began
    if data.run_requests:
        raise RuntimeError(f"a tick without news requested runs: {data.run_requests}")
    return seconds


if __name__ == "__main__":
    use_free_encoders()
    print(tick(sys.argv[1]))
