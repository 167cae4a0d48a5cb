#!/usr/bin/env bash
# Build the image of Dockerfile without a container engine, then run its command, its health check, and one image through the models.
#
#     make image-test [TORCH=torch==2.13.0+cpu] [TORCH_INDEX=URL] [WHEELS=FOLDER]
#
# Needs Debian's packages buildah and mmdebstrap, root, and the network. The base is Debian 12 with its Python instead of an image of a
# registry. WHEELS is a folder of wheels in which torch is looked up too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

for program in buildah mmdebstrap; do
  command -v "$program" >/dev/null || { echo "$program is not installed; do: apt-get install buildah mmdebstrap" >&2; exit 2; }
done
[ "$(id -u)" -eq 0 ] || { echo "building an image without an engine needs root" >&2; exit 2; }

folder=$(mktemp -d)
service=
finish() {
  [ -z "$service" ] || kill -KILL "$service" 2>/dev/null || true
  images rm --all >/dev/null 2>&1 || true
  rm -rf "$folder"
}
images() { buildah --root "$folder/storage" --runroot "$folder/run" --storage-driver vfs "$@"; }
trap finish EXIT

echo "== base"
mmdebstrap --quiet --variant=minbase --include=ca-certificates,python3,python3-venv bookworm "$folder/base.tar"
base=$(images from scratch)
images add --quiet "$base" "$folder/base.tar" / >/dev/null
# Certificate authorities and wheels of this machine.
images copy --quiet "$base" /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt >/dev/null
images config --env SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt "$base"
if [ -n "${WHEELS:-}" ]; then
  images copy --quiet "$base" "$WHEELS" /wheels-of-base >/dev/null
  images config --env UV_FIND_LINKS=/wheels-of-base "$base"
fi
images commit --quiet --rm "$base" localhost/base >/dev/null
rm "$folder/base.tar"

echo "== image"
arguments=(--build-arg BASE=localhost/base)
[ -z "${TORCH:-}" ] || arguments+=(--build-arg "TORCH=$TORCH")
[ -z "${TORCH_INDEX:-}" ] || arguments+=(--build-arg "TORCH_INDEX=$TORCH_INDEX")
# The format of OCI has no health checks.
images build --isolation chroot --format docker --pull-never "${arguments[@]}" --tag localhost/imagemill .

echo "== service"
configured() {
  images inspect --type image localhost/imagemill | python3 -c '
import json, sys
config = json.load(sys.stdin)["Docker"]["config"]
print(*{"user": [config["User"]], "command": config["Entrypoint"] + config["Cmd"], "health": config["Healthcheck"]["Test"][1:]}[sys.argv[1]], sep="\n")' "$1"
}
mapfile -t command < <(configured command)
mapfile -t health < <(configured health)
[ "$(configured user)" = 10001:10001 ] || { echo "the image runs as $(configured user)" >&2; exit 1; }

container=$(images from --pull-never localhost/imagemill)
within() { images run --isolation chroot "$container" -- "$@"; }
within python3 -c '
from pathlib import Path
from PIL import Image
folder = Path("/data/approved")
folder.mkdir()
Image.effect_noise((64, 48), 80).convert("RGB").save(folder / "a.jpg")
(folder / "a.txt").write_text("noise")'
if within "${health[@]}" 2>/dev/null; then echo "the health check succeeds without a service" >&2; exit 1; fi
within sh -c 'echo $$ > /history/pid; exec "$@"' sh "${command[@]}" &
running=$!
for _ in $(seq 120); do
  within "${health[@]}" 2>/dev/null && break
  kill -0 "$running" || { echo "the service ended" >&2; exit 1; }
  sleep 1
done
within "${health[@]}"
# With this isolation, process numbers are those of this machine.
service=$(within cat /history/pid)
[ "$(ps -o uid= -p "$service" | tr -d ' ')" = 10001 ] || { echo "the service does not run as the image's user" >&2; exit 1; }
kill -TERM "$service"
wait "$running"
service=
echo "the service ended with 0 after SIGTERM"

echo "== one image, preview models"
within imagemill run
echo "image-test: passed"
