"""Surfaces of vLLM that our source does not import by name, and actions that we rely on."""

# One entry a line.
# ruff: noqa: E501
# fmt: off

SCHEDULER = "v1/core/sched/scheduler.py"
RUNNER_V1 = "v1/worker/gpu_model_runner.py"
RUNNER_V2 = "v1/worker/gpu/model_runner.py"
ARGS = "engine/arg_utils.py"
WORKER = "v1/worker/gpu_worker.py"
CORE = "v1/engine/core.py"
SAMPLER = "v1/sample/sampler.py"
ATTENTION = "model_executor/layers/attention/attention.py"
REJECTION_V1 = "v1/sample/rejection_sampler.py"
REJECTION_V2 = "v1/worker/gpu/spec_decode/rejection_sampler.py"

# Classes of objects that we get, and functions and constants of modules that we import: by file.
REACHED: dict[str, str] = {
    "_custom_ops.py": "cpu_attention_with_kv_cache cpu_attn_get_scheduler_metadata cpu_attn_reshape_and_cache",
    "config/cache.py": "CacheConfig",
    "config/compilation.py": "CompilationConfig PassConfig",
    "config/load.py": "LoadConfig",
    "config/lora.py": "LoRAConfig",
    "config/parallel.py": "ParallelConfig",
    "config/quantization.py": "QuantizationConfigArgs",
    "config/scheduler.py": "SchedulerConfig",
    "config/structured_outputs.py": "StructuredOutputsConfig",
    "distributed/parallel_state.py": "GroupCoordinator",
    "envs.py": "VLLM_CPU_ATTN_SPLIT_KV",
    "forward_context.py": "ForwardContext",
    "lora/layers/utils.py": "LoRAMapping",
    "lora/model_manager.py": "LoRAModelManager",
    "lora/worker_manager.py": "WorkerLoRAManager",
    "model_executor/models/ernie_mtp.py": "ErnieMTP",
    "model_executor/models/glm4_moe_mtp.py": "Glm4MoeMTP",
    "model_executor/models/interfaces.py": "SupportsMultiModal SupportsEagle3",
    "model_executor/models/llama_eagle3.py": "Eagle3LlamaForCausalLM",
    "model_executor/models/mimo_mtp.py": "MiMoMTP",
    "model_executor/models/qwen3_5_mtp.py": "Qwen3_5MTP Qwen3_5MoeMTP",
    "model_executor/models/qwen3_next_mtp.py": "Qwen3NextMTP",
    "multimodal/inputs.py": "MultiModalFeatureSpec PlaceholderRange",
    "outputs.py": "RequestOutput",
    "utils/cpu_triton_utils.py": "_expand_kernel_impl",
    "utils/torch_utils.py": "set_random_seed",
    "v1/attention/backend.py": "AttentionBackend AttentionMetadataBuilder",
    "v1/attention/backends/cpu_attn.py": "CPUAttentionMetadataBuilder",
    "v1/attention/backends/flash_attn.py": "FlashAttentionMetadata",
    "v1/attention/backends/flashinfer.py": "FlashInferMetadata",
    "v1/attention/backends/triton_attn.py": "TritonAttentionMetadata",
    "v1/core/block_pool.py": "BlockPool",
    "v1/core/kv_cache_coordinator.py": "KVCacheCoordinator",
    "v1/core/kv_cache_manager.py": "KVCacheManager",
    "v1/core/sched/output.py": "SchedulerOutput CachedRequestData NewRequestData",
    "v1/core/single_type_kv_cache_manager.py": "SingleTypeKVCacheManager",
    "v1/engine/__init__.py": "EngineCoreOutput EngineCoreOutputs",
    "v1/engine/llm_engine.py": "LLMEngine",
    "v1/kv_cache_interface.py": "KVCacheSpec",
    "v1/metrics/stats.py": "SchedulerStats RequestSpecDecodeMetrics",
    "v1/outputs.py": "ModelRunnerOutput",
    "v1/request.py": "Request",
    "v1/sample/logits_processor/builtin.py": "MinTokensLogitsProcessor",
    "v1/sample/metadata.py": "SamplingMetadata",
    "v1/sample/ops/topk_topp_triton.py": "_TRITON_BUFFER_CACHE _TRITON_SPLIT_CACHE _TRITON_TABLE_CACHE",
    "v1/sample/rejection_sampler.py": "rejection_sample",
    "v1/spec_decode/metadata.py": "SpecDecodeMetadata",
    "v1/spec_decode/metrics.py": "SpecDecodingStats",
    "v1/structured_output/request.py": "StructuredOutputRequest",
    "v1/worker/block_table.py": "MultiGroupBlockTable BlockTable",
    "v1/worker/gpu/block_table.py": "BlockTables",
    "v1/worker/gpu/buffer_utils.py": "StagedWriteTensor UvaBackedTensor",
    "v1/worker/gpu/cudagraph_utils.py": "CreateForwardFn",
    "v1/worker/gpu/input_batch.py": "InputBatch InputBuffers",
    "v1/worker/gpu/mm/encoder_cache.py": "EncoderCache",
    "v1/worker/gpu/model_states/default.py": "DefaultModelState",
    "v1/worker/gpu/model_states/mamba_hybrid.py": "MambaHybridModelState",
    "v1/worker/gpu/sample/logprob.py": "LogprobTokenIdsState",
    "v1/worker/gpu/spec_decode/speculator.py": "BaseSpeculator DraftModelSpeculator",
    "v1/worker/gpu/states.py": "RequestState",
    "v1/worker/gpu_input_batch.py": "InputBatch CachedRequestState",
    "v1/worker/gpu_model_runner.py": "ExecuteModelState",
    "v1/worker/lora_model_runner_mixin.py": "LoRAModelRunnerMixin",
    "v1/worker/worker_base.py": "WorkerBase",
}

