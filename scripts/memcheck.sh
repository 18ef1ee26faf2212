#!/usr/bin/env bash
# Runs tests of the code that handles raw memory under valgrind's memcheck: a read or a write outside
# of what is allocated, or a decision over bytes that nobody wrote, ends it with an error.
#
# Usage: memcheck.sh PYTHON [TEST_FILE...]. First tests of the transfer engine, then the extension
# module that PYTHON has, under the given files of tests/python. Many times slower than the tests by
# themselves.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:?the interpreter that has the extension module}
shift
command -v valgrind >/dev/null || {
  echo "memcheck: valgrind is missing: install the package valgrind" >&2
  exit 1
}

# A forked child runs on to its exec or its end, and says nothing.
memcheck=(valgrind --quiet --error-exitcode=9 --fair-sched=yes --child-silent-after-fork=yes
  --num-callers=30 --suppressions=scripts/memcheck.supp)

# What copies, pins, maps, and frames. Left out is what hands addresses to the kernel that lead
# nowhere: the kernel refuses them, which is what those tests are about, and memcheck takes it amiss.
filters=(copy:: memory::tests region:: managed::arena device:: token:: transport::shm::message)
skipped=(--skip unmapped --skip bad_ --skip memory_that_changed --skip ends_in_nothing)

binaries=$(cargo test --locked --lib -p mooncake-transfer-engine --no-run \
  --message-format=json | "$python" -c '
import json, sys
messages = map(json.loads, sys.stdin)
print(*(m["executable"] for m in messages if m.get("executable")), sep="\n")')
for binary in $binaries; do
  echo "memcheck: $binary"
  "${memcheck[@]}" "$binary" --test-threads=1 "${filters[@]}" "${skipped[@]}"
done

# With an allocator of its own Python would hide what is done to its objects.
for file in "$@"; do
  echo "memcheck: $file"
  PYTHONMALLOC=malloc "${memcheck[@]}" "$python" -m pytest -q --timeout=0 "$file"
done
