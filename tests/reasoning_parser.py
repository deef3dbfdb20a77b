"""A reasoning parser for the embedded pair, whose text has its tokens (``--reasoning-parser``)."""

from vllm.config.reasoning import ReasoningConfig
from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser

NAME = "of_python"
START, END = 267, 387
"""Token ids of ``self`` and of `` return``."""


@ReasoningParserManager.register_module(NAME)
class PythonReasoningParser(BaseThinkingReasoningParser):
    """Reasoning begins with ``self`` and ends with `` return``."""

    start_token = property(lambda self: "self")
    end_token = property(lambda self: "Ġreturn")
    reasoning_end_str = property(lambda self: " return")


def forcing(end: str) -> ReasoningConfig:
    """Return the configuration of an engine that forces ``end`` where a budget is spent."""
    return ReasoningConfig(reasoning_parser=NAME, reasoning_end_str=end)
