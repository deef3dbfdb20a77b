"""``python -m tests.fuzz --minutes 10``: print each fault, then a summary."""

import argparse
import json
import os
import subprocess
import sys

from tests.fuzz.models import DRAFTS
from tests.models import ROOT
from tests.v2.environment import v2_environment


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--runner", choices=["v1", "v2"], default="v1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--per-engine", type=int, default=25, help="streams for each engine")
    parser.add_argument("--most-engines", type=int, default=10**6)
    parser.add_argument(
        "--shrink-seconds", type=float, default=60, help="for each kind of fault; 0: none"
    )
    parser.add_argument(
        "--control", action="store_true", help="stock vLLM in TriForce's place: finds nothing"
    )
    parser.add_argument("--model", choices=DRAFTS, help="of all engines")
    parser.add_argument("--connectors", action="store_true", help="KV connectors in half of them")
    args = parser.parse_args()
    if args.runner == "v2" and os.environ.get("TRITON_INTERPRET") != "1":
        again = [sys.executable, "-m", "tests.fuzz", *sys.argv[1:]]
        return subprocess.call(again, env=v2_environment(), cwd=ROOT)
    from tests.fuzz.campaign import Campaign

    campaign = Campaign(args)
    campaign.run()
    report = campaign.report()
    print(json.dumps(report, indent=2), flush=True)
    return bool(report["faults"]) or bool(report["engines that did not start"])


if __name__ == "__main__":
    sys.exit(main())
