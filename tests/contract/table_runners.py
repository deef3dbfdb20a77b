"""Surfaces of the workers and of both model runners."""

# One entry a line.
# ruff: noqa: E501
# fmt: off

from tests.contract.surface import Surface, calls, derives, does, has, overrides

MIXIN, BUILD = "vllm_triforce/worker/gpu.py", "vllm_triforce/core/kv_groups.py"
CACHE, PASS = "vllm_triforce/core/models.py", "vllm_triforce/core/model_pass.py"
V1, V2 = "vllm_triforce/runner_v1/runner.py", "vllm_triforce/runner_v2/runner.py"
OFF, HANDED = "vllm_triforce/runner_v1/plain_steps.py", "vllm_triforce/runner_v2/reports.py"
BATCH2 = "vllm_triforce/runner_v2/batch.py"
GRAPHS = "vllm_triforce/runner_v2/passes.py"
OFFLOAD = "vllm_triforce/offload/cache.py"
WORKER, CPU_WORKER = "v1/worker/gpu_worker.py", "v1/worker/cpu_worker.py"
RUNNER = "v1/worker/gpu_model_runner.py"
BASE = "v1/spec_decode/llm_base_proposer.py"
FACTS = "vllm_triforce/runner_v2/batch.py"
REJECTION2 = "vllm_triforce/runner_v2/rejection.py"
ADAPTERS2 = "vllm_triforce/runner_v2/adapters.py"
LORA_MIXIN, LORA2 = "v1/worker/lora_model_runner_mixin.py", "v1/worker/gpu/lora_utils.py"
SHAPING = "vllm_triforce/runner_v2/logits_processing.py"
STATS = "vllm_triforce/scheduler/stats.py"
LENDING = "vllm_triforce/scheduler/lookahead.py"
MASKS = "vllm_triforce/scheduler/grammar_masks.py"
MASKS2 = "vllm_triforce/runner_v2/rejection.py"
ACCEPTED = "vllm_triforce/scheduler/lookahead.py"
REJECT2 = "v1/worker/gpu/spec_decode/rejection_sampler.py"
RUNNER2 = "v1/worker/gpu/model_runner.py"
SPEC2 = "v1/worker/gpu/spec_decode/speculator.py"
ALONE2 = "v1/worker/gpu/spec_decode/standalone_ar/speculator.py"
PROPOSE1 = (
    "self, num_speculative_tokens, target_token_ids, target_positions, target_hidden_states, "
    "next_token_ids, token_indices_to_sample, common_attn_metadata, sampling_metadata, "
    "mm_embed_inputs=, num_rejected_tokens_gpu=, slot_mappings="
)
PROPOSE2 = (
    "self, input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, "
    "num_sampled, num_rejected, last_sampled, next_prefill_tokens, temperature, seeds, "
    "dp_sync_state=, dummy_run=, skip_attn_for_dummy_run=, mm_inputs=, is_profile=, "
    "num_speculative_tokens="
)

WORKERS: list[Surface] = [
    overrides(WORKER, "Worker.init_device", "self", MIXIN),
    overrides(CPU_WORKER, "CPUWorker.init_device", "self", "vllm_triforce/worker/cpu.py"),
    overrides(WORKER, "Worker.get_kv_cache_spec", "self", MIXIN),
    overrides(WORKER, "Worker.initialize_from_config", "self, kv_cache_config", MIXIN),
    overrides(CPU_WORKER, "CPUWorker.compile_or_warm_up_model", "self", MIXIN),
    overrides(WORKER, "Worker.compile_or_warm_up_model", "self", MIXIN),
    has("distributed/parallel_state.py", "GroupCoordinator", "world_size", "vllm_triforce/runner_v1/calibration.py"),
    calls("distributed/parallel_state.py", "GroupCoordinator.broadcast_object", "obj, src=", "vllm_triforce/runner_v1/calibration.py"),
    derives(CPU_WORKER, "CPUWorker", "Worker", "vllm_triforce/worker/cpu.py"),
    has(WORKER, "Worker", "model_runner use_v2_model_runner device", MIXIN),
    has("v1/worker/worker_base.py", "WorkerBase", "vllm_config", MIXIN),
    # The runner is there when init_device() returns, before any weights.
    does(WORKER, "Worker.init_device", "self.device = < self._init_workspace_and_model_runner(", MIXIN),
    does(WORKER, "Worker._init_workspace_and_model_runner", "self.model_runner =", MIXIN),
    does(CPU_WORKER, "CPUWorker.init_device", "self.device = < self.model_runner =", MIXIN),
    does(WORKER, "Worker.load_model", "self.model_runner.load_model(", MIXIN),
    does(WORKER, "Worker.get_kv_cache_spec", "self.model_runner.get_kv_cache_spec(", MIXIN),
    does(WORKER, "Worker.initialize_from_config", "self.model_runner.initialize_kv_cache(", MIXIN),
]

