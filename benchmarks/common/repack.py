"""`python -m benchmarks.common.repack DATA_ROOT` writes all sets of a data root again by `imagemill shards --overwrite`.

It prints the share of its CPU time that the checks of the sets take.
"""

import sys
import time
from typing import Any

from benchmarks.common.encoders import use_free_encoders
from dagster_project.cli.main import cli


def share_of_checks(root: str) -> float:
    """Write all sets of a data root again; return the share of this process's CPU time that their checks took."""
    from checks import bucket_shards

    spent, validate = [], bucket_shards.validate_shards

    def timed(*arguments: Any, **options: Any) -> Any:
        began = time.process_time()
        try:
            return list(validate(*arguments, **options))  # it is a generator
        finally:
            spent.append(time.process_time() - began)

    bucket_shards.validate_shards = timed
    try:
        cli.main(["shards", "--overwrite", "--data-root", root], standalone_mode=False)
    except SystemExit as ended:
        if ended.code:
            raise
    if not spent:
        raise RuntimeError("imagemill shards has not checked its sets")
    return sum(spent) / time.process_time()


if __name__ == "__main__":
    use_free_encoders()
    print(share_of_checks(sys.argv[1]))
