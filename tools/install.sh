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

# The draft source "suffix" needs arctic-inference, of which there is no wheel. Its build by pip would
# load a CUDA build of torch; here it is built beside our torch, by tools in a place of their own.
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
build_suffix() {
  "$venv/bin/python" -m venv "$tools/venv" &&
    "$venv/bin/uv" pip install --quiet --python "$tools/venv/bin/python" \
      nanobind==2.9.2 grpcio-tools "setuptools>=77" wheel cmake ninja pip &&
    realpath "$venv"/lib/python*/site-packages >"$tools/torch.pth" &&
    mv "$tools/torch.pth" "$tools"/venv/lib/python*/site-packages &&
    PATH="$tools/venv/bin:$PATH" "$tools/venv/bin/python" -m pip wheel --quiet --no-deps \
      --no-build-isolation --wheel-dir "$tools" arctic-inference==0.3.0 &&
    "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps "$tools"/*.whl
}
if [ -z "${2:-}" ] && ! "$venv/bin/python" -c "import arctic_inference" 2>/dev/null; then
  echo "building arctic-inference: half a minute" >&2
  build_suffix >"$tools/log" 2>&1 || {
    tail -20 "$tools/log" >&2
    echo "arctic-inference was not built: tests of the draft source 'suffix' are skipped" >&2
  }
fi
touch "$venv/.ready"
