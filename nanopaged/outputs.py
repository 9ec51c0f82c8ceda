"""What a caller gets back: a RequestOutput per request, with a CompletionOutput per sample. Names are vLLM's."""
from dataclasses import dataclass


@dataclass
class CompletionOutput:
    """One sample: the text so far, and why it ended."""
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None  # "stop" | "length" | "abort", None while it runs
    stop_reason: int | None = None  # the stop token that ended it, where it was one of stop_token_ids


@dataclass
class RequestOutput:
    """One request, finished or under way."""
    request_id: str
    prompt: str | None  # None: the prompt was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0  # prompt tokens whose K and V were found in the cache
