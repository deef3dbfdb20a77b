"""Arguments of single requests, in vLLM's ``extra_args`` (the OpenAI API's ``vllm_xargs``)."""

from vllm.exceptions import VLLMValidationError

from vllm_triforce.config.keys import MAX_NUM_SPECULATIVE_TOKENS, METHOD

_LIMIT = "num_speculative_tokens"


def request_limit(params) -> int | None:
    """Return the longest proposal that a request's ``extra_args`` allow; None without a limit.

    ``triforce`` is a bool, or ``{"num_speculative_tokens": N}``. The OpenAI API's ``vllm_xargs``
    have numbers in place of bools and no objects, so they also take the key
    ``triforce_num_speculative_tokens``.

    Raises:
        VLLMValidationError: a key or value is none of these.
    """
    limit = None
    for name, value in (params.extra_args or {}).items():
        if not (isinstance(name, str) and name.startswith(METHOD)):
            continue
        given = value
        if name == METHOD and isinstance(value, dict) and value.keys() == {_LIMIT}:
            given = value[_LIMIT]
        elif name == METHOD and value in (0, 1) and isinstance(value, (bool, int)):
            limit = limit if value else 0
            continue
        elif name != f"{METHOD}_{_LIMIT}":
            given = None
        if isinstance(given, bool) or not isinstance(given, int) or given < 0:
            raise VLLMValidationError(
                f"{name}={value!r} in extra_args (vllm_xargs) is not supported. Use "
                f'"{METHOD}": false to decode this request without speculation, or '
                f'"{METHOD}_{_LIMIT}": N for proposals of at most N tokens.',
                parameter=name,
            )
        limit = min(given, MAX_NUM_SPECULATIVE_TOKENS if limit is None else limit)
    return limit
