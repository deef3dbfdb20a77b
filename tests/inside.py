"""Insides of an engine in this process, for tests that look at them or change them."""


def scheduler_of(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler


def worker_of(llm):
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def built(llm):
    """What our worker has put together once the models are loaded."""
    return worker_of(llm).triforce._built


def controller_of(llm):
    return built(llm).speculator.controller


def budget_covers_all(llm) -> None:
    """Let level 2 of Runner V1 read everything, up to 4,096 tokens in blocks of 32."""
    built(llm).speculator.level2.cache.budget_blocks = 4096 // 32
