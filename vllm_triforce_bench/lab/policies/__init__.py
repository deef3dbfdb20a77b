"""Policies by name: all that serve, and those of the lab alone."""

from collections.abc import Iterator, Mapping

from vllm_triforce import selection
from vllm_triforce_bench.lab.policies.base import LabPolicy, Sizes
from vllm_triforce_bench.lab.policies.chunked import chunked
from vllm_triforce_bench.lab.policies.full import Full
from vllm_triforce_bench.lab.policies.h2o import H2O
from vllm_triforce_bench.lab.policies.second_look import SecondLook
from vllm_triforce_bench.lab.policies.topk import TopK


class LabPolicies(Mapping[str, type[LabPolicy]]):
    """Policies by name, in the order of tables.

    Serving policies are loaded on access: a broken one of another package breaks only runs that
    compare it.

    Args:
        first, last: policies of the lab alone, before and after those that serve.
    """

    def __init__(self, first: list[type[LabPolicy]], last: list[type[LabPolicy]]) -> None:
        self._lab_policies = {policy.name: policy for policy in [*first, *last]}
        names = [p.name for p in first], selection.POLICIES.names, [p.name for p in last]
        self._names = dict.fromkeys(name for part in names for name in part)
        self._serving: dict[str, type[LabPolicy]] = {}

    def __getitem__(self, name: str) -> type[LabPolicy]:
        """
        Raises:
            ValueError: another package's policy does not load, is none, or has the name of one of
                the lab.
        """
        if name in self._lab_policies:
            if name in selection.POLICIES.names:
                raise ValueError("the lab has one of that name; rename the other package's")
            return self._lab_policies[name]
        if name not in self._serving:
            self._serving[name] = chunked(selection.POLICIES[name])
        return self._serving[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


POLICIES = LabPolicies([Full, TopK], [SecondLook, H2O])

__all__ = ["H2O", "POLICIES", "Full", "LabPolicy", "SecondLook", "Sizes", "TopK"]
