"""The results that a caller gets: a RequestOutput per request, with a CompletionOutput per sample. Names are vLLM's."""
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Logprob:
    """How likely a token was: its log probability, and its rank among all tokens, 1 being the likeliest."""
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One sample: the text so far, and why it ended."""
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error", None while it runs
    stop_reason: int | str | None = None  # the stop token of stop_token_ids or the stop string that ended it; the error
    logprobs: list[Mapping[int, Logprob]] | None = None  # for each token: its own and those of the best ones
    cumulative_logprob: float | None = None  # the sum of its tokens' log probabilities, where these were wanted
    score: float | None = None  # what beam search ranks it by


@dataclass
class BeamSearchSequence:
    """A beam as vLLM gives it: tokens and text begin with the prompt."""
    tokens: list[int]
    text: str
    cum_logprob: float
    finish_reason: str | None = None


@dataclass
class RequestOutput:
    """One request, finished or under way."""
    request_id: str
    prompt: str | None  # None: the prompt was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0  # prompt tokens whose K and V were found in the cache
    prompt_logprobs: list[Mapping[int, Logprob] | None] | None = None  # for each prompt token; None for the first, which nothing predicts
    sequences: list[BeamSearchSequence] | None = None  # of a beam search: outputs once more, with the prompt


def token_logprobs(token: int, found: tuple, count: int, tokenizer) -> Mapping[int, Logprob]:
    """The log probability of a token, and after it those of the `count` best (-1: of all), as a dict by token id.

    found: (its own log probability, its rank, ids of the best tokens, their log probabilities), as the runner gives them
    """
    own, rank, ids, logprobs = found
    count = len(ids) if count < 0 else count
    if not isinstance(ids, list):
        return _ManyLogprobs(token, own, rank, ids[:count], logprobs[:count], tokenizer)
    result = {token: _logprob(token, own, rank, tokenizer)}
    for place, (best, logprob) in enumerate(zip(ids[:count], logprobs), 1):
        if best not in result:
            result[best] = _logprob(best, logprob, place, tokenizer)
    return result


def _logprob(token: int, logprob: float, rank: int, tokenizer) -> Logprob:
    return Logprob(logprob, rank, tokenizer.decode([token], skip_special_tokens=False) if tokenizer else None)


class _ManyLogprobs(Mapping):
    """What `token_logprobs` returns where there are very many: the runner's tensors, of which an entry is made when it is
    looked up. All entries at once would take two seconds and 50 MB for a vocabulary of 152,000."""

    def __init__(self, token: int, own: float, rank: int, ids: "Tensor", logprobs: "Tensor", tokenizer):
        self._token, self._own, self._rank, self._tokenizer = token, own, rank, tokenizer
        self._ids, self._logprobs = ids, logprobs  # [count] each, best first

    @cached_property
    def _places(self) -> dict[int, int]:
        ids = self._ids.tolist()
        return {self._token: ids.index(self._token) if self._token in ids else len(ids)} | {id: i for i, id in enumerate(ids)}

    def __getitem__(self, token: int) -> Logprob:
        place = self._places[token]
        if token == self._token:
            return _logprob(token, self._own, self._rank, self._tokenizer)
        return _logprob(token, self._logprobs[place].item(), place + 1, self._tokenizer)

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
