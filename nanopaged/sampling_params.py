"""The settings of a request: the sampling of its tokens, and the conditions that end its text. A value out of range
raises ValueError, in one sentence."""
import copy
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from types import NoneType
from typing import TYPE_CHECKING, Any

from nanopaged.inputs import MOST_TOKENS, always, between, check_fields, check_number, checked, refuse_unknown, settings
from nanopaged.options import feature

SMALLEST_TEMPERATURE = 1e-5  # sampling is greedy below this temperature: dividing by a smaller one would overflow
# The factors of two hashes: SplitMix64's (Steele et al. 2014), and lowbias32's (Wellons 2018).
HASH = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64, 0x7FEB352D, 0x846CA68B
LARGEST_BIAS = 100.0
MOST_SEQUENCES = 16_384  # of one request, as in vLLM: all of them are created when the request arrives
# What several settings must be: the type, the range of a value of this type, and the words for both
FLAG = bool, always, "True or False"
COUNT = Integral, lambda x: x >= -1, "an integer of at least 0, or -1 for all tokens"
TOKENS = list, tuple, set, frozenset
BIAS = "a dict from token ids to numbers"
# The entries of a generation_config.json that are read, and the settings that they give.
GENERATION_KEYS = {key: key for key in ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")} | {
    "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "stop_strings": "stop"}
OTHER_KEYS = "do_sample", "suppress_tokens", "bad_words_ids"
# Entries that would change texts and are not read, with the values that ask for nothing (besides null).
UNREAD_KEYS: dict[str, Any] = dict(
    max_length=20, min_length=0, max_time=0, num_beams=1, num_beam_groups=1, num_return_sequences=1,
    no_repeat_ngram_size=0, encoder_no_repeat_ngram_size=0, encoder_repetition_penalty=1, diversity_penalty=0,
    penalty_alpha=0, typical_p=1, top_h=0, epsilon_cutoff=0, eta_cutoff=0, guidance_scale=1, token_healing=False,
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "begin_suppress_tokens", "sequence_bias",
                     "exponential_decay_length_penalty", "force_words_ids", "constraints", "dola_layers",
                     "watermarking_config"), []))


if TYPE_CHECKING:
    from nanopaged.features.beam import BeamSearchParams as BeamSearchParams
    from nanopaged.features.structured import StructuredOutputsParams as StructuredOutputsParams
else:
    def __getattr__(name: str) -> Any:
        """vLLM's names that features have: loaded when they are first used."""
        if name not in (homes := {"BeamSearchParams": "beam", "StructuredOutputsParams": "structured"}):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(feature(homes[name], name), name)


def are_texts(texts: Iterable[Any]) -> bool:
    return all(isinstance(text, str) and text for text in texts)


def _are_words(words: Iterable[Any]) -> bool:
    return all(isinstance(word, (str, list)) and word for word in words)


