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


def attention_layers_of(llm) -> list:
    """The target's layers that level 2 of Runner V1 retrieves for."""
    return built(llm).speculator.level2._attention._layers
