"""Off costs (next to) nothing on Model Runner V1: what a batch without drafts skips.

Once speculation is configured, vLLM sends every batch through the rejection sampler and the
drafter's preparations. Both are skipped where there is nothing to verify and nobody to draft for.
"""


def skip_when_off(runner, min_context: int, on_skip) -> None:
    """Wraps two methods of one runner.

    Args:
        min_context: tokens below which a request is not speculated on.
        on_skip: called instead of the drafter where the whole batch is below it.
    """
    runner._sample = _sample_without_drafts_as_stock(runner._sample)
    runner.propose_draft_token_ids = _propose_unless_all_short(
        runner.propose_draft_token_ids, min_context, on_skip
    )


def _sample_without_drafts_as_stock(original):
    def _sample(logits, spec_decode_metadata):
        if spec_decode_metadata is not None and not spec_decode_metadata.max_spec_len:
            spec_decode_metadata = None
        return original(logits, spec_decode_metadata)

    return _sample


def _propose_unless_all_short(original, min_context: int, on_skip):
    def propose_draft_token_ids(
        scheduler_output,
        sampled_token_ids,
        sampling_metadata,
        hidden_states,
        sample_hidden_states,
        aux_hidden_states,
        spec_decode_metadata,
        common_attn_metadata,
        slot_mappings,
    ):
        # The longest of the batch, scheduled drafts included; only short requests have none.
        if common_attn_metadata.max_seq_len < min_context and not any(
            spec_decode_metadata.num_draft_tokens
        ):
            on_skip()
            return [[] for _ in spec_decode_metadata.num_draft_tokens]
        return original(
            scheduler_output,
            sampled_token_ids,
            sampling_metadata,
            hidden_states,
            sample_hidden_states,
            aux_hidden_states,
            spec_decode_metadata,
            common_attn_metadata,
            slot_mappings,
        )

    return propose_draft_token_ids
