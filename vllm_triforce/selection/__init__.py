"""Selection policies: each module here may define one, and is found by its class's ``name``."""

import importlib
import pkgutil

from vllm_triforce.selection.policy import SelectionPolicy
from vllm_triforce.selection.summaries import Summary


def _found() -> dict[str, type[SelectionPolicy]]:
    policies: dict[str, type[SelectionPolicy]] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for policy in vars(module).values():
            if not (isinstance(policy, type) and issubclass(policy, SelectionPolicy)):
                continue
            if policy.__module__ != module.__name__ or "name" not in vars(policy):
                continue
            if policy.name in policies:
                raise ValueError(
                    f"two selection policies are named {policy.name!r}: "
                    f"{policies[policy.name].__module__} and {module.__name__}; rename one"
                )
            policies[policy.name] = policy
    return dict(sorted(policies.items()))


POLICIES = _found()

__all__ = ["POLICIES", "SelectionPolicy", "Summary"]