RUNNER_V1: list[Surface] = [
    derives("v1/spec_decode/draft_model.py", "DraftModelProposer", "SpecDecodeBaseProposer", V1),
    calls("v1/spec_decode/draft_model.py", "DraftModelProposer.__init__", "vllm_config, device, runner", V1),
    overrides(BASE, "SpecDecodeBaseProposer._raise_if_mrope", "self", "vllm_triforce/worker/cpu.py"),
    overrides(BASE, "SpecDecodeBaseProposer.load_model", "self, target_model", V1),
    overrides("v1/spec_decode/draft_model.py", "DraftModelProposer._get_model", "self", V1),
    overrides(BASE, "SpecDecodeBaseProposer.dummy_run", "self, num_tokens, use_cudagraphs=, is_graph_capturing=, slot_mappings=", V1),
    overrides(BASE, "SpecDecodeBaseProposer.initialize_attn_backend", "self, kv_cache_config, kernel_block_sizes=", V1),
    overrides(BASE, "SpecDecodeBaseProposer.prepare_next_token_ids_padded", "self, sampled_token_ids, requests, gpu_input_batch, discard_request_mask", V1),
    overrides(BASE, "SpecDecodeBaseProposer.prepare_inputs_padded", "self, common_attn_metadata, spec_decode_metadata, valid_sampled_tokens_count", V1),
    overrides(BASE, "SpecDecodeBaseProposer.propose", PROPOSE1, V1),
    has(BASE, "SpecDecodeBaseProposer", "vllm_config device model", V1),
    overrides(RUNNER, "GPUModelRunner._get_spec_decode_draft_probs", "self, spec_decode_metadata", V1),
    does(RUNNER, "GPUModelRunner._sample", "self._get_spec_decode_draft_probs( < self.rejection_sampler(", V1),
    has("v1/spec_decode/metadata.py", "SpecDecodeMetadata", "num_draft_tokens draft_token_ids", V1),
    does("model_executor/layers/attention/kv_transfer_utils.py", "maybe_transfer_kv_layer", "has_kv_transfer_group(", "vllm_triforce/vllm_patches/stock_behavior.py"),
    has(RUNNER, "GPUModelRunner", "vllm_config drafter effective_drafter_max_model_len max_model_len requests input_batch attn_groups", V1),
    # It insists on the class, and tells us in this order what a step came to.
    does(RUNNER, "GPUModelRunner.sample_tokens", "isinstance(self.drafter, DraftModelProposer)", V1),
    does(RUNNER, "GPUModelRunner.propose_draft_token_ids", "isinstance(self.drafter, DraftModelProposer) < self.drafter.prepare_next_token_ids_padded( < self.drafter.prepare_inputs_padded( < self.drafter.propose(", V1),
    does(RUNNER, "GPUModelRunner.initialize_metadata_builders", "self.drafter.initialize_attn_backend(", V1),
    does(RUNNER, "GPUModelRunner.load_model", "self.drafter.load_model(", V1),
    does(RUNNER, "GPUModelRunner._dummy_run", "self.drafter.dummy_run(", V1),
    # A step that takes the path without speculation: what is asked of the config, and when.
    overrides(RUNNER, "GPUModelRunner.execute_model", "self, scheduler_output, intermediate_tensors=", OFF),
    overrides(RUNNER, "GPUModelRunner.sample_tokens", "self, grammar_output", OFF),
    has(RUNNER, "GPUModelRunner", "speculative_config", OFF),
    overrides(RUNNER, "GPUModelRunner._sample", "self, logits, spec_decode_metadata", OFF),
    has("v1/spec_decode/metadata.py", "SpecDecodeMetadata", "max_spec_len", OFF),
    has("v1/core/sched/output.py", "SchedulerOutput", "scheduled_new_reqs scheduled_cached_reqs finished_req_ids num_scheduled_tokens total_num_scheduled_tokens scheduled_spec_decode_tokens kv_connector_metadata", OFF),
    has("v1/core/sched/output.py", "CachedRequestData", "req_ids resumed_req_ids num_computed_tokens new_block_ids", OFF),
    has("v1/core/sched/output.py", "NewRequestData", "block_ids num_computed_tokens", OFF),
    has("v1/core/sched/output.py", "NewRequestData", "mm_features prefill_token_ids", FACTS),
    has("multimodal/inputs.py", "MultiModalFeatureSpec", "mm_position", FACTS),
    has("multimodal/inputs.py", "PlaceholderRange", "offset length is_embed", FACTS),
    has("v1/worker/gpu/mm/encoder_cache.py", "EncoderCache", "mm_features", FACTS),
    has("v1/worker/gpu/mm/rope.py", "RopeState", "prefill_delta positions", BATCH2),
    has("v1/worker/gpu/model_states/default.py", "DefaultModelState", "rope_state", V2),
    # The form in which both runners feed the target.
    has("config/model.py", "ModelConfig", "supports_multimodal_inputs uses_mrope mrope_num_dims", PASS),
    calls("model_executor/models/interfaces.py", "SupportsMultiModal.embed_input_ids", "input_ids, multimodal_embeddings, is_multimodal=", PASS),
    does(RUNNER, "GPUModelRunner.__init__", "self.mrope_positions = < self._make_buffer(", PASS),
    does(RUNNER, "GPUModelRunner._preprocess", "self.model.embed_input_ids( < self._prepare_mm_inputs(", PASS),
    does("v1/worker/gpu/mm/rope.py", "RopeState.__init__", "self.positions = < torch.zeros(", PASS),
    does(RUNNER2, "GPUModelRunner.execute_model", "self.model_state.prepare_inputs_embeds( < requires_raw_input_tokens(", PASS),
    has("v1/worker/gpu_input_batch.py", "InputBatch", "token_ids_cpu req_ids block_table", V1),
    has("v1/worker/gpu_input_batch.py", "CachedRequestState", "sampling_params num_prompt_tokens mm_features mrope_position_delta", V1),
    has("v1/worker/block_table.py", "MultiGroupBlockTable", "block_tables", V1),
    has("v1/worker/block_table.py", "BlockTable", "block_table num_blocks_per_row block_size", V1),
    has("v1/sample/metadata.py", "SamplingMetadata", "temperature top_k top_p", V1),
    has("sampling_params.py", "SamplingParams", "max_tokens min_p seed", V1),
]

