"""Edited logits and log probabilities: every row as the plain loops below compute it, whatever else is in the batch.

The editor is seen from outside: sequences start in rows of an engine, rows sample, tokens are noted. The reference
knows one sequence, as Python lists.
"""
import itertools
import math
import random
from copy import copy
from unittest.mock import Mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine import Sequence
from nanopaged.device.sampler import SamplingNeeds
from nanopaged.features import edits as logits_module
from nanopaged.features.edits import LogitsEditor, encode_bad_words
from nanopaged.features.logprobs import top_logprobs
from nanopaged.sampling_params import SamplingParams, SequenceSampling
from nanopaged.tests.helpers import GOLDEN
from nanopaged.text.tokenizer import load_tokenizer

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
VOCAB = 40
INF = math.inf


@pytest.fixture(params=DEVICES)
def device(request):
    return torch.device(request.param)


def editor_for(device, num_rows=16, vocab_size=VOCAB) -> LogitsEditor:
    def send(parts):
        values = torch.tensor([value for part in parts for value in part], dtype=torch.int32)
        if device.type == "cuda":
            values = values.pin_memory().to(device, non_blocking=True)
        return list(values.split([len(part) for part in parts]))
    return LogitsEditor(num_rows, vocab_size, device, send)


def normal(*shape, seed=0, scale=3.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def num_entries(editor: LogitsEditor) -> int:
    return sum(t.numel() for t in vars(editor).values() if torch.is_tensor(t))


def bits(tensor: torch.Tensor) -> list:
    return tensor.view(torch.int32).tolist()


def sequence(row: int, params=SamplingParams(), prompt_ids=(1,), output_ids=(), stop_ids=(), bad_words=()) -> Sequence:
    """By default a row that runs without the editor's knowledge, or has run."""
    seq = Sequence(list(prompt_ids), (), 0, frozenset(stop_ids), sampling=SequenceSampling(params, 0, list(bad_words)))
    seq.row, seq.token_ids = row, [*prompt_ids, *output_ids]
    return seq


def output_of(seq: Sequence) -> list[int]:
    return seq.token_ids[seq.num_prompt_tokens:]


# ---- The reference: one sequence, Python's lists

def edit(logits: list[float], seq: Sequence) -> list[float]:
    """The logits of the token after seq.token_ids."""
    p, prompt, output, result = seq.sampling.params, seq.token_ids[:seq.num_prompt_tokens], output_of(seq), list(logits)
    for token in range(len(result)):
        if p.allowed_token_ids is not None and token not in p.allowed_token_ids:
            result[token] = -INF
        if len(output) < p.min_tokens and token in seq.stop_token_ids:
            result[token] = -INF
        for word in seq.sampling.bad_words:
            before = word[:-1]
            if word[-1] == token and len(output) >= len(before) and output[len(output) - len(before):] == before:
                result[token] = -INF
        result[token] += (p.logit_bias or {}).get(token, 0)
    for function in p.logits_processors or ():
        result = function(output, torch.tensor(result)).tolist()
    for token in range(len(result)):
        if token in prompt or token in output:
            repetition = p.repetition_penalty
            result[token] = result[token] / repetition if result[token] > 0 else result[token] * repetition
        result[token] -= p.frequency_penalty * output.count(token)
        result[token] -= p.presence_penalty * (token in output)
    return result


def rank_and_best(logits: list[float], chosen: int, k: int) -> tuple[float, int, list[int], list[float]]:
    peak = max(logits)
    norm = peak + math.log(math.fsum(math.exp(x - peak) for x in logits))
    best = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[:k]
    rank = sum(x >= logits[chosen] for x in logits)
    return logits[chosen] - norm, rank, best, [logits[token] - norm for token in best]


# ---- Sequences that come and go

def keep_even(token_ids, logits):
    """A processor that changes its argument in place: no odd token comes after an odd number of tokens."""
    logits[1::2] -= 50.0 * (len(token_ids) % 2)
    return logits


def halve(token_ids, logits):
    return logits / 2


def random_sequence(row: int, rng: random.Random, processors: bool = False, num_output: int = 0) -> Sequence:
    """A sequence with each setting at some probability, of few tokens so that they repeat; every fourth sequence has no
    settings."""
    is_plain = rng.random() < 0.25

    def maybe(**settings):
        return {} if is_plain or rng.random() < 0.65 else settings

    def tokens(k, vocab_size=VOCAB):
        return rng.choices(range(vocab_size), k=k)

    def unknown(k):
        """Some of them: a tokenizer may have more tokens than the model, which therefore never draws them."""
        return tokens(k, VOCAB + 3)

    settings = (
        maybe(presence_penalty=rng.uniform(-2, 2)) | maybe(frequency_penalty=rng.uniform(-2, 2))
        | maybe(repetition_penalty=rng.uniform(0.3, 3)) | maybe(min_tokens=rng.randint(1, 12))
        | maybe(logit_bias={token: rng.uniform(-9, 9) for token in tokens(rng.randint(1, 8))})
        | maybe(allowed_token_ids=tokens(rng.randint(5, 20))) | maybe(bad_words=["word"])
        | (maybe(logits_processors=rng.choices([keep_even, halve], k=rng.randint(1, 3))) if processors else {}))
    bad = [unknown(rng.randint(1, 4)) for _ in range(rng.randint(1, 12))] if "bad_words" in settings else []
    return sequence(row, SamplingParams(max_tokens=None, **settings), tokens(rng.randint(1, 30)), tokens(num_output),
                    unknown(rng.randrange(4)), bad)


class Engine:
    """A runner's way to use an editor, with random tokens, and a list of each sequence beside it."""

    def __init__(self, device, num_rows, seed, processors=False):
        self.device, self.num_rows, self.processors = device, num_rows, processors
        self.rng, self.editor = random.Random(seed), editor_for(device, num_rows)
        self.sequences = {row: sequence(row) for row in range(num_rows)}

    def start(self, rows, **settings):
        seqs = [random_sequence(row, self.rng, self.processors, **settings) for row in rows]
        self.sequences |= {seq.row: seq for seq in seqs}
        self.editor.start(seqs)

    def sample(self, rows, logits) -> torch.Tensor:
        on_device = torch.tensor(rows, device=self.device)
        seqs = [self.sequences[row] for row in rows]
        lengths = torch.tensor([seq.num_tokens for seq in seqs], dtype=torch.int32)
        hooks = [(i, functions, output_of(seq), pytest.fail) for i, seq in enumerate(seqs)
                 if (functions := seq.sampling.params.logits_processors)]
        return self.editor(logits.to(self.device), on_device, lengths.to(self.device), hooks)

    def note(self, rows):
        """Tokens that end some bad word more often than chance would."""
        tokens = []
        for row in rows:
            words = self.sequences[row].sampling.bad_words
            tokens.append(self.rng.choice(self.rng.choice(words)) % VOCAB if words else self.rng.randrange(VOCAB))
            self.sequences[row].token_ids.append(tokens[-1])
        self.editor.add(torch.tensor(rows, device=self.device), torch.tensor(tokens, device=self.device))

    def some_rows(self):
        return self.rng.sample(sorted(self.sequences), self.rng.randint(1, len(self.sequences)))


@pytest.mark.parametrize("processors", [False, True], ids=["", "processors"])
@pytest.mark.parametrize("seed", range(4))
def test_mixed_batches_equal_the_reference(device, seed, processors):
    """Rows end, start and start over, with tokens generated already or without, and sample in any order beside rows
    that run without the editor's knowledge; its tables grow and shrink meanwhile. Logits of half precision are edited
    as their float32 values."""
    engine, num_edited = Engine(device, 17, seed, processors), 0
    for step in range(50):
        free = engine.rng.sample(range(17), engine.rng.choice([0, 0, 0, 0, 1, 1, 3, 17]))
        engine.sequences |= {row: sequence(row) for row in free}  # the old ones are gone
        new = engine.rng.sample(range(17), engine.rng.randint(1, 5))
        engine.start(new, num_output=engine.rng.choice([0, 0, 7]))
        rows = engine.some_rows()
        logits = normal(len(rows), VOCAB, seed=step).to(engine.rng.choice([torch.float32, torch.bfloat16])).to(device)
        before = logits.clone()
        edited = engine.sample(rows, logits)
        assert edited.dtype == torch.float32 and torch.equal(logits, before)
        for row, given, result in zip(rows, logits.tolist(), edited.tolist()):
            assert result == pytest.approx(edit(given, engine.sequences[row]), rel=1e-5, abs=1e-5)
            assert engine.editor.edits([row]) == engine.sequences[row].sampling.params.edits_logits
            num_edited += result != given
        engine.note(rows)
    assert num_edited > 90


def test_a_row_in_a_batch_equals_the_row_alone(device):
    """The logits are equal bit for bit in a batch whose other rows use every setting, and in an editor that has never
    seen another row."""
    engine = Engine(device, 12, seed=7, processors=True)
    engine.start(range(12))
    for step in range(8):
        rows = engine.some_rows()
        logits = normal(len(rows), VOCAB, seed=step)
        together = engine.sample(rows, logits)
        for i, row in enumerate(rows):
            assert bits(engine.sample([row], logits[i:i + 1])[0]) == bits(together[i])
            other = Engine(device, 1, seed=0)
            other.sequences[0] = alone = copy(engine.sequences[row])
            alone.row = 0
            other.editor.start([alone])
            assert bits(other.sample([0], logits[i:i + 1])[0]) == bits(together[i])
        engine.note(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_row_without_settings_keeps_every_bit(device, dtype):
    engine = Engine(device, 20, seed=3)
    engine.start(range(20))
    plain = [row for row in range(20) if not engine.sequences[row].sampling.params.edits_logits]
    assert 3 <= len(plain) <= 10 and not engine.editor.edits(plain) and engine.editor.edits(range(20))
    for step in range(6):
        logits = normal(20, VOCAB, seed=step).to(dtype)
        logits[:, :6] = torch.tensor([0.0, -0.0, INF, -INF, 1e-40, -1e-40])  # the last two are subnormal
        edited = engine.sample(list(range(20)), logits)
        assert bits(edited[plain].cpu()) == bits(logits[plain].float())
        engine.note(range(20))


def test_plain_requests_need_no_tables():
    editor = editor_for("cpu", num_rows=4, vocab_size=100)
    editor.send = None
    editor.start([plain := sequence(0, SamplingParams(temperature=0))])
    assert SamplingNeeds.of([plain], [1], editor) == SamplingNeeds(greedy=True)


def test_tables_hold_the_rows_that_need_them(device):
    """The tables have room for twice as many rows at most, and never for more rows than the engine has."""
    editor = editor_for(device, num_rows=10, vocab_size=1000)
    seqs = [sequence(row, SamplingParams(logit_bias={1: 1.0})) for row in range(10)]
    for seq in seqs * 2:  # starting over needs no more
        editor.start([seq])
        num_rows = len(editor.slot_of_row)
        assert (num_rows + 1) * 1000 <= num_entries(editor) <= min(2 * num_rows, 11) * 1000 + 100
    editor.start([seq := sequence(4, SamplingParams(presence_penalty=1.0))])
    assert 22_000 <= num_entries(editor) <= 22_100


def test_tables_shrink_when_a_row_that_needed_them_has_ended(device):
    """Bans become as few and as short as those of the rows that are left, and tables that no row needs go. Rows that
    edit nothing need none."""
    editor, words = editor_for(device, 10), [[token % VOCAB] * 5 for token in range(1000)]
    others = [sequence(0, SamplingParams(min_tokens=9), stop_ids=[2, 3]),
              sequence(1, SamplingParams(bad_words=["x"]), output_ids=[5, 6], bad_words=[[5, 6, 7], [8]])]
    editor.start([sequence(row) for row in range(10)])
    assert num_entries(editor) < 20 and not editor.edits(range(10))
    everything = SamplingParams(bad_words=["x"], presence_penalty=1, logit_bias={1: 1.0})
    ending = [sequence(row, everything, bad_words=words) for row in (2, 3)]
    editor.start([*others, *ending])
    assert num_entries(editor) > 2 * 1000 * 6
    ending.pop()  # it is gone, and the other one has left its row
    ending[0].row = -1
    editor.start([sequence(4)])
    assert num_entries(editor) < 200 and not editor.edits([2, 3, 4])
    others.clear()
    editor.start([sequence(5)])
    assert num_entries(editor) < 20 and not editor.edits(range(10))


def test_after_a_step_that_failed_the_device_is_told_what_it_missed(device):
    """The row of a sequence that ended has no slot any more, though the step that was to tell the device so failed."""
    engine, biased = Engine(device, 3, seed=0), SamplingParams(logit_bias={1: 5.0})
    engine.sequences = {row: sequence(row, biased) for row in range(2)}
    engine.editor.start(list(engine.sequences.values()))
    engine.sequences[0] = sequence(0)
    send, engine.editor.send = engine.editor.send, lambda parts: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.editor.start([sequence(2, biased)])
    engine.editor.send = send
    engine.editor.start([engine.sequences[0]])
    assert engine.sample([0, 1], torch.zeros(2, VOCAB))[:, 1].tolist() == [0, 5]


def test_many_generated_tokens_are_counted_exactly(device):
    """A model that is rewarded for repeating a token does so more often than 16 bits count."""
    seq, editor = sequence(0, SamplingParams(frequency_penalty=0.5), [0], [0] * 70_000), editor_for(device, 1)
    editor.start([seq])
    result = editor(torch.zeros(1, VOCAB, device=device), torch.zeros(1, dtype=torch.int64, device=device),
                    torch.tensor([70_001], device=device))
    assert result[0, 0] == -35_000


# ---- Logits processors

@pytest.mark.parametrize("result, given", [(None, "None"), (torch.zeros(3), "one of shape [3]"), (0.5, "0.5")], ids=str)
def test_a_processor_that_returns_no_logits_spoils_its_row_alone(device, result, given):
    editor, rows, failures = editor_for(device), torch.arange(2, device=device), []
    functions = [lambda token_ids, logits: logits.fill_(7), lambda token_ids, logits: result]
    given_logits = torch.zeros(2, VOCAB, device=device)
    logits = editor(given_logits, rows, rows, [(1, functions, [], failures.append)])
    assert given_logits.eq(0).all() and logits[0].eq(0).all() and logits[1].isnan().all()
    assert failures == [f"a logits processor failed: ValueError('it must return a tensor of shape [40], not {given}')"]


# ---- On a GPU's path

class CountOperations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.count += 1
        return function(*arguments, **(options or {}))


def test_the_work_does_not_depend_on_the_number_of_rows(device):
    """The operations are the same for 2 rows and for 50, and for one sequence that starts and for 20: no Python runs
    for each row."""
    engine = Engine(device, 50, seed=6)
    engine.start(range(50))
    editing = [seq for seq in engine.sequences.values() if seq.sampling.params.edits_logits]

    def count_operations(rows, num_starts):
        tensor, logits = torch.tensor(rows, device=device), normal(len(rows), VOCAB).to(device)
        with CountOperations() as counter:
            engine.editor.start(editing[:num_starts])
            engine.editor(logits, tensor, tensor + 30)
            engine.editor.add(tensor, tensor % VOCAB)
        return counter.count

    assert count_operations([3, 11], num_starts=2) == count_operations(list(range(50)), num_starts=20) < 160


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_host_does_not_wait_for_the_device():
    engine = Engine(torch.device("cuda"), 10, seed=1)
    rows, logits = torch.arange(10, device="cuda"), normal(10, VOCAB).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.start(range(10))
        engine.editor(logits, rows, rows + 30)
        engine.editor.add(rows, rows)
        top_logprobs(logits, rows, 5)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- Log probabilities

@pytest.mark.parametrize("k, num_rows", [(0, 30), (1, 30), (5, 30), (VOCAB, 30), (10**12, 30), (-1, 30), (3, 0)])
def test_logprobs_equal_the_reference(device, k, num_rows):
    chosen = torch.randint(VOCAB, [num_rows], generator=torch.Generator().manual_seed(1))
    logits = normal(num_rows, VOCAB).to(torch.bfloat16 if k == 5 else torch.float32)
    logits[::3] = logits[::3].round()  # equal ones
    logits[::4, ::3] = -INF
    logprobs, ranks, ids, best = (t.tolist() for t in top_logprobs(logits.to(device), chosen.int().to(device), k))
    for row in range(num_rows):
        expected = rank_and_best(logits[row].tolist(), chosen[row].item(), VOCAB if k < 0 else k)
        assert (ranks[row], ids[row]) == expected[1:3]
        assert [logprobs[row], *best[row]] == pytest.approx([expected[0], *expected[3]], abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logprobs_of_a_row_are_those_of_the_row_alone(device, dtype):
    """The rows have ties among bfloat16 logits, and come in pieces of any size."""
    logits, chosen = normal(40, 3000).to(device, dtype), torch.arange(40, device=device)
    together = top_logprobs(logits, chosen, 20)
    assert torch.equal(together[3], together[3].sort(descending=True).values)
    alone = [top_logprobs(logits[i:i + 1], chosen[i:i + 1], 20) for i in range(40)]
    pieces = top_logprobs(logits, chosen, 20, at_once=7 * 3000 + 5)
    for i in range(40):
        for a, b, c in zip(together, alone[i], pieces):
            assert torch.equal(a[i], b[0]) and torch.equal(a[i], c[i])


def test_logprobs_of_broken_logits_have_ids_of_the_vocabulary(device):
    logits = normal(3, VOCAB)
    logits[0], logits[1, 5], logits[2, 7] = math.nan, INF, -math.nan
    ids = top_logprobs(logits.to(device), torch.zeros(3, dtype=torch.int64, device=device), VOCAB)[2]
    assert ids.sort().values.tolist() == [list(range(VOCAB))] * 3


# ---- Bad words as texts

@pytest.mark.parametrize("name, words, tokens", [
    ("gpt2", ["king", " king"], [["k", "ing"], [" k", "ing"]] * 2),
    ("gpt2", ["the"], [["t", "he"]]),  # behind a space it is one token
    ("flags", ["king", "x"], [[" k", "ing"], [" ", "x"]])])  # this tokenizer puts a space before every text
def test_bad_words_are_banned_with_and_without_a_space_before(name, words, tokens):
    """A space that is given makes no difference."""
    tokenizer = load_tokenizer(GOLDEN / "tokenizers" / name)
    assert [list(map(tokenizer.decode, zip(word))) for word in encode_bad_words(words, tokenizer)] == tokens


def test_a_bad_word_of_no_tokens_is_refused():
    with pytest.raises(ValueError, match="^bad_words must be texts of at least one token, not ' '$"):
        encode_bad_words(["bad", " "], load_tokenizer(GOLDEN / "tokenizers" / "gpt2"))


@pytest.mark.parametrize("fails_at", range(1, 6))
def test_a_start_that_fails_leaves_the_tables_of_other_rows(device, monkeypatch, fails_at):
    """A runs, and no memory is left for a table of B. Then A samples, and C takes B's row."""
    editor = editor_for(device)
    a, b, c = (sequence(row, SamplingParams(bad_words=words), bad_words=bans) for row, words, bans in (
        (0, ["x"], [[4, 5, 6]]), (1, ["y"], [[4, 5, 6, 7, 8]]), (1, None, [])))
    editor.start([a])
    logits, rows, positions = normal(1, VOCAB).to(device), *torch.tensor([[0], [1]], device=device)
    expected, resize, calls = editor(logits, rows, positions), logits_module._resize, itertools.count(1)

    def fail(*args, **options):
        if next(calls) == fails_at:
            raise torch.OutOfMemoryError
        return resize(*args, **options)

    with monkeypatch.context() as patched, pytest.raises(torch.OutOfMemoryError):
        patched.setattr(logits_module, "_resize", fail)
        editor.start([b])
    assert torch.equal(editor(logits, rows, positions), expected)
    with monkeypatch.context() as patched, pytest.raises(torch.OutOfMemoryError):
        patched.setattr(torch.Tensor, "index_fill_", Mock(side_effect=torch.OutOfMemoryError))
        editor.start([b])
    b.row = -1
    editor.start([c])
    assert editor.slots.tolist()[:2] == [1, 0]
