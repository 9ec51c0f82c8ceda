"""Editing the logits before a token is sampled from them.

The order is vLLM's. Disallowed tokens, bad words and, before min_tokens, stop tokens get -inf. Then logit_bias is
added, the request's own logits processors run, and the penalties come last. Temperature, min_p, top_k and top_p follow
in sampler.py. Log probabilities (logprobs.py) are computed from the model's logits, before any edit.

With lookahead the host launches a step before it has read the tokens of the step before. The editor therefore keeps
everything that these settings depend on in tables on the device: how often each token was generated, the last few
tokens and the bias of each token. A table with an entry per token takes 600 kB a row with Qwen's vocabulary, so not
every batch row (runner.py) has one. A row that edits its logits gets a **table slot** when its sequence starts. All
other rows share slot 0, whose entries change no bit of a logit. Editing a batch is then a gather by slot and arithmetic
that is the same for every row.

    slots     batch row -> table slot
    settings  [slots, 5]              num_prompt_tokens; repetition, frequency and presence penalty; the bias of tokens
                                      without an entry of their own (the last four are floats, stored by their bits)
    bias      [slots, vocab_size]     added to the logits: logit_bias, and -inf for disallowed tokens
    seen      [slots, vocab_size]     2 * times generated + 1 if the prompt contains the token
    bans      [slots, bans, 2 + n]    (until, token, the n tokens before it): the token is not drawn while fewer than
                                      `until` tokens have been generated and the last n ones are these
    recent    [slots, n]              the last n generated tokens

A stop token is banned until min_tokens, and the last token of a bad word always. The n tokens are stored in reverse
order, each + 1; 0 stands for any token in `bans`, and for no token yet in `recent`. When sequences start, every table
gets the size that the running sequences need, so a table that none of them needs is empty. Only the number of slots
does not shrink until no slot is in use.

A plain request uses none of this.
"""
import math
import struct
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanopaged import engine

ALWAYS = 2**31 - 1  # `until` of a ban without end
NO_BIAS = -0.0  # x + -0.0 is x, bit for bit; -0.0 + 0.0 is not


class ProcessedSequence(engine.Sequence):
    """A text with logits processors. They read all tokens before the next one, so no step of it is planned ahead."""

    @property
    def num_new_tokens(self) -> int:
        return min(super().num_new_tokens, len(self.token_ids) - self.num_computed_tokens)


class _Slot(NamedTuple):
    """A table slot in use."""
    number: int
    owner: weakref.ref[engine.Sequence]
    bans: list[list[int]]
    needs: tuple[bool, bool, int, int]  # of tables: a bias, penalties, the number of bans, n of the longest one