HEAD, STATES2 = "vllm_triforce/core/models.py", "vllm_triforce/runner_v2/sources/source.py"
EAGLE, EAGLE3 = "v1/worker/gpu/spec_decode/eagle/utils.py", "model_executor/models/llama_eagle3.py"
HEADS: list[Surface] = [
    calls(EAGLE, "load_eagle_model", "target_model, vllm_config", V1),
    has("model_executor/models/interfaces.py", "SupportsEagle3", "set_aux_hidden_state_layers", HEAD),
    has(EAGLE3, "Eagle3LlamaForCausalLM", "combine_hidden_states compute_logits", HEAD),
    overrides(EAGLE3, "Eagle3LlamaForCausalLM.forward", "self, input_ids, positions, hidden_states, inputs_embeds=", HEAD),
    calls("model_executor/model_loader/utils.py", "get_model_cls", "model_config", "vllm_triforce/config/check_draft.py"),
    *(
        surface
        for kind, name in (("mimo", "MiMoMTP"), ("glm4_moe", "Glm4MoeMTP"), ("ernie", "ErnieMTP"))
        for surface in (
            overrides(f"model_executor/models/{kind}_mtp.py", f"{name}.forward", "self, input_ids, positions, hidden_states, intermediate_tensors=, inputs_embeds=, spec_step_idx=", HEAD),
            calls(f"model_executor/models/{kind}_mtp.py", f"{name}.compute_logits", "hidden_states", HEAD),
        )
    ),
    calls("config/speculative.py", "SpeculativeConfig.hf_config_override", "hf_config", "vllm_triforce/config/check_draft.py"),
    has(RUNNER, "GPUModelRunner", "use_aux_hidden_state_outputs execute_model_state", V1),
    has(RUNNER, "ExecuteModelState", "hidden_states aux_hidden_states", OFF),
    does(RUNNER, "GPUModelRunner.execute_model", "self.execute_model_state =", OFF),
    has("v1/worker/gpu_input_batch.py", "InputBatch", "num_computed_tokens_cpu num_reqs", "vllm_triforce/runner_v1/runner.py"),
    has(RUNNER2, "GPUModelRunner", "use_aux_hidden_state_outputs vllm_config", V2),
    overrides(ALONE2, "StandaloneARSpeculator.load_draft_model", "self, target_model, target_attn_layer_names", V2),
    has("v1/worker/gpu/input_batch.py", "InputBatch", "positions", STATES2),
]

