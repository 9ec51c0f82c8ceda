"""What changes logits before a token is sampled from them, and the log probabilities that are reported.

In vLLM's order: tokens that are not allowed, bad words and, before min_tokens, what would end the text get -inf;
logit_bias is added; the request's own logits processors have their turn; then come the penalties. Temperature, min_p,
top_k and top_p follow in sampler.py. Log probabilities are those of the logits as the model gave them.

With lookahead the host launches a step before it has seen the tokens of the step before. So what these settings depend
on is on the device, in tables: how often each token has been generated, the last few of them, what is added to the
logit of each token. An entry for every token takes 600 kB with Qwen's vocabulary, so not every row of the engine
(runner.py) has one: a row that edits its logits is given a **slot** when its sequence starts, and all others share slot
0, whose entries change no bit of a logit. A batch is then a gather by slot and arithmetic, the same for every row.

    slots     row of the engine -> slot
    settings  [slots, 5]              num_prompt_tokens; repetition, frequency and presence penalty; what bias is
                                      filled with (the last four are floats, by their bits)
    bias      [slots, vocab_size]     is added to the logits: logit_bias, and -inf for what is not allowed
    seen      [slots, vocab_size]     2 * times generated + 1 if it is in the prompt
    bans      [slots, bans, 2 + n]    (until, token, the n tokens before it): the token is not drawn while fewer than
                                      `until` tokens have been generated, and the last ones are these
    recent    [slots, n]              the last n generated tokens

Bans are stop tokens, until min_tokens, and the ends of bad words, always. The n tokens stand last one first, each + 1,
and 0 is no token: any, or none yet. When sequences start, every table gets the size that the running ones need: one
that none of them needs has no entries. Only the number of slots stays what it was, until none is in use.
"""
import math
import struct
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanopaged.device.fused import compile_rows
from nanopaged.sampling_params import SamplingParams

ALWAYS = 2**31 - 1  # `until` of a ban without end
NOTHING = -0.0  # x + -0.0 is x, bit for bit; -0.0 + 0.0 is not
LOGPROBS_AT_ONCE = 2**23  # logits that top_logprobs works on at a time


class Start(NamedTuple):
    """A sequence that starts, or starts again, in a row of the engine."""
    row: int
    params: SamplingParams
    prompt_ids: list[int]
    output_ids: list[int]  # generated so far
    stop_ids: Collection[int]  # tokens that end the text
    bad_words: list[list[int]]  # from encode_bad_words


class _Slot(NamedTuple):
    """A slot in use, and what its sequence needs of the tables."""
    number: int
    has_bias: bool
    has_penalty: bool
    num_bans: int
    depth: int  # tokens before the last one of its longest ban


