#!/usr/bin/env bash
# Runs the tests of the code that handles raw memory under valgrind's memcheck. An access outside of
# allocated memory, or a branch on uninitialized bytes, ends the run with an error.
#
# Usage: memcheck.sh PYTHON [TEST_FILE...]. Runs tests of the transfer engine first, and then the
# given files of tests/python with the extension module of PYTHON. Many times slower than the tests
# without valgrind.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:?the interpreter that has the extension module}
shift
command -v valgrind >/dev/null || {
  echo "memcheck: valgrind is missing: install the package valgrind" >&2
  exit 1
}

# Forked children run without reports until they exec or end.
memcheck=(valgrind --quiet --error-exitcode=9 --fair-sched=yes --child-silent-after-fork=yes
  --num-callers=30 --suppressions=scripts/memcheck.supp)

# The modules that copy, pin, map and frame memory. Left out are tests that hand invalid addresses to
# the kernel: the kernel rejects them, as those tests expect, but memcheck reports them.
filters=(copy:: memory::tests region:: managed::arena token:: transport::shm::message)
skipped=(unmapped bad_ memory_that_changed)

binaries=$(cargo test --locked --lib -p mooncake-transfer-engine --no-run \
  --message-format=json | "$python" -c '
import json, sys
messages = map(json.loads, sys.stdin)
print(*(m["executable"] for m in messages if m.get("executable")), sep="\n")')
for binary in $binaries; do
  echo "memcheck: $binary"
  tests=$("$binary" --list)
  for name in "${filters[@]}" "${skipped[@]}"; do
    grep -qF "$name" <<<"$tests" || { echo "memcheck: no test is called $name" >&2; exit 1; }
  done
  "${memcheck[@]}" "$binary" --test-threads=1 "${filters[@]}" "${skipped[@]/#/--skip=}"
done

# Python's own allocator would hide errors in the memory of its objects.
for file in "$@"; do
  echo "memcheck: $file"
  PYTHONMALLOC=malloc "${memcheck[@]}" "$python" -m pytest -q --timeout=0 "$file"
done
