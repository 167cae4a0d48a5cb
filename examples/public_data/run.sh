#!/usr/bin/env bash
# ./public_data/run.sh DATASET {convert|rescale|coord|validate|all} --preset NAME [options of `imagemill preset`]
# Datasets lie beside this file; the folder above it is the data root unless IMAGEMILL_DATA_ROOT is set.
set -euo pipefail

usage="usage: run.sh DATASET {convert|rescale|coord|validate|all} --preset NAME"
[ $# -ge 2 ] || { echo "$usage" >&2; exit 2; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
dataset=$1 step=$2
shift 2

program=${IMAGEMILL:-$(command -v imagemill || echo "$here/../../.venv/bin/imagemill")}
export IMAGEMILL_DATA_ROOT=${IMAGEMILL_DATA_ROOT:-$(dirname "$here")}
exec "$program" preset "$step" "$dataset" --public-data-root "$here" "$@"