class LogitsEditor:
    """The tables, and what is done with them.

    send: lists of integers -> int32 tensors on the device, in one transfer that the host does not wait for
    fused: with compiled arithmetic, which reads logits and tables once
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device, send: Callable, fused: bool = False):
        self.vocab_size, self.device, self.send = vocab_size, device, send
        self.add_bias = compile_rows(add_bias, 3) if fused else add_bias
        self.penalise = compile_rows(penalise, 4) if fused else penalise
        self.slot_of_row: dict[int, _Slot] = {}
        self.unsent: set[int] = set()  # rows whose slot the device does not know; they stay here if a step fails
        self.free_slots: list[int] = []
        self.slots = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.bias = torch.zeros(0, vocab_size, device=device)
        self.settings, self.seen, self.bans, self.recent = (torch.zeros(shape, dtype=torch.int32, device=device)
                                                            for shape in ((1, 5), (0, vocab_size), (0, 0, 2), (0, 0)))

    def edits(self, rows: Iterable[int]) -> bool:
        """Does any of these rows edit its logits? If none does, a step needs neither `__call__` nor `add`."""
        return bool(self.slot_of_row) and any(row in self.slot_of_row for row in rows)

    # ---- when sequences start

    def start(self, starts: list[Start], free_rows: Iterable[int] = ()) -> None:
        """Take note of all sequences that start in this step, those without settings too: others had their rows.

        free_rows: rows that sequences have left. A sequence that comes back to its row starts again
        """
        gone = {*free_rows, *(start.row for start in starts)} & self.slot_of_row.keys()
        self.free_slots += [self.slot_of_row.pop(row).number for row in gone]
        starts = [start for start in starts if start.params.edits_logits]
        self.unsent |= gone | {start.row for start in starts}
        if not self.unsent:
            return
        if not self.slot_of_row:
            self.free_slots, self.settings = [], self.settings[:1]
        bans = [_bans(start, self.vocab_size) for start in starts]
        for start, own_bans in zip(starts, bans):
            p = start.params
            self.slot_of_row[start.row] = _Slot(
                number=self.free_slots.pop() if self.free_slots else len(self.slot_of_row) + 1,
                has_bias=bool(p.logit_bias or p.allowed_token_ids), has_penalty=p.has_penalty,
                num_bans=len(own_bans), depth=max((len(ban) - 2 for ban in own_bans), default=0))
        self._resize_tables()
        rows = list(self.unsent)
        indices = [self.slot_of_row[row].number if row in self.slot_of_row else 0 for row in rows]
        self._write(*self.send([rows, indices, *self._lists(starts, bans)]))
        self.unsent.clear()

    def _resize_tables(self) -> None:
        """Make room for what all rows with slots need, and for no more."""
        slots, size = self.slot_of_row.values(), len(self.settings)
        needed = max((slot.number for slot in slots), default=0) + 1
        if needed > size:
            size = min(max(needed, 2 * size), len(self.slots) + 1)
        num_bans = max((slot.num_bans for slot in slots), default=0)
        depth = max((slot.depth for slot in slots), default=0)
        with_bias = size if any(slot.has_bias for slot in slots) else 0
        with_penalty = size if any(slot.has_penalty for slot in slots) else 0
        with_bans = size if num_bans else 0
        self.settings = _resize(self.settings, size, 5)
        self.bias = _resize(self.bias, with_bias, self.vocab_size, fill=NOTHING)
        self.seen = _resize(self.seen, with_penalty, self.vocab_size)
        self.bans = _resize(self.bans, with_bans, num_bans, 2 + depth)
        self.recent = _resize(self.recent, with_bans, depth)

    def _lists(self, starts: list[Start], bans: list[list[list[int]]]) -> list[list[int]]:
        """What _write writes: slots, their settings, and entries (slot, ..., value) of bias, seen, bans and recent."""
        slots, settings, bias, seen, ban_entries, recent = [], [], [], [], [], []
        depth = self.recent.shape[1]
        for start, own_bans in zip(starts, bans):
            p, slot = start.params, self.slot_of_row[start.row].number
            slots.append(slot)
            settings += len(start.prompt_ids), *_bits(p.repetition_penalty, p.frequency_penalty, p.presence_penalty,
                                                      NOTHING if p.allowed_token_ids is None else -math.inf)
            added = p.logit_bias or {}
            tokens = added if p.allowed_token_ids is None else p.allowed_token_ids
            values = _bits(*(added.get(token, NOTHING) for token in tokens))
            bias += [x for entry in zip(tokens, values) for x in (slot, *entry)]
            if p.has_penalty:
                seen += [x for token in set(start.prompt_ids) for x in (slot, token, 1)]
                seen += [x for token in start.output_ids for x in (slot, token, 2)]
            ban_entries += [x for i, ban in enumerate(own_bans) for j, n in enumerate(ban) for x in (slot, i, j, n)]
            last = start.output_ids[:-1 - depth:-1]
            recent += [x for j, token in enumerate(last) for x in (slot, j, token + 1)]
        return [slots, settings, bias, seen, ban_entries, recent]

    def _write(self, rows, slots_of_rows, slots, settings, bias, seen, bans, recent) -> None:
        slots, settings = slots.long(), settings.view(-1, 5)
        self.slots[rows] = slots_of_rows.long()
        self.settings[slots] = settings
        if len(self.bias):
            self.bias[slots] = settings[:, 4:].view(torch.float32)
            slots_of_bias, tokens, values = bias.view(-1, 3).unbind(1)
            self.bias[slots_of_bias, tokens] = values.view(torch.float32)
        if len(self.seen):
            self.seen.index_fill_(0, slots, 0)
            self._count(*seen.view(-1, 3).unbind(1))
        for table, entries in ((self.bans, bans), (self.recent, recent)):
            if len(table):
                *index, values = entries.view(-1, table.dim() + 1).unbind(1)
                table.index_fill_(0, slots, 0)[tuple(index)] = values

    def _count(self, slots: Tensor, tokens: Tensor, amounts: Tensor) -> None:
        self.seen.view(-1).scatter_add_(0, slots.long() * self.vocab_size + tokens, amounts)

    # ---- in each step

    def __call__(self, logits: Tensor, rows: Tensor, positions: Tensor, processors: list[tuple] = ()) -> Tensor:
        """The edited logits, float32: logits [R, vocab_size] of any float type, which stay as they are.

        rows, positions: [R], the rows of the engine and the positions of the tokens that are drawn
        processors: (i, functions, generated token ids, fail) for each of the R rows that has logits processors. If one of
            them raises, that is told to fail, and the row becomes NaN, which ends its request and no other
        """
        slots, edited = self.slots[rows], logits.to(torch.float32, copy=True) if processors else logits
        if len(self.bias):
            edited = self.add_bias(edited, slots, self.bias)
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
        return self.penalise(edited, slots, self.seen, self.settings) if len(self.seen) else edited.float()

    def add(self, rows: Tensor, tokens: Tensor) -> None:
        """Take note of the tokens that were drawn in these rows: [R] each."""
        slots = self.slots[rows]
        if len(self.seen):
            self._count(slots, tokens, (slots > 0).int() * 2)  # slot 0 has seen nothing
        if self.recent.numel():
            self.recent[slots] = torch.cat([tokens[:, None].int() + 1, self.recent[slots][:, :-1]], 1)


def add_bias(logits: Tensor, slots: Tensor, bias: Tensor) -> Tensor:
    return logits.float() + bias[slots]


def ban(logits: Tensor, bans: Tensor, recent: Tensor, num_generated: Tensor) -> Tensor:
    """-inf where a ban holds: logits [R, vocab_size], bans [R, bans, 2 + n], recent [R, n], num_generated [R]."""
    until, tokens, before = bans[..., 0], bans[..., 1], bans[..., 2:]
    holds = (num_generated[:, None] < until) & ((before == 0) | (before == recent[:, None])).all(-1)
    return logits.float().scatter_reduce(1, tokens.long(), torch.where(holds, -math.inf, math.inf), "amin")


def penalise(logits: Tensor, slots: Tensor, seen: Tensor, settings: Tensor) -> Tensor:
    """Repetition penalty (Keskar et al. 2019, section 4.1), frequency and presence penalty (OpenAI's API)."""
    logits, seen = logits.float(), seen[slots]
    repetition, frequency, presence = settings[slots, 1:4].view(torch.float32)[:, :, None].unbind(1)
    logits = torch.where(seen > 0, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    return logits - frequency * (seen >> 1) - presence * (seen > 1)


def top_logprobs(logits: Tensor, chosen: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log probabilities of the chosen tokens and of the k best: logits [R, vocab_size], chosen [R].

    For vLLM's default (logprobs_mode="raw_logprobs") the logits are those of the model, unedited. A k of -1, or of more
    than there are, is all tokens. Returns the chosen token's log probability [R] and rank [R], which is the number of
    tokens as likely or more; the best tokens [R, k] and their log probabilities [R, k], of equals the lower id first.
    Works through LOGPROBS_AT_ONCE logits at a time, because R may be the tokens of a prompt.
    """
    vocab_size, parts = logits.shape[1], []
    k, size = min(k, vocab_size) if k >= 0 else vocab_size, max(1, LOGPROBS_AT_ONCE // vocab_size)
    for piece, tokens in zip(logits.split(size), chosen.long()[:, None].split(size)):
        logprobs = piece.float().log_softmax(-1)
        of_chosen = logprobs.gather(1, tokens)
        ids = best_tokens(logprobs, k)
        parts.append((of_chosen[:, 0], (logprobs >= of_chosen).sum(-1), ids, logprobs.gather(1, ids)))
    return tuple(map(torch.cat, zip(*parts)))


def best_tokens(logprobs: Tensor, k: int) -> Tensor:
    """The k best of each row, [R, k]. Of equal numbers torch.topk takes any, others in other batches maybe. So it is
    given no equal ones: the float's bits, as an integer of the same order, and behind them the id."""
    bits = logprobs.view(torch.int32)
    order = (bits ^ ((bits >> 31) & (2**31 - 1))).long()
    keys = order * 2**32 - torch.arange(logprobs.shape[1], device=logprobs.device)
    return -keys.topk(k).values % 2**32


def encode_bad_words(words: list[str], tokenizer) -> list[list[int]]:
    """Token ids of each word, and of the word behind a space where that is as many tokens and begins differently, as in
    vLLM. ValueError for a word of no tokens."""
    result = []
    for word in words:
        plain, spaced = (tokenizer.encode(space + word.lstrip(), add_special_tokens=False) for space in ("", " "))
        if not plain:
            raise ValueError(f"bad_words must be texts of at least one token, not {word!r}")
        result += [plain, spaced] if len(spaced) == len(plain) and spaced[0] != plain[0] else [plain]
    return result


def _bans(start: Start, vocab_size: int) -> list[list[int]]:
    """The bans of one sequence, but for tokens that the model does not have."""
    bans = [[start.params.min_tokens, token] for token in start.stop_ids if start.params.min_tokens]
    bans += [[ALWAYS, word[-1], *(token + 1 for token in word[-2::-1])] for word in start.bad_words]
    return [ban for ban in bans if 0 <= ban[1] < vocab_size]


def _process(function: Callable, token_ids: list[int], logits: Tensor) -> Tensor:
    result = function(token_ids, logits)
    if not isinstance(result, Tensor) or result.shape != logits.shape:
        given = f"one of shape {list(result.shape)}" if isinstance(result, Tensor) else repr(result)
        raise ValueError(f"it must return a tensor of shape {list(logits.shape)}, not {given:.80}")
    return result


def _resize(table: Tensor, *shape: int, fill: float = 0) -> Tensor:
    """The table with this shape, the entries that it has room for where they were."""
    padding = [n for have, want in zip(reversed(table.shape), reversed(shape)) for n in (0, want - have)]
    return F.pad(table, padding, value=fill) if any(padding) else table


def _bits(*floats: float) -> tuple[int, ...]:
    """The bits of 32-bit floats, as integers."""
    return struct.unpack(f"{len(floats)}i", struct.pack(f"{len(floats)}f", *floats))
