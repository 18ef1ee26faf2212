#!/usr/bin/env bash
# Runs the tests that need RDMA devices in a virtual machine with Soft-RoCE.
#
# Usage: test-rdma.sh. Builds on this machine and runs in the guest (scripts/rdma-vm). Where a virtual
# machine cannot be set up, says why, and fails only if RDMA_TESTS=required.
set -euo pipefail
cd "$(dirname "$0")/.."

# Test targets whose trials named real::… need a device.
targets=(mooncake-verbs:devices mooncake-rdma:transfers)

if ! reason=$(scripts/rdma-vm --setup 2>&1); then
  printf 'test-rdma: skipped, no virtual machine: %s\n' "$(tail -n 1 <<<"$reason")"
  [ "${RDMA_TESTS:-}" != required ] || exit 1
  exit 0
fi

binaries=()
for target in "${targets[@]}"; do
  messages=$(cargo test --no-run --locked --quiet --message-format=json -p "${target%%:*}" \
    --test "${target##*:}" --features mooncake-verbs/rdma,mooncake-verbs/test-util)
  binaries+=("$(sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' <<<"$messages" | tail -n 1)")
done

scripts/rdma-vm --timeout 280 -- bash -c 'for binary; do "$binary" real:: || exit; done' bash "${binaries[@]}"
