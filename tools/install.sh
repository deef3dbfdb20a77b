#!/usr/bin/env bash
# Makes .venv with a CPU build of vLLM, this package (editable), and the demo's and tests' packages.
# Usage: tools/install.sh [PYTHON [WHEEL]]      Python 3.11 to 3.13, x86-64 Linux, no GPU needed
# A WHEEL of this package is installed instead of the checkout, without packages for tests.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
packages=(-e '.[cpu,dev,bench]')
[ -z "${2:-}" ] || packages=("$2[cpu]")
venv=.venv

"$python" - <<'P' || exit 1
import sys
if not (3, 11) <= sys.version_info[:2] <= (3, 13):
    sys.exit(f"Python {sys.version.split()[0]} found; 3.11 to 3.13 needed: make PYTHON=python3.11 ...")
P
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
echo "installing vLLM's CPU build and its dependencies into $venv: some minutes, 4 GB" >&2
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check uv

# The CPU build of torch comes from pip's find-links if it is there, else from PyTorch's index.
links=${PIP_FIND_LINKS:-$("$venv/bin/python" -m pip config get global.find-links 2>/dev/null || true)}
if [ -n "$links" ] && compgen -G "${links%/}/torch-2.13.0+cpu-*" >/dev/null; then
  from=(--find-links "$links")
else
  from=(--extra-index-url https://download.pytorch.org/whl/cpu --index-strategy unsafe-best-match)
fi
"$venv/bin/uv" pip install --quiet --python "$venv/bin/python" "${from[@]}" \
  --overrides tools/cpu-overrides.txt \
  "${packages[@]}" ./tools/vllm-alias
touch "$venv/.ready"
