"""Editing the logits before a token is drawn from them.

The order is vLLM's. Tokens that are not allowed, bad words and, before min_tokens, stop tokens get -inf. Then
logit_bias is added, the request's own logits processors run, and the penalties come last. Temperature, min_p, top_k and
top_p follow in sampler.py. Log probabilities (logprobs.py) are computed from the model's logits, before any edit.

With lookahead the host launches a step before it has read the tokens of the step before. So the device counts in a
table how often each token was generated. All tables have a row for each batch row. They are made when the first request
asks for them, and cost other requests nothing: a step edits the rows of the sequences that ask.

    bias       [rows, vocab_size]   added to the logits: logit_bias, and -inf for tokens that are never drawn
    seen       [rows, vocab_size]   2 * times generated + 1 if the prompt contains the token
    penalties  [rows, 3]            repetition, frequency, presence; none: 1, 0, 0

The host says for each step which tokens are banned in it: stop tokens before min_tokens, and the last token of a bad
word whose other tokens stand at the end of the text. Logits processors and bad words of several tokens read the text,
so the engine does not plan ahead for their sequences.
"""
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanopaged import engine
from nanopaged.device.logits import LogitsStep
from nanopaged.device.transfer import send, to_device
from nanopaged.sampling_params import SamplingParams
from nanopaged.weights.build import memory_for

NO_BIAS = -0.0  # x + -0.0 is x, bit for bit; -0.0 + 0.0 is not


class EditedSequence(engine.Sequence):
    """A text whose logits are edited."""
    bad_words: list[list[int]]

    @property
    def num_new_tokens(self) -> int:
        num_new = super().num_new_tokens
        if self.sampling.params.logits_processors or max(map(len, self.bad_words), default=1) > 1:
            num_new = min(num_new, len(self.token_ids) - self.num_computed_tokens)
        return num_new

    def split(self) -> tuple[list[int], list[int]]:
        """The tokens of the prompt, and those generated."""
        return self.token_ids[:self.num_prompt_tokens], self.token_ids[self.num_prompt_tokens:]

    def bans(self, position: int) -> list[int]:
        """Tokens that must not be drawn at this position, besides those that never are."""
        (_, text), params = self.split(), self.sampling.params
        bans = [word[-1] for word in self.bad_words if len(word) > 1 and text[1 - len(word):] == word[:-1]]
        return bans + [*self.stop_token_ids] * (position - self.num_prompt_tokens < params.min_tokens)


SEQUENCE = EditedSequence


def start(core: Any, params: SamplingParams, sequences: list[Any]) -> None:
    """Prepare the samples of a request, and the tables that it needs. ValueError: too little memory for these."""
    words = params.bad_words or ()
    bad_words, texts = ([word for word in words if isinstance(word, kind)] for kind in (list, str))
    bad_words += encode_bad_words(texts, core.require_tokenizer()) if texts else []
    for seq in sequences:
        seq.bad_words = bad_words
    for runner in core.runners:
        runner.use(Edits).make_tables(params)


class Plan(NamedTuple):
    """The edits of one step."""
    at: Tensor  # [E], rows of logits that are edited
    banned: tuple[Tensor, Tensor]  # index in `at`, token
    # (index in `at`, functions, generated token ids, fail) of those with logits processors. If a function raises, the
    # row becomes NaN, and fail(message) says why: that ends this request alone
    processors: list[tuple]
    has_bias: bool
    has_penalty: bool


