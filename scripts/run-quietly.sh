#!/usr/bin/env bash
# Runs a command and prints a line about it. What the command prints is shown if it fails.
#
# Usage: run-quietly.sh TITLE COMMAND [ARGUMENT...]
set -euo pipefail

title=$1
shift
output=$(mktemp)
trap 'rm -f "$output"' EXIT
"$@" >"$output" 2>&1 &
child=$!
# A shell that runs no jobs lets its children ignore an interruption.
trap 'kill "$child" 2>/dev/null; exit 130' INT TERM
if [[ -t 1 ]]; then
  while kill -0 "$child" 2>/dev/null; do
    printf '\r%s: %d s' "$title" "$SECONDS"
    sleep 1
  done
  printf '\r\033[K'
else
  echo "$title ..."
fi
code=0
wait "$child" || code=$?
if ((code != 0)); then
  cat "$output" >&2
  echo "$title: failed with exit code $code" >&2
  exit "$code"
fi
echo "$title: done in $SECONDS s"
