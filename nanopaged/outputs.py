"""The results for a caller: a RequestOutput per request, with a CompletionOutput per sample. The names are vLLM's."""
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary


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
    logprobs: list[dict[int, Logprob]] | None = None  # for each token: its own Logprob and those of the best tokens
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
    """What drafts were good for (nanopaged/features/drafts.py)."""
    num_draft_steps: int = 0  # that computed drafts; those of n samples count n times
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # drafts that came true

    @property
    def mean_acceptance_length(self) -> float:
        """The tokens that a step with drafts has appended: the accepted drafts, and the token after them."""
        return 1 + self.num_accepted_tokens / max(1, self.num_draft_steps)

    def __add__(self, other: "RequestMetrics") -> "RequestMetrics":
        return RequestMetrics(*(a + b for a, b in zip(vars(self).values(), vars(other).values())))


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
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    sequences: list[BeamSearchSequence] | None = None  # of a beam search: the outputs again, in vLLM's form
    metrics: RequestMetrics | None = None  # None: without drafts


class EngineDeadError(RuntimeError):
    """A worker process of an engine on several GPUs has ended or hangs; the engine can do nothing more."""


class RequestError(RuntimeError):
    """A streamed request ended with finish_reason "error". output: as far as it got."""

    def __init__(self, output: RequestOutput):
        super().__init__(output.outputs[0].stop_reason)
        self.output = output


def token_logprobs(token: int, found: tuple[float, int, list[int], list[float]], tokenizer: Any) -> dict[int, Logprob]:
    """Token id -> Logprob, of the token itself first and then of the best tokens.

    found: (the token's log probability, its rank, the ids of the best tokens, their log probabilities), from the runner
    """
    own, rank, ids, logprobs = found
    texts = _TEXTS.setdefault(tokenizer, {}) if tokenizer else {}

    def text(token: int) -> str | None:
        if token not in texts and tokenizer:
            texts[token] = tokenizer.decode([token], skip_special_tokens=False)
        return texts.get(token)

    return {token: Logprob(own, rank, text(token))} | {
        best: Logprob(logprob, place, text(best))
        for place, (best, logprob) in enumerate(zip(ids, logprobs), 1) if best != token}


# Tokenizer -> the texts of its tokens. With the log probabilities of all tokens, each is needed at every position.
_TEXTS: WeakKeyDictionary[Any, dict[int, str]] = WeakKeyDictionary()
