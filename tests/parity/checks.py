"""What must come out of a case: the same code for both runners."""

import itertools
import re
from collections import Counter

import numpy as np
import torch

from tests import calibration, joint, reasoning_parser
from tests.asked import sampled_from, shaped, target_logits
from tests.calibration import assert_rate
from tests.outputs import assert_same_outputs
from tests.parity.cases import ANSWER, Case
from tests.parity.running import Job, Seen
from tests.parity.stock import Stock, has_one_answer

ACCEPTANCE = (
    "num_level1_drafted",
    "num_level1_accepted",
    "num_level2_drafted",
    "num_level2_accepted",
    "num_proposals",
)
# Of a right distribution, once in ten thousand runs; the runs are seeded, so it is never or ever.
LEAST_P_VALUE = 1e-4


def check_all(case: Case, job: Job, seen: Seen, reference: Stock) -> None:
    checks = Checks(case, job, seen, reference)
    checks.ended_as_asked()
    if "per_request_spec_decode_metrics" in case.engine:
        checks.figures_add_up()
    for name, least in case.at_least.items():
        count = sum(getattr(batch.counted, name) for batch in seen.batches)
        assert count >= least, f"{name} is {count}: nothing was tested"
    for name in case.checks:
        getattr(checks, name.replace(" ", "_"))()


def p_values(target: str, answered: list[tuple[list[int], dict, list[int]]]) -> list[float]:
    """Of all sampled tokens together, by each test of ``calibration``.

    Args:
        answered: prompt, parameters and completion of each request.
    """
    probs, sampled = [], []
    for prompt, params, new in answered:
        if params.get("temperature", 0) == 0:
            continue
        logits = target_logits(target, prompt, new, params.get("adapter"))
        probs.append(sampled_from(shaped(logits, prompt, new, params), params))
        sampled.append(torch.tensor(new))
    probs, sampled = torch.cat(probs), torch.cat(sampled)
    assert len(sampled) >= 100
    excluded = float(probs.gather(1, sampled[:, None]).min()) == 0
    assert not excluded, "a token that the target's sampling parameters exclude"
    return calibration.p_values(probs, sampled)


