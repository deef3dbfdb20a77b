"""Patches of ``EngineArgs``: TriForce's keys become a stock ``SpeculativeConfig`` and our worker.

``SpeculativeConfig`` forbids unknown methods and keys. A user's ``{"method": "triforce", ...}``
becomes ``method="draft_model"`` plus ``additional_config["triforce"]``, and the platform's
worker becomes our subclass. ``draft_model`` gives us the scheduler's lookahead slots and room for
the draft's distributions. All checks run here, before weights load.
"""

from contextlib import nullcontext
from typing import Any

from vllm.logger import init_logger

from vllm_triforce.config import TriForceConfig, check_draft, checks
from vllm_triforce.config.budget import chunk_size
from vllm_triforce.config.keys import METHOD
from vllm_triforce.config.level2 import (
    check_level2_model,
    fit_levels,
    has_recurrent_layers,
    why_no_level2,
)
from vllm_triforce.config.synthetic import (
    RATES_KEY,
    SYNTHETIC,
    WARNING,
    check_synthetic,
    extend_rates,
)
from vllm_triforce.vllm_patches import swaps
from vllm_triforce.vllm_patches.cli_args import (
    FLAGS,
    REGISTRY,
    merge_flags,
    name_flags_in_refusals,
    refusing,
    uses_triforce,
)
from vllm_triforce.vllm_patches.patch import install_in_engine, patch
from vllm_triforce.vllm_patches.stock_behavior import mark

logger = init_logger("vllm.triforce")

# Smallest block of vLLM's faster CPU kernels. Its default, 128, makes coarse retrieval chunks: on
# SmolLM2 40 % more of level 2's tokens are rejected (docs/results.md).
_CPU_BLOCK_SIZE = 32

# Keys of a stock SpeculativeConfig about loading the draft, passed on unchanged.
_DRAFT_KEYS = (
    "quantization",
    "revision",
    "code_revision",
    "draft_tensor_parallel_size",
    "draft_load_config",
)

# Keys of a stock SpeculativeConfig about level 3's rejection sampling, passed on.
_REJECTION_KEYS = ("rejection_sample_method", RATES_KEY)

# vLLM's methods while it reads a head's config. By another it would guess one from the path.
_EAGLE3, _MTP = "eagle3", "mtp"

# By their names: they build on this package.
_WORKERS = {
    "vllm.v1.worker.cpu_worker.CPUWorker": "vllm_triforce.worker.cpu.TriForceCPUWorker",
    "vllm.v1.worker.gpu_worker.Worker": "vllm_triforce.worker.gpu.TriForceGPUWorker",
}


def _read_keys(engine_args, target_config) -> tuple[TriForceConfig, dict[str, Any], Any]:
    """Split ``speculative_config`` into TriForce's keys, filled in, and those for vLLM.

    Returns:
        Both, and the Hugging Face config of the draft model; None without one.
    """
    given = engine_args.speculative_config.items()
    keys = {key.replace("-", "_"): value for key, value in given if key != "method"}
    draft = {key: keys.pop(key) for key in ("model", *_DRAFT_KEYS) if key in keys}
    if draft.get("model") is not None and not isinstance(draft["model"], str):
        raise ValueError(
            f"model={draft['model']!r} must be the path or hub name of a draft model. "
            "Leave it out for prompt lookup."
        )
    if not draft.get("model") and (others := sorted(draft.keys() - {"model"})):
        raise ValueError(
            f"{others} describe a draft model, but no 'model' is given. Name one, or leave them "
            "out."
        )
    draft |= {key: keys.pop(key) for key in _REJECTION_KEYS if key in keys}
    method = draft.get("rejection_sample_method", "standard")
    has_fixed_shapes = checks.has_fixed_shapes()
    checks.check_rejection_sample_method(method, has_fixed_shapes)
    config = TriForceConfig.from_speculative_config(keys)
    check_synthetic(method, draft.get(RATES_KEY), config.synthetic_level1_acceptance)
    checks.check_selection(config)
    config = fit_levels(config, target_config)
    hf_config = None
    if draft.get("model") and not config.is_plain:
        hf_config = check_draft.read_draft_config(draft, engine_args.trust_remote_code)
    filled = config.with_defaults(
        # On Model Runner V2 the controller runs in our scheduler.
        can_adapt=not (has_fixed_shapes and engine_args.scheduler_cls),
        model=draft.get("model"),
        has_fixed_shapes=has_fixed_shapes,
        max_num_seqs=engine_args.max_num_seqs,
        is_head=hf_config is not None and check_draft.is_head(hf_config),
        has_states=has_recurrent_layers(target_config),
        max_length=_max_tokens_with_lora(engine_args) if engine_args.enable_lora else None,
    )
    return filled, draft, hf_config


