#!/usr/bin/env bash
# Install moeconv into .venv, make a small checkpoint, convert it, verify it, show what a rank reads.
#
#   bash examples/quickstart.sh                     from any folder, as often as you like
#   PYTHON=python3.12 bash examples/quickstart.sh   with this Python (3.11 or newer)
#
# What it makes lies in .venv, which is kept, and in build/quickstart, which is made anew.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
venv=.venv
work=build/quickstart

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
unset PYTHONHOME PYTHONPATH VIRTUAL_ENV

# show COMMAND…: print a command, then run it.
show() {
  printf '\n$ %s\n' "$*"
  "$@"
}

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "\`$python\` is not Python 3.11 or newer; name one with PYTHON=…" >&2
    exit 1
  fi
  show "$python" -m venv --clear "$venv"
fi
echo "installing moeconv into $venv (the first time takes minutes: PyTorch is large)"
show "$venv/bin/python" -m pip install -qq -c constraints.txt -e .
export PATH="$PWD/$venv/bin:$PATH"

rm -rf "$work"
show python examples/make_checkpoint.py "$work/Qwen3-tiny"
show moeconv trtllm "$work/Qwen3-tiny" --out "$work/converted"
show moeconv verify "$work/converted" --read-data --source "$work/Qwen3-tiny"
show moeconv rank "$work/converted" --tp 2 --tp-rank 0
