"""Level 2's acceptance in batches of unequal contexts, beside that of each request alone.

    python -m benchmarks.unequal_contexts build/smollm2/gqa
    python -m benchmarks.unequal_contexts examples/models/target --draft examples/models/draft

Requests are sampled at T=1 with a seed each, so they sample the same tokens alone and together, but
for rounding. Acceptance is that of a tested token: tokens after a rejected one are not counted.
"""

import argparse
import os
from dataclasses import dataclass

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

CONTEXTS = (7000, 1000, 5000, 2000, 7900, 3000, 6000, 4000)
BATCHES = ((0, 1), (1, 0), (0, 1, 2, 3), (3, 2, 1, 0), tuple(range(8)), tuple(range(8))[::-1])


@dataclass
class Run:
    """Outcome of a batch."""

    num_accepted: int
    num_rejected: int
    samples: list[list[int]]

    @property
    def acceptance(self) -> float:
        return self.num_accepted / max(1, self.num_accepted + self.num_rejected)


def start(model: str, draft: str | None):
    from vllm import LLM

    config = {"method": "triforce", "adaptive": False, "min_context": 0}
    if draft:
        config["model"] = draft
    return LLM(
        model,
        dtype="float32",
        max_model_len=8192,
        max_num_seqs=len(CONTEXTS),
        max_num_batched_tokens=sum(CONTEXTS),  # a seeded prompt is read in one chunk
        kv_cache_memory_bytes=2 << 30,
        block_size=32,
        enforce_eager=True,
        distributed_executor_backend="uni",
        speculative_config=config,
    )


def measure(llm, prompts: list[list[int]], seeds: list[int], num_tokens: int) -> Run:
    from vllm import SamplingParams

    from vllm_triforce.metrics.report import counters_of

    params = dict(temperature=1.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    before = counters_of(llm)
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        [SamplingParams(seed=seed, **params) for seed in seeds],
        use_tqdm=False,
    )
    counted = counters_of(llm).since(before)
    samples = [list(output.outputs[0].token_ids) for output in outputs]
    return Run(counted.num_level2_accepted, counted.num_level3_rejections, samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("--draft")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    args = parser.parse_args()
    import pydoc_data.topics

    llm = start(args.model, args.draft)
    topics = pydoc_data.topics.topics
    text = llm.get_tokenizer()("\n\n".join(topics[name] for name in sorted(topics)))["input_ids"]
    prompts = [text[8000 * i :][:context] for i, context in enumerate(CONTEXTS)]
    alone = [measure(llm, [prompt], [seed], args.tokens) for seed, prompt in enumerate(prompts)]
    for context, run in zip(CONTEXTS, alone):
        print(f"{context} alone: {run.acceptance:.3f} of {run.num_accepted + run.num_rejected}")
    for rows in BATCHES:
        together = measure(llm, [prompts[row] for row in rows], list(rows), args.tokens)
        parts = [alone[row] for row in rows]
        total = Run(sum(p.num_accepted for p in parts), sum(p.num_rejected for p in parts), [])
        same = sum(tokens == part.samples[0] for tokens, part in zip(together.samples, parts))
        print(
            f"{[CONTEXTS[row] for row in rows]}: {together.acceptance:.3f}, alone "
            f"{total.acceptance:.3f}; {same} of {len(rows)} sample the same tokens"
        )


if __name__ == "__main__":
    main()
