"""Structured output: a text that fits a JSON schema, a regular expression, one of several choices, or a grammar.

The package `llguidance` compiles a grammar, and a matcher follows one text through it. After each token the matcher
knows which tokens may come next, as a **mask** with a bit for each token, and which must. These **forced tokens** are
appended without being sampled, and the next step computes them together, as a chunk. For the choices "yes" and "yet"
with tokens of one letter:

    sampled     'y'                       the mask allows this token alone
    forced      'e'                       no other token may follow, so it is not sampled
    sampled     't'                       the mask allows 's' and 't'
    forced      end of sequence           the text is complete

**Sampled late.** The mask comes last, after edits of the logits. It depends on the token before, which the host knows
once it has read the step before; with a lookahead that is after this launch. So a step with a grammar is sampled when
the next one is launched, or at the latest when it is read:

    launch 1 | sample 1, launch 2 | read 1 | sample 2, launch 3 | read 2 | ...
"""
import asyncio
import copy
import ctypes
import json
import sys
import weakref
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import takewhile
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from nanopaged import engine
from nanopaged.device.logits import LogitsStep
from nanopaged.device.sampler import SamplingNeeds
from nanopaged.device.step_input import StepInput
from nanopaged.device.transfer import ForwardPass, LaunchedStep, integers, on_its_device, send
from nanopaged.features.structured import StructuredOutputsParams, end_tokens
from nanopaged.sampling_params import SamplingParams

MOST_FORCED = 256  # tokens at once
# A mask takes 5 ms at most; those of ambiguous grammars would take seconds. Rows of JSON are long and cheap.
MOST_ITEMS, MOST_ITEMS_IN_ROW, MOST_ITEMS_IN_ROW_OF_JSON = 5000, 300, 2000
LEAST_LOGIT = -1e4  # of what ends a complete text; float16 has it, and it stays finite at any temperature
TRIAL = """
import faulthandler, json, os, sys
import llguidance
nowhere = open(os.devnull, "w")
getattr(os, "nice", int)(10)
for line in sys.stdin:
    faulthandler.dump_traceback_later(float(sys.argv[1]), exit=True, file=nowhere)
    try:
        llguidance.LLMatcher.validate_grammar(llguidance.grammar_from(*json.loads(line)))
    except Exception:
        pass
    faulthandler.cancel_dump_traceback_later()
    print("done", flush=True)
"""


