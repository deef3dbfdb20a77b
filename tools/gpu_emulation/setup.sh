#!/usr/bin/env bash
# Makes the environment of the GPU emulation (docs/gpu-emulation.md):   setup.sh FOLDER
# 6 GB, with a virtual environment in FOLDER/venv. Repeated, it does only what is left to do.
#   KIT=FOLDER    a kit of tools/gpu_kit/make_kit.sh; without it one is made
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
[ $# = 1 ] || { echo "usage: setup.sh FOLDER" >&2; exit 2; }
mkdir -p "$1"
folder=$(cd "$1" && pwd)
venv=$folder/venv

say() { echo "setup.sh: $*" >&2; }
command -v gcc >/dev/null || { say "gcc is needed, for two small libraries: install it"; exit 1; }

find_python() {
  local python
  for python in "$(command -v python3.12 || true)" "$HOME"/.pyenv/versions/3.12*/bin/python3.12; do
    if [ -x "$python" ] && "$python" -c 'import ensurepip, venv' 2>/dev/null; then
      echo "$python"
      return
    fi
  done
  say "no Python 3.12 with venv, neither as python3.12 nor in ~/.pyenv/versions; vLLM's CUDA"
  say "build and its libraries are for that one: install it (pyenv install 3.12)"
  return 1
}

if ! cmp -s "$here/requirements.txt" "$folder/requirements.txt"; then
  echo "== Python packages"
  [ -x "$venv/bin/python" ] || "$(find_python)" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check uv
  "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" -r "$here/requirements.txt"
  cp "$here/requirements.txt" "$folder/requirements.txt"
fi

kit=${KIT:-$folder/kit}
if [ ! -f "$kit/SHA256" ]; then
  [ -z "${KIT:-}" ] || { say "KIT=$KIT holds no kit: it has no file SHA256"; exit 1; }
  echo "== a kit of vLLM's CUDA build"
  PYTHON=$venv/bin/python bash "$here/../gpu_kit/make_kit.sh" "$kit"
fi
if ! cmp -s "$kit/SHA256" "$folder/site.SHA256"; then
  echo "== vLLM's CUDA build"
  rm -rf "$folder/site" "$folder/site.SHA256"
  bash "$here/../gpu_kit/install.sh" "$kit" "$folder/site" >/dev/null
  cp "$kit/SHA256" "$folder/site.SHA256"
fi

mkdir -p "$folder/stubs"
for pair in cuda:libcuda.so.1 nvml:libnvidia-ml.so.1; do
  source=$here/stubs/${pair%%:*}.c library=$folder/stubs/${pair#*:}
  [ "$library" -nt "$source" ] && continue
  gcc -shared -fPIC -w -O1 -Wl,-soname,"${pair#*:}" -o "$library.new" "$source"
  mv "$library.new" "$library"
done

# For every process of the environment: vLLM, and the emulation where the process before had it.
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
start='import os; os.environ.get("GPU_EMULATION") == "1" and __import__("emu").start()'
printf '%s\n' "$folder/site" "$here" "$start" >"$packages/gpu_emulation.pth.new"
mv "$packages/gpu_emulation.pth.new" "$packages/gpu_emulation.pth"
