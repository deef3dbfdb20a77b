"""The names of the smoke step's rungs, by which other steps say what they need."""

IMPORT = "import"
STOCK, TRIFORCE, CHOOSING = "stock", "TriForce", "TriForce, choosing"


def modes(device: str, no_compile: bool) -> list[str]:
    """How engines run, from the simplest to what serving uses."""
    if device == "cpu":
        return ["eager"]
    return ["eager", "graphs" if no_compile else "compiled"]


def rung(mode: str, engine: str) -> str:
    return f"{mode}, {engine}"


def need(device: str, no_compile: bool, engine: str) -> str:
    """A need of a step (``run.Step``): that this engine runs as serving runs it."""
    return f"smoke:{rung(modes(device, no_compile)[-1], engine)}"
