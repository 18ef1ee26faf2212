#!/usr/bin/env bash
# Prepares a machine for building: system packages, Rust components, a virtual environment.
#
# Usage: setup.sh VENV. Installs system packages only as root on a machine with apt; elsewhere lists
# the missing packages and stops. Leaves alone everything that is already installed.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?the path of the virtual environment}

report() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# The Rust toolchain: at least the version of the manifest, with formatter and linter.
command -v cargo >/dev/null || die "Rust is missing: install it with rustup (https://rustup.rs)"
wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
present=$(rustc --version | cut -d' ' -f2)
oldest=$(printf '%s\n%s\n' "$wanted" "$present" | sort -V | head -1)
[ "$oldest" = "$wanted" ] || die "Rust $present is older than $wanted: run rustup update"
for component in fmt clippy; do
  cargo "$component" --version >/dev/null 2>&1 && continue
  rustup component add "${component/fmt/rustfmt}" || die "cargo $component is missing"
done

# The first Python from 3.11 on.
python=
for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13 python3.14}; do
  if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python=$candidate
    break
  fi
done
[ -n "$python" ] || die "no Python 3.11 or later; install one, or name it: make PYTHON=…"

# System packages, each with a test for its presence.
missing=()
command -v cc >/dev/null || missing+=(gcc libc6-dev)
command -v make >/dev/null || missing+=(make)
command -v readelf >/dev/null || missing+=(binutils)
command -v pkg-config >/dev/null || missing+=(pkg-config)
[ -e /usr/include/infiniband/verbs.h ] || missing+=(libibverbs-dev)
[ -e /usr/include/rdma/rdma_cma.h ] || missing+=(librdmacm-dev)
# libclang-cpp does not count: bindgen cannot use it.
has_libclang() {
  [ -n "${LIBCLANG_PATH:-}" ] || ldconfig -p 2>/dev/null | grep -qE 'libclang(-[0-9.]+)?\.so' ||
    compgen -G '/usr/lib/llvm-*/lib/libclang.so*' >/dev/null ||
    compgen -G '/usr/lib/llvm-*/lib/libclang-[0-9]*.so*' >/dev/null
}
has_libclang || missing+=(libclang-dev)
"$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=("${python##*/}-venv")
if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    report "installing ${missing[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${missing[@]}"
  else
    die "install these packages first (Debian names): ${missing[*]}"
  fi
fi

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r scripts/tools.txt
report "ready: Rust $present, $("$venv/bin/python" --version), tools in $venv"
