"""What of the time of decoding goes into model passes, and what is beside them.

    python tools/time_outside_passes.py --context 16000 --temperature 0.6 --top-p 0.9

Takes the options of examples/demo.py. Counts from the ninth token on: the first steps select,
compile and fill caches. Stock vLLM and TriForce run in turns on the same stretches of text.
"""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import demo

_SKIPPED_TOKENS = 8


@dataclass
class PassTimes:
    """Seconds inside the models of an engine."""

    seconds: float = 0.0
    num_passes: int = 0

    def watch(self, model) -> None:
        model.forward = self._timed(model.forward, is_pass=True)
        model.compute_logits = self._timed(model.compute_logits, is_pass=False)

    def _timed(self, function, is_pass: bool):
        def timed(*args, **kwargs):
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start
                self.num_passes += is_pass

        return timed


def watch_engine(llm) -> PassTimes:
    """Times the passes of the target and, where there is one, of the draft."""
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    times = PassTimes()
    times.watch(worker.model_runner.model)
    draft = getattr(getattr(worker, "triforce", None), "model", None)
    if draft is not None:
        times.watch(draft)
    return times


def decode(llm, prompt: list[int], times: PassTimes, args) -> str:
    """Continues a prompt; one line of what was found."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=args.temperature, top_p=args.top_p, max_tokens=args.tokens, ignore_eos=True
    )
    engine = llm.llm_engine
    engine.add_request(f"{time.monotonic_ns()}", {"prompt_token_ids": prompt}, params)
    num_tokens = num_steps = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            num_tokens = len(output.outputs[0].token_ids)
        num_steps += 1
        if num_tokens <= _SKIPPED_TOKENS:
            start, first_tokens, num_steps = time.perf_counter(), num_tokens, 0
            times.seconds, times.num_passes = 0.0, 0
    seconds = time.perf_counter() - start
    outside = seconds - times.seconds
    return (
        f"{(num_tokens - first_tokens) / seconds:6.1f} tokens/s, {num_steps} steps, "
        f"{times.num_passes} passes; outside of them {outside / seconds:.1%} of the time, "
        f"{1000 * outside / num_steps:.1f} ms a step"
    )


def main() -> None:
    args = demo.parse_args()
    keys = {"method": "triforce", "retrieval_budget": args.budget}
    if args.draft:
        keys["model"] = args.draft
    engines = {
        "stock vLLM": demo.start_engine(args, None),
        "TriForce": demo.start_engine(args, keys),
    }
    times = {name: watch_engine(llm) for name, llm in engines.items()}
    text = engines["stock vLLM"].get_tokenizer()(Path(args.prompt).read_text())["input_ids"]
    for run in range(args.runs):
        prompt = text[run * args.stride :][: args.context]
        for name, llm in engines.items():
            demo.decode(llm, prompt, args, show=False, max_tokens=24)
            print(
                f"stretch {run + 1}, {name:10}: {decode(llm, prompt, times[name], args)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