RUNNER_V2: list[Surface] = [
    derives(ALONE2, "StandaloneARSpeculator", "DraftModelSpeculator", V2),
    calls(ALONE2, "StandaloneARSpeculator.__init__", "vllm_config, device", V2),
    overrides(SPEC2, "BaseSpeculator.propose", PROPOSE2, V2),
    overrides(ALONE2, "StandaloneARSpeculator.propose", PROPOSE2, V2),
    overrides(SPEC2, "BaseSpeculator.init_cudagraph_manager", "self, cudagraph_mode", V2),
    overrides(SPEC2, "BaseSpeculator.capture", "self", V2),
    overrides(SPEC2, "DraftModelSpeculator.load_model", "self, target_model", V2),
    overrides(ALONE2, "StandaloneARSpeculator.set_attn", "self, model_state, kv_cache_config, block_tables, target_input_buffers, target_attn_groups", V2),
    has(SPEC2, "BaseSpeculator", "num_query_per_req num_extra_query_per_req", V2),
    has(SPEC2, "DraftModelSpeculator", "vllm_config device draft_tokens draft_logits vocab_size num_speculative_steps max_num_reqs model draft_attn_layer_names draft_token_confidence_probs observe_verification supports_mm_inputs", V2),
    # Start-up: speculator and handler are made, and may be replaced; then this order.
    does(RUNNER2, "GPUModelRunner.__init__", "self.req_states = < self.speculator = < self.draft_tokens_handler =", V2),
    does(RUNNER2, "GPUModelRunner.load_model", "isinstance(self.speculator, DraftModelSpeculator) < self.speculator.load_model(", V2),
    does(RUNNER2, "GPUModelRunner.initialize_kv_cache", "self.block_tables = < self.cudagraph_manager = < self.speculator.set_attn( < self.speculator.init_cudagraph_manager( < init_kv_cache( < self.kv_caches =", V2),
    does(RUNNER2, "GPUModelRunner.capture_model", "self.cudagraph_manager.capture( < self.speculator.capture(", V2),
    # A step: the outcome is in the request states before propose(); then its result is read.
    does(RUNNER2, "GPUModelRunner.sample_tokens", "self.postprocess_sampled( < self.speculator.observe_verification( < self.speculator.propose( < self.req_states.draft_tokens[input_batch.idx_mapping] = < self.draft_tokens_handler.set_draft_tokens(", V2),
    does(RUNNER2, "GPUModelRunner._dummy_run", "self.speculator.propose(", V2),
    does(RUNNER2, "GPUModelRunner.take_draft_token_ids", "self.draft_tokens_handler.get_draft_tokens(", HANDED),
    has(RUNNER2, "GPUModelRunner", "speculator draft_tokens_handler req_states block_tables attn_groups sampler max_model_len kv_cache_config cudagraph_manager model_state input_buffers kernel_block_sizes finish_requests", V2),
    overrides(RUNNER2, "GPUModelRunner.finish_requests", "self, scheduler_output", V2),
    calls("v1/worker/gpu/spec_decode/utils.py", "DraftTokensHandler.__init__", "device", HANDED),
    overrides("v1/worker/gpu/spec_decode/utils.py", "DraftTokensHandler.set_draft_tokens", "self, input_batch, draft_tokens", HANDED),
    overrides("v1/worker/gpu/spec_decode/utils.py", "DraftTokensHandler.get_draft_tokens", "self", HANDED),
    has("v1/worker/gpu/spec_decode/utils.py", "DraftTokensHandler", "req_ids", HANDED),
    has("v1/outputs.py", "DraftTokenIds", "req_ids draft_token_ids", HANDED),
    has("v1/worker/gpu/input_batch.py", "InputBatch", "req_ids num_reqs num_reqs_after_padding idx_mapping idx_mapping_np num_draft_tokens_per_req is_prefilling_np query_start_loc seq_lens positions num_tokens num_tokens_after_padding num_computed_prefill_tokens_np num_scheduled_tokens prefill_len_np seq_lens_cpu_upper_bound", V2),
    has("v1/worker/gpu/states.py", "RequestState", "all_token_ids num_computed_tokens num_computed_tokens_np max_seq_len req_id_to_index draft_tokens last_sampled_tokens prefill_len total_len", V2),
    has("v1/worker/gpu/buffer_utils.py", "StagedWriteTensor", "gpu", V2),
    has("v1/worker/gpu/buffer_utils.py", "UvaBackedTensor", "np gpu", V2),
    has("v1/worker/gpu/block_table.py", "BlockTables", "block_tables block_sizes num_blocks block_table_ptrs gather_block_tables compute_slot_mappings", V2),
    has("v1/worker/gpu/sample/states.py", "SamplingStates", "temperature top_k top_p min_p seeds seeds_set vocab_size", BATCH2),
    # Without a seed of its own, a request that comes back draws by another one.
    does("v1/core/sched/scheduler.py", "Scheduler.schedule", "scheduled_new_reqs.extend( < scheduled_resumed_reqs.clear(", "vllm_triforce/kernels/draw.py"),
    does("v1/worker/gpu/sample/states.py", "SamplingStates.add_request", "np.random.randint( < self.seeds.np[req_idx] =", "vllm_triforce/kernels/draw.py"),
    has("v1/worker/gpu/sample/sampler.py", "Sampler", "sampling_states", V2),
    # LoRA: who has which adapter, and when vLLM's layers are told; behind a proposal nothing of the target is computed.
    overrides(LORA2, "LoraState.make_lora_inputs", "self, req_ids, idx_mapping, num_scheduled_tokens", ADAPTERS2),
    has(LORA2, "LoraState", "lora_requests remove_request add_request", ADAPTERS2),
    calls(LORA_MIXIN, "LoRAModelRunnerMixin._set_active_loras", "prompt_lora_mapping, token_lora_mapping, lora_requests", ADAPTERS2),
    calls(LORA_MIXIN, "LoRAModelRunnerMixin.maybe_setup_dummy_loras", "lora_config", ADAPTERS2),
    calls(LORA_MIXIN, "LoRAModelRunnerMixin.maybe_select_dummy_loras", "lora_config, num_scheduled_tokens, mapping_type=, num_sampled_tokens=, num_active_loras=", ADAPTERS2),
    overrides(LORA_MIXIN, "LoRAModelRunnerMixin.maybe_dummy_run_with_lora", "self, lora_config, num_scheduled_tokens, num_sampled_tokens, remove_lora=, num_active_loras=, mapping_type=", ADAPTERS2),
    does(RUNNER2, "GPUModelRunner._dummy_run", "self.maybe_dummy_run_with_lora( < self.execute_model(", ADAPTERS2),
    does(RUNNER2, "GPUModelRunner.execute_model", "self.prepare_inputs( < self.lora_state.make_lora_inputs( < self._set_active_loras(", ADAPTERS2),
    does(RUNNER2, "GPUModelRunner.capture_model", "self.maybe_setup_dummy_loras( < self.speculator.capture(", ADAPTERS2),
    does(RUNNER2, "GPUModelRunner.sample_tokens", "self.sample( < self.prompt_logprobs_worker.compute_prompt_logprobs( < self.prompt_logprobs_worker.compute_prompt_token_id_logprobs( < self.speculator.propose(", ADAPTERS2),
    has(RUNNER2, "GPUModelRunner", "lora_config lora_state device", ADAPTERS2),
    has(LORA_MIXIN, "LoRAModelRunnerMixin", "lora_manager", ADAPTERS2),
    has("lora/worker_manager.py", "WorkerLoRAManager", "_adapter_manager", ADAPTERS2),
    has("lora/model_manager.py", "LoRAModelManager", "_last_mapping", ADAPTERS2),
    has("lora/layers/utils.py", "LoRAMapping", "prompt_mapping", ADAPTERS2),
    has("lora/request.py", "LoRARequest", "lora_name lora_int_id lora_path load_inplace", ADAPTERS2),
    has("config/lora.py", "LoRAConfig", "max_loras", ADAPTERS2),
    has("v1/core/sched/output.py", "SchedulerOutput", "scheduled_spec_decode_tokens", V2),
    # What is heard of each request, and its named log-probabilities beside drafts.
    has("v1/worker/gpu/sample/sampler.py", "Sampler", "logits_processors", FACTS),
    has("v1/worker/gpu/sample/sampler.py", "Sampler", "logprob_token_ids_state logprobs_mode", REJECTION2),
    does("v1/worker/gpu/sample/sampler.py", "Sampler.add_request", "processor.add_request(", FACTS),
    overrides("v1/worker/gpu/sample/logits_processor/interface.py", "LogitsProcessor.add_request", "self, req_idx, sampling_params", FACTS),
    overrides("v1/worker/gpu/sample/logits_processor/interface.py", "LogitsProcessor.apply", "self, logits, ctx", FACTS),
    has(RUNNER2, "GPUModelRunner", "max_num_reqs", FACTS),
    has(RUNNER2, "GPUModelRunner", "rejection_sampler batch_sharder", REJECTION2),
    overrides(REJECT2, "RejectionSampler._verify", "self, logits, draft_logits, draft_sampled, pos, cu_num_logits, idx_mapping, idx_mapping_np, expanded_idx_mapping, expanded_local_pos, seq_lens_upper_bound_np, verify_draft_sampled", REJECTION2),
    # Its two calls, made by us with slots in the place of states.
    does(REJECT2, "RejectionSampler._verify", "self.sampler.apply_sampling_params( < rejection_sample(", REJECTION2),
    calls(REJECT2.replace("sampler.py", "sampler_utils.py"), "rejection_sample", "target_logits, draft_logits, draft_sampled, cu_num_logits, pos, idx_mapping, expanded_idx_mapping, expanded_local_pos, temperature, seed, num_speculative_steps, synthetic_conditional_rates, use_fp64=, use_block_verification=", REJECTION2),
    calls("v1/worker/gpu/sample/sampler.py", "Sampler.apply_sampling_params", "logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, pos, input_ids, expanded_local_pos, seq_lens_upper_bound_np", REJECTION2),
    has(REJECT2, "RejectionSampler", "sampler num_speculative_steps synthetic_conditional_rates use_block_verification", REJECTION2),
    overrides(REJECT2, "RejectionSampler._get_logprobs_tensors", "self, sampled, num_sampled, logits, cu_num_logits, cu_num_logits_np, max_num_logprobs", REJECTION2),
    has(REJECT2, "RejectionSampler", "use_block_verification", "vllm_triforce/config/checks.py"),
    does(REJECT2, "RejectionSampler._verify_in_chunks", "self._verify( < self._get_logprobs_tensors(", REJECTION2),
    calls("v1/worker/gpu/sample/logprob.py", "compute_topk_scores", "logits, num_logprobs, sampled_token_ids, cu_num_logits, logprob_token_ids_state=, expanded_idx_mapping=, max_per_req_token_ids=, logits_mode=", REJECTION2),
    has("v1/worker/gpu/sample/logprob.py", "LogprobTokenIdsState", "max_num_token_ids", REJECTION2),
    has("sampling_params.py", "SamplingParams", "structured_outputs logprob_token_ids allowed_token_ids", FACTS),
    # What the draft levels' logits are shaped by: the sampler's states, whose order the file checks.
    has("v1/worker/gpu/states.py", "RequestState", "prompt_len all_token_ids", SHAPING),
    has("v1/worker/gpu/sample/sampler.py", "Sampler", "logits_processors", SHAPING),
    has("v1/worker/gpu/sample/logit_bias.py", "LogitBiasState", "use_logit_bias num_allowed_token_ids allowed_token_ids num_logit_bias logit_bias_token_ids logit_bias min_lens num_stop_token_ids restore_when_all_masked stop_token_ids", SHAPING),
    has("v1/worker/gpu/sample/penalties.py", "PenaltiesState", "use_penalty repetition_penalty frequency_penalty presence_penalty prompt_bin_mask output_bin_counts", SHAPING),
    calls("v1/worker/gpu/sample/logit_bias.py", "apply_logit_bias", "logits, expanded_idx_mapping, pos, num_allowed_token_ids, allowed_token_ids, num_logit_bias, logit_bias_token_ids, logit_bias, min_lens, num_stop_token_ids, restore_when_all_masked, stop_token_ids, check_all_masked_rows=", SHAPING),
    has("v1/worker/gpu/sample/bad_words.py", "BadWordsState", "num_bad_words bad_word_token_ids bad_word_offsets", SHAPING),
    # Data-parallel engines draw other seeds for requests without one, and so other inner noise.
    does("v1/worker/gpu/sample/states.py", "SamplingStates.add_request", "np.random.randint(", "vllm_triforce/kernels/draw.py"),
    calls("utils/torch_utils.py", "set_random_seed", "seed, data_parallel_index", "vllm_triforce/kernels/draw.py"),
    calls("v1/worker/gpu/async_utils.py", "async_copy_to_np", "x", HANDED),
    calls("utils/torch_utils.py", "async_tensor_h2d", "data, device=", V2),
    has("v1/worker/gpu/input_batch.py", "InputBuffers", "query_start_loc", V2),
    # CUDA graphs of the two inner levels.
    derives("v1/worker/gpu/cudagraph_utils.py", "ModelCudaGraphManager", "CudaGraphManager", GRAPHS),
    calls("v1/worker/gpu/cudagraph_utils.py", "CudaGraphManager.__init__", "vllm_config, device, cudagraph_mode, decode_query_len, lora_capture_cases=", GRAPHS),
    calls("v1/worker/gpu/cudagraph_utils.py", "CudaGraphManager.capture", "create_forward_fn, progress_bar_desc=", GRAPHS),
    calls("v1/worker/gpu/cudagraph_utils.py", "CudaGraphManager.dispatch", "num_reqs, num_tokens, uniform_token_count, num_active_loras", GRAPHS),
    calls("v1/worker/gpu/cudagraph_utils.py", "CudaGraphManager.run_fullgraph", "desc", GRAPHS),
    has("v1/worker/gpu/cudagraph_utils.py", "CudaGraphManager", "graphs pool needs_capture lora_capture_cases", GRAPHS),
    has("v1/worker/gpu/cudagraph_utils.py", "BatchExecutionDescriptor", "cg_mode num_tokens num_reqs uniform_token_count num_active_loras", GRAPHS),
    overrides("v1/worker/gpu/cudagraph_utils.py", "CreateForwardFn.__call__", "self, desc, warmup", GRAPHS),
    has("v1/worker/gpu/cudagraph_utils.py", "CudaGraphManager", "cudagraph_mode decode_query_len varlen_decode _capture_descs _candidates compilation_config max_num_reqs lora_capture_cases", "vllm_triforce/runner_v2/decode_graphs.py"),
    has("v1/worker/gpu/cudagraph_utils.py", "BatchExecutionDescriptor", "cg_mode num_tokens num_reqs uniform_token_count num_active_loras", "vllm_triforce/runner_v2/decode_graphs.py"),
    overrides("v1/engine/core.py", "EngineCore.post_step", "self, model_executed", "vllm_triforce/vllm_patches/stock_behavior.py"),
    does("v1/engine/core.py", "EngineCore.post_step", "self.model_executor.take_draft_token_ids( < self.scheduler.update_draft_token_ids(", "vllm_triforce/vllm_patches/stock_behavior.py"),
    does("v1/engine/core.py", "EngineCore.step", "self.model_executor.sample_tokens( < self.scheduler.update_from_output(", "vllm_triforce/scheduler/v1.py"),
    overrides("v1/core/sched/scheduler.py", "Scheduler.update_from_output", "self, scheduler_output, model_runner_output", "vllm_triforce/scheduler/v1.py"),
    has(RUNNER, "GPUModelRunner", "take_draft_token_ids", "vllm_triforce/scheduler/v1.py"),
    overrides("v1/core/sched/scheduler.py", "Scheduler._update_after_schedule", "self, scheduler_output", "vllm_triforce/scheduler/v1.py"),
    does("v1/core/sched/scheduler.py", "Scheduler.schedule", "pad_spec_decode = < self._update_after_schedule(", LENDING),
    overrides("v1/core/sched/scheduler.py", "Scheduler._update_request_with_output", "self, request, new_token_ids, is_stale=", ACCEPTED),
    does("v1/core/sched/scheduler.py", "Scheduler.update_from_output", "self._update_request_with_output( < self._free_request(", ACCEPTED),
    calls("v1/core/kv_cache_manager.py", "KVCacheManager.cache_blocks", "request, num_computed_tokens", ACCEPTED),
    has("v1/request.py", "Request", "num_computed_tokens num_tokens", ACCEPTED),
    overrides("v1/core/sched/scheduler.py", "Scheduler._update_after_schedule", "self, scheduler_output", "vllm_triforce/scheduler/v2.py"),
    overrides("v1/core/sched/scheduler.py", "Scheduler.update_from_output", "self, scheduler_output, model_runner_output", "vllm_triforce/scheduler/v2.py"),
    has("v1/core/sched/scheduler.py", "Scheduler", "requests running num_spec_tokens max_model_len max_num_running_reqs vllm_config", "vllm_triforce/scheduler/v2.py"),
    has("v1/core/sched/scheduler.py", "Scheduler", "vllm_config", "vllm_triforce/scheduler/__init__.py"),
    has("v1/request.py", "Request", "request_id num_computed_tokens num_prompt_tokens num_tokens max_tokens is_prefill_chunk sampling_params spec_token_ids", "vllm_triforce/scheduler/v2.py"),
    has("v1/outputs.py", "ModelRunnerOutput", "req_ids req_id_to_index sampled_token_ids", "vllm_triforce/scheduler/v2.py"),
    # Blocks for drafts: none where vLLM schedules, lent behind it, taken back before it.
    overrides("v1/core/sched/scheduler.py", "Scheduler.get_grammar_bitmask", "self, scheduler_output", MASKS),
    has("v1/core/sched/scheduler.py", "Scheduler", "structured_output_manager vllm_config", MASKS),
    has("v1/core/sched/output.py", "SchedulerOutput", "has_structured_output_requests scheduled_spec_decode_tokens", MASKS),
    has("v1/structured_output/__init__.py", "StructuredOutputManager", "vllm_config _grammar_bitmask", MASKS),
    does("v1/structured_output/__init__.py", "StructuredOutputManager.grammar_bitmask", "max_num_spec_tokens = < self._grammar_bitmask = < self.backend.allocate_token_bitmask(", MASKS),
    overrides("v1/worker/gpu/structured_outputs.py", "StructuredOutputsWorker.apply_grammar_bitmask", "self, logits, input_batch, grammar_req_ids, grammar_bitmask", MASKS2),
    has("v1/worker/gpu/structured_outputs.py", "StructuredOutputsWorker", "grammar_bitmask", MASKS2),
    has(RUNNER2, "GPUModelRunner", "structured_outputs_worker max_num_reqs num_speculative_steps", MASKS2),
    overrides("v1/worker/gpu_worker.py", "Worker.load_model", "self, *, load_dummy_weights=", "vllm_triforce/worker/gpu.py"),
    overrides("v1/core/sched/scheduler.py", "Scheduler.schedule", "self, throttle_prefills=", LENDING),
    overrides("v1/core/sched/scheduler.py", "Scheduler._request_remaining_blocks", "self, request", LENDING),
    does("v1/core/sched/scheduler.py", "Scheduler.schedule", "self.kv_cache_manager.allocate_slots( < SchedulerOutput( < self._build_kv_connector_meta( < self._update_after_schedule(", LENDING),
    does("v1/core/sched/scheduler.py", "Scheduler.__init__", "self.num_lookahead_tokens = < self.dynamic_sd_lookup = < self._spec_decode_step_blocks =", LENDING),
    has("v1/core/sched/scheduler.py", "Scheduler", "requests running waiting kv_holding_waiting num_waiting_for_streaming_input connector kv_cache_manager num_spec_tokens num_lookahead_tokens dynamic_sd_lookup _spec_decode_step_blocks max_num_running_reqs max_num_active_reqs max_num_scheduled_tokens max_model_len vllm_config", LENDING),
    has("v1/request.py", "Request", "request_id status num_computed_tokens num_in_flight_tokens num_prompt_tokens num_tokens num_output_placeholders max_tokens spec_token_ids", LENDING),
    has("v1/request.py", "RequestStatus", "WAITING_FOR_STREAMING_REQ", LENDING),
    calls("v1/core/kv_cache_manager.py", "KVCacheManager.allocate_slots", "request, num_new_tokens, reserved_blocks=", LENDING),
    has("v1/core/kv_cache_manager.py", "KVCacheManager", "coordinator block_pool watermark_blocks empty_kv_cache_blocks", LENDING),
    has("v1/core/sched/scheduler.py", "Scheduler", "_get_local_prefix_cache_hit deferred_waiting scheduler_config lora_config adaptive_long_prefill_threshold get_request_counts _pause_state max_num_scheduled_tokens", LENDING),
    has("config/scheduler.py", "SchedulerConfig", "long_prefill_token_threshold max_num_batched_tokens enable_chunked_prefill", LENDING),
    has("config/lora.py", "LoRAConfig", "max_loras", LENDING),
    has("v1/core/sched/interface.py", "PauseState", "UNPAUSED", LENDING),
    has("v1/request.py", "Request", "is_prefill_chunk lora_request block_hashes structured_output_request sampling_params", LENDING),
    has("v1/request.py", "RequestStatus", "WAITING PREEMPTED WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR", LENDING),
    has("v1/structured_output/request.py", "StructuredOutputRequest", "is_grammar_ready", LENDING),
    calls("v1/core/kv_cache_manager.py", "KVCacheManager.prefix_cache_lookup_enabled", "request", LENDING),
    calls("v1/core/kv_cache_coordinator.py", "KVCacheCoordinator.find_longest_cache_hit", "block_hashes, max_cache_hit_length", LENDING),
    has("v1/core/sched/output.py", "SchedulerOutput", "num_spec_tokens_to_schedule", "vllm_triforce/scheduler/v1.py"),
    calls("v1/core/kv_cache_coordinator.py", "KVCacheCoordinator.get_num_blocks_to_allocate", "request_id, num_tokens, new_computed_blocks, num_encoder_tokens, total_computed_tokens, num_local_computed_tokens, num_tokens_main_model, apply_admission_cap=", LENDING),
    has("v1/core/kv_cache_coordinator.py", "KVCacheCoordinator", "single_type_managers", LENDING),
    has("v1/core/single_type_kv_cache_manager.py", "SingleTypeKVCacheManager", "req_to_blocks block_size", LENDING),
    calls("v1/core/block_pool.py", "BlockPool.free_blocks", "ordered_blocks", LENDING),
    has("v1/core/block_pool.py", "BlockPool", "get_num_free_blocks", LENDING),
    has("config/vllm.py", "VllmConfig", "max_concurrent_batches", LENDING),
    has("v1/worker/block_table.py", "BlockTable", "num_blocks_per_row", "vllm_triforce/runner_v1/batch.py"),
    has("v1/worker/gpu/block_table.py", "BlockTables", "num_blocks", V2),
    # vLLM's figures: what it counts of a step, by this method and for each request.
    overrides("v1/core/sched/scheduler.py", "Scheduler.update_from_output", "self, scheduler_output, model_runner_output", STATS),
    overrides("v1/core/sched/scheduler.py", "Scheduler.make_spec_decoding_stats", "self, spec_decoding_stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id", STATS),
    does("v1/core/sched/scheduler.py", "Scheduler.update_from_output", "self.make_spec_decoding_stats( < request.spec_decode_metrics.observe( < EngineCoreOutput(", STATS),
    has("v1/core/sched/scheduler.py", "Scheduler", "requests spec_decode_metrics_level", STATS),
    has("v1/request.py", "Request", "spec_decode_metrics", STATS),
    has("v1/metrics/stats.py", "RequestSpecDecodeMetrics", "histogram num_draft_tokens per_step_accepted per_step_drafted", STATS),
    calls("v1/metrics/stats.py", "RequestSpecDecodeMetrics.observe", "num_draft_tokens, num_accepted, detailed=", STATS),
    # What it leaves out of them, and which of a request's outputs carries its own.
    does("v1/core/sched/scheduler.py", "Scheduler.update_from_output", "request.is_finished( < self.make_spec_decoding_stats( < self.make_stats(", STATS),
    has("v1/request.py", "Request", "sampling_params spec_decode_metrics", STATS),
    has("v1/engine/__init__.py", "EngineCoreOutput", "request_id spec_decode_metrics", STATS),
    has("v1/engine/__init__.py", "EngineCoreOutputs", "outputs scheduler_stats", STATS),
    does("v1/engine/output_processor.py", "OutputProcessor.process_outputs", "req_state.spec_decode_metrics = < req_state.detokenizer.update(", STATS),
    does("v1/core/sched/async_scheduler.py", "AsyncScheduler._update_after_schedule", "super()._update_after_schedule( < request.spec_token_ids =", "vllm_triforce/scheduler/v2.py"),
    does("v1/core/sched/scheduler.py", "Scheduler.schedule", "SchedulerOutput( < self._update_after_schedule(", "vllm_triforce/scheduler/v2.py"),
    calls("utils/torch_utils.py", "async_tensor_h2d", "data, device=", "vllm_triforce/runner_v2/speculator.py"),
    calls("v1/worker/gpu/attn_utils.py", "get_varlen_cudagraph_unsupported_backend", "attn_groups, vllm_config, max_query_len, checked_layer_names=", "vllm_triforce/runner_v2/decode_graphs.py"),
    has("v1/worker/gpu/cudagraph_utils.py", "CudaGraphManager", "_init_candidates", "vllm_triforce/runner_v2/decode_graphs.py"),
    calls("v1/worker/gpu/cudagraph_utils.py", "CudaGraphManager.dispatch", "num_reqs, num_tokens, uniform_token_count, num_active_loras", "vllm_triforce/runner_v2/decode_graphs.py"),
    derives("v1/worker/gpu/cudagraph_utils.py", "ModelCudaGraphManager", "CudaGraphManager", "vllm_triforce/runner_v2/decode_graphs.py"),
    does("v1/worker/gpu/cudagraph_utils.py", "ModelCudaGraphManager.capture", "super().capture(", "vllm_triforce/runner_v2/decode_graphs.py"),
    overrides("v1/worker/gpu/cudagraph_utils.py", "CreateForwardFn.__call__", "self, desc, warmup", "vllm_triforce/runner_v2/decode_graphs.py"),
    has(RUNNER2, "GPUModelRunner", "cudagraph_manager kernel_block_sizes", V2),
    calls(RUNNER2, "GPUModelRunner._dummy_run", "num_tokens, uniform_decode=, context_len=", "vllm_triforce/runner_v2/calibration.py"),
    has("config/compilation.py", "CUDAGraphMode", "NONE PIECEWISE FULL FULL_DECODE_ONLY FULL_AND_PIECEWISE decode_mode", V2),
]

