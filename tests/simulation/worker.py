"""A worker of Model Runner V2 whose device is a ``World``: it hears what a real one hears, sends
what a real one sends, and checks that it can do what it is asked."""

from dataclasses import dataclass

import torch
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds, ModelRunnerOutput

from tests.simulation.world import World
from vllm_triforce.config import ResolvedConfig
from vllm_triforce.controller.routes import HIERARCHICAL, Choice
from vllm_triforce.core.limits import decodes_plainly, room_for_proposal
from vllm_triforce.core.messages import BLOCKS_KEPT, PLAN
from vllm_triforce.runner_v2.reports import Reports

TOKEN, STOP = 7, 3
"""What requests emit, and what ends those that have it among their ``stop_token_ids``."""


@dataclass
class _State:
    """A request as the worker knows it."""

    prefill: int
    """Tokens to be read before it decodes."""
    computed: int
    blocks: list[int]
    limit: int
    """Tokens at which it ends."""
    params: object
    planned: int = 0
    """Tokens, by the plan of its last step."""
    proposed: int = 0
    route: str = ""
    has_summaries: bool = False
    """True once level 2 has proposed."""


@dataclass
class Step:
    """What a step took, in seconds, and gave."""

    full: float
    proposing: float
    output: ModelRunnerOutput
    num_decoding: int = 0
    num_reading: int = 0
    plain: float = 0.0
    """That its full pass would have taken with a token a request."""
    num_drafts: int = 0
    seconds: float = 0.0
    """Since the output before; without the time in which nobody was there."""
    num_tokens: int = 0


