"""Ask questions about one long document, of a server or with `LLM.chat`, and time each answer.

The document comes first in every request, so from the second question on vLLM's prefix cache holds
it and only the question is prefilled. TriForce speeds up decoding over the long context.
Start the server as in openai_client.py; then:

    python examples/long_document_chat.py
    python examples/long_document_chat.py --document FILE --questions "What is it about?" "By whom?"

or without a server, by `LLM.chat` in this process:

    python examples/long_document_chat.py --target MODEL --draft DRAFT

A longer document needs a model of more positions than SmolLM2's 8,192: `--characters` cuts it.
The embedded pair answers no questions: it continues the text with lines like source code.
"""

import argparse
import os
import time
from pathlib import Path

HERE = Path(__file__).parent
HELD_OUT = HERE / "prompts" / "held_out.txt"
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
    offline = parser.add_argument_group("without a server")
    offline.add_argument("--target", help="the model, in this process")
    offline.add_argument("--draft", help="a draft model or head; left out: prompt lookup")
    offline.add_argument("--dtype", default="auto")
    offline.add_argument("--max-model-len", type=int, help="default: the model's own")
    offline.add_argument("--eager", action="store_true", help="do not compile the models")
    return parser.parse_args()


def conversation(document: str, question: str) -> list[dict]:
    return [{"role": "system", "content": document}, {"role": "user", "content": question}]


def answer(client, model: str, messages: list[dict], max_tokens: int) -> None:
    """Stream an answer from a server."""
    begin = time.perf_counter()
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        max_completion_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
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


def answer_offline(llm, messages: list[dict], max_tokens: int) -> None:
    """Answer by `LLM.chat`, which applies the model's chat template."""
    from vllm import SamplingParams

    template = None  # the model's own
    if llm.get_tokenizer().chat_template is None:  # the embedded pair
        template = (HERE / "chat_template.jinja").read_text()
    begin = time.perf_counter()
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    (output,) = llm.chat(messages, params, use_tqdm=False, chat_template=template)
    seconds = time.perf_counter() - begin
    print(output.outputs[0].text)
    print(
        f"<<< {len(output.prompt_token_ids)} tokens in, {len(output.outputs[0].token_ids)} out: "
        f"{seconds:.2f} s, prompt and answer"
    )


def start_engine(args: argparse.Namespace):
    # GiB of KV cache on a CPU; ignored on a GPU.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    from vllm import LLM

    keys = {"method": "triforce"} | ({"model": args.draft} if args.draft else {})
    return LLM(
        args.target,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        enforce_eager=args.eager,
        speculative_config=keys,
    )


def main(args: argparse.Namespace) -> None:
    document = args.document.read_text()[: args.characters]
    if args.target:
        llm = start_engine(args)
    else:
        from openai import OpenAI

        client = OpenAI(base_url=args.base_url, api_key=args.api_key)
        model = client.models.list().data[0].id
    for question in args.questions:
        print(f"\n>>> {question}")
        messages = conversation(document, question)
        if args.target:
            answer_offline(llm, messages, args.max_tokens)
        else:
            answer(client, model, messages, args.max_tokens)


if __name__ == "__main__":
    main(parse_args())
