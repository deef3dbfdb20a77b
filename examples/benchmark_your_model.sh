#!/usr/bin/env bash
# Measures TriForce on a model and a text of your own, in three parts with a report each.
#
#   TARGET=MODEL DRAFT=DRAFT TEXT=book.txt bash examples/benchmark_your_model.sh
#
# On the embedded pair, in a few minutes on two cores (a test run, whose figures mean little):
#
#   SMALL=1 bash examples/benchmark_your_model.sh
#
# It needs the extra `bench` (pip install '.[bench]'). Each command resumes where it was stopped.
set -euo pipefail
cd "$(dirname "$0")/.."

TARGET=${TARGET:-examples/models/target}
DRAFT=${DRAFT-examples/models/draft}      # empty: prompt lookup
TEXT=${TEXT:-examples/prompts/held_out.txt}  # like the text you serve; four times the longest context
OUTPUT=${OUTPUT:-benchmark-results}
STEPS=${STEPS:-lab bench serve}

if [[ -n "${SMALL:-}" ]]; then
  CONTEXT=600 BUDGETS=256 CONTEXTS=600 BATCH_SIZES=1 TEMPERATURES=0 TOKENS=16 REPETITIONS=1
  CONCURRENCIES=1 INPUT_LENS=600 PAIRS=2 REPLAY_TOKENS=16 STRETCHES=1
  LAB_MORE=(--chunk-size 32) BENCH_MORE=(--kv-cache-gib 0.25 --engine '{"enforce_eager": true}')
  SERVE_MORE=("${BENCH_MORE[@]}" --no-control --requests-per-run 1)
fi
VLLM_TRIFORCE=${VLLM_TRIFORCE:-vllm-triforce}
DTYPE=${DTYPE:-float32}                   # bfloat16 on a GPU
DEVICE=${DEVICE:-cpu}                     # of the lab: cuda on a GPU
CONTEXT=${CONTEXT:-16000}
BUDGETS=${BUDGETS:-1024 4096}             # the greater the budget, the more is accepted

run() { echo "+ $*"; "$@"; }

for step in $STEPS; do
  case $step in
    # 1. Agreement of greedy tokens with the full cache's, by retrieval budget.
    lab)
      # shellcheck disable=SC2086  # several budgets
      run "$VLLM_TRIFORCE" lab "$TARGET" --text "$TEXT" --experiments budget \
        --policies retrieval quest streaming --context "$CONTEXT" --budgets $BUDGETS \
        --replay-tokens "${REPLAY_TOKENS:-64}" --stretches "${STRETCHES:-3}" \
        --dtype "$DTYPE" --device "$DEVICE" --output "$OUTPUT/lab" ${LAB_MORE[@]+"${LAB_MORE[@]}"}
      ;;
    # 2. Decode speed and acceptance of a fixed batch; greedy outputs compared with stock vLLM's.
    bench)
      run "$VLLM_TRIFORCE" bench --target "$TARGET" --draft "$DRAFT" --prompts "$TEXT" \
        --methods stock,ngram,triforce --contexts "${CONTEXTS:-4K,16K}" \
        --batch-sizes "${BATCH_SIZES:-1,4}" --temperatures "${TEMPERATURES:-0,0.6}" \
        --budgets "${BUDGETS// /,}" --tokens "${TOKENS:-128}" --repetitions "${REPETITIONS:-3}" \
        --dtypes "$DTYPE" --output "$OUTPUT/bench" ${BENCH_MORE[@]+"${BENCH_MORE[@]}"}
      ;;
    # 3. Two servers in turn under traffic, with requests that come and go.
    serve)
      run "$VLLM_TRIFORCE" bench --serve --target "$TARGET" --draft "$DRAFT" --prompts "$TEXT" \
        --batch-sizes "${CONCURRENCIES:-1,4,16}" --contexts "${INPUT_LENS:-4K}" \
        --temperatures "${TEMPERATURES:-0,0.6}" --tokens "${TOKENS:-128}" \
        --budgets "${BUDGETS%% *}" --repetitions "${PAIRS:-5}" --dtypes "$DTYPE" --output "$OUTPUT/serve" ${SERVE_MORE[@]+"${SERVE_MORE[@]}"}
      ;;
    *)
      echo "STEPS has '$step'; use lab, bench, serve" >&2
      exit 2
      ;;
  esac
done
echo "Read $OUTPUT/*/report.html"
