"""The controller: what each request does in a step, from measured times and acceptance."""

from vllm_triforce.controller.controller import Candidate, Controller
from vllm_triforce.controller.cost_model import CostModel
from vllm_triforce.controller.planner import Choice

__all__ = ["Candidate", "Choice", "Controller", "CostModel"]