BUILDING: list[Surface] = [
    calls("config/vllm.py", "get_layers_from_vllm_config", "vllm_config, layer_type", BUILD),
    calls("v1/worker/utils.py", "allocate_kv_cache", "kv_cache_config, device, layout, kernel_block_sizes", CACHE),
    # The KV cache in host memory.
    overrides(WORKER, "Worker.determine_available_memory", "self", "vllm_triforce/worker/gpu.py"),
    overrides(WORKER, "Worker._maybe_activate_jit_monitor", "self", "vllm_triforce/worker/gpu.py"),
    has(WORKER, "Worker", "peak_activation_memory cudagraph_memory_estimate", "vllm_triforce/worker/gpu.py"),
    # What vLLM measures of its graphs is there when the speculator is asked to capture its own.
    does("v1/worker/gpu/cudagraph_utils.py", "profile_cudagraph_memory", "manager._capture_mem_samples = < runner.capture_model(", V2),
    calls("v1/worker/gpu/cudagraph_utils.py", "_extrapolate_full_graph_memory", "mem_samples, total_graphs", V2),
    overrides("v1/worker/gpu/cudagraph_utils.py", "CudaGraphManager._capture_stream", "self, desc", GRAPHS),
    overrides(CPU_WORKER, "CPUWorker.determine_available_memory", "self", "vllm_triforce/worker/cpu.py"),
    calls("v1/worker/utils.py", "allocate_kv_cache", "kv_cache_config, device, layout, kernel_block_sizes", OFFLOAD),
    calls("v1/kv_cache_interface.py", "create_kv_cache_views", "raw, spec, num_blocks, layout, kv_cache_tensor, kernel_block_size=", OFFLOAD),
    has("v1/kv_cache_interface.py", "KVCacheTensor", "size layers layer_stride block_stride offset", OFFLOAD),
    does("v1/worker/gpu/attn_utils.py", "init_kv_cache", "allocate_kv_cache( < bind_kv_cache_to_layers(", "vllm_triforce/offload/startup.py"),
    calls("v1/simple_kv_offload/cuda_mem_ops.py", "pin_tensor", "tensor", OFFLOAD),
    calls("v1/attention/selector.py", "get_attn_backend", "head_size, dtype, kv_cache_dtype", "vllm_triforce/offload/startup.py"),
    has("v1/kv_cache_layout.py", "KVCacheLayout", "is_layer_compact is_block_compact", OFFLOAD),
    calls("utils/torch_utils.py", "get_accelerator_view_from_cpu_tensor", "cpu_tensor", OFFLOAD),
    calls("v1/worker/utils.py", "AttentionGroup.create_metadata_builders", "vllm_config, device, kernel_block_size", CACHE),
    calls("v1/worker/utils.py", "AttentionGroup.get_metadata_builder", "", CACHE),
    has("v1/worker/utils.py", "AttentionGroup", "backend layer_names kv_cache_spec kv_cache_group_id", CACHE),
    has("v1/kv_cache_interface.py", "KVCacheConfig", "num_blocks kv_cache_tensors kv_cache_groups", CACHE),
    has("v1/kv_cache_interface.py", "KVCacheTensor", "size layers layer_stride block_stride", CACHE),
    has("v1/kv_cache_interface.py", "KVCacheGroupSpec", "layer_names kv_cache_spec", CACHE),
    has("v1/kv_cache_interface.py", "KVCacheSpec", "block_size page_size_bytes", CACHE),
    has("v1/kv_cache_layout.py", "KVCacheLayout", "LBHNC LBNHC BLHNC", CACHE),
    overrides("config/cache.py", "CacheConfig.get_resolved_kv_cache_layout", "self", CACHE),
    # Copies that the host does not wait for.
    calls("utils/torch_utils.py", "async_tensor_h2d", "data, device, dtype", "vllm_triforce/runner_v2/sources/draft_model.py"),
    calls("utils/torch_utils.py", "async_tensor_h2d", "data, device", "vllm_triforce/runner_v2/selections.py"),
    # Weak: graphs of other sizes have the same memory.
    calls("utils/torch_utils.py", "weak_ref_tensor", "tensor", "vllm_triforce/runner_v2/passes.py"),
]

TABLE = WORKERS + RUNNER_V1 + HEADS + RUNNER_V2 + BUILDING
