#!/usr/bin/env bash
# Look at the data before a training job takes its machines: every file in one process, one verdict, then the job.
#
#   examples/preflight.sh [OPTION of `imagemill validate`]… FILE… -- COMMAND…
#
#   examples/preflight.sh public_data/coco/rescale_32_768/{train,val}.coord.jsonl -- torchrun train.py
#
# FILE: records of Stage 2, of a preset or of Stage-A (.jsonl), a preset's folder, a bucket's folder of shards.
# COMMAND runs only where nothing is wrong; else the exit code is that of `validate`: 1 for findings, 2 for wrong usage.
# IMAGEMILL names the program where it is not on the PATH.
set -euo pipefail

checks=()
while (($#)) && [[ $1 != -- ]]; do
    checks+=("$1")
    shift
done
if (($# < 2)); then
    echo "usage: ${0##*/} [OPTION]… FILE… -- COMMAND…" >&2
    exit 2
fi
shift

"${IMAGEMILL:-imagemill}" validate ${checks[@]+"${checks[@]}"} >&2
exec "$@"
