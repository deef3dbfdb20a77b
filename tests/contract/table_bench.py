"""Surfaces that the benchmark drives: engines step by step, statistics, datasets."""

# One entry a line.
# ruff: noqa: E501
# fmt: off

from tests.contract.surface import Surface, calls, does, has

BENCH = "vllm_triforce_bench/bench/"
ENGINES, BATCH, SERVE = BENCH + "engines.py", BENCH + "batch.py", BENCH + "serve.py"
FACTS, PROMPTS = BENCH + "model_facts.py", BENCH + "prompts.py"

TABLE: list[Surface] = [
    has("entrypoints/llm.py", "LLM", "llm_engine reset_prefix_cache generate", ENGINES),
    has("v1/engine/llm_engine.py", "LLMEngine", "logger_manager add_request step has_unfinished_requests", ENGINES),
    calls("v1/engine/llm_engine.py", "LLMEngine.add_request", "request_id, prompt, params", ENGINES),
    has("v1/metrics/loggers.py", "StatLoggerManager", "stat_loggers", ENGINES),
    has("v1/metrics/loggers.py", "StatLoggerBase", "record log_engine_initialized", ENGINES),
    does("v1/metrics/loggers.py", "StatLoggerManager.record", "stat_logger.record(", ENGINES),
    has("v1/metrics/stats.py", "SchedulerStats", "spec_decoding_stats", ENGINES),
    has("v1/spec_decode/metrics.py", "SpecDecodingStats", "num_drafts num_draft_tokens num_accepted_tokens num_accepted_tokens_per_pos", ENGINES),
    has("engine/arg_utils.py", "EngineArgs", "kv_cache_memory_bytes enable_prefix_caching distributed_executor_backend disable_log_stats use_tqdm_on_load max_num_seqs seed", ENGINES),
    has("sampling_params.py", "SamplingParams", "temperature top_p max_tokens ignore_eos output_kind", ENGINES),
    has("sampling_params.py", "SamplingParams", "logprobs detokenize", BATCH),
    has("outputs.py", "RequestOutput", "num_cached_tokens outputs request_id", ENGINES),
    calls("transformers_utils/config.py", "get_config", "model, trust_remote_code=, revision=, code_revision=", FACTS),
    calls("tokenizers/registry.py", "get_tokenizer", "tokenizer_name, trust_remote_code=, revision=", PROMPTS),
    calls("benchmarks/serve.py", "benchmark", "task_type=, endpoint_type=, api_url=, base_url=, model_id=, model_name=, tokenizer=, input_requests=, logprobs=, request_rate=, burstiness=, disable_tqdm=, num_warmups=, profile=, selected_percentile_metrics=, selected_percentiles=, ignore_eos=, goodput_config_dict=, max_concurrency=, lora_modules=, extra_headers=, extra_body=, ready_check_timeout_sec=", SERVE),
    does("benchmarks/serve.py", "benchmark", "calculate_metrics(", SERVE),
    calls("utils/network_utils.py", "get_open_port", "", BENCH + "server.py"),
    has("benchmarks/datasets/datasets.py", "SampleRequest", "prompt prompt_len expected_output_len", SERVE),
    calls("benchmarks/datasets/datasets.py", "add_dataset_parser", "parser", PROMPTS),
    calls("benchmarks/datasets/datasets.py", "get_samples", "args, tokenizer", PROMPTS),
    has("benchmarks/datasets/datasets.py", "SampleRequest", "prompt", PROMPTS),
    does("triton_utils/dispatcher.py", "_rebind_kernels", "vars(", "vllm_triforce/vllm_patches/cpu_build.py"),
]