class Checks:
    """A method for each name of ``Case.checks``.

    Args:
        reference: stock vLLM, whose answers are right.
    """

    def __init__(self, case: Case, job: Job, seen: Seen, reference: Stock) -> None:
        self.case, self.job, self.seen, self.reference = case, job, seen, reference
        self.batches = seen.batches

    def ended_as_asked(self) -> None:
        assert len(self.batches) == len(self.job.rounds)
        for batch, requests in zip(self.batches, self.job.rounds):
            assert len(batch.outputs) == len(requests)
            for output, (_, params) in zip(batch.outputs, requests):
                assert output.finished != self.case.is_session
                assert [o.index for o in output.outputs] == list(range(params.get("n", 1)))
                limit = params["max_tokens"]
                assert limit is None or all(len(o.token_ids) <= limit for o in output.outputs)

    def figures_add_up(self) -> None:
        """Each answer's own figures, which vLLM keeps, add up to what TriForce counts."""
        for batch in self.batches:
            # A session's are of all turns so far.
            outputs = batch.outputs[-1:] if self.case.is_session else batch.outputs
            own = [o.spec_decode_metrics for output in outputs for o in output.outputs]
            counted = batch.counted
            assert sum(sum(figures.histogram) for figures in own) == counted.num_level3_steps
            assert sum(figures.num_draft_tokens for figures in own) == counted.num_level2_drafted
            accepted = sum(sum(figures.per_step_accepted) for figures in own)
            assert accepted == counted.num_level2_accepted

    def ended_inside_a_run(self) -> None:
        """Tokens were accepted behind the ends of some requests."""
        outputs = [output.outputs[0] for output in self.batches[0].outputs]
        made = [1 + sum(n + 1 for n in o.spec_decode_metrics.per_step_accepted) for o in outputs]
        behind = [its - len(o.token_ids) for its, o in zip(made, outputs)]
        assert sum(count > 0 for count in behind) > 1, behind

    def stock(self) -> None:
        """Tokens, text, reasons, usage and log-probabilities of requests with one right answer."""
        identical = asked = 0
        for number, batch in enumerate(self.batches):
            wanted = self.reference.answers(self.job)[number]
            chosen = [i for i, answer in enumerate(wanted) if answer is not None]
            identical += assert_same_outputs(
                self.reference.engine(self.job) if self.case.ties else None,
                [wanted[i] for i in chosen],
                [batch.outputs[i] for i in chosen],
            )
            asked += len(chosen)
        assert asked
        assert identical >= (1 - self.case.ties) * asked

    def nothing_proposed(self) -> None:
        for batch in self.batches:
            assert batch.counted.num_proposals == batch.counted.num_level2_passes == 0
        assert not any(self.seen.held.values())

    def gate(self) -> None:
        """The first round is of short requests, the last of both kinds."""
        first, last = self.batches[0], self.batches[-1]
        least = self.case.keys["min_context"]
        is_long = [len(prompt) >= least for prompt, _ in self.job.rounds[-1]]
        assert not any(len(prompt) >= least for prompt, _ in self.job.rounds[0])
        assert 0 < sum(is_long) < len(is_long)
        assert first.counted.num_proposals == 0
        most = sum(len(o.outputs[0].token_ids) for o, long in zip(last.outputs, is_long) if long)
        assert 0 < last.counted.num_proposals <= most

    def crossed(self) -> None:
        """The first round ends before the gate, the second goes on behind it."""
        before, behind = self.batches
        assert before.counted.num_proposals == 0
        assert behind.counted.num_level2_accepted > 0

    def policy(self) -> None:
        assert self.seen.policy == self.case.keys["selection"]

    def always_right(self) -> None:
        for batch in self.batches:
            assert batch.counted.num_level2_accepted == batch.counted.num_level2_drafted > 0

    def level_1_always_right(self) -> None:
        for batch in self.batches:
            assert batch.counted.num_level1_accepted == batch.counted.num_level1_drafted > 0

    def level_1_for_text_alone(self) -> None:
        """The last round has images only."""
        counted = self.batches[-1].counted
        assert counted.num_level1_drafted == 0 < counted.num_proposals

    def nan(self) -> None:
        first, again = self.batches
        assert first.disturbed["struck"] and first.counted.num_nan_requests == 1
        assert first.disturbed["warned"], "the log says so once"
        rows, together = first.disturbed["rows"], len(self.job.rounds[0])
        assert together in rows and rows[-1] < together, "it is disabled, the others are not"
        # On Runner V2 the scheduler hears of it, long before the request ends.
        assert not any(first.disturbed.get("able", ())[-2:])
        assert first.disturbed.get("as planned", True), "or parallel ranks launch differently"
        assert first.counted.num_level2_accepted > 0
        assert first.disturbed["finite"], "what it may have reached is cleaned"
        # What comes after is as if nothing had been.
        assert again.counted.num_nan_requests == 0
        assert again.counted.num_level2_accepted > first.counted.num_level2_accepted
        assert max(self.seen.held.values()) <= len(self.job.rounds[1])
        assert self.seen.held["disabled"] == 0

    def preempted(self) -> None:
        assert self.batches[0].num_preempted > 0

    def nothing_kept(self) -> None:
        """But for the last round's requests, until the next one comes."""
        assert self.seen.num_blocks_held == 0
        assert max(self.seen.held.values()) <= len(self.job.rounds[-1])

    def prefix(self) -> None:
        """The first request is cold, and again as the second."""
        cold, cached, _ = self.batches
        (first,) = cold.outputs
        assert first.num_cached_tokens == 0
        known = [*first.prompt_token_ids, *first.outputs[0].token_ids[:-1]]
        for batch in self.batches[1:]:
            for output in batch.outputs:
                pairs = zip(known, output.prompt_token_ids[:-1])
                common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
                assert output.num_cached_tokens == common // 32 * 32
        assert output.num_cached_tokens > len(first.prompt_token_ids), "of the answer too"
        for name in ACCEPTANCE:
            assert getattr(cached.counted, name) == getattr(cold.counted, name) > 0, name

    def read_together(self) -> None:
        """The first round is read in one step: all but one find what the first has yet to write."""
        first, *others = self.batches[0].outputs
        assert first.num_cached_tokens == 0
        assert all(output.num_cached_tokens >= 9 * 32 for output in others)
        num_tokens = sum(len(prompt) for prompt, _ in self.job.rounds[0])
        assert num_tokens <= self.case.engine["max_num_batched_tokens"]

    def cut(self) -> None:
        """More tokens were sampled than came out: a turn ended inside a run of accepted ones."""
        (batch,) = self.batches
        emitted = sum(len(output.outputs[0].token_ids) for output in batch.outputs)
        in_runs = batch.counted.num_level3_steps + batch.counted.num_level2_accepted
        # The step that has read a piece emits a token, and verifies nothing.
        assert len(batch.outputs) + in_runs > emitted

    def stopped(self) -> None:
        assert self.batches[0].outputs[0].outputs[0].finish_reason == "stop"

    def ended_after_min_tokens(self) -> None:
        for output, (_, params) in zip(self.batches[0].outputs, self.job.rounds[0]):
            assert len(output.outputs[0].token_ids) == params["min_tokens"] + 1

    def reasoning_ended(self) -> None:
        """All that have a budget: or nothing was tested."""
        for batch, requests in zip(self.batches, self.job.rounds):
            for output, (_, params) in zip(batch.outputs, requests):
                if params["thinking_token_budget"] is not None:
                    assert "\n    return" in output.outputs[0].text

    def grammar_from_the_end_of_reasoning(self) -> None:
        """Which is inside a run of accepted tokens: or nothing was tested."""
        for batch in self.batches:
            assert any(reasoning_parser.END in run[:-1] for run in batch.runs)
            for output in batch.outputs:
                thought, end, answer = output.outputs[0].text.partition(" return")
                assert end and re.fullmatch(ANSWER, answer), (thought, answer)

    def named(self) -> None:
        """Who names tokens gets their log-probabilities (``stock`` compares them), no other any."""
        for output, (_, params) in zip(self.batches[0].outputs, self.job.rounds[0]):
            tables = output.outputs[0].logprobs or []
            named = params.get("logprob_token_ids")
            assert len(tables) == (params["max_tokens"] if named else 0)
            assert all(set(named) <= set(table) for table in tables)

    def limited(self) -> None:
        """By each answer's own figures: all, none, and two tokens of a proposal at most."""
        answers = [output.outputs[0] for output in self.batches[0].outputs]
        free, off, few = (answer.spec_decode_metrics for answer in answers)
        assert max(free.per_step_drafted) > 2 and not off.num_draft_tokens
        assert 0 < max(few.per_step_drafted) <= 2

    def obeyed(self) -> None:
        """Sampled requests whose tokens are restricted."""
        restricted = 0
        for output, (_, params) in zip(self.batches[0].outputs, self.job.rounds[0]):
            if has_one_answer(params):
                continue
            if allowed := params.get("allowed_token_ids"):
                restricted += 1
                assert set(output.outputs[0].token_ids) <= set(allowed)
            if "structured_outputs" in params:
                restricted += 1
                assert set(output.outputs[0].text) <= set(" abcdefghijklm")
                assert len(output.outputs[0].text) >= 6
        assert restricted == 2

    def as_alone(self) -> None:
        def by_prompt(batches) -> list:
            return sorted(
                (
                    len(output.prompt_token_ids),
                    list(answer.token_ids),
                    answer.spec_decode_metrics.histogram,
                )
                for batch in batches
                for output in batch.outputs
                for answer in output.outputs
            )

        batches = [batch for batch in self.batches if len(batch.outputs) > 1]
        alone = by_prompt(batch for batch in self.batches if len(batch.outputs) == 1)
        assert batches
        for batch in batches:
            assert by_prompt([batch]) == alone

    def _p_values(self) -> list[float]:
        answered = [
            (prompt, params, list(output.outputs[0].token_ids))
            for batch, requests in zip(self.batches, self.job.rounds)
            for output, (prompt, params) in zip(batch.outputs, requests)
        ]
        return p_values(self.job.target, answered)

    def calibrated(self) -> None:
        """Every token at once, against the target's distribution after the tokens before it. Greedy
        requests beside them: the oracle's best token, wherever two are not as good."""
        found = self._p_values()
        assert min(found) > LEAST_P_VALUE, found
        for output, (prompt, params) in zip(self.batches[0].outputs, self.job.rounds[0]):
            if params.get("temperature", 0) == 0:
                new = list(output.outputs[0].token_ids)
                logits = target_logits(self.job.target, prompt, new, params.get("adapter"))
                logits = shaped(logits, prompt, new, params)
                assert bool((logits.amax(-1) - logits[range(len(new)), new] < 1e-4).all())

    def not_calibrated(self) -> None:
        assert min(self._p_values()) < LEAST_P_VALUE

    def both_accepted_and_rejected(self) -> None:
        assert 0.2 < self.batches[0].counted.level2_acceptance_rate < 0.8

    def at_synthetic_rates(self) -> None:
        """Level 3 by place in a proposal."""
        (batch,), of_level1 = self.batches, self.case.keys["synthetic_level1_acceptance"]
        rates = self.case.keys["synthetic_acceptance_rates"]
        if self.case.keys["levels"] == "1,3":
            rates = [of_level1] * len(rates)
        else:
            drafted = batch.counted.num_level1_drafted
            assert_rate(batch.counted.num_level1_accepted, drafted, of_level1, least=50)
        accepted: Counter[int] = Counter()
        tested: Counter[int] = Counter()
        for output in batch.outputs:
            figures = output.outputs[0].spec_decode_metrics
            for drafted, count in zip(figures.per_step_drafted, figures.per_step_accepted):
                accepted.update(range(count))
                tested.update(range(min(count + 1, drafted)))
        for place, rate in enumerate(rates):
            assert_rate(accepted[place], tested[place], rate, least=50)

    def rejected_at_both_levels(self) -> None:
        """Or nothing was tested."""
        assert 0.05 < self.batches[0].counted.level2_acceptance_rate < 0.98
        assert 0.01 < self.batches[0].counted.level1_acceptance_rate < 0.98

    def _joint_p_values(self) -> list[float]:
        """Of each kind of request: of the joint of its second and third token."""
        (batch,), (requests,) = self.batches, self.job.rounds
        logits = joint.exact_logits(self.job.target, requests[0][0])
        samples: dict[str, list] = {}
        asked = {}
        for output, (_, params) in zip(batch.outputs, requests):
            asked[repr(params)] = params
            samples.setdefault(repr(params), []).extend(o.token_ids for o in output.outputs)
        assert all(len(own) >= 1500 for own in samples.values())
        prompt = requests[0][0]
        return [
            joint.pvalue(np.array(own), joint.asked_joint(logits, prompt, asked[kind]))
            for kind, own in samples.items()
        ]

    def joint(self) -> None:
        found = self._joint_p_values()
        assert min(found) > LEAST_P_VALUE, found

    def not_joint(self) -> None:
        assert max(self._joint_p_values()) < 1e-6
