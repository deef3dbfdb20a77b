#!/usr/bin/env bash
# A session on a machine with a GPU: correctness first, then times (docs/gpu-suite.md).
#   bash benchmarks/gpu/session.sh OUT [KIT]      logs and results go to OUT; KIT installs vLLM
# Each step is one process with a time limit. A step that fails does not stop the later ones, except
# the first: without one right answer there is nothing to check or to time.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=$(mkdir -p "$1" && cd "$1" && pwd) kit=${2:-}
failed=()

if ! python3 -c "import vllm" 2>/dev/null; then
  [ -n "$kit" ] || { echo "vLLM is not installed; give a KIT (tools/gpu_kit)" >&2; exit 2; }
  eval "$(bash "$kit/install.sh" "$kit" /tmp/site)" || exit 2
fi
plugin=$(python3 tools/plugin_folder.py /tmp/triforce-plugin) || exit 2
export PYTHONPATH="$PWD:$plugin${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1

step() {  # step NAME SECONDS COMMAND...
  local name=$1 limit_s=$2 begin=$SECONDS
  shift 2
  echo "-- $name, at most $limit_s s"
  timeout "$limit_s" "$@" >"$out/$name.log" 2>&1
  local status=$?
  echo "   status $status after $((SECONDS - begin)) s, $out/$name.log"
  tail -n 4 "$out/$name.log"
  [ $status -eq 0 ] || failed+=("$name")
  return $status
}
check() { python3 -m pytest -q -s -p no:cacheprovider --tb short "$@"; }
export -f check

# 1. Correctness.
step one-prompt 300 bash -c "check benchmarks/gpu/test_one_prompt.py" || exit 1
step kernels 300 bash -c "check tests/kernels"
step exact-flash-attn 540 bash -c "check benchmarks/gpu/test_exactness.py -k FLASH_ATTN"
# Triton multiplies float32 as TF32 by default, which is coarser than the margin of float32 tokens.
TRITON_F32_DEFAULT=ieee \
  step exact-triton-attn 540 bash -c "check benchmarks/gpu/test_exactness.py -k TRITON_ATTN"
step exact-flashinfer 540 bash -c "check benchmarks/gpu/test_exactness.py -k FLASHINFER"
step exact-offload 540 bash -c "check benchmarks/gpu/test_exactness.py -k offload"

# 2. Times, with random weights: one call of bench, and speed-ups at any acceptance from its parts.
# Greedy outputs of random weights part at every rounding: bench's exit code 1 says no more.
python3 -m benchmarks.gpu.models "$out/models" llama-3.1-8b
step times 1200 bash -c "python3 -m vllm_triforce.cli bench \
  --target '$out/models/llama-3.1-8b' --draft '$out/models/llama-3.1-8b-draft' \
  --methods stock,triforce:all --prompts vllm_triforce --dtypes bfloat16 \
  --contexts ${CONTEXTS:-8000,32000,122000} --batch-sizes ${BATCH_SIZES:-1} --tokens 128 \
  --pass-times --engine '{\"load_format\": \"dummy\"}' --triforce '{\"min_context\": 0}' \
  --engines-at-once 2 --output '$out/times' || [ \$? = 1 ]"
step speedup 60 python3 -m benchmarks.gpu.speedup "$out/times"
cat "$out/speedup.log"

echo "failed: ${failed[*]:-none}"
[ ${#failed[@]} -eq 0 ]