class Edits(LogitsStep):
    """The tables, and the arithmetic that edits logits with them."""

    def __init__(self, runner: Any) -> None:
        self.num_rows, self.vocab_size, self.device = runner.max_num_seqs, runner.config.vocab_size, runner.device
        self.tables: dict[str, Tensor] = {}
        # Batch row -> the block table of the sequence that is written there: a list that nobody else has, and that a
        # sequence does not have any more when it starts again.
        self.written: dict[int, list[int]] = {}

    def make_tables(self, params: SamplingParams) -> None:
        make = partial(torch.full, device=self.device)
        size = 4 * self.num_rows * self.vocab_size
        with memory_for(f"{self.device} has no memory for a table of {size / 2**30:.2f} GiB, which logit_bias, "
                        "allowed_token_ids, bad_words and penalties need; lower max_num_seqs",
                        size if self.device.type == "cpu" else 0):
            if has_bias(params) and "bias" not in self.tables:
                self.tables.setdefault("bias", make((self.num_rows, self.vocab_size), NO_BIAS))
            if params.has_penalty and "seen" not in self.tables:
                none = torch.tensor([1.0, 0.0, 0.0], device=self.device)  # for rows that are written already
                self.tables.setdefault("penalties", none.repeat(self.num_rows, 1))
                self.tables.setdefault("seen", make((self.num_rows, self.vocab_size), 0, dtype=torch.int32))

    def plan(self, seqs: list[Any], positions: list[int]) -> Plan | None:
        edited = [(i, seq) for i, seq in enumerate(seqs) if isinstance(seq, EditedSequence)]
        if not edited:
            return None
        if new := [seq for _, seq in edited if self.written.get(seq.row) is not seq.block_table]:
            self._write(new)
        bans = [(k, token) for k, (i, seq) in enumerate(edited) for token in seq.bans(positions[i])
                if token < self.vocab_size]
        settings = [seq.sampling.params for _, seq in edited]
        processors = [(k, functions, seq.split()[1], partial(setattr, seq, "stop_reason"))
                      for k, (_, seq) in enumerate(edited) if (functions := seq.sampling.params.logits_processors)]
        at, rows, tokens = send(self.device, [[i for i, _ in edited], [k for k, _ in bans], [t for _, t in bans]])
        return Plan(at, (rows.long(), tokens.long()), processors, any(map(has_bias, settings)),
                    any(params.has_penalty for params in settings))

    def _write(self, seqs: list[Any]) -> None:
        """Write the rows of sequences that start, or start again."""
        for seq in seqs:
            p, prompt_ids, output_ids = seq.sampling.params, *seq.split()
            if "bias" in self.tables:
                added, fill = p.logit_bias or {}, NO_BIAS
                if p.allowed_token_ids is not None:
                    added, fill = {token: added.get(token, NO_BIAS) for token in p.allowed_token_ids}, -math.inf
                banned = {word[0]: -math.inf for word in seq.bad_words if len(word) == 1 and word[0] < self.vocab_size}
                self._put(self.tables["bias"][seq.row].fill_(fill), added | banned)
            if "seen" in self.tables:
                penalties = p.repetition_penalty, p.frequency_penalty, p.presence_penalty
                self._put(self.tables["penalties"][seq.row], dict(enumerate(penalties)))
                counts = Counter(dict.fromkeys(prompt_ids, 1)) + Counter(2 * output_ids)
                self._put(self.tables["seen"][seq.row].zero_(), counts)
            self.written[seq.row] = seq.block_table  # last: a row that was not written whole is written again

    def _put(self, row: Tensor, entries: dict[int, float]) -> None:
        """Write these entries of a table's row."""
        index, values = torch.tensor([*entries], dtype=torch.int64), torch.tensor([*entries.values()], dtype=row.dtype)
        row[to_device(self.device, index)] = to_device(self.device, values)

    # ---- on the device

    def __call__(self, logits: Tensor, plan: Plan, rows: Tensor, positions: Tensor) -> Tensor:
        rows = rows.index_select(0, plan.at)
        edited = logits.index_select(0, plan.at).float()
        if plan.has_bias:
            edited += self.tables["bias"][rows]
        edited.index_put_(plan.banned, edited.new_full((), -math.inf))
        for k, functions, token_ids, fail in plan.processors:
            try:
                for function in functions:
                    edited[k] = _process(function, token_ids, edited[k])
            except Exception as error:
                edited[k] = math.nan
                fail(f"a logits processor failed: {error!r}")
        if plan.has_penalty:
            edited = penalise(edited, self.tables["seen"][rows], self.tables["penalties"][rows])
        return edited if len(edited) == len(logits) else logits.float().index_copy(0, plan.at.long(), edited)

    def drew(self, tokens: Tensor, plan: Plan, rows: Tensor) -> None:
        if plan.has_penalty:
            places = rows.index_select(0, plan.at).long() * self.vocab_size + tokens.index_select(0, plan.at)
            self.tables["seen"].view(-1).scatter_add_(0, places, torch.full_like(places, 2, dtype=torch.int32))


def has_bias(params: SamplingParams) -> bool:
    return bool(params.logit_bias or params.allowed_token_ids or params.bad_words)


def penalise(logits: Tensor, seen: Tensor, penalties: Tensor) -> Tensor:
    """Repetition penalty (Keskar et al. 2019, section 4.1), frequency and presence penalty (OpenAI's API): logits and
    seen [E, vocab_size], penalties [E, 3]."""
    repetition, frequency, presence = penalties[:, :, None].unbind(1)
    logits = torch.where(seen > 0, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    return logits.addcmul_(frequency, seen >> 1, value=-1).addcmul_(presence, seen > 1, value=-1)


def encode_bad_words(words: list[str], tokenizer: Any) -> list[list[int]]:
    """The token ids of each word. As in vLLM, the word after a space counts too, if it has the same number of tokens
    and another first token. ValueError for a word without tokens."""
    result: list[list[int]] = []
    for word in words:
        plain, spaced = (tokenizer.encode(space + word.lstrip(), add_special_tokens=False) for space in ("", " "))
        if not plain:
            raise ValueError(f"bad_words must be texts of at least one token, not {word!r}")
        result += [plain, spaced] if len(spaced) == len(plain) and spaced[0] != plain[0] else [plain]
    return result


def _process(function: Callable, token_ids: list[int], logits: Tensor) -> Tensor:
    result = function(token_ids, logits)
    if not isinstance(result, Tensor) or result.shape != logits.shape:
        given = f"one of shape {list(result.shape)}" if isinstance(result, Tensor) else repr(result)
        raise ValueError(f"it must return a tensor of shape {list(logits.shape)}, not {given:.80}")
    return result
