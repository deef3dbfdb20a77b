"""What stock vLLM answers, on Model Runner V1: the one reference for both runners."""

from tests.parity.running import Job, converse, generate


def has_one_answer(params: dict) -> bool:
    return params.get("temperature", 0) == 0 or params.get("top_k") == 1


class Stock:
    """Requests are asked once, whatever case they are in, beside others of their kind."""

    def __init__(self, engines) -> None:
        self._engines = engines
        self._known: dict[str, object] = {}

    def engine(self, job: Job):
        """The case's limit counts where a request reaches it; small models have no greater one."""
        limit = job.engine.get("max_model_len")
        is_small = job.engine.get("skip_tokenizer_init", False)
        reached = limit is not None and any(
            params["max_tokens"] is None or len(prompt) + params["max_tokens"] > limit
            for batch in job.rounds
            for prompt, params in batch
        )
        own = {"max_model_len": limit} if limit and (reached or is_small) else {}
        its = ("lora", "reasoning", "logprobs_mode", "mm_per_prompt")
        own |= {k: v for k, v in job.engine.items() if any(name in k for name in its)}
        if "limit_mm_per_prompt" in own:  # such a model needs its tokenizer
            own["skip_tokenizer_init"] = False
        return self._engines.get(job.target, **own)

    def usual(self, model):
        """The completion of the text's beginning, for parameters that depend on it."""
        return self.completion(model, model.text[:700], USUAL)

    def completion(self, model, prompt: list[int], params: dict):
        job = Job("", model.target, {}, {}, [[(prompt, params)]], 0, ())
        return self.answers(job)[0][0].outputs[0]

    def answers(self, job: Job) -> list[list]:
        """By round and request; None where there is no one right answer."""
        llm = self.engine(job)
        if job.is_session:
            return [converse(llm, pieces) for pieces in job.rounds]
        asked = [
            [(prompt, _greedy(params)) if has_one_answer(params) else None for prompt, params in b]
            for b in job.rounds
        ]
        # Those of one kind together: named log-probabilities disturb the others' in stock vLLM.
        kinds: dict[str, list] = {}
        for request in (request for batch in asked for request in batch if request):
            if self._key(llm, request) not in self._known:
                self._known[self._key(llm, request)] = None
                kinds.setdefault(repr(request[1]), []).append(request)
        for requests in kinds.values():
            for request, output in zip(requests, generate(llm, requests)):
                self._known[self._key(llm, request)] = output
        return [[r and self._known[self._key(llm, r)] for r in batch] for batch in asked]

    @staticmethod
    def _key(llm, request) -> str:
        return repr((llm.model_config.model, llm.model_config.max_model_len, request))


USUAL = {"max_tokens": 40, "ignore_eos": False}


def _greedy(params: dict) -> dict:
    return {k: v for k, v in params.items() if k not in ("temperature", "top_k", "seed")}
