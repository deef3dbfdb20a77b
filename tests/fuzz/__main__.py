"""``python -m tests.fuzz --minutes 10``: print each fault, then a summary."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def v2_environment() -> dict[str, str]:
    """Model Runner V2 under Triton's interpreter, which must be there before vLLM is imported."""
    support = [str(ROOT / "tests" / "v2" / "support"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, support)),
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "OMP_NUM_THREADS": "1",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--runner", choices=["v1", "v2"], default="v1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--per-engine", type=int, help="streams for each engine")
    parser.add_argument("--most-engines", type=int, default=10**6)
    parser.add_argument("--shrink-seconds", type=float, default=60, help="for each kind of fault")
    parser.add_argument(
        "--control", action="store_true", help="stock vLLM in TriForce's place: finds nothing"
    )
    args = parser.parse_args()
    if args.runner == "v2" and os.environ.get("TRITON_INTERPRET") != "1":
        again = [sys.executable, "-m", "tests.fuzz", *sys.argv[1:]]
        return subprocess.call(again, env=v2_environment(), cwd=ROOT)
    from tests.fuzz.campaign import STREAMS_PER_ENGINE, Campaign

    campaign = Campaign(args.runner, args.seed, args.shrink_seconds, args.control)
    per_engine = args.per_engine or STREAMS_PER_ENGINE
    campaign.run(60 * args.minutes, per_engine, args.most_engines)
    report = campaign.report()
    for found in campaign.found.values():
        print(found.script)
    print(json.dumps(report, indent=2), flush=True)
    return bool(report["faults"]) or bool(report["engines that did not start"])


if __name__ == "__main__":
    sys.exit(main())
