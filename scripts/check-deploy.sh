#!/usr/bin/env bash
# Checks the files of deploy/ with the tools that are installed, and names those that are not.
#
# In CI (CI=true) a tool that is missing is an error, but for kubectl: Debian's does not know the patches of the
# overlays. Without kubectl the manifests of base/ are checked as they are.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH=$PWD/.venv/bin:$PATH
missing=()
is_failed=false
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

has() { command -v "$1" >/dev/null; }
miss() { missing+=("$1"); [ "${CI:-}" != true ] || is_failed=true; }

if has systemd-analyze; then
  addition=mooncake-master.service.d/several-masters.conf
  mkdir "$work/${addition%/*}"
  sed -E 's#^ExecStop=-\S+#ExecStop=-/bin/true#' "deploy/systemd/${addition##*/}" >"$work/$addition"
  for unit in deploy/systemd/*.service; do
    # The programs are not installed here: only the unit is checked.
    sed -E 's#^ExecStart=\S+#ExecStart=/bin/true#' "$unit" >"$work/${unit##*/}"
    systemd-analyze verify "$work/${unit##*/}"
    echo "$unit: verified"
  done
else
  miss "systemd-analyze (apt: systemd)"
fi
if has promtool; then
  (cd deploy/prometheus && promtool check config prometheus.yml && promtool test rules alerts-test.yml)
else
  miss "promtool (apt: prometheus)"
fi
if ! has kubernetes-validate; then
  miss "kubernetes-validate (pip; make check-deploy installs it)"
elif has kubectl; then
  for folder in deploy/kubernetes/base deploy/kubernetes/overlays/*/; do
    kubectl kustomize "$folder" >"$work/resources.yaml"
    kubernetes-validate --strict "$work/resources.yaml"
  done
else
  for file in deploy/kubernetes/base/*.yaml; do
    [ "${file##*/}" = kustomization.yaml ] || kubernetes-validate --strict "$file"
  done
  missing+=("kubectl 1.21 or later, which renders the overlays")
fi
for name in "${missing[@]}"; do echo "not checked, because it is not installed: $name" >&2; done
! $is_failed || { echo "CI must have these tools" >&2; exit 1; }
