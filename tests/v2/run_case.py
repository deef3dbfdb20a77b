"""Runs ``cases.py`` on Model Runner V2 and prints what it saw as JSON.

``python -m tests.v2.run_case`` in ``v2_environment()``, with the models and prompts on stdin.
"""

import json
import sys

MARKER = "RESULTS "


def main() -> None:
    from tests.v2.cases import run

    print(MARKER + json.dumps(run(json.load(sys.stdin))), flush=True)


if __name__ == "__main__":
    main()
