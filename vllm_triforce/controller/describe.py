"""Log line with the measurements of the start-up."""

from vllm_triforce.controller.acceptance import LEVEL2_PRIOR
from vllm_triforce.controller.controller import Controller
from vllm_triforce.controller.routes import PLAIN_ROUTE, Candidate


def describe(controller: Controller) -> str:
    """Describe in one line of the log the measured costs, and where speculation begins to pay."""
    model, config = controller.model, controller.config
    table = dict(model.measured.full_by_tokens)
    contexts = [context for context, _ in table[1]]
    shortest, longest = contexts[0], contexts[-1]
    max_tokens, max_proposed = max(table), config.num_speculative_tokens
    choices = {
        context: controller.preview(Candidate("preview", int(context), max_proposed))
        for context in contexts
    }
    wins = [context for context, choice in choices.items() if choice.route != PLAIN_ROUTE]
    decided = "no context is long enough for speculation to pay here"
    if wins:
        length = choices[wins[-1]].num_tokens
        decided = (
            f"a request alone is speculated on from {wins[0]} tokens of context on (of the sizes "
            f"measured), with {length} tokens a step at {wins[-1]}"
        )
    one, many = dict(table[1]), dict(table[max_tokens])
    return (
        f"TriForce measured: full pass of 1 and {max_tokens} tokens {_ms(one[shortest])} and "
        f"{_ms(many[shortest])} without context, {_ms(one[longest])} and {_ms(many[longest])} at "
        f"{longest} tokens; level 2 {_ms(model.level2(1, 3))}; level 1 {_ms(model.draft(1))}. "
        f"At an acceptance of {LEVEL2_PRIOR:.2f} {decided}. Times and acceptance are measured on."
    )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"
