"""vLLM's schedulers for Model Runner V2, whose steps carry plans."""

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_triforce.scheduler.accepted_blocks import CachesAcceptedBlocks
from vllm_triforce.scheduler.figures import FiguresOfProposals
from vllm_triforce.scheduler.grammar_masks import SizesGrammarMasks
from vllm_triforce.scheduler.lookahead import LendsBlocks
from vllm_triforce.scheduler.outcomes import CountsOutcomes
from vllm_triforce.scheduler.plans import PlansSteps


class TriForceSchedulerV2(
    PlansSteps, LendsBlocks, CachesAcceptedBlocks, CountsOutcomes, SizesGrammarMasks, Scheduler
):
    """Waits for each step's proposals, and has those verified."""


class TriForceAsyncSchedulerV2(
    PlansSteps,
    LendsBlocks,
    FiguresOfProposals,
    CountsOutcomes,
    SizesGrammarMasks,
    AsyncScheduler,
):
    """Has as many tokens verified as were planned, proposed or not."""
