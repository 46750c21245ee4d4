#!/usr/bin/env bash
# The steps of publish.yml: convert a part of a checkpoint and send it, or join the parts.
#
#   publish.sh pin         say which commit SRC is now, and what would be done with it
#   publish.sh part 2/4    do the second of four parts of the work
#   publish.sh join        do what is left, let the model appear, verify it where it is
#
# SRC is the checkpoint, REPO the repository (org/name), HF_TOKEN may write there; CONVERT is the
# command that `moeconv inspect SRC` names, such as `marlin-fp4 --engine sglang`. Each part may run
# on a machine of its own: they meet on a branch of the repository. Any of them may be run again.
set -euo pipefail
: "${SRC:?name the checkpoint}" "${REPO:?name the repository, as org/name}"

read -ra command <<<"${CONVERT:-trtllm}"
convert=(
  moeconv "${command[@]}" "$SRC"
  --out "${OUT:-build/converted}"
  --max-shard-size "${MAX_SHARD_SIZE:-2GB}"
  --push "$REPO"
  --max-disk "${MAX_DISK:-8GB}"
)

case "${1:-}" in
  pin)
    "${convert[@]}" --dry-run
    source=$(moeconv inspect "$SRC" --json |
      python3 -c 'import json, sys; print(json.load(sys.stdin)["root"])')
    echo "source=$source" | tee -a "${GITHUB_OUTPUT:-/dev/null}"
    ;;
  part)
    "${convert[@]}" --shard-of "$2"
    ;;
  join)
    "${convert[@]}"
    moeconv verify "$REPO"
    [[ -d $SRC ]] || moeconv verify "$REPO" --against-source
    ;;
  *)
    echo "usage: publish.sh pin | part I/N | join" >&2
    exit 2
    ;;
esac
