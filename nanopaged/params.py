"""How a request wants its tokens chosen, and when it wants to stop."""
from dataclasses import dataclass
from numbers import Integral, Real

from nanopaged.inputs import check_number

SMALLEST_TEMPERATURE = 1e-5  # below it sampling is greedy: dividing by less would overflow


@dataclass
class SamplingParams:
    """Sampling settings of one request; names and defaults are vLLM's.

    n: how many samples; sample j of a request with seed s equals a request of its own with seed s + j
    temperature: 0, or anything below SMALLEST_TEMPERATURE, is greedy
    top_p, top_k, min_p: keep the smallest set of best tokens with total probability top_p; the top_k best
        (0 or -1: all); those with at least min_p times the best one's probability. All at once: the intersection
    seed: draws the same random numbers in any batch; None takes one from the engine's own seed
    max_tokens: new tokens at most
    stop_token_ids: tokens that end the text, beside the checkpoint's end-of-sequence tokens
    ignore_eos: go on after end-of-sequence tokens

    Raises ValueError, one sentence, for a value out of range.
    """
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 16
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False

    def __post_init__(self):
        check_number("n", self.n, Integral, lambda x: x >= 1, "an integer of at least 1")
        check_number("temperature", self.temperature, Real, lambda x: 0 <= x <= 1e6, "a number from 0 to 1e6")
        check_number("top_p", self.top_p, Real, lambda x: 0 < x <= 1, "a number above 0 and at most 1")
        check_number("top_k", self.top_k, Integral, lambda x: -1 <= x < 2**63, "an integer of at least 1, or 0 for all tokens")
        check_number("min_p", self.min_p, Real, lambda x: 0 <= x <= 1, "a number from 0 to 1")
        check_number("max_tokens", self.max_tokens, Integral, lambda x: x >= 1, "an integer of at least 1")
        if self.seed is not None:
            check_number("seed", self.seed, Integral, lambda x: -2**63 <= x < 2**63, "an integer of at most 64 bits")
        check_number("ignore_eos", self.ignore_eos, bool, lambda x: True, "True or False")
        if self.stop_token_ids is not None:
            check_number("stop_token_ids", self.stop_token_ids, (list, tuple, set, frozenset), lambda x: True, "a list of token ids")
        for token in self.stop_token_ids or ():
            check_number("stop_token_ids", token, Integral, lambda x: x >= 0, "a list of token ids")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < SMALLEST_TEMPERATURE

    @property
    def has_filter(self) -> bool:
        """Some tokens are never drawn: top_k, top_p or min_p is set."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0