class Worker:
    """
    Args:
        config: ours; None for stock vLLM, without speculation.
        world: the machine and the text.
        is_asynchronous: whether as many tokens are verified as were planned.
        is_short_of_memory: whether fewer may be, for lack of blocks.
    """

    def __init__(
        self,
        world: World,
        config: ResolvedConfig | None,
        is_asynchronous: bool,
        max_model_len: int,
        block_size: int,
        measured=None,
        is_short_of_memory: bool = False,
    ) -> None:
        self.world, self.config = world, config
        self.is_asynchronous = is_asynchronous
        self._max_model_len, self._block_size = max_model_len, block_size
        self.is_short_of_memory = is_short_of_memory
        self._reports = Reports(torch.device("cpu"))
        self._reports.set_measurements(measured)
        self._states: dict[str, _State] = {}
        self._slots: set[str] = set()
        self._took: list[str] = []
        self.stops: dict[str, int] = {}
        """Position of the stop token, of requests that emit one."""

    def execute(self, step) -> Step:
        plan = PLAN.of(step)
        assert (plan is None) == (self.config is None)
        self._reports.begin_step(None if plan is None else plan.number)
        self._hear(step)
        if not step.total_num_scheduled_tokens:
            assert plan is None or not plan.proposing
            return Step(0.0, 0.0, EMPTY_MODEL_RUNNER_OUTPUT)
        names = list(step.num_scheduled_tokens)
        machine = self.world.machine
        tokens, contexts, sampled, num_prompt, num_drafts = [], [], [], 0, 0
        emitting = []
        reads = any(self._states[name].computed < self._states[name].prefill for name in names)
        for name in names:
            state, count = self._states[name], step.num_scheduled_tokens[name]
            drafts = len(step.scheduled_spec_decode_tokens.get(name, ()))
            assert state.computed + count <= len(state.blocks) * self._block_size, (
                "no room for its KV"
            )
            assert state.computed + count < self._max_model_len
            if state.computed + count - drafts < state.prefill:
                assert not drafts
                num_prompt += count
                state.computed += count
                sampled.append([])
                continue
            emitting.append(name)
            own = count - drafts
            if state.computed >= state.prefill:
                assert own == 1
                self._check_placeholders(name, state, drafts, reads)
            if own == 1:
                tokens.append(count)
                contexts.append(state.computed)
                num_drafts += drafts
            else:
                num_prompt += own
            accepted = self._verify(name, state, min(drafts, state.proposed))
            state.computed += own + accepted
            start = state.computed - accepted  # where the first new token stands
            stop = self.stops.get(name)
            sampled.append([STOP if start + n == stop else TOKEN for n in range(accepted + 1)])
        full = machine.full_pass(tokens, contexts, num_prompt) + machine.beside
        full += machine.verifying * (num_drafts > 0)
        proposing = self._propose(plan, set(emitting), step)
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=sampled,
        )
        return Step(
            full,
            proposing,
            self._reports.attach_to(output),
            len(tokens),
            len(names) - len(tokens),
            machine.full_pass([1] * len(tokens), contexts, num_prompt) + machine.beside,
            num_drafts,
        )

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """What a scheduler that waits is told."""
        if self.config is None:
            return None
        if self.is_asynchronous:
            places = self.config.num_speculative_tokens
            return DraftTokenIds(self._took, [[TOKEN] * places for _ in self._took])
        tokens = [[TOKEN] * self._states[name].proposed for name in self._took]
        return DraftTokenIds(self._took, tokens)

    def blocks_of(self, name: str) -> list[int]:
        """A request's block table."""
        return self._states[name].blocks

    def _hear(self, step) -> None:
        for name, (count,) in (BLOCKS_KEPT.of(step) or {}).items():
            if name in self._states:
                del self._states[name].blocks[count:]
        for name in {*step.finished_req_ids, *(step.preempted_req_ids or ())}:
            self._states.pop(name, None)
            self._slots.discard(name)
        for new in step.scheduled_new_reqs:
            assert new.req_id not in self._states
            self._slots.discard(new.req_id)
            prompt = len(new.prompt_token_ids)
            self._states[new.req_id] = _State(
                len(new.prefill_token_ids),
                new.num_computed_tokens,
                list(new.block_ids[0]),
                min(self._max_model_len, prompt + new.sampling_params.max_tokens),
                new.sampling_params,
            )
        cached = step.scheduled_cached_reqs
        assert not cached.resumed_req_ids, "Model Runner V2 takes them for new ones"
        for name, blocks in zip(cached.req_ids, cached.new_block_ids):
            self._states[name].blocks += blocks[0] if blocks else []

    def _check_placeholders(self, name: str, state: _State, drafts: int, reads: bool) -> None:
        if self.config is None:
            assert not drafts
            return
        if not self.is_asynchronous:
            assert drafts <= state.proposed <= state.planned, (name, drafts, state)
            return
        # The scheduler cuts them where they would reach beyond max_model_len if all that is in
        # flight were accepted, where blocks are short, and beside prompts.
        reach = state.computed + 2 * (1 + self.config.num_speculative_tokens)
        may_be_cut = self.is_short_of_memory or reads or reach >= self._max_model_len - 1
        assert drafts == state.planned or (may_be_cut and drafts < state.planned), (name, state)

    def _verify(self, name: str, state: _State, num_tokens: int) -> int:
        text, route = self.world.text.of(name), state.route
        rates = {HIERARCHICAL: text.level2, "prompt_lookup": text.lookup}
        rate = rates.get(route, text.level1 * text.level2)
        return self.world.accepted(rate, num_tokens)

    def _propose(self, plan, emitting: set[str], step) -> float:
        """Seconds; and ``proposed`` of every request."""
        self._took = list(step.num_scheduled_tokens)
        for name in self._took:
            self._states[name].proposed = self._states[name].planned = 0
        if plan is None:
            return 0.0
        assert plan.proposing.keys() <= emitting, "planned for requests that cannot propose"
        by_route: dict[str, dict[str, Choice]] = {}
        for name, its in plan.proposing.items():
            state = self._states[name]
            assert 0 < its.num_tokens <= self.config.num_speculative_tokens and its.num_rounds > 0
            assert not decodes_plainly(state.params)
            self._slots.add(name)
            by_route.setdefault(its.route, {})[name] = its
            state.planned, state.route = its.num_tokens, its.route
        assert len(self._slots) <= self.config.max_speculating_seqs, "more than have slots"
        return sum(self._go(route, plans) for route, plans in by_route.items())

    def _go(self, route: str, plans: dict[str, Choice]) -> float:
        """What the requests of a route propose, and what that takes."""
        machine, gamma, rows = self.world.machine, self.config.gamma, []
        rounds = max(its.num_rounds for its in plans.values())
        contexts = [self._states[name].computed for name in plans]
        seconds = machine.proposing(route, contexts, rounds, gamma)
        for name, its in plans.items():
            state = self._states[name]
            most = room_for_proposal(
                state.computed,
                its.num_tokens,
                len(state.blocks) * self._block_size,
                state.limit,
                self.config.min_context,
            )
            row = (
                self._levels(name, most, its) if route == HIERARCHICAL else (max(0, most), 0, 0, 0)
            )
            if route == HIERARCHICAL and not state.has_summaries:
                seconds += machine.selection * state.computed
                state.has_summaries = True
            text = self.world.text.of(name)
            if route == "prompt_lookup" and self.world.draw.random() >= text.match:
                row = (0, 0, 0, 0)
            state.proposed = row[0]
            rows.append(row)
        self._reports.add(list(plans), torch.tensor(rows, dtype=torch.int32))
        self._reports.add_time(route, 0.0, seconds)
        return seconds

    def _levels(self, name: str, most: int, its: Choice) -> tuple[int, int, int, int]:
        gamma = self.config.gamma
        text = self.world.text.of(name)
        length = rounds = right = wrong = 0
        while length < most and rounds < its.num_rounds:
            kept = self.world.accepted(text.level1, gamma)
            right, wrong, rounds = right + kept, wrong + (kept < gamma), rounds + 1
            length = min(most, length + kept + 1)
        return length, rounds, right, wrong
