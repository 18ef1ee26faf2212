#!/usr/bin/env bash
# Links the release extension against an old glibc, so that one wheel runs on every common Linux.
#
# Cargo calls this instead of `cc` for the target of the wheel only; build scripts and procedural
# macros keep the machine's own linker. The linker is zig's (a Python package, see setup.sh), which
# carries the glibc stubs of every version. Give ZIG and ZIG_TARGET, such as
# `x86_64-linux-gnu.2.28`; `make wheel` does.
set -euo pipefail
: "${ZIG:?set it to the zig program}" "${ZIG_TARGET:?set it to architecture-linux-gnu.version}"

arguments=()
for argument in "$@"; do
  case $argument in
    # zig chooses its own linker, start files and word size for the target.
    -fuse-ld=* | -B* | -m64 | --target=*) ;;
    # Not known to zig's linker, and without meaning for what we link.
    -Wl,--no-undefined-version | -Wl,-O1 | -Wl,--undefined-version) ;;
    # RDMA libraries are loaded at run time by name; the build script of the bindings asks for them.
    -libverbs | -lrdmacm) ;;
    # zig has no libgcc_s; its own unwinder is linked in instead.
    -lgcc_s) arguments+=(-lunwind) ;;
    *) arguments+=("$argument") ;;
  esac
done
exec "$ZIG" cc -target "$ZIG_TARGET" -Wl,--as-needed "${arguments[@]}"
