"""The results for a caller: a RequestOutput per request, with a CompletionOutput per sample. The names are vLLM's."""
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Logprob:
    """A token's log probability, and its rank among all tokens; rank 1 is the likeliest token."""
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One sample: its text so far, and the reason of its end."""
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"; None while the sample runs
    stop_reason: int | str | None = None  # the stop token of stop_token_ids, the stop string, or the error's sentence
    logprobs: list[Mapping[int, Logprob]] | None = None  # for each token: its own Logprob and those of the best tokens
    cumulative_logprob: float | None = None  # the sum of the tokens' log probabilities, if the request asked for them
    score: float | None = None  # the score by which a beam search ranks the samples


@dataclass
class BeamSearchSequence:
    """A beam in vLLM's form: tokens and text begin with the prompt."""
    tokens: list[int]
    text: str
    cum_logprob: float
    finish_reason: str | None = None


@dataclass
class RequestMetrics:
    """What drafts were good for (nanopaged/scheduling/drafts.py)."""
    num_draft_steps: int = 0  # that computed drafts; those of n samples count n times
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # drafts that came true

    @property
    def mean_acceptance_length(self) -> float:
        """The tokens that a step with drafts has appended: the accepted drafts, and the token after them."""
        return 1 + self.num_accepted_tokens / max(1, self.num_draft_steps)

    def __add__(self, other: "RequestMetrics") -> "RequestMetrics":
        return RequestMetrics(*(a + b for a, b in zip(astuple(self), astuple(other))))

    def __sub__(self, other: "RequestMetrics") -> "RequestMetrics":
        return RequestMetrics(*(a - b for a, b in zip(astuple(self), astuple(other))))


@dataclass
class RequestOutput:
    """One request, finished or still running."""
    request_id: str
    prompt: str | None  # None: the prompt was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0  # prompt tokens whose K and V were found in the cache
    # For each prompt token; None for the first token, which no other token predicts.
    prompt_logprobs: list[Mapping[int, Logprob] | None] | None = None
    sequences: list[BeamSearchSequence] | None = None  # of a beam search: the outputs again, in vLLM's form
    metrics: RequestMetrics | None = None  # None: without drafts


class EngineDeadError(RuntimeError):
    """A worker process of an engine on several GPUs has ended or hangs; the engine can do nothing more."""


class RequestError(RuntimeError):
    """A streamed request ended with finish_reason "error". output: as far as it got."""

    def __init__(self, output: RequestOutput):
        super().__init__(output.outputs[0].stop_reason)
        self.output = output


def token_logprobs(token: int, found: tuple[float, int, Any, Any], count: int,
                   tokenizer: Any) -> Mapping[int, Logprob]:
    """Token id -> Logprob, of the token itself first and then of the `count` best tokens (-1: of all tokens).

    found: (the token's log probability, its rank, the ids of the best tokens, their log probabilities), from the runner
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


def _logprob(token: int, logprob: float, rank: int, tokenizer: Any) -> Logprob:
    return Logprob(logprob, rank, tokenizer.decode([token], skip_special_tokens=False) if tokenizer else None)


class _ManyLogprobs(Mapping):
    """The result of `token_logprobs` for the whole vocabulary, on the runner's tensors.

    An entry is made when it is looked up: all entries of a vocabulary of 152,000 would take two seconds and 50 MB.
    """

    def __init__(self, token: int, own: float, rank: int, ids: "Tensor", logprobs: "Tensor", tokenizer: Any):
        self._token = token
        self._own = own
        self._rank = rank
        self._tokenizer = tokenizer
        self._ids = ids  # [count], best token first
        self._logprobs = logprobs  # [count]

    @cached_property
    def _places(self) -> dict[int, int]:
        """Token id -> its place in the tensors, with the token itself first."""
        ids = self._ids.tolist()
        own_place = ids.index(self._token) if self._token in ids else len(ids)
        return {self._token: own_place} | {id: place for place, id in enumerate(ids)}

    def __getitem__(self, token: int) -> Logprob:
        place = self._places[token]
        if token == self._token:
            return _logprob(token, self._own, self._rank, self._tokenizer)
        return _logprob(token, self._logprobs[place].item(), place + 1, self._tokenizer)

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
