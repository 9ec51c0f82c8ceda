"""Edited logits: every row as the plain loops below compute it, whatever else is in the batch.

The edits are seen from outside: sequences start in rows of an engine, rows sample, tokens are noted. The reference
knows one sequence, as Python lists.
"""
import math
import random
from copy import copy
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine import Sequence
from nanopaged.device.sampler import SamplingNeeds
from nanopaged.features.edits import EditedSequence, Edits, encode_bad_words
from nanopaged.sampling_params import SamplingParams, SequenceSampling
from nanopaged.tests.helpers import GOLDEN, GREEDY, PROMPT, load, tokens_of
from nanopaged.text.tokenizer import load_tokenizer

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
VOCAB = 40
INF = math.inf


@pytest.fixture(params=DEVICES)
def device(request):
    return torch.device(request.param)


def edits_for(device, num_rows=16, vocab_size=VOCAB, params=None) -> Edits:
    """With the tables of every kind, or of these settings."""
    edits = Edits(SimpleNamespace(max_num_seqs=num_rows, config=SimpleNamespace(vocab_size=vocab_size),
                                  device=torch.device(device)))
    edits.make_tables(params or SamplingParams(logit_bias={1: 1.0}, presence_penalty=1))
    return edits


def normal(*shape, seed=0, scale=3.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def bits(tensor: torch.Tensor) -> list:
    return tensor.view(torch.int32).tolist()


def sequence(row: int, params=SamplingParams(), prompt_ids=(1,), output_ids=(), stop_ids=(), bad_words=()) -> Sequence:
    """Which starts in this row; by default a plain one."""
    kind = EditedSequence if params.edits_logits or params.logits_processors else Sequence
    seq = kind(list(prompt_ids), (), 0, frozenset(stop_ids), sampling=SequenceSampling(params))
    seq.row, seq.token_ids, seq.bad_words = row, [*prompt_ids, *output_ids], list(bad_words)
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
        for word in seq.bad_words:
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
    """A runner's way to use the edits, with random tokens, and a list of each sequence beside it."""

    def __init__(self, device, num_rows, seed, processors=False):
        self.device, self.processors = device, processors
        self.rng, self.edits = random.Random(seed), edits_for(device, num_rows)
        self.sequences = {row: sequence(row) for row in range(num_rows)}

    def start(self, rows, **settings):
        self.sequences |= {row: random_sequence(row, self.rng, self.processors, **settings) for row in rows}

    def sample(self, rows, logits) -> torch.Tensor:
        seqs = [self.sequences[row] for row in rows]
        self.rows = torch.tensor(rows, device=self.device)
        self.plan = self.edits.plan(seqs, [seq.num_tokens for seq in seqs])
        assert (self.plan is None) == all(type(seq) is Sequence for seq in seqs)
        return self.edits(logits.to(self.device), self.plan, self.rows, None) if self.plan else logits.float()

    def note(self, rows):
        """Draw tokens that end some bad word more often than chance would, in the rows that sampled."""
        tokens = []
        for row in rows:
            words = self.sequences[row].bad_words
            tokens.append(self.rng.choice(self.rng.choice(words)) % VOCAB if words else self.rng.randrange(VOCAB))
            self.sequences[row].token_ids.append(tokens[-1])
        if self.plan:
            self.edits.drew(torch.tensor(tokens, device=self.device), self.plan, self.rows)

    def some_rows(self):
        return self.rng.sample(sorted(self.sequences), self.rng.randint(1, len(self.sequences)))


@pytest.mark.parametrize("processors", [False, True], ids=["", "processors"])
@pytest.mark.parametrize("seed", range(4))
def test_mixed_batches_equal_the_reference(device, seed, processors):
    """Rows end, start and start over, with tokens generated already or without, and sample in any order beside plain
    rows. Logits of half precision are edited as their float32 values."""
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
            num_edited += result != given
        engine.note(rows)
    assert num_edited > 90


def test_a_row_in_a_batch_equals_the_row_alone(device):
    """The logits are equal bit for bit in a batch whose other rows use every setting, and in tables that have never
    had another row."""
    engine = Engine(device, 12, seed=7, processors=True)
    engine.start(range(12))
    for step in range(8):
        rows = engine.some_rows()
        logits = normal(len(rows), VOCAB, seed=step)
        together = engine.sample(rows, logits)
        engine.note(rows)
        for i, row in enumerate(rows):
            other = Engine(device, 1, seed=0)
            other.sequences[0] = alone = copy(engine.sequences[row])
            alone.row, alone.token_ids = 0, alone.token_ids[:-1]
            assert bits(other.sample([0], logits[i:i + 1])[0].cpu()) == bits(together[i].cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_row_without_settings_keeps_every_bit(device, dtype):
    engine = Engine(device, 20, seed=3)
    engine.start(range(20))
    plain = [row for row in range(20) if not engine.sequences[row].sampling.params.edits_logits]
    assert 3 <= len(plain) <= 10
    for step in range(6):
        logits = normal(20, VOCAB, seed=step).to(dtype)
        logits[:, :6] = torch.tensor([0.0, -0.0, INF, -INF, 1e-40, -1e-40])  # the last two are subnormal
        edited = engine.sample(list(range(20)), logits)
        assert bits(edited[plain].cpu()) == bits(logits[plain].float())
        engine.note(range(20))


def test_plain_requests_need_no_tables_and_others_those_that_they_ask_for():
    edits = edits_for("cpu", 4, 100, SamplingParams(min_tokens=2))
    assert SamplingNeeds.of([sequence(0, SamplingParams(temperature=0))], [1], [edits]) == SamplingNeeds(True)
    assert not edits.tables
    edits.make_tables(SamplingParams(allowed_token_ids=[3]))
    assert [*edits.tables] == ["bias"] and edits.tables["bias"].shape == (4, 100)


def test_the_first_penalty_changes_no_row_that_is_written_already():
    """The tables of penalties come when a request first asks for them."""
    edits, logits = edits_for("cpu", params=SamplingParams(min_tokens=1)), normal(1, VOCAB)
    seqs = [sequence(0, SamplingParams(min_tokens=1)), sequence(1, SamplingParams(presence_penalty=0.5))]
    for count in (1, 2):
        plan = edits.plan(seqs[:count], [1] * count)
        edited = edits(logits.repeat(count, 1), plan, rows := torch.arange(count), rows)
        assert torch.equal(edited[:1], logits)
        edits.drew(torch.full([count], 5), plan, rows)
        edits.make_tables(SamplingParams(presence_penalty=0.5))
    plan = edits.plan(seqs, [2, 2])
    edited = edits(logits.repeat(2, 1), plan, rows, rows)
    assert torch.equal(edited[:1], logits) and edited[1, 5] == logits[0, 5] - 0.5


def test_a_request_whose_tables_do_not_fit_gets_a_sentence(monkeypatch):
    edits = edits_for("cpu", 4, 100, SamplingParams(min_tokens=2))
    monkeypatch.setattr(torch, "full", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(ValueError, match="^cpu has no memory for a table of 0.00 GiB, .* lower max_num_seqs$"):
        edits.make_tables(SamplingParams(presence_penalty=1))


def test_a_start_that_fails_is_made_up_for(device, monkeypatch):
    """A row that was half written is written again, and other rows stay as they are."""
    engine, biased = Engine(device, 2, seed=0), SamplingParams(logit_bias={1: 5.0})
    engine.sequences = {row: sequence(row, biased) for row in range(2)}
    engine.sample([0], torch.zeros(1, VOCAB))
    with monkeypatch.context() as patched, pytest.raises(torch.OutOfMemoryError):
        patched.setattr(Edits, "_put", Mock(side_effect=torch.OutOfMemoryError))
        engine.sample([1], torch.zeros(1, VOCAB))
    assert engine.sample([0, 1], torch.zeros(2, VOCAB))[:, 1].tolist() == [5, 5]


def test_many_generated_tokens_are_counted_exactly(device):
    """A model that is rewarded for repeating a token does so more often than 16 bits count."""
    engine = Engine(device, 1, seed=0)
    engine.sequences[0] = sequence(0, SamplingParams(frequency_penalty=0.5), [0], [0] * 70_000)
    assert engine.sample([0], torch.zeros(1, VOCAB))[0, 0] == -35_000


# ---- Logits processors

@pytest.mark.parametrize("result, given", [(None, "None"), (torch.zeros(3), "one of shape [3]"), (0.5, "0.5")], ids=str)
def test_a_processor_that_returns_no_logits_spoils_its_row_alone(device, result, given):
    engine = Engine(device, 2, seed=0)
    functions = [lambda token_ids, logits: logits.fill_(7), lambda token_ids, logits: result]
    engine.sequences[1] = broken = sequence(1, SamplingParams(logits_processors=functions))
    given_logits = torch.zeros(2, VOCAB, device=device)
    logits = engine.sample([0, 1], given_logits)
    assert given_logits.eq(0).all() and logits[0].eq(0).all() and logits[1].isnan().all()
    assert broken.stop_reason == ("a logits processor failed: ValueError('it must return a tensor of shape [40], not "
                                  f"{given}')")


# ---- On a GPU's path

class CountOperations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.count += 1
        return function(*arguments, **(options or {}))


def test_the_work_does_not_depend_on_the_number_of_rows(device):
    """The operations of a step are the same for 2 rows and for 50, once all have started: no Python runs for each."""
    engine = Engine(device, 50, seed=6)
    engine.start(range(50))
    engine.sample(range(50), normal(50, VOCAB))

    def count_operations(rows):
        logits = normal(len(rows), VOCAB).to(device)
        with CountOperations() as counter:
            engine.sample(rows, logits)
            engine.edits.drew(engine.rows, engine.plan, engine.rows)
        return counter.count

    few = next([a, b] for a in range(50) for b in range(50) if engine.sample([a, b], normal(2, VOCAB)) is not None
               and engine.plan and engine.plan.has_bias and engine.plan.has_penalty)
    assert abs(count_operations(few) - count_operations(list(range(50)))) <= 2 and count_operations(few) < 60


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_host_does_not_wait_for_the_device():
    from nanopaged.features.logprobs import top_logprobs
    engine = Engine(torch.device("cuda"), 10, seed=1)
    rows, logits = torch.arange(10, device="cuda"), normal(10, VOCAB).cuda()
    engine.start(range(10))
    seqs = list(engine.sequences.values())
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan = engine.edits.plan(seqs, [seq.num_tokens for seq in seqs])
        engine.edits(logits, plan, rows, rows + 30)
        engine.edits.drew(rows, plan, rows)
        top_logprobs(logits, rows, 5)
    finally:
        torch.cuda.set_sync_debug_mode("default")


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


def test_bad_words_may_be_token_ids():
    """They need no tokenizer. With a token banned, and a pair, no other text changes."""
    llm = load("qwen3", device="cpu")
    plain = tokens_of(llm.generate([PROMPT, PROMPT], GREEDY))[0]
    single, pair = plain[3], plain[1:3]
    for words, kept in (([[single]], 3), ([pair], 2), ([pair, [single]], 2), ([[10**6], [7, 10**6]], 24)):
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, bad_words=words)
        edited, other = tokens_of(llm.generate([PROMPT, PROMPT], [params, GREEDY]))
        assert other == plain and edited[:kept] == plain[:kept] and (kept == 24 or edited[kept] != plain[kept])
        assert all(word not in [edited[i:i + len(word)] for i in range(24)] for word in words)