class LogitsEditor:
    """The tables, and the arithmetic that edits logits with them.

    send: lists of integers -> int32 tensors on the device, in one transfer that the host does not wait for
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device,
                 send: Callable[[list[list[int]]], list[Tensor]]) -> None:
        self.vocab_size, self.device, self.send = vocab_size, device, send
        self.slot_of_row: dict[int, _Slot] = {}
        self.sent = [0] * num_rows  # what `slots` has; a step that fails leaves both
        self.slots = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.bias = torch.zeros(0, vocab_size, device=device)
        self.settings, self.seen, self.bans, self.recent = (torch.zeros(shape, dtype=torch.int32, device=device)
                                                            for shape in ((1, 5), (0, vocab_size), (0, 0, 2), (0, 0)))

    def edits(self, rows: Iterable[int]) -> bool:
        """Whether any of these rows edits its logits. If none does, a step needs neither `__call__` nor `add`."""
        return not self.slot_of_row.keys().isdisjoint(rows)

    # ---- when sequences start

    def start(self, seqs: list[engine.Sequence]) -> None:
        """Give table slots to the sequences that start in this step, or start again after a preemption.

        seqs: all of these, also those without edits, because a row's slot belonged to its last sequence
        """
        if not (self.slot_of_row or any(self.sent) or any(seq.sampling.params.edits_logits for seq in seqs)):
            return
        new = {seq.row for seq in seqs}
        self.slot_of_row = {row: slot for row, slot in self.slot_of_row.items()
                            if row not in new and (owner := slot.owner()) is not None and owner.row == row}
        used = {slot.number for slot in self.slot_of_row.values()}
        free = (number for number in count(1) if number not in used)
        seqs = [seq for seq in seqs if seq.sampling.params.edits_logits]
        for seq in seqs:
            p, bans = seq.sampling.params, _bans(seq, self.vocab_size)
            depth = max(map(len, bans), default=2) - 2
            needs = bool(p.logit_bias or p.allowed_token_ids), p.has_penalty, len(bans), depth
            self.slot_of_row[seq.row] = _Slot(next(free), weakref.ref(seq), bans, needs)
        numbers = [self.slot_of_row[row].number if row in self.slot_of_row else 0 for row in range(len(self.sent))]
        if seqs or numbers != self.sent:
            self._resize_tables(max(numbers))
            self._write(*self.send([numbers, *self._lists(seqs)]))
            self.sent = numbers

    def _resize_tables(self, most: int) -> None:
        """Give each table the size that the slots in use need. most: the largest of these, or 0"""
        size = len(self.settings) if most else 1
        if most >= size:
            size = min(max(most + 1, 2 * size), len(self.slots) + 1)
        needs = (slot.needs for slot in self.slot_of_row.values())
        has_bias, has_penalty, num_bans, depth = map(max, zip((False, False, 0, 0), *needs))
        # All of them or, if memory is short, none: the bans of other rows must fit `recent`.
        self.settings, self.bias, self.seen, self.bans, self.recent = (
            _resize(self.settings, size, 5), _resize(self.bias, size * has_bias, self.vocab_size, fill=NO_BIAS),
            _resize(self.seen, size * has_penalty, self.vocab_size),
            _resize(self.bans, size * bool(num_bans), num_bans, 2 + depth),
            _resize(self.recent, size * bool(num_bans), depth))

    def _lists(self, seqs: list[engine.Sequence]) -> list[list[int]]:
        """The lists that `_write` reads: slots, settings, and entries (slot, ..., value) of the other tables."""
        slots, settings, bias, seen, ban_entries, recent = lists = [list[int]() for _ in range(6)]
        depth = self.recent.shape[1]
        for seq in seqs:
            p, (slot, _, bans, _) = seq.sampling.params, self.slot_of_row[seq.row]
            prompt_ids, output_ids = seq.token_ids[:seq.num_prompt_tokens], seq.token_ids[seq.num_prompt_tokens:]
            slots.append(slot)
            settings += len(prompt_ids), *_bits(p.repetition_penalty, p.frequency_penalty, p.presence_penalty,
                                                NO_BIAS if p.allowed_token_ids is None else -math.inf)
            added = p.logit_bias or {}
            tokens = added if p.allowed_token_ids is None else p.allowed_token_ids
            values = _bits(*(added.get(token, NO_BIAS) for token in tokens))
            bias += [x for entry in zip(tokens, values) for x in (slot, *entry)]
            if p.has_penalty:
                counts = Counter(dict.fromkeys(prompt_ids, 1))
                counts.update(2 * output_ids)
                seen += [x for entry in counts.items() for x in (slot, *entry)]
            ban_entries += [x for i, ban in enumerate(bans) for j, n in enumerate(ban) for x in (slot, i, j, n)]
            recent += [x for j, token in enumerate(output_ids[:-1 - depth:-1]) for x in (slot, j, token + 1)]
        return lists

    def _write(self, slot_of_each_row: Tensor, slots: Tensor, settings: Tensor, bias: Tensor, *others: Tensor) -> None:
        slots, settings = slots.long(), settings.view(-1, 5)
        self.settings[slots] = settings
        if len(self.bias):
            slots_of_bias, tokens, values = bias.view(-1, 3).unbind(1)
            self.bias[slots] = settings[:, 4:].view(torch.float32)
            self.bias[slots_of_bias, tokens] = values.view(torch.float32)
        for table, entries in zip((self.seen, self.bans, self.recent), others):
            if len(table):
                *index, values = entries.view(-1, table.dim() + 1).unbind(1)
                table.index_fill_(0, slots, 0)[tuple(index)] = values
        self.slots.copy_(slot_of_each_row)  # last: if a line above fails, `slots` is what `sent` says

    # ---- in each step

    def __call__(self, logits: Tensor, rows: Tensor, positions: Tensor, processors: Iterable[tuple] = ()) -> Tensor:
        """The edited logits, float32: logits [R, vocab_size] of any float type, which are not changed in place.

        rows, positions: [R], the batch rows, and the positions of the tokens to draw
        processors: (i, functions, generated token ids, fail) for each of the R rows with logits processors. If a
            function raises, the editor calls fail(message) and fills the row with NaN, which ends this request alone.
        """
        slots = self.slots[rows]
        edited = logits.to(torch.float32, copy=True) if processors else logits
        if len(self.bias):
            edited = add_bias(edited, slots, self.bias)
        if len(self.bans):
            num_generated = positions - self.settings[slots, 0]
            edited = ban(edited, self.bans[slots], self.recent[slots], num_generated)
        for i, functions, token_ids, fail in processors:
            try:
                for function in functions:
                    edited[i] = _process(function, token_ids, edited[i])
            except Exception as error:
                edited[i] = math.nan
                fail(f"a logits processor failed: {error!r}")
        return penalise(edited, slots, self.seen, self.settings) if len(self.seen) else edited.float()

    def add(self, rows: Tensor, tokens: Tensor) -> None:
        """Record the tokens that were drawn in these rows: [R] each."""
        slots = self.slots[rows]
        if len(self.seen):  # slot 0 counts nothing
            self.seen.view(-1).scatter_add_(0, slots * self.vocab_size + tokens, (slots > 0).int() * 2)
        if self.recent.numel():
            self.recent[slots] = torch.cat([tokens[:, None].int() + 1, self.recent[slots][:, :-1]], 1)


def add_bias(logits: Tensor, slots: Tensor, bias: Tensor) -> Tensor:
    return bias[slots].add_(logits)


def ban(logits: Tensor, bans: Tensor, recent: Tensor, num_generated: Tensor) -> Tensor:
    """Set banned tokens to -inf: logits [R, vocab_size], bans [R, bans, 2 + n], recent [R, n], num_generated [R]."""
    until, tokens, before = bans[..., 0], bans[..., 1], bans[..., 2:]
    holds = (num_generated[:, None] < until) & ((before == 0) | (before == recent[:, None])).all(-1)
    return logits.float().scatter_reduce(1, tokens.long(), torch.where(holds, -math.inf, math.inf), "amin")


def penalise(logits: Tensor, slots: Tensor, seen: Tensor, settings: Tensor) -> Tensor:
    """Repetition penalty (Keskar et al. 2019, section 4.1), frequency and presence penalty (OpenAI's API)."""
    logits, seen = logits.float(), seen[slots]
    repetition, frequency, presence = settings[slots, 1:4].view(torch.float32)[:, :, None].unbind(1)
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


def _bans(seq: engine.Sequence, vocab_size: int) -> list[list[int]]:
    """The bans of one sequence, without tokens that the model does not have."""
    min_tokens = seq.sampling.params.min_tokens
    bans = [[min_tokens, token] for token in seq.stop_token_ids if min_tokens]
    bans += [[ALWAYS, word[-1], *(token + 1 for token in word[-2::-1])] for word in seq.sampling.bad_words]
    return [ban for ban in bans if 0 <= ban[1] < vocab_size]


def _process(function: Callable, token_ids: list[int], logits: Tensor) -> Tensor:
    result = function(token_ids, logits)
    if not isinstance(result, Tensor) or result.shape != logits.shape:
        given = f"one of shape {list(result.shape)}" if isinstance(result, Tensor) else repr(result)
        raise ValueError(f"it must return a tensor of shape {list(logits.shape)}, not {given:.80}")
    return result


def _resize(table: Tensor, *shape: int, fill: float = 0) -> Tensor:
    """The table cut or padded at the end of each dimension to this shape."""
    padding = [n for size, wanted in zip(reversed(table.shape), reversed(shape)) for n in (0, wanted - size)]
    return F.pad(table, padding, value=fill) if any(padding) else table


def _bits(*floats: float) -> tuple[int, ...]:
    """The bits of 32-bit floats, as integers."""
    return struct.unpack(f"{len(floats)}i", struct.pack(f"{len(floats)}f", *floats))
