"""Surfaces of the front process: arguments, configuration, start-up."""

# One entry a line.
# ruff: noqa: E501
# fmt: off

from tests.contract.surface import Surface, calls, does, has, overrides

ARGS = "engine/arg_utils.py"
SPEC = "config/speculative.py"
OURS = "vllm_triforce/vllm_patches/engine_args.py"
CLI = "vllm_triforce/vllm_patches/cli_args.py"
CHECK = "vllm_triforce/config/checks.py"
CHECK_OFFLOAD = "vllm_triforce/config/checks.py"
MIXIN = "vllm_triforce/worker/gpu.py"
BUDGET = "vllm_triforce/runner_v1/thinking_budget.py"

COPY, COPY_CONFIG = "vllm_triforce/core/models.py", "vllm_triforce/config/level2.py"
LAYERS = "vllm_triforce/core/models.py"

REQUEST = "vllm_triforce/config/request_args.py"

TABLE: list[Surface] = [
    calls("exceptions.py", "VLLMValidationError.__init__", "message, parameter=", REQUEST),
    has("sampling_params.py", "SamplingParams", "extra_args", REQUEST),
    has("config/model.py", "ModelConfig", "model tokenizer tokenizer_mode tokenizer_revision trust_remote_code seed hf_overrides enforce_eager model_impl disable_sliding_window quantization quantization_config dtype get_num_experts get_total_num_kv_heads get_head_size", COPY_CONFIG),
    has("config/quantization.py", "QuantizationConfigArgs", "linear", COPY_CONFIG),
    has("config/parallel.py", "ParallelConfig", "enable_eplb", COPY_CONFIG),
    has("config/load.py", "LoadConfig", "load_format model_loader_extra_config", COPY_CONFIG),
    calls("config/vllm.py", "VllmConfig.get_quantization_config", "model_config, load_config", COPY),
    has("config/model.py", "ModelConfig", "maybe_untie_word_embeddings", COPY),
    has("config/compilation.py", "CompilationConfig", "pass_config", COPY),
    has("config/compilation.py", "PassConfig", "fuse_attn_quant", COPY),
    has("config/compilation.py", "CompilationConfig", "static_forward_context static_all_moe_layers", LAYERS),
    has("config/vllm.py", "VllmConfig", "compilation_config", LAYERS),
    calls("model_executor/model_loader/__init__.py", "get_model", "vllm_config=", COPY),
    calls("compilation/backends.py", "set_model_tag", "tag", COPY),
    calls("model_executor/layers/attention/attention.py", "Attention.forward", "query, key, value", COPY),
    overrides(ARGS, "EngineArgs.add_cli_args", "parser", CLI),
    overrides(ARGS, "EngineArgs.from_cli_args", "cls, args", CLI),
    overrides(ARGS, "EngineArgs.create_engine_config", "self, usage_context=, headless=", OURS),
    overrides(ARGS, "EngineArgs.create_speculative_config", "self, target_model_config, target_parallel_config", OURS),
    has(ARGS, "EngineArgs", "speculative_config additional_config block_size trust_remote_code scheduler_cls enable_lora max_num_batched_tokens max_num_seqs performance_mode pipeline_parallel_size tensor_parallel_size", OURS),
    calls(ARGS, "EngineArgs.get_batch_defaults", "world_size", OURS),
    # What a proposal may have beside LoRA.
    does(ARGS, "EngineArgs.create_engine_config", "self.create_speculative_config( < self._set_default_max_num_seqs_and_batched_tokens_args(", OURS),
    has(ARGS, "EngineArgs", "spec_method spec_model spec_tokens", CLI),
    does(ARGS, "EngineArgs.create_engine_config", "maybe_override_with_speculators(", OURS),
    overrides("v1/metrics/loggers.py", "StatLoggerManager.record", "self, scheduler_stats, iteration_stats, mm_cache_stats=, engine_idx=", "vllm_triforce/vllm_patches/counters.py"),
    # Ours runs inside: it reads the keys that create_engine_config left in place.
    does(ARGS, "EngineArgs.create_engine_config", "self.create_speculative_config(", OURS),
    does(ARGS, "EngineArgs.create_speculative_config", "SpeculativeConfig(", OURS),
    has(SPEC, "SpeculativeConfig", "method model num_speculative_tokens draft_sample_method rejection_sample_method synthetic_acceptance_rates draft_model_config quantization revision code_revision draft_tensor_parallel_size draft_load_config uses_draft_model", OURS),
    overrides(SPEC, "SpeculativeConfig.max_num_new_slots_for_drafting", "self", "vllm_triforce/vllm_patches/stock_behavior.py"),
    does("v1/core/sched/scheduler.py", "Scheduler.schedule", "draft_slots =", "vllm_triforce/vllm_patches/stock_behavior.py"),
    does("config/vllm.py", "VllmConfig.num_lookahead_tokens", "speculative_config.uses_draft_model(", OURS),
    has("config/vllm.py", "VllmConfig", "additional_config cache_config parallel_config lora_config structured_outputs_config watermark_config model_config scheduler_config use_v2_model_runner", OURS),
    has("config/structured_outputs.py", "StructuredOutputsConfig", "backend", CHECK),
    # Where it no longer does, the backend need not be refused.
    does("v1/structured_output/backend_lm_format_enforcer.py", "LMFormatEnforcerBackend.compile_grammar", "max_rollback_tokens =", CHECK),
    has("config/parallel.py", "ParallelConfig", "worker_cls data_parallel_index pipeline_parallel_size decode_context_parallel_size prefill_context_parallel_size data_parallel_size is_moe_model", CHECK),
    calls("utils/cpu_resource_utils.py", "get_cgroup_memory_limit", "", CHECK_OFFLOAD),
    has("config/parallel.py", "ParallelConfig", "tensor_parallel_size nnodes data_parallel_size_local", CHECK_OFFLOAD),
    has("config/cache.py", "CacheConfig", "block_size cache_dtype get_resolved_kv_cache_layout", CHECK),
    has("config/model.py", "ModelConfig", "model runner_type is_encoder_decoder is_attention_free is_hybrid has_inner_state use_mla uses_mrope enable_prompt_embeds uses_alibi architectures hf_text_config get_vocab_size max_model_len dtype seed", CHECK),
    calls("transformers_utils/config.py", "get_safetensors_params_metadata", "model, revision=", "vllm_triforce/config/check_draft.py"),
    calls("transformers_utils/repo_utils.py", "get_model_path", "model", "vllm_triforce/config/check_draft.py"),
    calls("transformers_utils/config.py", "get_config", "model, trust_remote_code=, revision=, code_revision=", "vllm_triforce/config/check_draft.py"),
    has("platforms/interface.py", "Platform", "is_cpu device_name check_and_update_config", CHECK),
    does("platforms/cpu.py", "CpuPlatform.check_and_update_config", "parallel_config.worker_cls =", OURS),
    does("platforms/cuda.py", "CudaPlatformBase.check_and_update_config", "parallel_config.worker_cls =", OURS),
    # Who calls register(), and when.
    does("plugins/__init__.py", "load_general_plugins", "load_plugins_by_group(", "vllm_triforce/plugin.py"),
    does(ARGS, "EngineArgs.__post_init__", "load_general_plugins(", "vllm_triforce/plugin.py"),
    does(ARGS, "AsyncEngineArgs.add_cli_args", "load_general_plugins(", "vllm_triforce/plugin.py"),
    # Start-up, in the order that the mixin's hooks rely on.
    does("v1/executor/uniproc_executor.py", "UniProcExecutor._init_executor", "self.driver_worker.init_worker( < self.driver_worker.init_device( < self.driver_worker.load_model(", MIXIN),
    does("v1/executor/multiproc_executor.py", "WorkerProc.__init__", "self.worker.init_device( < self.worker.load_model(", MIXIN),
    does("v1/engine/core.py", "EngineCore._initialize_kv_caches", "self.model_executor.get_kv_cache_specs( < self.model_executor.determine_available_memory( < self.model_executor.initialize_from_config( < self.model_executor.compile_or_warm_up_model(", MIXIN),
    has("entrypoints/llm.py", "LLM", "collective_rpc", "vllm_triforce/metrics/report.py"),
    # Every request parameter is answered.
    overrides("sampling_params.py", "SamplingParams._validate_spec_decode", "self, speculative_config", "vllm_triforce/vllm_patches/stock_behavior.py"),
    overrides("v1/sample/rejection_sampler.py", "RejectionSampler.forward", "self, metadata, draft_probs, logits, sampling_metadata", "vllm_triforce/runner_v1/rejection.py"),
    overrides("v1/sample/rejection_sampler.py", "RejectionSampler.apply_logits_processors", "self, logits, sampling_metadata, metadata", "vllm_triforce/runner_v1/rejection.py"),
    overrides("v1/sample/rejection_sampler.py", "RejectionSampler._get_logprobs_tensors", "self, max_num_logprobs, metadata, logits, target_logits, bonus_logits, sampled_token_ids", "vllm_triforce/runner_v1/rejection.py"),
    calls("v1/sample/rejection_sampler.py", "rejection_sample", "draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs, target_logits, bonus_token_ids, sampling_metadata", "vllm_triforce/runner_v1/rejection.py"),
    has("v1/sample/logits_processor/builtin.py", "LogitBiasLogitsProcessor", "biases", "vllm_triforce/runner_v1/rejection.py"),
    has("v1/sample/logits_processor/builtin.py", "MinPLogitsProcessor", "min_p min_p_count", "vllm_triforce/runner_v1/rejection.py"),
    has("v1/sample/logits_processor/builtin.py", "MinTokensLogitsProcessor", "min_toks", "vllm_triforce/runner_v1/rejection.py"),
    # Budgets of reasoning: the states, and in which order the sampler and the rejection sampler ask.
    overrides("v1/sample/thinking_budget_state.py", "ThinkingBudgetStateHolder.update_state", "self, output_token_ids, spec_token_ids, repeat_indices=", BUDGET),
    overrides("v1/sample/thinking_budget_state.py", "ThinkingBudgetStateHolder.apply_to_logits", "self, logits, predict_bonus_token, spec_token_ids", BUDGET),
    overrides("v1/sample/thinking_budget_state.py", "ThinkingBudgetStateHolder._find_last_sequence_index", "target_list, token_ids", BUDGET),
    calls("v1/sample/thinking_budget_state.py", "ThinkingBudgetStateHolder.__init__", "reasoning_config, max_num_seqs, num_spec_tokens, device, is_pin_memory", BUDGET),
    calls("v1/sample/thinking_budget_state.py", "ThinkingBudgetStateHolder._init_state_entry", "prompt_tok_ids, thinking_token_budget", BUDGET),
    calls("v1/sample/thinking_budget_state.py", "ThinkingBudgetStateHolder._update_think_state", "state", BUDGET),
    has("v1/sample/thinking_budget_state.py", "ThinkingBudgetStateHolder", "_state think_end_token_ids", BUDGET),
    does("v1/sample/sampler.py", "Sampler.apply_logits_processors", "holder.update_state( < holder.apply_to_logits(", BUDGET),
    does("v1/sample/rejection_sampler.py", "RejectionSampler.forward", "self.sampler( < self.apply_logits_processors(", BUDGET),
    has("v1/worker/gpu_input_batch.py", "InputBatch", "thinking_budget_state_holder max_num_reqs sampling_metadata", "vllm_triforce/runner_v1/rejection.py"),
    has("config/vllm.py", "VllmConfig", "reasoning_config", "vllm_triforce/runner_v1/rejection.py"),
    # What requests ask of their logits, in the order of the sampler.
    has("sampling_params.py", "SamplingParams", "allowed_token_ids bad_words_token_ids min_tokens all_stop_token_ids logit_bias repetition_penalty frequency_penalty presence_penalty", "vllm_triforce/runner_v1/sampling.py"),
    does("v1/sample/rejection_sampler.py", "RejectionSampler.apply_logits_processors", "self.apply_penalties( < token_mask = < logits.masked_fill_( < apply_bad_words_with_drafts( < processor.apply_with_spec_decode(", "vllm_triforce/core/limits.py"),
    does("v1/sample/sampler.py", "Sampler.apply_logits_processors", "apply_bad_words( < processor.apply( < self.apply_penalties(", "vllm_triforce/runner_v1/sampling.py"),
    has("v1/sample/metadata.py", "SamplingMetadata", "all_greedy no_penalties max_num_logprobs logprob_token_ids allowed_token_ids_mask bad_words_token_ids thinking_budget_state_holder logitsprocs", "vllm_triforce/runner_v1/rejection.py"),
    has("v1/spec_decode/metadata.py", "SpecDecodeMetadata", "draft_token_ids num_draft_tokens max_spec_len", "vllm_triforce/runner_v1/rejection.py"),
    # The way of the counters.
    overrides("v1/core/sched/scheduler.py", "Scheduler.update_from_output", "self, scheduler_output, model_runner_output", "vllm_triforce/vllm_patches/counters.py"),
    overrides("v1/core/sched/scheduler.py", "Scheduler._handle_stopped_request", "self, request", "vllm_triforce/vllm_patches/stock_behavior.py"),
    does("v1/core/sched/scheduler.py", "Scheduler._handle_stopped_request", "request.num_computed_tokens = < self._update_request_as_session(", "vllm_triforce/vllm_patches/stock_behavior.py"),
    has("v1/request.py", "Request", "resumable num_tokens num_computed_tokens num_output_placeholders", "vllm_triforce/vllm_patches/stock_behavior.py"),
    has("v1/metrics/stats.py", "SchedulerStats", "num_kv_fetch_reqs_by_stage", "vllm_triforce/vllm_patches/counters.py"),
    has("v1/metrics/loggers.py", "StatLoggerManager", "stat_loggers record", "vllm_triforce/vllm_patches/counters.py"),
    has("v1/metrics/loggers.py", "PrometheusStatLogger", "_counter_cls per_engine_labelvalues", "vllm_triforce/metrics/carrier.py"),
    has("model_executor/layers/attention/attention.py", "Attention", "kv_cache impl num_heads num_kv_heads head_size", "vllm_triforce/runner_v1/sources/draft_model.py"),
]
