"""Write the facts of a released vLLM's source about the surfaces that TriForce uses.

    python tools/vllm_facts.py 0.33.0                     # single files from the release's wheel
    python tools/vllm_facts.py 0.33.0 --source FOLDER     # FOLDER/config/vllm.py and so on

Run it after a new entry in ``tests/contract/table.py`` or a new import of vLLM in the package.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.contract import contract  # noqa: E402
from tools.vllm_source import fetch  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("version")
    parser.add_argument("--source", type=Path, help="the folder vllm of that release")
    args = parser.parse_args()
    folder = args.source or fetch(
        args.version, ROOT / "build" / f"vllm-{args.version}", contract.files_needed()
    )
    facts = contract.facts_of(folder, args.version)
    path = contract.kept_facts(args.version)
    path.write_text(json.dumps(facts, indent=0, sort_keys=True) + "\n")
    problems = contract.complaints(facts)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes, {len(problems)} moved")
    print("\n".join(problems))


if __name__ == "__main__":
    main()
