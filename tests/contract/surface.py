"""Kinds of entries of the table of vLLM surfaces, and what each means."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Surface:
    """An interface of vLLM; ``user`` is the file of ours that would break."""

    file: str  # below the folder vllm
    name: str  # class, function or method
    wanted: str
    user: str
    judge: Callable[["Surface", dict], str | None]
    needs_events: bool = False

    @property
    def place(self) -> str:
        return f"vllm/{self.file}: {self.name}" if self.name else f"vllm/{self.file}"

    @property
    def steps(self) -> list[str]:
        """Return the actions of ``does``."""
        return self.wanted.split(" < ")


def overrides(file: str, name: str, signature: str, user: str) -> Surface:
    """Require an exact signature of a method that we override or wrap."""
    return Surface(file, name, signature, user, _judge_signature)


def calls(file: str, name: str, arguments: str, user: str) -> Surface:
    """A function that we call: ``a, b, c=`` passes two by place, and c by name. It takes them,
    under these names, and wants no others. For a class, name its ``__init__``."""
    return Surface(file, name, arguments, user, _judge_call)


def has(file: str, name: str, members: str, user: str) -> Surface:
    """Require a class that itself defines these attributes, methods or fields (``a b c``)."""
    return Surface(file, name, members, user, _judge_members)


def derives(file: str, name: str, base: str, user: str) -> Surface:
    """Require a class with this direct base."""
    return Surface(file, name, base, user, _judge_base)


def does(file: str, name: str, wanted: str, user: str) -> Surface:
    """A function in whose source these come in this order, separated by `` < ``: ``f(`` a call,
    ``x =`` an assignment, ``isinstance(x, C)`` a test."""
    return Surface(file, name, wanted, user, _judge_events, needs_events=True)


def offers(file: str, names: str, user: str) -> Surface:
    """A module from which these can be had (``a b``). What is imported by name need not be said:
    contract.py reads our imports."""
    return Surface(file, "", names, user, _judge_names)


def _judge_names(surface: Surface, facts: dict) -> str | None:
    missing = sorted(set(surface.wanted.split()) - set(facts["names"].split()))
    return f"no longer offers {', '.join(missing)}" if missing else None


def _judge_signature(surface: Surface, facts: dict) -> str | None:
    found = facts["functions"].get(surface.name)
    if found is None:
        return "is gone"
    return None if found == surface.wanted else f"takes ({found}), not ({surface.wanted})"


def _judge_call(surface: Surface, facts: dict) -> str | None:
    found = facts["functions"].get(surface.name)
    if found is None:
        return "is gone"
    parameters, positional, takes_any = [], [], False
    by_name_only = False
    for part in filter(None, found.split(", ")):
        if part.startswith("**"):
            takes_any = True
        elif part.startswith("*"):
            by_name_only = True
        else:
            parameters.append(part)
            if not by_name_only:
                positional.append(part.rstrip("="))
    if positional and positional[0] in ("self", "cls"):
        positional, parameters = positional[1:], parameters[1:]
    given = [part for part in surface.wanted.split(", ") if part]
    by_place = [part for part in given if not part.endswith("=")]
    by_name = [part.rstrip("=") for part in given if part.endswith("=")]
    if positional[: len(by_place)] != by_place:
        return f"takes ({found}): we pass {by_place} by place"
    names = [part.rstrip("=") for part in parameters]
    if unknown := [name for name in by_name if name not in names and not takes_any]:
        return f"takes ({found}): no longer {unknown}"
    missing = [p for p in parameters if not p.endswith("=") and p not in by_place + by_name]
    return f"takes ({found}): wants {missing}, which we do not pass" if missing else None


def _judge_members(surface: Surface, facts: dict) -> str | None:
    found = facts["classes"].get(surface.name)
    if found is None:
        return "is gone"
    known = set(found["members"].split())
    missing = [name for name in surface.wanted.split() if name not in known]
    return f"no longer has {', '.join(missing)}" if missing else None


def _judge_base(surface: Surface, facts: dict) -> str | None:
    found = facts["classes"].get(surface.name)
    if found is None:
        return "is gone"
    return None if surface.wanted in found["bases"] else f"derives from {found['bases']}"


def _judge_events(surface: Surface, facts: dict) -> str | None:
    found = facts["events"].get(surface.name)
    if found is None:
        return "is gone"
    done = ""
    for step in surface.steps:
        if step not in found:
            return f"no longer does {step!r}{done}"
        found = found[found.index(step) + 1 :]
        done = f" after {step!r}"
    return None