@settings
class SamplingParams:
    """Sampling settings of one request; names, order and defaults are vLLM's.

    n: the number of samples, up to MOST_SEQUENCES; sample j of a request with seed s equals a request of its own with
        seed s + j
    presence_penalty, frequency_penalty: subtracted from the logit of a generated token; the presence penalty once, the
        frequency penalty once per occurrence; from -2 to 2
    repetition_penalty: divides the positive logit of each token of the prompt and the generated text, and multiplies a
        negative logit; from 1e-6 to 1e6
    temperature: 0, or any value below SMALLEST_TEMPERATURE, is greedy
    top_p, top_k, min_p: filters, applied after the temperature in vLLM's order. First, min_p keeps the tokens with at
        least min_p times the probability of the best token. Then top_k keeps the top_k best tokens (0 or -1: all), and
        tokens equal to the last of these. Then top_p keeps the fewest best tokens that together have the share top_p of
        the remaining probability
    seed: gives the same random numbers in any batch; None takes a seed from the engine's own seed
    stop: a string, or several, that end the text. The text is cut before the stop string that is complete first
    stop_token_ids: tokens that end the text, besides the checkpoint's end-of-sequence tokens
    ignore_eos: continue after end-of-sequence tokens
    max_tokens: the largest number of new tokens; None: limited by the model's positions only
    min_tokens: the number of new tokens before an end-of-sequence token, a stop token or a stop string can end the text
    logprobs, prompt_logprobs: return the log probability of each generated token, or of each prompt token, and of this
        number of best tokens at its position (0: none, -1: all; up to LLM's max_logprobs). These are the model's log
        probabilities, before penalties, biases, filters and temperature
    detokenize: return texts; False returns token ids only
    skip_special_tokens: leave special tokens out of the text
    include_stop_str_in_output: cut the text after the stop string instead of before it
    logit_bias: token id -> number added to the token's logit, clamped to [-LARGEST_BIAS, LARGEST_BIAS]; ids may be
        strings, as in JSON
    allowed_token_ids: only these tokens are sampled
    bad_words: texts, or lists of token ids, that are never generated: the token that would complete one is not sampled
    structured_outputs: what the text must fit, a StructuredOutputsParams or a dict of its fields. The mask is applied
        last. A complete text ends, whatever ignore_eos says
    logits_processors: functions (generated token ids, logits [vocab_size] float32) -> logits, applied one after another
        between logit_bias and the penalties. They need the last token on the host, so the engine cannot look ahead
    """
    n: int = checked(1, *between(Integral, 1, MOST_SEQUENCES))
    presence_penalty: float = checked(0.0, *between(Real, -2, 2))
    frequency_penalty: float = checked(0.0, *between(Real, -2, 2))
    repetition_penalty: float = checked(1.0, Real, lambda x: 1e-6 <= x <= 1e6, "a number from 1e-6 to 1e6")
    temperature: float = checked(1.0, Real, lambda x: 0 <= x <= 1e6, "a number from 0 to 1e6")
    top_p: float = checked(1.0, Real, lambda x: 0 < x <= 1, "a number above 0 and at most 1")
    top_k: int = checked(0, Integral, lambda x: -1 <= x < 2**63, "an integer of at least 1, or 0 for all tokens")
    min_p: float = checked(0.0, *between(Real, 0, 1))
    seed: int | None = checked(None, Integral, lambda x: -2**63 <= x < 2**63, "an integer of at most 64 bits")
    stop: str | list[str] | None = checked(
        None, (str, list, tuple), lambda x: x if isinstance(x, str) else are_texts(x),
        "a string that is not empty, or a list of them")
    stop_token_ids: list[int] | None = checked(None, TOKENS, always, "a list of token ids")
    ignore_eos: bool = checked(False, *FLAG)
    max_tokens: int | None = checked(16, (Integral, NoneType), lambda x: x >= 1, "an integer of at least 1, or None")
    min_tokens: int = checked(0, *between(Integral, 0, MOST_TOKENS))
    logprobs: int | None = checked(None, *COUNT)
    prompt_logprobs: int | None = checked(None, *COUNT)
    detokenize: bool = checked(True, *FLAG)
    skip_special_tokens: bool = checked(True, *FLAG)
    include_stop_str_in_output: bool = checked(False, *FLAG)
    logit_bias: dict[int, float] | None = checked(None, dict, always, BIAS)
    allowed_token_ids: list[int] | None = checked(None, TOKENS, len, "a list of at least one token id")
    bad_words: list[str | list[int]] | None = checked(
        None, (list, tuple), _are_words, "a list of strings that are not empty, or of lists of token ids")
    logits_processors: list[Callable] | None = checked(None, (list, tuple), lambda x: all(map(callable, x)),
                                                       "a list of functions (token_ids, logits) -> logits")
    structured_outputs: "StructuredOutputsParams | None" = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.structured_outputs is not None:
            self.structured_outputs = feature("structured", "structured_outputs").read(self.structured_outputs)
        if self.max_tokens is not None:
            check_number("min_tokens", self.min_tokens, Integral, lambda x: x <= self.max_tokens,
                         f"at most max_tokens {self.max_tokens}")
        for name in ("stop_token_ids", "allowed_token_ids"):
            if (tokens := getattr(self, name)) is not None:
                setattr(self, name, _read_ids(name, tokens, "a list of token ids"))
        if self.logit_bias is not None:
            self.logit_bias = _read_bias(self.logit_bias)
        for word in self.bad_words or ():
            if not isinstance(word, str):
                _read_ids("bad_words", word, "strings, or lists of token ids")
        if self.stop and not self.detokenize:
            raise ValueError("stop strings are searched in the text, so stop cannot be given with detokenize=False "
                             "(stop=None leaves out those of generation_config.json, too)")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError if logit_bias or allowed_token_ids names a token outside of the model's vocabulary."""
        for name in ("logit_bias", "allowed_token_ids"):
            token: int = max(getattr(self, name) or (), default=0)
            if token >= vocab_size:
                raise ValueError(f"{name} has token id {token}; the model's ids are 0 to {vocab_size - 1}")

    def check_logprobs(self, most: int) -> None:
        """Raise ValueError for more log probabilities of a token than LLM's max_logprobs, `most`, allows (-1: any)."""
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None and count > most >= 0:
                raise ValueError(f"{name} must be at most max_logprobs {most}, or -1 for all tokens, not {count}; make "
                                 "the LLM with a larger max_logprobs")

    @classmethod
    def from_generation_config(cls, config: dict[str, Any], **given: Any) -> "SamplingParams":
        """The settings that a checkpoint's generation_config.json recommends. `given` settings take precedence.

        The keys of GENERATION_KEYS and OTHER_KEYS are read. As in transformers, "do_sample": false means greedy
        decoding unless a temperature is given. A missing do_sample means true, as in vLLM.
        """
        read = read_settings(config)
        try:
            cls(**{"max_tokens": None} | read)
        except ValueError as error:
            raise ValueError(f"generation_config.json (without it, config.json) cannot be used: {error}; correct it, "
                             "or use generation_config='vllm'") from None
        most = (read | given).get("max_tokens", cls.max_tokens)
        if "min_tokens" in read and isinstance(most, Integral):  # a request may be shorter than the file's texts
            read["min_tokens"] = min(read["min_tokens"], most)
        return cls(**read | given)

    def clone(self) -> "SamplingParams":
        """A deep copy that shares the logits processors, as in vLLM."""
        return copy.deepcopy(self, {id(processor): processor for processor in self.logits_processors or ()})

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def is_greedy(self) -> bool:
        return self.temperature < SMALLEST_TEMPERATURE

    @property
    def has_filter(self) -> bool:
        """Whether top_k, top_p or min_p is set, so that some tokens cannot be sampled."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def has_penalty(self) -> bool:
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def edits_logits(self) -> bool:
        """Whether nanopaged/features/edits.py changes the logits before sampling; logits processors do not count."""
        return bool(self.has_penalty or self.min_tokens or self.logit_bias or self.allowed_token_ids or self.bad_words)


def read_override(config: dict[str, Any] | None) -> dict[str, Any]:
    """LLM's override_generation_config. ValueError for an entry that is not read, or for one out of range."""
    config = config or {}
    refuse_unknown("override_generation_config has no entry", config, (*GENERATION_KEYS, *OTHER_KEYS))
    SamplingParams(**read_settings(config))
    return config


