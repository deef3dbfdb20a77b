"""Stream a completion from a running server with the `openai` client.

Start the server first. With the embedded pair on a CPU, from the root of the checkout:

    VLLM_CPU_KVCACHE_SPACE=2 vllm serve examples/models/target --dtype float32 \
        --chat-template examples/chat_template.jinja --speculative-config \
        '{"method": "triforce", "model": "examples/models/draft", "retrieval_budget": 1024}'

or with a chat model and no draft: `vllm serve MODEL --speculative-model triforce`. Then:

    python examples/openai_client.py
    python examples/openai_client.py --prompt "Why is the sky blue?" --temperature 0.7

Nothing in this file is specific to TriForce: clients of vLLM's server need no change.
"""

import argparse
from pathlib import Path

from openai import OpenAI

HELD_OUT = Path(__file__).parent / "prompts" / "held_out.txt"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="EMPTY")
    parser.add_argument("--prompt", help="default: the beginning of prompts/held_out.txt")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    return parser.parse_args()


def main(args: argparse.Namespace) -> None:
    client = OpenAI(base_url=args.base_url, api_key=args.api_key)
    model = client.models.list().data[0].id
    prompt = args.prompt or HELD_OUT.read_text()[:20_000]

    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_completion_tokens=args.max_tokens,
        temperature=args.temperature,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        if chunk.usage:
            usage = chunk.usage
    print(f"\n{model}: {usage.prompt_tokens} tokens in, {usage.completion_tokens} out")


if __name__ == "__main__":
    main(parse_args())
