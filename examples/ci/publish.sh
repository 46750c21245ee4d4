#!/usr/bin/env bash
# The steps of publish.yml: convert a part of a checkpoint and send it, or join the parts.
#
#   publish.sh part 2/4    do the second of four parts of the work
#   publish.sh join        do what is left, let the model appear, verify it where it is
#
# SRC is the checkpoint, REPO the repository (org/name), HF_TOKEN may write there. Each part may run
# on a machine of its own: they meet on a branch of the repository. Any of them may be run again.
set -euo pipefail
: "${SRC:?name the checkpoint}" "${REPO:?name the repository, as org/name}"

convert=(
  moeconv "${VERB:-trtllm}" "$SRC"
  --out "${OUT:-build/converted}"
  --max-shard-size "${MAX_SHARD_SIZE:-2GB}"
  --push "$REPO"
  --max-disk "${MAX_DISK:-8GB}"
)

case "${1:-}" in
  part)
    "${convert[@]}" --shard-of "$2"
    ;;
  join)
    "${convert[@]}"
    moeconv verify "$REPO"
    ;;
  *)
    echo "usage: publish.sh part I/N | join" >&2
    exit 2
    ;;
esac
