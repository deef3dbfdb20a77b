"""Send questions about one long document to a server, and time each answer.

The document comes first in every request, so from the second question on vLLM's prefix cache holds
it and only the question is prefilled. TriForce speeds up decoding over the long context.
Start the server as in openai_client.py; then:

    python examples/long_document_chat.py
    python examples/long_document_chat.py --document FILE --questions "What is it about?" "By whom?"

A longer document needs a model of more positions than SmolLM2's 8,192: `--characters` cuts it.
The embedded pair answers no questions: it continues the text with lines like source code.
"""

import argparse
import time
from pathlib import Path

from openai import OpenAI

HELD_OUT = Path(__file__).parent / "prompts" / "held_out.txt"
QUESTIONS = [
    "# Which classes are defined above, and what are they for?",
    "# What does the function at the end return?",
    "# Write a test for the first function.",
]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="EMPTY")
    parser.add_argument("--document", type=Path, default=HELD_OUT)
    parser.add_argument("--characters", type=int, default=20_000, help="of the document")
    parser.add_argument("--questions", nargs="+", default=QUESTIONS)
    parser.add_argument("--max-tokens", type=int, default=128)
    return parser.parse_args()


def answer(client: OpenAI, model: str, document: str, question: str, max_tokens: int) -> None:
    begin = time.perf_counter()
    stream = client.chat.completions.create(
        model=model,
        messages=[
            {"role": "system", "content": document},
            {"role": "user", "content": question},
        ],
        max_completion_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    print(f"\n>>> {question}")
    first = last = begin
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            last = time.perf_counter()
            first = last if first == begin else first
            print(chunk.choices[0].delta.content, end="", flush=True)
        if chunk.usage:
            usage = chunk.usage
    speed = (usage.completion_tokens - 1) / (last - first) if last > first else 0.0
    print(
        f"\n<<< {usage.prompt_tokens} tokens in, {usage.completion_tokens} out: "
        f"first token after {first - begin:.2f} s, then {speed:.1f} tokens/s"
    )


def main(args: argparse.Namespace) -> None:
    client = OpenAI(base_url=args.base_url, api_key=args.api_key)
    model = client.models.list().data[0].id
    document = args.document.read_text()[: args.characters]
    for question in args.questions:
        answer(client, model, document, question, args.max_tokens)


if __name__ == "__main__":
    main(parse_args())
