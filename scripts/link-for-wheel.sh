#!/usr/bin/env bash
# Links the release extension against an old glibc, so that one wheel runs on every common Linux.
#
# Cargo calls this script instead of `cc`, and only for the target of the wheel; build scripts and
# procedural macros keep the machine's own linker. The linker is that of zig (a Python package, see
# setup.sh), which carries glibc stubs of every version. `make wheel` sets ZIG and ZIG_TARGET (such
# as `x86_64-linux-gnu.2.28`).
set -euo pipefail
: "${ZIG:?set it to the zig program}" "${ZIG_TARGET:?set it to architecture-linux-gnu.version}"

arguments=()
for argument in "$@"; do
  case $argument in
    # zig chooses its own linker, start files and word size for the target.
    -fuse-ld=* | -B* | -m64 | --target=*) ;;
    # Options that zig's linker does not know and that have no effect here.
    -Wl,--no-undefined-version | -Wl,-O1 | -Wl,--undefined-version) ;;
    # RDMA libraries are loaded by name at run time, although the build script of the bindings links
    # them.
    -libverbs | -lrdmacm) ;;
    # zig has no libgcc_s; its own unwinder replaces it.
    -lgcc_s) arguments+=(-lunwind) ;;
    *) arguments+=("$argument") ;;
  esac
done
exec "$ZIG" cc -target "$ZIG_TARGET" -Wl,--as-needed "${arguments[@]}"