def _max_tokens_with_lora(engine_args) -> int:
    """Count the tokens, at least 1, that each request may propose if LoRA is enabled.

    vLLM refuses to start if a step has no room for the proposals of ``max_num_seqs`` requests. Its
    defaults depend on the usage context; the smallest count of all contexts is returned.
    """
    parallel = engine_args.pipeline_parallel_size * engine_args.tensor_parallel_size
    tokens_by_context, seqs_by_context = engine_args.get_batch_defaults(parallel)
    scale = 2 if engine_args.performance_mode == "throughput" else 1
    counts = []
    for context, default in tokens_by_context.items():
        num_tokens = engine_args.max_num_batched_tokens or scale * default
        num_seqs = min(num_tokens, scale * seqs_by_context[context])
        counts.append(num_tokens // (engine_args.max_num_seqs or num_seqs) - 1)
    return max(1, min(counts))


@patch(
    "vllm.engine.arg_utils:EngineArgs.create_engine_config",
    "self, usage_context, headless",
    why='reads and checks our keys, stores them in `additional_config["triforce"]`, and sets '
    "`worker_cls` and, unless the user chose one, `scheduler_cls`",
    until=REGISTRY,
)
def _create_engine_config(original, self, *args, **kwargs):
    if not uses_triforce(self):
        return original(self, *args, **kwargs)
    names = [name for name, _ in FLAGS.values()]
    replaced = ("speculative_config", "additional_config", "block_size", *names)
    saved = {name: getattr(self, name) for name in replaced}
    with name_flags_in_refusals(self):
        try:
            with refusing():
                install_in_engine()
                self.speculative_config = merge_flags(self)
            self.additional_config = {**(self.additional_config or {}), METHOD: None}
            for name in names:
                setattr(self, name, None)
            if checks.is_cpu() and self.block_size is None:
                self.block_size = _CPU_BLOCK_SIZE
            vllm_config = original(self, *args, **kwargs)
        finally:
            for name, value in saved.items():
                setattr(self, name, value)
        with refusing():
            return _finish_config(vllm_config)


@patch(
    "vllm.engine.arg_utils:EngineArgs.create_speculative_config",
    "self, target_model_config, target_parallel_config",
    why="passes `draft_model` to `SpeculativeConfig`, which forbids unknown methods and keys",
    until=REGISTRY,
)
def _create_speculative_config(original, self, *args, **kwargs):
    if not uses_triforce(self):
        with refusing():
            _check_not_replaced(self)
        return original(self, *args, **kwargs)
    return _create(original, self, *args, **kwargs)


def _create(original, engine_args, target_model_config, target_parallel_config):
    """Make the ``SpeculativeConfig`` of an engine that runs TriForce."""
    from vllm.config import SpeculativeConfig

    has_draft = engine_args.speculative_config.get("model")
    with refusing():
        _set_stock_config(engine_args, target_model_config, target_parallel_config)
    # Without a draft vLLM gets the target in its place, and would turn the config of a target
    # with MTP layers into theirs.
    override = swaps.DRAFT_OVERRIDE.during(SpeculativeConfig, staticmethod(_unchanged))
    with nullcontext() if has_draft else override:
        speculative_config = original(engine_args, target_model_config, target_parallel_config)
    if has_draft:
        with refusing():
            _check_not_guessed(speculative_config, engine_args.speculative_config["method"])
            check_draft.check_draft_kind(speculative_config.draft_model_config, checks.is_cpu())
        if speculative_config.method == _EAGLE3:
            hf_config = speculative_config.draft_model_config.hf_config
            layers = check_draft.aux_layers(hf_config, target_model_config)
            swaps.HEAD_LAYERS.set(hf_config, layers)
            swaps.NUM_HEAD_LAYERS.set(hf_config, len(layers))
        # A head's blocks and steps are those of a draft with a separate cache.
        speculative_config.method = "draft_model"
    # Level 1 runs over a window, so the draft's context length is no limit.
    speculative_config.draft_model_config.max_model_len = target_model_config.max_model_len
    mark(speculative_config)
    return speculative_config


def _unchanged(hf_config, *args, **kwargs):
    """Return a draft's config as it is; at the top, since vLLM pickles it with the config."""
    return hf_config


def _check_not_guessed(speculative_config, method: str) -> None:
    """Refuse a draft that vLLM takes for one of another method, mostly because of its path."""
    hf_config = speculative_config.draft_model_config.hf_config
    if speculative_config.method != method or (
        method == _MTP and not check_draft.is_mtp(hf_config)
    ):
        raise ValueError(
            f"draft model {speculative_config.model!r}: vLLM takes it for a head of "
            f"{speculative_config.method!r}, by its path or its config. Rename its folder, or "
            "leave 'model' out of speculative_config for prompt lookup."
        )


def _check_not_replaced(engine_args) -> None:
    """Refuse a target whose checkpoint names another method, which vLLM would use instead."""
    keys, kept = engine_args.speculative_config, engine_args.additional_config
    if keys is not None and isinstance(kept, dict) and METHOD in kept:
        raise ValueError(
            f"method={METHOD!r} is not supported with a checkpoint of speculators: vLLM takes its "
            f"method, {keys['method']!r}. Use the model that it speculates for, "
            f"{engine_args.model!r}."
        )


def _set_stock_config(engine_args, target_model_config, target_parallel_config) -> None:
    """Check target and draft, and replace our keys by those of a stock ``SpeculativeConfig``."""
    checks.check_target(target_model_config, target_parallel_config)
    config, draft, hf_config = _read_keys(engine_args, target_model_config)
    # vLLM passes it on to its config.
    engine_args.additional_config[METHOD] = config, draft.get("model") or None
    method = "draft_model"
    if hf_config is not None:
        check_draft.check_draft(draft["model"], hf_config, target_model_config, config)
        if check_draft.is_head(hf_config):
            check_draft.check_head(draft["model"], hf_config, target_model_config)
            is_mtp = check_draft.is_mtp(hf_config)
            method = _MTP if is_mtp else _EAGLE3
            if is_mtp:  # of the target's checkpoint
                for key in ("quantization", "revision", "code_revision"):
                    draft.setdefault(key, getattr(target_model_config, key))
    if RATES_KEY in draft:
        draft[RATES_KEY] = extend_rates(draft[RATES_KEY], config.num_speculative_tokens)
    # Without a draft model the target's name satisfies SpeculativeConfig. It is not loaded twice:
    # our speculator does the loading.
    draft["model"] = draft.get("model") or target_model_config.model
    engine_args.speculative_config = {
        **draft,
        "method": method,
        "num_speculative_tokens": config.num_speculative_tokens,
        "draft_sample_method": "probabilistic",
    }


def _finish_config(vllm_config):
    """Resolve our keys, check them against the engine's, and set worker and scheduler classes."""
    config, draft_model = vllm_config.additional_config[METHOD]
    chunk = vllm_config.cache_config.block_size
    if not checks.is_cpu():  # where a chunk is a whole block
        chunk = chunk_size(chunk)
    resolved = config.resolve(chunk)
    given = config.retrieval_budget
    if given not in (None, resolved.retrieval_budget) and not config.is_plain:
        logger.warning(
            "retrieval_budget=%d does not fit chunks of %d tokens, vLLM's KV blocks or parts of "
            "them: it is %d. A smaller --block-size allows smaller budgets.",
            given,
            chunk,
            resolved.retrieval_budget,
        )
    checks.check_vllm_config(vllm_config, resolved)
    if resolved.level2_model is not None:
        check_level2_model(resolved.level2_model, vllm_config)
    if vllm_config.speculative_config.rejection_sample_method == SYNTHETIC:
        logger.warning(WARNING)
    vllm_config.additional_config[METHOD] = {**vars(resolved), "draft_model": draft_model}
    worker_cls = vllm_config.parallel_config.worker_cls
    if worker_cls not in _WORKERS:
        raise ValueError(
            f"TriForce has no worker for worker_cls={worker_cls!r}, only for {sorted(_WORKERS)}. "
            "Leave --worker-cls out, or use another method."
        )
    vllm_config.parallel_config.worker_cls = _WORKERS[worker_cls]
    _choose_scheduler(vllm_config)
    if vllm_config.use_v2_model_runner:
        # With "probabilistic" vLLM would allocate distributions for max_num_seqs requests; our
        # speculator allocates them for max_speculating_seqs.
        vllm_config.speculative_config.draft_sample_method = "greedy"
    if resolved.uses_level2:
        drafts_alone = resolved.levels == "2,3"
        logger.info(
            "TriForce's level 2 reads %s by selection '%s'; level 1 %s.",
            resolved.budget_text,
            resolved.selection,
            "takes no part" if drafts_alone else f"drafts from {', '.join(resolved.sources)}",
        )
    elif reason := why_no_level2(vllm_config.model_config):
        sources = ", ".join(resolved.sources)
        logger.info("TriForce drafts from %s. Level 2 takes no part: %s.", sources, reason)
    return vllm_config


def _choose_scheduler(vllm_config) -> None:
    """Set our scheduler class, unless the user chose one.

    With a scheduler of the user's, Runner V2 proposes fixed lengths.
    """
    scheduler_config = vllm_config.scheduler_config
    if not vllm_config.use_v2_model_runner:
        # With a schedule of draft lengths by batch size, here one for all, vLLM's schedulers give
        # no request placeholders for drafts. vLLM's CPU kernel accepts some (patches/README.md).
        speculative_config = vllm_config.speculative_config
        length = speculative_config.num_speculative_tokens
        speculative_config.num_speculative_tokens_per_batch_size = [(1, 1, length)]
    if scheduler_config.scheduler_cls is not None:
        return
    # Model Runner V1 runs on the CPU only, where vLLM never schedules asynchronously.
    name = "v1.TriForceScheduler"
    if vllm_config.use_v2_model_runner:
        is_async = scheduler_config.async_scheduling
        name = "v2.TriForceAsyncSchedulerV2" if is_async else "v2.TriForceSchedulerV2"
    scheduler_config.scheduler_cls = f"vllm_triforce.scheduler.{name}"
