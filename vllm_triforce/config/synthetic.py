"""Acceptance at given rates (vLLM's ``rejection_sample_method: synthetic``), for benchmarks."""

from typing import Any

SYNTHETIC = "synthetic"
RATES_KEY = "synthetic_acceptance_rates"
WARNING = (
    "rejection_sample_method='synthetic': drafts are accepted at given rates whatever the model "
    "says. Outputs are not the model's; this is for benchmarks only."
)


def check_synthetic(method: str, rates: Any, level1_rate: float | None) -> None:
    """Refuse rates without ``rejection_sample_method='synthetic'``, and it without valid rates."""
    if method != SYNTHETIC:
        given = {RATES_KEY: rates, "synthetic_level1_acceptance": level1_rate}
        for name, value in given.items():
            if value is not None:
                raise ValueError(
                    f"{name}={value!r} is not supported with rejection_sample_method={method!r}, "
                    "which keeps the model's outputs. Leave it out, or use 'synthetic' for a "
                    "benchmark."
                )
    elif not _are_rates(rates):
        raise ValueError(
            f"rejection_sample_method='synthetic' is not supported with {RATES_KEY}={rates!r}: the "
            "nth rate is the probability that the first n tokens of a proposal are accepted. Use "
            "a list of numbers from 0 to 1, none above the one before it."
        )


def extend_rates(rates: list[float], num_tokens: int) -> list[float]:
    """Continue a list to ``num_tokens`` rates, as vLLM needs it, by the last token's own rate.

    The controller chooses the length of proposals, which a user does not know.
    """
    last = rates_by_place(rates)[-1]
    return [*rates, *(rates[-1] * last**n for n in range(1, num_tokens - len(rates) + 1))]


def rates_by_place(rates: list[float]) -> list[float]:
    """Compute the probability that each token is accepted if those before it are."""
    return [
        rate / before if before else 0.0 for rate, before in zip(rates, [1.0, *rates], strict=False)
    ]


def _are_rates(rates: Any) -> bool:
    if not isinstance(rates, list) or not rates:
        return False
    are_shares = all(isinstance(rate, int | float) and 0 <= rate <= 1 for rate in rates)
    return are_shares and rates == sorted(rates, reverse=True)
