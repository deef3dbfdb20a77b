#!/usr/bin/env bash
# Makes the environment of the GPU emulation (docs/gpu-emulation.md):   setup.sh FOLDER
# 6 GB, with a virtual environment in FOLDER/venv. A repeated run does only the missing steps.
#   VLLM=0.32.0    vLLM's release; 0.33.0 is supported too
#   KIT=FOLDER     a kit of that release by tools/gpu_kit/make_kit.sh; default: makes one
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
[ $# = 1 ] || { echo "usage: setup.sh FOLDER" >&2; exit 2; }
mkdir -p "$1"
folder=$(cd "$1" && pwd)
venv=$folder/venv
version=${VLLM:-0.32.0}

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

kit=${KIT:-$folder/kit}
is_kit() { [ -f "$kit/SHA256" ] && grep -q "^vllm-$version-" "$kit/MANIFEST"; }
[ -z "${KIT:-}" ] || is_kit || { say "KIT=$KIT holds no kit of vLLM $version"; exit 1; }

case $version in
  0.32.*) of_torch="torch==2.11.0 torchvision==0.26.0 triton==3.6.0" ;; # as on the GPU machine
  0.33.*) of_torch="torch==2.14.0 torchvision==0.29.0 triton==3.8.0" ;; # as its wheel wants it
  *) say "it is not known which torch vLLM $version takes: add that to this script" && exit 1 ;;
esac
# shellcheck disable=SC2086
{ printf '%s\n' $of_torch && cat "$here/requirements.txt"; } >"$folder/requirements.new"
if ! cmp -s "$folder/requirements.new" "$folder/requirements.txt"; then
  echo "== Python packages"
  [ -x "$venv/bin/python" ] || "$(find_python)" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check uv
  "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" -r "$folder/requirements.new"
fi
mv "$folder/requirements.new" "$folder/requirements.txt"

if ! is_kit; then
  echo "== a kit of vLLM's CUDA build"
  VLLM=$version PYTHON=$venv/bin/python bash "$here/../gpu_kit/make_kit.sh" "$kit"
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

# Every Python process of the environment finds vLLM, and a child of an emulated process starts it.
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
start='import os; os.environ.get("GPU_EMULATION") == "1" and __import__("emu").start()'
printf '%s\n' "$folder/site" "$here" "$start" >"$packages/gpu_emulation.pth.new"
mv "$packages/gpu_emulation.pth.new" "$packages/gpu_emulation.pth"