def read_settings(config: dict[str, Any]) -> dict[str, Any]:
    """The settings in a generation_config.json, unchecked."""
    read = {setting: config[key] for key, setting in GENERATION_KEYS.items() if config.get(key) is not None}
    tokens, words = config.get("suppress_tokens") or [], config.get("bad_words_ids") or []
    if tokens or words:
        are_lists = isinstance(tokens, list) and isinstance(words, list)
        read["bad_words"] = [[token] for token in tokens] + words if are_lists else (tokens, words)
    return read | ({"temperature": 0.0} if config.get("do_sample") is False else {})


def unread_keys(config: dict[str, Any]) -> list[str]:
    """The entries of a generation_config.json that would change texts, and that are not read."""
    superseded = {"max_length": "max_new_tokens", "min_length": "min_new_tokens"}  # as in transformers
    return [key for key, neutral in UNREAD_KEYS.items() if config.get(key) not in (None, neutral)
            and config.get(superseded.get(key, "")) is None]


def wrap_int64(seed: int) -> int:
    """Seeds wrap around at 64 bits, as the arithmetic on them does."""
    return (seed + 2**63) % 2**64 - 2**63


def _read_ids(name: str, tokens: Iterable[Any], expected: str) -> list[int]:
    return [check_number(name, token, Integral, lambda x: x >= 0, expected) for token in tokens]


def _read_bias(bias: dict[Any, Any]) -> dict[int, float]:
    """logit_bias with Python's integers as ids, and clamped numbers."""
    tokens = [int(token) if isinstance(token, str) and token.isascii() and token.isdigit() else token for token in bias]
    numbers = [check_number("logit_bias", value, Real, lambda x: x == x, BIAS) for value in bias.values()]
    return dict(zip(_read_ids("logit_bias", tokens, BIAS),
                    (min(LARGEST_BIAS, max(-LARGEST_BIAS, number)) for number in numbers)))


class SequenceSampling:
    """The sampling settings of a sequence, for the runner; the scheduler does not read them.

    seed: sample j of a request with seed s has seed s + j
    num_logprobs: return the log probability of each sampled token and of this many best; -1: of all; None: none
    num_prompt_logprobs: the same for each prompt token
    """

    def __init__(self, params: SamplingParams, seed: int = 0, num_logprobs: int | None = None,
                 num_prompt_logprobs: int | None = None):
        self.params, self.seed = params, seed
        self.num_logprobs, self.num_prompt_logprobs = num_logprobs, num_prompt_logprobs
        # Computed once, because each step asks
        self.is_greedy, self.has_filter = params.is_greedy, params.has_filter
        self.wants_logprobs = num_logprobs is not None or num_prompt_logprobs is not None