# Functions that are replaced, to which vLLM 0.33 added parameters: ours of the first hands them on.
MAY_GROW = {"rejection_sample", "hf_config_override"}

# Function by function, what comes in its source in this order: ``f(`` a call, ``x =`` an
# assignment, ``isinstance(x, C)`` a test.
ACTIONS: list[tuple[str, str, tuple[str, ...]]] = [
    # What a proposal may have beside LoRA.
    (ARGS, "EngineArgs.create_engine_config", ("self.create_speculative_config(", "self._set_default_max_num_seqs_and_batched_tokens_args(")),
    (ARGS, "EngineArgs.create_engine_config", ("maybe_override_with_speculators(",)),
    # Ours runs inside: it reads the keys that create_engine_config left in place.
    (ARGS, "EngineArgs.create_speculative_config", ("SpeculativeConfig(",)),
    (SCHEDULER, "Scheduler.schedule", ("draft_slots =",)),
    ("config/vllm.py", "VllmConfig.num_lookahead_tokens", ("speculative_config.uses_draft_model(",)),
    # Where it no longer does, the backend need not be refused.
    ("v1/structured_output/backend_lm_format_enforcer.py", "LMFormatEnforcerBackend.compile_grammar", ("max_rollback_tokens =",)),
    ("platforms/cpu.py", "CpuPlatform.check_and_update_config", ("parallel_config.worker_cls =",)),
    ("platforms/cuda.py", "CudaPlatformBase.check_and_update_config", ("parallel_config.worker_cls =",)),
    # Who calls register(), and when.
    ("plugins/__init__.py", "load_general_plugins", ("load_plugins_by_group(",)),
    (ARGS, "EngineArgs.__post_init__", ("load_general_plugins(",)),
    (ARGS, "AsyncEngineArgs.add_cli_args", ("load_general_plugins(",)),
    # Start-up, in the order that the mixin's hooks rely on.
    ("v1/executor/uniproc_executor.py", "UniProcExecutor._init_executor", ("self.driver_worker.init_worker(", "self.driver_worker.init_device(", "self.driver_worker.load_model(")),
    ("v1/executor/multiproc_executor.py", "WorkerProc.__init__", ("self.worker.init_device(", "self.worker.load_model(")),
    (CORE, "EngineCore._initialize_kv_caches", ("self.model_executor.get_kv_cache_specs(", "self.model_executor.determine_available_memory(", "self.model_executor.initialize_from_config(", "self.model_executor.compile_or_warm_up_model(")),
    (SAMPLER, "Sampler.apply_logits_processors", ("holder.update_state(", "holder.apply_to_logits(")),
    (REJECTION_V1, "RejectionSampler.forward", ("self.sampler(", "self.apply_logits_processors(")),
    (REJECTION_V1, "RejectionSampler.apply_logits_processors", ("self.apply_penalties(", "token_mask =", "logits.masked_fill_(", "apply_bad_words_with_drafts(", "processor.apply_with_spec_decode(")),
    (SAMPLER, "Sampler.apply_logits_processors", ("apply_bad_words(", "processor.apply(", "self.apply_penalties(")),
    (SCHEDULER, "Scheduler._handle_stopped_request", ("request.num_computed_tokens =", "self._update_request_as_session(")),
    # The runner is there when init_device() returns, before any weights.
    (WORKER, "Worker.init_device", ("self.device =", "self._init_workspace_and_model_runner(")),
    (WORKER, "Worker._init_workspace_and_model_runner", ("self.model_runner =",)),
    ("v1/worker/cpu_worker.py", "CPUWorker.init_device", ("self.device =", "self.model_runner =")),
    (WORKER, "Worker.load_model", ("self.model_runner.load_model(",)),
    (WORKER, "Worker.get_kv_cache_spec", ("self.model_runner.get_kv_cache_spec(",)),
    (WORKER, "Worker.initialize_from_config", ("self.model_runner.initialize_kv_cache(",)),
    (RUNNER_V1, "GPUModelRunner._sample", ("self._get_spec_decode_draft_probs(", "self.rejection_sampler(")),
    ("model_executor/layers/attention/kv_transfer_utils.py", "maybe_transfer_kv_layer", ("has_kv_transfer_group(",)),
    # It insists on the class, and tells us in this order what a step came to.
    (RUNNER_V1, "GPUModelRunner.sample_tokens", ("isinstance(self.drafter, DraftModelProposer)",)),
    (RUNNER_V1, "GPUModelRunner.propose_draft_token_ids", ("isinstance(self.drafter, DraftModelProposer)", "self.drafter.prepare_next_token_ids_padded(", "self.drafter.prepare_inputs_padded(", "self.drafter.propose(")),
    (RUNNER_V1, "GPUModelRunner.initialize_metadata_builders", ("self.drafter.initialize_attn_backend(",)),
    (RUNNER_V1, "GPUModelRunner.load_model", ("self.drafter.load_model(",)),
    (RUNNER_V1, "GPUModelRunner._dummy_run", ("self.drafter.dummy_run(",)),
    (RUNNER_V1, "GPUModelRunner.__init__", ("self.mrope_positions =", "self._make_buffer(")),
    (RUNNER_V1, "GPUModelRunner._preprocess", ("self.model.embed_input_ids(", "self._prepare_mm_inputs(")),
    ("v1/worker/gpu/mm/rope.py", "RopeState.__init__", ("self.positions =", "torch.zeros(")),
    (RUNNER_V2, "GPUModelRunner.execute_model", ("self.model_state.prepare_inputs_embeds(", "requires_raw_input_tokens(")),
    (RUNNER_V1, "GPUModelRunner.execute_model", ("self.execute_model_state =",)),
    # Start-up: speculator and handler are made, and may be replaced; then this order.
    (RUNNER_V2, "GPUModelRunner.__init__", ("self.req_states =", "self.speculator =", "self.draft_tokens_handler =")),
    (RUNNER_V2, "GPUModelRunner.load_model", ("isinstance(self.speculator, DraftModelSpeculator)", "self.speculator.load_model(")),
    (RUNNER_V2, "GPUModelRunner.initialize_kv_cache", ("self.block_tables =", "self.cudagraph_manager =", "self.speculator.set_attn(", "self.speculator.init_cudagraph_manager(", "init_kv_cache(", "self.kv_caches =")),
    (RUNNER_V2, "GPUModelRunner.capture_model", ("self.cudagraph_manager.capture(", "self.speculator.capture(")),
    # A step: the outcome is in the request states before propose(); then its result is read.
    (RUNNER_V2, "GPUModelRunner.sample_tokens", ("self.postprocess_sampled(", "self.speculator.observe_verification(", "self.speculator.propose(", "self.req_states.draft_tokens[input_batch.idx_mapping] =", "self.draft_tokens_handler.set_draft_tokens(")),
    (RUNNER_V2, "GPUModelRunner._dummy_run", ("self.speculator.propose(",)),
    (RUNNER_V2, "GPUModelRunner.take_draft_token_ids", ("self.draft_tokens_handler.get_draft_tokens(",)),
    # Without a seed of its own, a request that comes back draws by another one.
    (SCHEDULER, "Scheduler.schedule", ("scheduled_new_reqs.extend(", "scheduled_resumed_reqs.clear(")),
    ("v1/worker/gpu/sample/states.py", "SamplingStates.add_request", ("np.random.randint(", "self.seeds.np[req_idx] =")),
    (RUNNER_V2, "GPUModelRunner._dummy_run", ("self.maybe_dummy_run_with_lora(", "self.execute_model(")),
    (RUNNER_V2, "GPUModelRunner.execute_model", ("self.prepare_inputs(", "self.lora_state.make_lora_inputs(", "self._set_active_loras(")),
    (RUNNER_V2, "GPUModelRunner.capture_model", ("self.maybe_setup_dummy_loras(", "self.speculator.capture(")),
    (RUNNER_V2, "GPUModelRunner.sample_tokens", ("self.sample(", "self.prompt_logprobs_worker.compute_prompt_logprobs(", "self.prompt_logprobs_worker.compute_prompt_token_id_logprobs(", "self.speculator.propose(")),
    ("v1/worker/gpu/sample/sampler.py", "Sampler.add_request", ("processor.add_request(",)),
    # Its two calls, made by us with slots in the place of states.
    (REJECTION_V2, "RejectionSampler._verify", ("self.sampler.apply_sampling_params(", "rejection_sample(")),
    (REJECTION_V2, "RejectionSampler._verify_in_chunks", ("self._verify(", "self._get_logprobs_tensors(")),
    # Data-parallel engines draw other seeds for requests without one, and so other inner noise.
    (CORE, "EngineCore.post_step", ("self.model_executor.take_draft_token_ids(", "self.scheduler.update_draft_token_ids(")),
    (CORE, "EngineCore.step", ("self.model_executor.sample_tokens(", "self.scheduler.update_from_output(")),
    (SCHEDULER, "Scheduler.schedule", ("pad_spec_decode =", "self._update_after_schedule(")),
    (SCHEDULER, "Scheduler.update_from_output", ("self._update_request_with_output(", "self._free_request(")),
    ("v1/structured_output/__init__.py", "StructuredOutputManager.grammar_bitmask", ("max_num_spec_tokens =", "self._grammar_bitmask =", "self.backend.allocate_token_bitmask(")),
    (SCHEDULER, "Scheduler.schedule", ("self.kv_cache_manager.allocate_slots(", "SchedulerOutput(", "self._build_kv_connector_meta(", "self._update_after_schedule(")),
    (SCHEDULER, "Scheduler.__init__", ("self.num_lookahead_tokens =", "self.dynamic_sd_lookup =", "self._spec_decode_step_blocks =")),
    (SCHEDULER, "Scheduler.update_from_output", ("self.make_spec_decoding_stats(", "request.spec_decode_metrics.observe(", "EngineCoreOutput(")),
    # What it leaves out of them, and which of a request's outputs carries its own.
    (SCHEDULER, "Scheduler.update_from_output", ("request.is_finished(", "self.make_spec_decoding_stats(", "self.make_stats(")),
    ("v1/engine/output_processor.py", "OutputProcessor.process_outputs", ("req_state.spec_decode_metrics =", "req_state.detokenizer.update(")),
    ("v1/core/sched/async_scheduler.py", "AsyncScheduler._update_after_schedule", ("super()._update_after_schedule(", "request.spec_token_ids =")),
    ("v1/worker/gpu/cudagraph_utils.py", "ModelCudaGraphManager.capture", ("super().capture(",)),
    # What vLLM measures of its graphs is there when the speculator is asked to capture its own.
    ("v1/worker/gpu/cudagraph_utils.py", "profile_cudagraph_memory", ("manager._capture_mem_samples =", "runner.capture_model(")),
    ("v1/worker/gpu/attn_utils.py", "init_kv_cache", ("allocate_kv_cache(", "bind_kv_cache_to_layers(")),
    (ATTENTION, "unified_kv_cache_update", ("get_attention_context(", "attn_layer.impl.do_kv_cache_update(")),
    (ATTENTION, "set_default_quant_scales", ("layer._k_scale_float =", "layer._v_scale_float =")),
    ("v1/sample/ops/topk_topp_triton.py", "apply_top_k_top_p_triton", ("_TRITON_BUFFER_CACHE.get(",)),
    ("v1/sample/ops/topk_topp_triton.py", "_apply_topp_split", ("_TRITON_SPLIT_CACHE.get(",)),
    (SAMPLER, "Sampler.sample", ("self.apply_temperature(",)),
    ("v1/metrics/loggers.py", "StatLoggerManager.record", ("stat_logger.record(",)),
    ("benchmarks/serve.py", "benchmark", ("calculate_metrics(",)),
    ("triton_utils/dispatcher.py", "_rebind_kernels", ("vars(",)),
]
