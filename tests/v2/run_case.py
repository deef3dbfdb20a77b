"""Runs one group of cases on Model Runner V2 and prints what it saw as JSON.

``python -m tests.v2.run_case greedy|sampling|faults|source NAME``, as test_runner_v2.py does.
"""

import json
import sys

MARKER = "RESULTS "


def main() -> None:
    if sys.argv[1] == "greedy":
        from tests.v2.greedy_cases import run
    elif sys.argv[1] == "source":
        from tests.v2 import source_cases

        def run():
            return source_cases.run(sys.argv[2])

    elif sys.argv[1] == "faults":
        from tests.v2.fault_cases import run
    else:
        from tests.v2.sampling_cases import run
    print(MARKER + json.dumps(run()), flush=True)


if __name__ == "__main__":
    main()
