#!/usr/bin/env bash
# Checks the files of deploy/ with the tools that are installed, and names those that are not.
set -euo pipefail
cd "$(dirname "$0")/.."
missing=()
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

needs() { command -v "$1" >/dev/null || { missing+=("$2"); return 1; }; }

if needs systemd-analyze "systemd-analyze (apt: systemd)"; then
  for unit in deploy/systemd/*.service; do
    # The programs are not installed here: only the unit is checked.
    sed -E 's#^ExecStart=\S+#ExecStart=/bin/true#' "$unit" >"$work/${unit##*/}"
    systemd-analyze verify "$work/${unit##*/}"
    echo "$unit: verified"
  done
fi
if needs promtool "promtool (apt: prometheus)"; then
  (cd deploy/prometheus && promtool check config prometheus.yml && promtool test rules alerts-test.yml)
fi
if needs kubectl "kubectl" && needs kubernetes-validate "kubernetes-validate (pip)"; then
  for folder in deploy/kubernetes/base deploy/kubernetes/overlays/*/; do
    kubectl kustomize "$folder" >"$work/resources.yaml"
    kubernetes-validate --strict "$work/resources.yaml"
  done
fi
for name in "${missing[@]}"; do echo "not checked, because it is not installed: $name"; done
