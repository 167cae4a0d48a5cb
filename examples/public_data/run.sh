#!/usr/bin/env bash
# ./public_data/run.sh DATASET COMMAND [flags] [-- options of `imagemill preset`]; `run.sh help` lists them
# Datasets are beside this file; the folder above it is the data root unless IMAGEMILL_DATA_ROOT is set.
set -euo pipefail

usage() {
  cat <<'EOF'
usage: run.sh DATASET {convert|rescale|coord|validate|all} [flags] [-- options of `imagemill preset`]

Commands:
  convert    the dataset's own annotations into DATASET/raw/{train,val}.jsonl
  rescale    images and records into DATASET/PRESET/
  coord      norm and coord records; with max_objects in presets.yaml, the derived preset too
  validate   every rule on a preset's files; exit 1 on a finding
  all        rescale, then coord
  help       this text

Flags:
  --preset NAME         default: default_preset of the dataset in presets.yaml, else its only preset
  --skip-image-check    validate: open no image
  --raw-only            validate: raw records alone
  --preset-only         validate: the preset alone (default)

All options of a command: imagemill preset COMMAND --help
EOF
}

dataset=${1:-} step=${2:-}
case $dataset:$step in
  help:* | -h:* | --help:* | *:help | *:-h | *:--help) usage; exit 0 ;;
  *:convert | *:rescale | *:coord | *:validate | *:all) ;;
  *:download) echo "run.sh: nothing is downloaded: name your copy in presets.yaml, then run convert" >&2; exit 2 ;;
  *: | :*) usage >&2; exit 2 ;;
  *) echo "run.sh: no command '$step'" >&2; usage >&2; exit 2 ;;
esac
shift 2
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# Words behind `--` are options of the command as well.
for word; do
  shift
  [ "$word" = -- ] || set -- "$@" "$word"
done

program=${IMAGEMILL:-$(command -v imagemill || echo "$here/../../.venv/bin/imagemill")}
export IMAGEMILL_DATA_ROOT=${IMAGEMILL_DATA_ROOT:-$(dirname "$here")}
exec "$program" preset "$step" "$dataset" --public-data-root "$here" "$@"
