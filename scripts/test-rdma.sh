#!/usr/bin/env bash
# Runs the tests that need RDMA devices in a virtual machine with Soft-RoCE.
#
# Usage: test-rdma.sh [--build]. With --build, builds them on this machine and writes a list of the programs; without,
# runs those in the guest (scripts/rdma-vm). Where a virtual machine cannot be set up or does not boot, says why, and
# fails only if RDMA_TESTS=required.
set -euo pipefail
cd "$(dirname "$0")/.."
list=target/rdma-tests

# Test targets, and the names of their tests that use the devices of the machine.
targets=(
  devices:real
  transfers:real
  behaviour:rdma
  rdma_pairs:real
)

if [ "${1:-}" = --build ]; then
  # The selection of `make test`: cargo builds nothing once more.
  read -ra selection <<<"$(sed -n 's/^RUST_TESTED := //p' Makefile)"
  for target in "${targets[@]}"; do
    selection+=(--test "${target%:*}")
  done
  messages=$(cargo test --no-run --quiet --message-format=json "${selection[@]}")
  for target in "${targets[@]}"; do
    IFS=: read -r test name <<<"$target"
    binary=$(sed -n "s#.*\"executable\":\"\([^\"]*/$test-[0-9a-f]*\)\".*#\1#p" <<<"$messages" | tail -n 1)
    printf '%s\n' "${binary:?no program of $test}" "$name"
  done >"$list"
  exit
fi

skip() {
  printf 'test-rdma: skipped, no virtual machine: %s\n' "$1"
  [ "${RDMA_TESTS:-}" != required ] || exit 1
  exit 0
}

reason=$(scripts/rdma-vm --setup 2>&1) || skip "$(tail -n 1 <<<"$reason")"
scripts/rdma-vm --quiet --timeout 240 -- true || skip 'it does not boot, see above'

# Runs a command in the guest. One whose kernel dies, as the emulator of QEMU before 8.1 lets it now and then with two CPUs,
# is started again with one.
in_guest() {
  local code=0
  scripts/rdma-vm "$@" || code=$?
  [ $code = 125 ] || return $code
  printf 'test-rdma: the guest died, and is started again with one CPU\n'
  scripts/rdma-vm --cpus 1 "$@"
}

mapfile -t commands <"$list"
# The last one needs devices in a network namespace.
pairs=${commands[-2]}
commands=("${commands[@]:0:${#commands[@]}-2}")

# The guest has no network beyond its own: upstream's package is installed here.
python=.venv/bin/python
upstream=$(PYTHONPATH=tests/python "$python" -c 'import upstream_package; print(upstream_package.upstream_python())')

in_guest --timeout 600 -- env MOONCAKE_TEST_UPSTREAM_PYTHON="$upstream" bash -c '
  "$1" -m pytest -q -p no:cacheprovider tests/python/test_rdma.py || exit
  shift
  while [ $# -gt 0 ]; do "$1" "$2::" || exit; shift 2; done
' bash "$python" "${commands[@]}"

# Two devices here, and two in a network namespace, as on another host.
in_guest --timeout 600 --nics 4 --netns 1 -- \
  "$python" -m pytest -q -p no:cacheprovider tests/python/test_rdma_faults.py
[ -z "${MOONCAKE_LONG_TESTS:-}" ] || in_guest --timeout 600 --nics 4 --netns 1 -- "$pairs"