class GrammarCompiler:
    """Compiles the grammars of one tokenizer. Any thread may call it.

    eos_token_ids: tokens that end a complete text
    vocab_size: of the model; tokens from there on have no logits
    """
    most_compiled = 128  # grammars that are kept for later requests
    compile_seconds: float = 5  # that `compile_safely` waits

    def __init__(self, tokenizer: Any, eos_token_ids: Collection[int], vocab_size: int):
        try:
            import llguidance
        except ImportError:
            raise ValueError("structured outputs need the package llguidance: pip install llguidance") from None
        eos = sorted(token for token in eos_token_ids if token < vocab_size)
        if not eos:
            raise ValueError("structured outputs need an end-of-sequence token, and the checkpoint names none")
        self.llguidance, self.eos_token_ids = llguidance, eos
        self.compiled: dict[tuple[str, str], Any] = {}  # or why not; least recently used first
        self.process: Process | None = None  # runs TRIAL
        self.turn = asyncio.Lock()  # to use it
        wrapper = llguidance.TokenizerWrapper(_Vocabulary(tokenizer, eos, vocab_size))
        try:
            self.vocabulary = llguidance.LLTokenizer(wrapper, eos_token=eos)
        except TypeError as error:  # older versions know one such token
            raise ValueError("structured outputs need llguidance 1.7 or newer: pip install -U llguidance") from error
        self.num_words = engine.cdiv(self.vocabulary.vocab_size, 32)  # of a mask

    def compile(self, params: StructuredOutputsParams) -> "Grammar":
        """The grammar at its beginning. ValueError, with llguidance's reason, if it cannot be compiled."""
        source = source_of(params)
        found = self.compiled.get(source) or self._compile(*source)
        self._keep(source, found)
        if isinstance(found, str):
            raise ValueError(f"structured_outputs cannot be used: {' '.join(found.split()):.300}")
        if params.reasoning_token_ids:
            return GrammarAfterReasoning(found.deep_copy(), self, params.reasoning_token_ids)
        return Grammar(found.deep_copy(), self)

    async def compile_safely(self, params: StructuredOutputsParams) -> None:
        """`compile`, for clients that nobody knows: it can be cancelled, and gives up after compile_seconds.

        llguidance takes hours for some schemas of 900 bytes, and a thread cannot be ended. So a process compiles the
        grammar first, which ends itself when the time is over.
        """
        source = source_of(params)
        if source in self.compiled:
            return
        async with self.turn:
            process, self.process = self.process, None
            if process is None or process.returncode is not None:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-c", TRIAL, str(self.compile_seconds), stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
            assert process.stdin and process.stdout
            try:
                process.stdin.write(json.dumps(source).encode() + b"\n")
                if await process.stdout.readline():  # "" if it has ended itself, after compile_seconds
                    self.process = process
            finally:
                if self.process is None and process.returncode is None:
                    process.kill()
            if self.process is None:
                self._keep(source, f"it takes more than {self.compile_seconds} seconds to compile; give a simpler one")
            await asyncio.to_thread(self.compile, params)

    async def close(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()

    def _keep(self, source: tuple[str, str], found: Any) -> None:
        self.compiled.pop(source, None)
        self.compiled[source] = found  # as the last, used most recently
        while len(self.compiled) > self.most_compiled:
            self.compiled.pop(next(iter(self.compiled)), None)

    def _compile(self, kind: str, source: str) -> Any:
        """The matcher, or the reason why there is none."""
        matcher = self.llguidance.LLMatcher
        try:
            if kind == "json":
                grammar = matcher.grammar_from_json_schema(source, defaults={"whitespace_flexible": False})
            else:
                grammar = self.llguidance.grammar_from(kind, source)  # type: ignore[arg-type]
            limits = self.llguidance.LLParserLimits(
                step_max_items=MOST_ITEMS,
                max_items_in_row=MOST_ITEMS_IN_ROW_OF_JSON if kind == "json" else MOST_ITEMS_IN_ROW)
            compiled = matcher(self.vocabulary, grammar, log_level=0, limits=limits)  # warnings would go to stderr
            return compiled.get_error() or compiled
        except (ValueError, TypeError) as problem:
            return str(problem)


def source_of(params: StructuredOutputsParams) -> tuple[str, str]:
    """llguidance's name for the kind of grammar, and the grammar as text. ValueError if json is no JSON."""
    if params.choice is not None:
        # A terminal of its own: thousands of choices as alternatives of a rule are beyond llguidance's limits.
        return "lark", f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, params.choice))}"
    if params.regex is not None:
        return "regex", params.regex
    if params.grammar is not None:
        return "grammar" if "::=" in params.grammar else "lark", params.grammar
    schema = {"type": "object"} if params.json is None else params.json
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        if params.disable_additional_properties and '"properties"' in text and '"allOf"' not in text:
            text = json.dumps(_close_objects(json.loads(text)))
    except (ValueError, TypeError, RecursionError) as problem:
        raise ValueError(f"structured_outputs cannot be used: json is no JSON ({problem})") from None
    return "json", text


