"""Surfaces of attention backends, forward passes, sampling and kernels."""

# One entry a line.
# ruff: noqa: E501
# fmt: off

from tests.contract.surface import Surface, calls, derives, does, has, offers, overrides

CPU, FLASH = "v1/attention/backends/cpu_attn.py", "v1/attention/backends/flash_attn.py"
TRITON, FLASHINFER = "v1/attention/backends/triton_attn.py", "v1/attention/backends/flashinfer.py"
DENSE = "vllm_triforce/runner_v2/retrieval.py"
OURS_CPU, OURS_GPU = "vllm_triforce/attention/cpu.py", "vllm_triforce/attention/gpu/retrieval.py"
IMPL_GPU, BACKENDS = "vllm_triforce/attention/gpu/impl.py", "vllm_triforce/attention/platforms.py"
BACKENDS_GPU = "vllm_triforce/attention/gpu/backends.py"
KERNELS, PASS = "vllm_triforce/attention/gpu/paged_kernels.py", "vllm_triforce/core/model_pass.py"
FORWARD = (
    "self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=, "
    "output_block_scale="
)
BUILD = "self, common_prefix_len, common_attn_metadata, fast_build="
UPDATE = "self, layer, key, value, kv_cache, slot_mapping"
METADATA = "num_actual_tokens max_query_len query_start_loc max_seq_len seq_lens block_table slot_mapping"

