"""Can the rest run on this machine? vLLM and the plugin import, and a prompt is answered."""

import argparse
import json
import platform
import tempfile
from pathlib import Path

from vllm_triforce_bench.gpu_suite.engine import decode, make_engine
from vllm_triforce_bench.gpu_suite.geometry import GEOMETRIES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--result", type=Path, required=True)
    args = parser.parse_args()
    import torch
    import vllm

    gpu = torch.cuda.get_device_name() if args.device != "cpu" else platform.machine()
    found = {"device": gpu, "torch": torch.__version__, "vllm": vllm.__version__}
    with tempfile.TemporaryDirectory() as folder:
        model = GEOMETRIES["tiny"].write(Path(folder))
        llm = make_engine(model, args.device, load_format="dummy", max_model_len=512)
        found["num_tokens"] = len(decode(llm, [[5, 6, 7]], 8).token_ids[0])
    args.result.write_text(json.dumps(found))
    print(found)


if __name__ == "__main__":
    main()
