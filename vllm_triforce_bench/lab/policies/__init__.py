"""Policies by name: all that serve, and those of the lab alone."""

from collections.abc import Iterator, Mapping

from vllm_triforce import selection
from vllm_triforce_bench.lab.policies.base import LabPolicy, Sizes
from vllm_triforce_bench.lab.policies.chunked import chunked
from vllm_triforce_bench.lab.policies.full import Full
from vllm_triforce_bench.lab.policies.topk import TopK

_LAB_ALONE: dict[str, type[LabPolicy]] = {policy.name: policy for policy in (Full, TopK)}


class LabPolicies(Mapping[str, type[LabPolicy]]):
    """Policies by name, in the order of tables.

    Serving policies are loaded on access: a broken one of another package breaks only runs that
    compare it.
    """

    def __getitem__(self, name: str) -> type[LabPolicy]:
        """
        Raises:
            ValueError: another package's policy does not load, is none, or has the name of one of
                the lab.
        """
        if name not in _LAB_ALONE:
            return chunked(selection.POLICIES[name])
        if name in selection.POLICIES:
            raise ValueError("the lab has one of that name; rename the other package's")
        return _LAB_ALONE[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*_LAB_ALONE, *selection.POLICIES]))

    def __len__(self) -> int:
        return len({*_LAB_ALONE, *selection.POLICIES})


POLICIES = LabPolicies()

__all__ = ["POLICIES", "Full", "LabPolicy", "Sizes", "TopK"]
