"""Promise: a stream's pieces are the answer that is not streamed, which is stock vLLM's."""

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from tests.outputs import assert_same_outputs, run, speculating

pytestmark = pytest.mark.engine

HALF = "\N{REPLACEMENT CHARACTER}"
# The pair's tokenizer has seen none of these: each takes two to four tokens.
CHARACTERS = "é“”👧"
NUM_TOKENS = 48


@pytest.fixture(scope="module")
def prompt(text):
    return text[1000:2000]


@pytest.fixture(scope="module")
def asked(stock, prompt, ranks_without_compiler) -> list[dict]:
    """Parameters of requests that say, in bytes of the characters above, now a character, now what
    is none; some end inside one, some by a stop string of two."""
    tokenizer = stock.get_tokenizer()
    allowed = tokenizer(CHARACTERS + " a", add_special_tokens=False)["input_ids"]
    common = dict(
        temperature=0,
        ignore_eos=True,
        allowed_token_ids=sorted(set(allowed)),
        frequency_penalty=2.0,
        max_tokens=NUM_TOKENS,
    )
    text = run(stock, [prompt], [SamplingParams(**common)])[0].outputs[0].text
    place = next(i for i in range(8, len(text)) if text[i] in CHARACTERS)
    stop = text[place : place + 2]
    return [
        *(common | {"max_tokens": n} for n in (7, 8, 9, 10)),
        common | {"logprobs": 2},
        common | {"logprobs": 1, "stop": [stop]},
        common | {"stop": [stop], "include_stop_str_in_output": True},
        common | {"n": 2, "temperature": 1.0, "top_k": 1, "logprobs": 0},
    ]


def stream(llm, prompt, asked: list[dict]) -> list[dict[int, list]]:
    """By request and choice, vLLM's ``CompletionOutput`` of each piece."""
    engine = llm.llm_engine
    for number, params in enumerate(asked):
        params = SamplingParams(**params, output_kind=RequestOutputKind.DELTA)
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    found: list[dict[int, list]] = [{} for _ in asked]
    while engine.has_unfinished_requests():
        for output in engine.step():
            for piece in output.outputs:
                found[int(output.request_id)].setdefault(piece.index, []).append(piece)
    return found


@pytest.fixture(scope="module")
def answers(stock, llm, prompt, asked):
    params = [SamplingParams(**each) for each in asked]
    wanted, found = (
        run(stock, [prompt] * len(asked), params),
        run(llm, [prompt] * len(asked), params),
    )
    assert assert_same_outputs(stock, wanted, found) == len(asked) + 1, "one has two choices"
    return found


@pytest.mark.parametrize("interval", [1, pytest.param(3, marks=pytest.mark.thorough), 7])
def test_pieces_are_the_answer(llm, prompt, asked, answers, interval):
    """Also characters of several tokens, which an accepted run may cut anywhere."""
    asked = [params | {"stream_interval": interval} for params in asked]
    with speculating(llm, rejections=False):
        streams = stream(llm, prompt, asked)
    num_cut = num_whole = 0
    for pieces_of, answer in zip(streams, answers, strict=True):
        assert len(pieces_of) == len(answer.outputs)
        for whole in answer.outputs:
            pieces = pieces_of[whole.index]
            assert "".join(piece.text for piece in pieces) == whole.text
            tokens = [token for piece in pieces for token in piece.token_ids]
            assert tokens == list(whole.token_ids)
            reasons = [(piece.finish_reason, piece.stop_reason) for piece in pieces]
            *before, last = reasons
            assert last == (whole.finish_reason, whole.stop_reason)
            assert before == [(None, None)] * len(before)
            assert all(len(piece.token_ids) >= interval for piece in pieces[1:-1])
            if whole.logprobs is not None:
                tables = [list(table) for piece in pieces for table in piece.logprobs]
                assert tables == [list(table) for table in whole.logprobs]
            num_whole += sum(ord(c) > 127 and c != HALF for c in whole.text)
            num_cut += check_ends(llm.get_tokenizer(), pieces, whole.text)
    assert num_whole > 20 and num_cut > 0, (num_whole, num_cut, answers[4].outputs[0].text)


def check_ends(tokenizer, pieces, text: str) -> int:
    """No piece ends in half a character that is whole later.

    Returns:
        The number of pieces of several tokens whose last token begins, or goes on with, one.
    """
    num_cut, said, tokens = 0, "", []
    for piece in pieces[:-1]:
        said += piece.text
        tokens += piece.token_ids
        assert not piece.text.endswith(HALF) or text[len(said) - 1] == HALF
        is_cut = tokenizer.decode(tokens).endswith(HALF) and not said.endswith(HALF)
        num_cut += is_cut and len(piece.token_ids) > 1
    return num_cut