def _close_objects(schema: Any) -> Any:
    """The schema with additionalProperties false in each object that has properties and does not say it."""
    if isinstance(schema, list):
        return [_close_objects(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {}
    for key, value in schema.items():
        if key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, dict):
            value = {name: _close_objects(part) for name, part in value.items()}
        elif key in ("items", "prefixItems", "additionalProperties") \
                or key in ("anyOf", "oneOf") and "properties" not in schema:
            value = _close_objects(value)
        closed[key] = value
    others = {"additionalProperties", "unevaluatedProperties", "patternProperties", "anyOf", "oneOf", "$ref"}
    if "properties" in schema and others.isdisjoint(schema):
        closed["additionalProperties"] = False
    return closed


class _Vocabulary:
    """A tokenizer as llguidance wants it."""

    def __init__(self, tokenizer: Any, eos_token_ids: list[int], vocab_size: int):
        self.tokenizer, self.eos_token_id, self.bos_token_id = tokenizer, eos_token_ids[0], None
        self.tokens = tokenizer.token_bytes()[:vocab_size]
        self.tokens += [b""] * (max(eos_token_ids) + 1 - len(self.tokens))
        special = {*tokenizer.special_token_ids(), *eos_token_ids}
        self.special_token_ids = sorted(token for token in special if token < len(self.tokens))
        self.token_of = {text: token for token, text in enumerate(self.tokens) if text and token not in special}
        self.longest = max(map(len, self.token_of), default=0)

    def __call__(self, text: str | bytes) -> list[int]:
        """The tokens of a text that a grammar forces. They must have the bytes of the text, and not all tokenizers keep
        these: SentencePiece puts a space in front, others normalize, lack bytes, or have more tokens than the model."""
        data = text.encode() if isinstance(text, str) else text
        tokens = self.tokenizer.encode(data.decode(), add_special_tokens=False)
        if max(tokens, default=0) < len(self.tokens) and b"".join(map(self.tokens.__getitem__, tokens)) == data:
            return tokens
        tokens = []  # each the longest that fits, up to a byte that no token has
        while end := next((end for end in range(min(len(data), self.longest), 0, -1) if data[:end] in self.token_of),
                          0):
            tokens.append(self.token_of[data[:end]])
            data = data[end:]
        return tokens


class GrammarSequence(engine.Sequence):
    """A text that a grammar follows."""
    grammar: "Grammar"
    drafts: Sequence[int] = ()  # with drafts, those that are not decided yet

    def append(self, token: int) -> None:
        """Append the token and those that must follow. Then samples under way continue another text. K and V of the
        sampled token, which a step under way may have computed, belong to this one."""
        params, end = self.sampling.params, len(self.token_ids) + 1
        # The log probability of a forced token, and penalties that count it, need its logits or the sampler.
        may_force = params.logprobs is None and not (params.edits_logits or params.logits_processors)
        try:
            new = self.grammar.on_token(self, token, may_force)
        except BaseException as error:  # other sequences of the step have their tokens still to come
            self.stop_reason, new = f"the grammar failed: {error!r}", [-1]
        for token in new:
            if self.status is not engine.Status.FINISHED:
                super().append(token)
        if len(new) > 1:
            self.num_computed_tokens, self.num_pending_tokens = min(self.num_computed_tokens, end), 0


SEQUENCE = GrammarSequence


def start(core: Any, params: SamplingParams, sequences: list[Any]) -> None:
    """Prepare the samples of a request. ValueError: its grammar cannot be compiled."""
    assert params.structured_outputs is not None
    with core.lock.interrupts:  # llguidance calls the tokenizer, and would panic at a KeyboardInterrupt
        grammar = compiler_of(core).compile(params.structured_outputs)
        for seq in sequences:
            seq.grammar = grammar.copy()
    for runner in core.runners:
        runner.use(Masks)
        runner.extend_steps(LateStep)


COMPILERS: WeakKeyDictionary[Any, GrammarCompiler] = WeakKeyDictionary()


def compiler_of(core: Any) -> GrammarCompiler:
    """The engine's compiler, which is made when a request first asks for it."""
    if core not in COMPILERS:
        try:
            tokenizer = core.require_tokenizer()
        except ValueError as error:
            raise ValueError(f"structured outputs need the checkpoint's tokenizer: {error}") from None
        COMPILERS[core] = GrammarCompiler(tokenizer, core.eos_token_ids, core.config.vocab_size)
    return COMPILERS[core]


class Grammar:
    """Follows one text: what may come next, and what must."""

    def __init__(self, matcher: Any, compiler: GrammarCompiler):
        self.matcher, self.compiler, self.eos_token_ids = matcher, compiler, compiler.eos_token_ids

    def copy(self) -> "Grammar":
        made = copy.copy(self)
        made.matcher = self.matcher.deep_copy()
        return made

    def on_token(self, seq: engine.Sequence, token: int, may_force: bool) -> list[int]:
        """The tokens to append: the sampled one and those that must follow. -1 ends the sequence with an error."""
        new, is_text = [token], token >= 0 and token not in self.eos_token_ids
        if is_text:
            self.matcher.consume_token(token)
            if may_force and (forced := self.propose(seq.token_ids, MOST_FORCED)):
                self.matcher.consume_tokens(forced)
                new += forced
        if self.matcher.is_error():  # here or in `fill_mask`
            reason = self.matcher.get_error().partition("<state>")[0]
            seq.stop_reason = f"the grammar failed: {' '.join(reason.split())}"
            return [-1]
        if is_text and may_force and self.matcher.is_stopped():
            new.append(self.eos_token_ids[0])
        return new

    def propose(self, token_ids: list[int], k: int) -> list[int]:
        """The next tokens, at most k, as far as the grammar leaves no choice. (Other proposals would read token_ids;
        the matcher has followed them.)"""
        return self.matcher.compute_ff_tokens()[:k]

    def num_allowed(self) -> int:
        words = torch.empty(self.compiler.num_words, dtype=torch.int32)
        self.fill_mask(words.data_ptr(), [])
        return sum((word & 0xFFFFFFFF).bit_count() for word in words.tolist())

    def num_fitting(self, token_ids: list[int]) -> int:
        """How many of these tokens may come next, one after the other. (None that ends the text, and none that only the
        model has: it would put the matcher into error.)"""
        size = self.compiler.vocabulary.vocab_size
        return self.matcher.validate_tokens(
            [*takewhile(lambda token: token < size and token not in self.eos_token_ids, token_ids)])

    def fill_mask(self, address: int, drafts: list[int]) -> int:
        """Write the tokens that may come after these drafts to compiler.num_words int32 on the host, and return their
        size in bytes: token i is bit i % 32 of word i // 32. None may if the matcher has failed, or fails here at a
        limit of llguidance."""
        if drafts:
            self.matcher.consume_tokens(drafts)
            size = Grammar.fill_mask(self, address, [])
            self.matcher.rollback(len(drafts))
            return size
        size = 4 * self.compiler.num_words
        if not self.matcher.is_stopped():
            self.matcher.unsafe_compute_mask_ptr(address, size)
        if not self.matcher.is_stopped():
            return size
        mask = (ctypes.c_uint8 * size).from_address(address)
        ctypes.memset(address, 0, size)
        for token in self.eos_token_ids if not self.matcher.is_error() else ():  # the text is complete
            mask[token // 8] |= 1 << token % 8
        return size


class GrammarAfterReasoning(Grammar):
    """A grammar that begins when the model's reasoning has ended. Until then all tokens may come but those that end the
    text, which fits no grammar yet.

    token_ids: of `reasoning_token_ids` in StructuredOutputsParams, [end] or [begin, end]
    """

    def __init__(self, matcher: Any, compiler: GrammarCompiler, token_ids: Sequence):
        super().__init__(matcher, compiler)
        *begin, end = token_ids
        size, largest = compiler.vocabulary.vocab_size, max(end_tokens(begin, end))
        if largest >= size:
            raise ValueError(f"reasoning_token_ids has token id {largest}; the tokenizer's are 0 to {size - 1}")
        self.begin, (*self.row, self.end) = [-1, *begin][-1], end_tokens([], end)
        self.num_seen = 0  # tokens of the row in front of the end
        self.reasons: bool | None = not begin  # False: it may begin; None: it has ended, or there was none
        bits = (1 << size) - 1 - sum(1 << token for token in self.eos_token_ids)
        self.free_mask = bits.to_bytes(4 * compiler.num_words, "little")

    def _follow(self, tokens: list[int]) -> tuple[bool | None, int, list[int]]:
        """`reasons` and `num_seen` after these tokens, and those of them that are the grammar's."""
        reasons, num_seen = self.reasons, self.num_seen
        for index, token in enumerate(tokens):
            if reasons is None or not reasons and token != self.begin:
                return None, 0, tokens[index:]
            reasons = None if num_seen == len(self.row) and token == self.end else True
            if num_seen < len(self.row):
                num_seen = num_seen + 1 if token == self.row[num_seen] else int(token == self.row[0])
        return reasons, num_seen, []

    def on_token(self, seq: engine.Sequence, token: int, may_force: bool) -> list[int]:
        self.reasons, self.num_seen, text = self._follow([token])
        return super().on_token(seq, token, may_force) if text else [token]

    def num_fitting(self, token_ids: list[int]) -> int:
        *_, text = self._follow(token_ids)
        return len(token_ids) - len(text) + super().num_fitting(text)

    def fill_mask(self, address: int, drafts: list[int]) -> int:
        reasons, _, text = self._follow(drafts)
        if reasons:
            ctypes.memmove(address, self.free_mask, len(self.free_mask))
            return len(self.free_mask)
        size = super().fill_mask(address, text)
        if reasons is False:
            (ctypes.c_uint8 * size).from_address(address)[self.begin // 8] |= 1 << self.begin % 8
        return size


# --------------------------------------------------------------------------------------------------
# On the device
# --------------------------------------------------------------------------------------------------

class LateStep(LaunchedStep):
    """A step in which sequences with a grammar sample is sampled late: their masks need the tokens of the step before
    on the host. The next launch samples it, or `is_done` or the call does:

        launch 1 | sample 1, launch 2 | read 1 | sample 2, launch 3 | read 2
    """
    forward_pass: ForwardPass | None = None  # launched, and not sampled

    def __init__(self, runner: Any):
        self.masks: Masks = runner.use(Masks)
        if before := self.masks.unsampled():
            before.sample()  # the launch of this step changes batch rows
        super().__init__(runner)

    def start(self, forward_pass: ForwardPass) -> None:
        self.forward_pass = forward_pass
        if self.needs.is_late:
            self.masks.unsampled = weakref.ref(self)  # weakly, because a step refers to the runner
        else:
            self.sample()

    @on_its_device
    @torch.inference_mode()
    def sample(self) -> None:
        """Launch sampling, and the copy of the tokens to the host, if that has not been done."""
        if self.forward_pass is not None:
            logits, tokens = self.forward_pass.logits, self.forward_pass.draw()
            self.forward_pass = ForwardPass(lambda: tokens, logits)  # a retry must not draw again
            self.copy(tokens, logits)
            self.forward_pass = None  # frees the logits

    def is_done(self) -> bool:
        self.sample()
        return super().is_done()

    def __call__(self) -> engine.Sampled:
        self.sample()
        return super().__call__()


class Masks(LogitsStep):
    """Sends masks to the device as bits: 19 KB a row for 152,000 tokens. (The model may have more tokens than the
    grammars' tokenizer.)"""
    is_late = True
    unsampled: Callable[[], LateStep | None] = staticmethod(lambda: None)  # the last late step, as a weak reference

    def __init__(self, runner: Any):
        device, max_rows = runner.device, runner.max_num_samples
        self.num_bytes = 4 * engine.cdiv(runner.config.vocab_size, 32)
        # Written again only after a step that read it was read itself: sampling waits for the tokens before.
        self.host = torch.empty(max_rows, self.num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.masks = torch.empty_like(self.host, device=device)
        # Recorded sampling with masks, by number of places: graph, places, tokens
        self.recorded: dict[int, Any] = {}
        self.recorded_input = torch.zeros(3 * max_rows, dtype=torch.int32, device=device)

    def plan(self, seqs: list[engine.Sequence], positions: list[int]) -> dict[int, tuple[Any, int]] | None:
        """(sequence, position of its next token) of each logit row that has a grammar."""
        return {row: (seq, position) for row, (seq, position) in enumerate(zip(seqs, positions))
                if isinstance(seq, GrammarSequence)} or None

    @staticmethod
    def masked(plan: dict[int, tuple[Any, int]]) -> dict[int, Any]:
        """The logit rows that are sampled with a mask: a token that the grammar has forced by now is not sampled."""
        return {row: seq for row, (seq, position) in plan.items() if seq.is_pending(position)}

    def __call__(self, logits: Tensor, plan: dict[int, tuple[Any, int]], rows: Tensor, positions: Tensor) -> Tensor:
        seqs = self.masked(plan)
        masks = self.send([seqs.get(row) for row in range(len(logits))])
        # A complete text ends, though min_tokens or another edit has given its ends -inf.
        if complete := [row for row, seq in seqs.items() if self.is_complete(row, seq)]:
            at = send(logits.device, [complete])[0]
            logits = logits.index_copy(0, at.long(), logits.index_select(0, at).clamp(min=LEAST_LOGIT))
        return self.mask(logits, masks)

    def is_complete(self, row: int, seq: Any) -> bool:
        """Whether the mask that was sent for this row allows nothing but tokens that end the text."""
        allowed = int.from_bytes(ctypes.string_at(self.host[row].data_ptr(), self.num_bytes), "little")
        return not allowed & ~sum(1 << token for token in seq.grammar.eos_token_ids)

    def send(self, seqs: list[Any]) -> Tensor:
        """The masks [R, num_bytes] on the device, one for each sequence; None: of a row that allows all tokens. A
        sequence with drafts has several: that of its next token, then those after one draft, two .."""
        start, num_rows = self.host.data_ptr(), Counter[Any]()
        for row, seq in enumerate(seqs):
            address = start + self.num_bytes * row
            if seq is None:
                ctypes.memset(address, 0xFF, self.num_bytes)
            else:
                try:
                    size = seq.grammar.fill_mask(address, seq.drafts[:num_rows[seq]])
                except BaseException as error:  # a panic of Rust: nothing is allowed, which ends this sequence
                    size, seq.stop_reason = 0, f"the grammar failed: {error!r}"
                ctypes.memset(address + size, 0, self.num_bytes - size)  # ids that the tokenizer lacks
            num_rows[seq] += 1
        return self.masks[:len(seqs)].copy_(self.host[:len(seqs)], non_blocking=True)

    @staticmethod
    def mask(logits: Tensor, masks: Tensor) -> Tensor:
        """Set the logits of tokens that may not come next to -inf: logits [R, vocab_size]; masks [R, num_bytes] uint8,
        a bit for each token, and unused bits at the end."""
        bits = masks[:, :, None] & (1 << torch.arange(8, dtype=torch.uint8, device=masks.device))
        return logits.masked_fill(bits.flatten(1)[:, :logits.shape[1]] == 0, -torch.inf)

    # ---- recorded steps

    def redraw(self, runner: Any, batch: StepInput, tokens: Tensor, plan: dict[int, tuple[Any, int]]) -> Tensor:
        """The tokens that a recorded step has drawn from the unchanged logits, drawn anew where the plan changes these
        (graphs.py)."""
        places = batch.sampling_places
        tokens = tokens.clone()  # graphs share memory: the replay below may write where the step's tokens are
        if masked := {places[logit_row]: seq for logit_row, seq in self.masked(plan).items()}:
            at, drawn = self._replay(runner, batch, masked)
            tokens.index_copy_(0, at, drawn)
        if len(places) == len(batch.seqs):
            return tokens[:len(batch.seqs)]
        at, rows = runner.send([places, [batch.rows[place] for place in places]])
        tokens = tokens.index_select(0, at)
        # Of the places of a sequence with drafts only those that sample set its last token.
        runner.rows.last_tokens.index_copy_(0, rows.long(), tokens.clamp(min=0).int())
        return tokens

    def _replay(self, runner: Any, batch: StepInput, masked: dict[int, Any]) -> tuple[Tensor, Tensor]:
        """Draw tokens for these places of the step with masks, by a graph that is recorded at its first use."""
        at = list(masked)
        self.send(list(masked.values()))
        size = min(1 << (len(at) - 1).bit_length(), len(self.host))
        padding = size - len(at)
        message = integers([at + [0] * padding, [batch.rows[i] for i in at] + [runner.max_num_seqs] * padding,
                            [batch.seq_lens[i] for i in at] + [0] * padding])
        message = message.pin_memory() if self.masks.is_cuda else message
        self.recorded_input[:len(message)].copy_(message, non_blocking=True)
        if size not in self.recorded:
            self.recorded[size] = runner._record(partial(self._static_step, runner), size)
        graph, places, tokens = self.recorded[size]
        graph.replay()
        return places[:len(at)], tokens[:len(at)]

    def _static_step(self, runner: Any, size: int) -> tuple[Tensor, Tensor]:
        """Sampling with masks, at so many places: (places, tokens)."""
        at, rows, lens = self.recorded_input[:3 * size].view(3, size)
        logits = self.mask(runner.graph_logits.index_select(0, at), self.masks[:size])
        return at.long(), runner.sample(logits, rows, lens, SamplingNeeds())