TABLE: list[Surface] = [
    # CPU.
    overrides(CPU, "CPUAttentionBackendImpl.forward", FORWARD, OURS_CPU),
    overrides(CPU, "CPUAttentionMetadataBuilder.build", BUILD, OURS_CPU),
    has(CPU, "CPUAttentionBackendImpl", "num_heads num_kv_heads head_size scale sliding_window alibi_slopes sinks kv_sharing_target_layer_name logits_soft_cap kv_cache_dtype", OURS_CPU),
    has(CPU, "CPUAttentionMetadata", METADATA + " scheduler_metadata", OURS_CPU),
    has(CPU, "CPUAttentionMetadataBuilder", "head_dim dtype isa kv_cache_dtype", OURS_CPU),
    calls("_custom_ops.py", "cpu_attention_with_kv_cache", "query=, key_cache=, value_cache=, output=, query_start_loc=, seq_lens=, scale=, causal=, alibi_slopes=, sliding_window=, block_table=, softcap=, scheduler_metadata=, s_aux=, dynamic_causal=, k_scale=, v_scale=, kv_cache_dtype=", OURS_CPU),
    calls("_custom_ops.py", "cpu_attn_get_scheduler_metadata", "num_reqs=, num_heads=, num_kv_heads=, head_dim=, seq_lens=, dtype=, query_start_loc=, causal=, sliding_window_size=, isa=, enable_kv_split=, dynamic_causal=, kv_cache_dtype=", OURS_CPU),
    calls("_custom_ops.py", "cpu_attn_reshape_and_cache", "key, value, key_cache, value_cache, slot_mapping, isa, k_scale=, v_scale=, kv_cache_dtype=", OURS_CPU),
    offers("_custom_ops.py", "cpu_attention_with_kv_cache cpu_attn_get_scheduler_metadata cpu_attn_reshape_and_cache", OURS_CPU),
    offers("envs.py", "VLLM_CPU_ATTN_SPLIT_KV", OURS_CPU),
    # FLASH_ATTN.
    overrides(FLASH, "FlashAttentionImpl.forward", FORWARD, IMPL_GPU),
    overrides(FLASH, "FlashAttentionImpl.do_kv_cache_update", UPDATE, IMPL_GPU),
    overrides(FLASH, "FlashAttentionMetadataBuilder.build", BUILD, OURS_GPU),
    has(FLASH, "FlashAttentionImpl", "num_heads num_kv_heads head_size scale sliding_window alibi_slopes sinks kv_sharing_target_layer_name logits_soft_cap kv_cache_dtype attn_type vllm_flash_attn_version", IMPL_GPU),
    has(FLASH, "FlashAttentionMetadata", METADATA + " causal", OURS_GPU),
    calls("vllm_flash_attn/flash_attn_interface.py", "flash_attn_varlen_func", "q=, k=, v=, max_seqlen_q=, cu_seqlens_q=, max_seqlen_k=, seqused_k=, softmax_scale=, causal=, window_size=, softcap=, block_table=, out=, q_descale=, k_descale=, v_descale=, fa_version=", KERNELS),
    # TRITON_ATTN.
    overrides(TRITON, "TritonAttentionImpl.forward", FORWARD, IMPL_GPU),
    overrides(TRITON, "TritonAttentionImpl.do_kv_cache_update", UPDATE, IMPL_GPU),
    overrides(TRITON, "TritonAttentionMetadataBuilder.build", BUILD, OURS_GPU),
    has(TRITON, "TritonAttentionImpl", "num_heads num_kv_heads head_size scale sliding_window alibi_slopes sinks kv_sharing_target_layer_name logits_soft_cap kv_cache_dtype attn_type", IMPL_GPU),
    has(TRITON, "TritonAttentionMetadata", METADATA, OURS_GPU),
    calls("v1/attention/ops/triton_unified_attention.py", "unified_attention", "q=, k=, v=, out=, cu_seqlens_q=, max_seqlen_q=, seqused_k=, max_seqlen_k=, softmax_scale=, causal=, window_size=, block_table=, softcap=, q_descale=, k_descale=, v_descale=", KERNELS),
    # FLASHINFER.
    overrides(FLASHINFER, "FlashInferImpl.forward", FORWARD, IMPL_GPU),
    overrides(FLASHINFER, "FlashInferImpl.do_kv_cache_update", UPDATE, IMPL_GPU),
    overrides(FLASHINFER, "FlashInferMetadataBuilder.build", BUILD, OURS_GPU),
    has(FLASHINFER, "FlashInferImpl", "num_heads num_kv_heads head_size scale sliding_window window_left alibi_slopes sinks kv_sharing_target_layer_name logits_soft_cap kv_cache_dtype", IMPL_GPU),
    has(FLASHINFER, "FlashInferMetadata", "num_actual_tokens slot_mapping num_decodes num_decode_tokens num_prefills num_prefill_tokens", OURS_GPU),
    # Shared by all of them.
    has("platforms/interface.py", "Platform", "device_name", BACKENDS),
    has("platforms/interface.py", "Platform", "is_cpu", BACKENDS),
    has("platforms/interface.py", "Platform", "is_cuda_alike", BACKENDS),
    has("v1/attention/backend.py", "AttentionBackend", "supported_kv_cache_layouts get_supported_kernel_block_sizes get_impl_cls get_builder_cls get_name forward_includes_kv_cache_update", OURS_GPU),
    has("v1/attention/backend.py", "AttentionMetadataBuilder", "build build_for_cudagraph_capture get_cudagraph_support", OURS_GPU),
    has("v1/attention/backend.py", "CommonAttentionMetadata", "query_start_loc query_start_loc_cpu seq_lens num_reqs num_actual_tokens max_query_len max_seq_len block_table_tensor slot_mapping causal positions", DENSE),
    has("v1/attention/backend.py", "CommonAttentionMetadata", "query_start_loc query_start_loc_cpu seq_lens num_reqs num_actual_tokens max_query_len max_seq_len block_table_tensor slot_mapping causal", OURS_CPU),
    # Keys and values are written before attention reads, by an operation of its own.
    has("forward_context.py", "ForwardContext", "attn_metadata", "vllm_triforce/attention/base.py"),
    does("model_executor/layers/attention/attention.py", "unified_kv_cache_update", "get_attention_context( < attn_layer.impl.do_kv_cache_update(", "vllm_triforce/attention/base.py"),
    has("model_executor/layers/attention/attention.py", "Attention", "impl kv_cache num_heads num_kv_heads head_size get_attn_backend get_kv_cache_spec", "vllm_triforce/core/models.py"),
    derives("model_executor/layers/attention/attention.py", "Attention", "AttentionLayerBase", "vllm_triforce/core/kv_groups.py"),
    calls("v1/attention/backend.py", "AttentionMetadataBuilder.build", "common_prefix_len, common_attn_metadata", DENSE),
    calls("forward_context.py", "set_forward_context", "attn_metadata, vllm_config, num_tokens=, slot_mapping=", PASS),
    does("model_executor/layers/attention/attention.py", "set_default_quant_scales", "layer._k_scale_float = < layer._v_scale_float =", OURS_GPU),
    calls("v1/kv_cache_interface.py", "is_quantized_kv_cache", "kv_cache_dtype", BACKENDS_GPU),
    calls("v1/attention/backends/fa_utils.py", "get_flash_attn_version", "head_size=", BACKENDS_GPU),
    calls(FLASH, "FlashAttentionBackend.supports_head_size", "head_size", BACKENDS_GPU),
    has("platforms/interface.py", "Platform", "fp8_dtype", BACKENDS_GPU),
    # Sampling, and the fault that is mended.
    calls("v1/sample/ops/topk_topp_sampler.py", "apply_top_k_top_p", "logits, k, p", "vllm_triforce/runner_v1/sampling.py"),
    calls("v1/sample/ops/topk_topp_sampler.py", "apply_top_k_top_p", "logits, k, p", "vllm_triforce/runner_v2/sampling.py"),
    # A captured launch writes to these, which a larger batch replaces.
    offers("v1/sample/ops/topk_topp_triton.py", "_TRITON_BUFFER_CACHE _TRITON_SPLIT_CACHE _TRITON_TABLE_CACHE", "vllm_triforce/runner_v2/sampling.py"),
    does("v1/sample/ops/topk_topp_triton.py", "apply_top_k_top_p_triton", "_TRITON_BUFFER_CACHE.get(", "vllm_triforce/runner_v2/sampling.py"),
    does("v1/sample/ops/topk_topp_triton.py", "_apply_topp_split", "_TRITON_SPLIT_CACHE.get(", "vllm_triforce/runner_v2/sampling.py"),
    does("v1/sample/sampler.py", "Sampler.sample", "self.apply_temperature(", "vllm_triforce/runner_v1/sampling.py"),
    calls("v1/sample/rejection_sampler.py", "expand_batch_to_tokens", "x, cu_num_tokens, num_tokens, replace_from, replace_to", "vllm_triforce/vllm_patches/cpu_build.py"),
    calls("triton_utils/dispatcher.py", "register_kernels", "overrides", "vllm_triforce/vllm_patches/cpu_build.py"),
    overrides("utils/cpu_triton_utils.py", "_expand_kernel_impl", "output, input_val, cu_num_tokens, replace_from, replace_to, MAX_NUM_TOKENS=", "vllm_triforce/vllm_patches/cpu_build.py"),
]
