#!/usr/bin/env bash
# A session on a machine with a GPU: correctness first, then times (docs/gpu-suite.md).
#   bash benchmarks/gpu/session.sh OUT [KIT]      logs and results go to OUT; KIT installs vLLM
#   PARTS="correctness times"                     either alone, for a short loan of the machine
# Checks run side by side, since most of their time is the CPU's; nothing runs beside the times.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=$(mkdir -p "$1" && cd "$1" && pwd) kit=${2:-}
parts=${PARTS:-correctness times}
for part in $parts; do
  [[ $part =~ ^(correctness|times)$ ]] || { echo "PARTS has '$part': it takes correctness and times" >&2; exit 2; }
done
# Background jobs ignore an interrupt, and their engines would hold the GPU.
trap 'for job in $(jobs -p); do pkill -TERM -P "$job"; done; exit 130' INT TERM

if ! python3 -c "import vllm" 2>/dev/null; then
  [ -n "$kit" ] || { echo "vLLM is not installed; give a KIT (tools/gpu_kit)" >&2; exit 2; }
  eval "$(bash "$kit/install.sh" "$kit" /tmp/site)" || exit 2
fi
plugin=$(python3 tools/plugin_folder.py /tmp/triforce-plugin) || exit 2
export PYTHONPATH="$PWD:$plugin${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1

step() {  # step NAME SECONDS COMMAND...
  local name=$1 limit_s=$2 begin=$SECONDS status
  shift 2
  timeout "$limit_s" "$@" >"$out/$name.log" 2>&1
  status=$?
  echo "-- $name: status $status after $((SECONDS - begin)) s of $limit_s, $out/$name.log"
  tail -n "${LAST_LINES:-4}" "$out/$name.log"
  [ $status -eq 0 ] || echo "$name" >>"$out/failed"
}
check() { VLLM_CACHE_ROOT=$(mktemp -d) python3 -m pytest -q -s -p no:cacheprovider --tb short "$@"; }
export -f check
rm -f "$out/failed"

if [[ $parts == *correctness* ]]; then
  # Triton multiplies float32 as TF32 by default, coarser than the margin of float32 tokens.
  export TRITON_F32_DEFAULT=ieee OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=2
  step one-prompt 300 bash -c "check benchmarks/gpu/test_one_prompt.py" &
  step kernels 300 bash -c "check tests/kernels -n 3 --dist loadfile" &
  step batches 540 python3 -m tests.emulated_gpu --device --jobs 4 &
  for backend in FLASH_ATTN TRITON_ATTN FLASHINFER; do
    step "greedy-$backend" 540 bash -c "check benchmarks/gpu/test_exactness.py -k 'greedy and $backend'" &
  done
  step sampled 540 bash -c "check benchmarks/gpu/test_exactness.py -k 'samples and not offload'" &
  step offload 540 bash -c "check benchmarks/gpu/test_exactness.py -k offload" &
  wait
  unset TRITON_F32_DEFAULT OMP_NUM_THREADS TORCHINDUCTOR_COMPILE_THREADS
fi

if [[ $parts == *times* ]]; then
  export model=${MODEL:-llama-3.1-8b} engine=${ENGINE:-'{"load_format": "dummy"}'} out
  python3 -m benchmarks.gpu.models "$out/models" "$model"
  touch "$out/begin"
  bench() {
    python3 -m vllm_triforce.cli bench --target "$out/models/$model" \
      --draft "$out/models/$model-draft" --methods "${METHODS:-stock,triforce:all}" \
      --prompts vllm_triforce --dtypes bfloat16 --contexts "${CONTEXTS:-8000,32000,122000}" \
      --batch-sizes "${BATCH_SIZES:-1}" --tokens "${TOKENS:-128}" \
      --repetitions "${REPETITIONS:-3}" --engine "$engine" --pass-times --engines-at-once 2 \
      --output "$out/times"
    # Exit code 1: greedy outputs differ (random weights: expected), or an error: no new results.
    [ $? -le 1 ] && [ "$out/times/results.json" -nt "$out/begin" ]
  }
  export -f bench
  step times "${TIMES_LIMIT:-1200}" bash -c bench
fi

[ ! -e "$out/failed" ] || { echo "failed: $(xargs <"$out/failed")"; exit 1; }
echo "all steps passed"
