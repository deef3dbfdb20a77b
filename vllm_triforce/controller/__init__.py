"""Controller: decides how far requests speculate, from measured costs and acceptance."""

from vllm_triforce.controller.controller import Controller
from vllm_triforce.controller.cost_model import CostModel
from vllm_triforce.controller.measurements import Measurements, StepTime
from vllm_triforce.controller.routes import PLAIN, Candidate, Choice

__all__ = [
    "PLAIN",
    "Candidate",
    "Choice",
    "Controller",
    "CostModel",
    "Measurements",
    "StepTime",
]
