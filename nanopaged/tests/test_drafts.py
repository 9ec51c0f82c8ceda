"""Drafts: the text is the same as without them, whatever is guessed, and the books stay right.

Sequences draft at every step here (`pays` is 0), unless a test is about when drafts rest."""
import random
import re
from functools import cache
from itertools import chain, count, repeat
from types import SimpleNamespace

import pytest
import torch

from nanopaged import LLM, SamplingParams
from nanopaged.cli.main import main
from nanopaged.features.drafts import Drafting, Ngram
from nanopaged.tests.helpers import (
    DEVICE,
    GOLDEN,
    GREEDY,
    PROMPT,
    WITH_STATES,
    assert_golden,
    complaint,
    expectations,
    load,
    run,
    tokens_of,
)

VARIANTS = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))
PROMPTS = [PROMPT[:n] + list(range(n)) for n in (3, 9, 15)] + [PROMPT * 2, [7]]
SAMPLED = SamplingParams(temperature=0.9, seed=5, max_tokens=30, ignore_eos=True)


class Oracle:
    """Knows how texts go on, and is right with probability p per token. It guesses for one sequence."""

    def __init__(self, texts, p=1.0, seed=0):
        self.texts, self.p, self.rng = texts, p, random.Random(seed)

    def propose(self, token_ids, k):
        text = next((text for text in self.texts if text[:len(token_ids)] == token_ids), [])
        return [token if self.rng.random() < self.p else (token + 1) % 90 for token in text[len(token_ids):][:k]]


class Liar:
    def propose(self, token_ids, k):
        return [(sum(token_ids) + i) % 90 for i in range(k)]


def drafting(model="qwen3", method="ngram", num_tokens=5, pays=0, device="cpu", **options):
    """Tests that are not about a GPU's steps compile no kernels for one."""
    config = {"method": method, "num_speculative_tokens": num_tokens}
    llm = load(model, speculative_config=config, device=device, **options)
    llm.drafting.pays = pays
    return llm


def knowing(outputs, p=1.0):
    """A method for `drafting`: an Oracle of these outputs."""
    texts = [output.prompt_token_ids + sample.token_ids for output in outputs for sample in output.outputs]
    return lambda: Oracle(texts, p)


def proposing(propose):
    """A method for `drafting`: proposers that only have this function."""
    return lambda: SimpleNamespace(propose=propose)


def run_all(llm, prompts, params):
    return tokens_of(run(llm, prompts, repeat(params)))


def samples(outputs):
    return [[(sample.token_ids, sample.finish_reason, sample.stop_reason, sample.text) for sample in output.outputs]
            for output in outputs]


# ---- The same text

@pytest.mark.parametrize("variant", VARIANTS)
def test_every_family_generates_what_transformers_does(variant):
    texts = [torch.cat(parts).tolist() for parts in zip(*expectations(variant)[:2])]
    llm = drafting(variant, lambda: Oracle(texts, p=0.7), device=DEVICE if variant == "qwen3" else "cpu")
    assert_golden(llm, variant, num_tokens=24)
    metrics = llm.drafting.metrics
    assert 0 < metrics.num_accepted_tokens < metrics.num_draft_tokens


SHORTAGES = [dict(block_size=1), dict(block_size=3, max_num_batched_tokens=4), dict(block_size=4, num_blocks=16),
             dict(block_size=4, num_blocks=16, swap_space=0.01), dict(enable_prefix_caching=False), dict(lookahead=1),
             dict(max_num_seqs=2), dict(block_size=4, num_blocks=30, data_parallel_size=2, lookahead=1)]


@pytest.fixture(scope="module")
def expected():
    return [load("qwen3", device="cpu").generate(PROMPTS, params, use_tqdm=False) for params in (GREEDY, SAMPLED)]


@pytest.mark.parametrize("options", SHORTAGES, ids=str)
def test_outputs_do_not_depend_on_drafts(options, expected):
    for params, outputs, method in ((GREEDY, expected[0], knowing(expected[0], 0.8)), (GREEDY, expected[0], "ngram"),
                                    (SAMPLED, expected[1], knowing(expected[1])), (SAMPLED, expected[1], Liar)):
        assert run_all(drafting(method=method, **options), PROMPTS, params) == tokens_of(outputs)


@cache
def without_drafts(model):
    return load(model, device="cpu").generate(PROMPTS, SAMPLED, use_tqdm=False)


# One place moves states of all kinds, so one model has all options. Each kind computes the states behind drafts itself,
# with experts beside it or without.
STATES = [dict(block_size=4, num_blocks=18, lookahead=1, snapshot_memory=0.8),
          dict(block_size=1, snapshot_memory=0.5), dict(snapshot_memory=0),
          dict(max_num_batched_tokens=9, lookahead=1), dict(max_num_seqs=2)]


@pytest.mark.parametrize("model, options", [
    *(("lfm2", options) for options in STATES), ("granite4-h", STATES[1]), ("qwen3.5", STATES[1]),
    *((model, STATES[0]) for model in ("granite4-h", "qwen3-next", "qwen3.5"))], ids=str)
def test_states_go_back_to_the_last_right_draft(model, options):
    """Also from snapshots, after preemptions, and where few slots are left for drafts."""
    outputs = without_drafts(model)
    llm = drafting(model, knowing(outputs, 0.7), **options)
    for _ in range(2):
        assert run_all(llm, PROMPTS, SAMPLED) == tokens_of(outputs)
    metrics, kind = llm.drafting.metrics, llm.scheduler.block_manager.kinds["states"]
    assert 0 < metrics.num_accepted_tokens < metrics.num_draft_tokens and not any(kind.ref_counts)


@pytest.mark.parametrize("options", [{}, dict(num_blocks=30, block_size=4, lookahead=1), dict(kv_cache_dtype="fp8")],
                         ids=str)
def test_mixed_requests(options):
    """Samples of one prompt, filters, stop strings and tokens, log probabilities, penalties, ends within a draft."""
    settings = [SamplingParams(n=4, seed=1, max_tokens=25, ignore_eos=True),
                SamplingParams(seed=2, max_tokens=25, top_k=9, top_p=0.9, min_p=0.01),
                SamplingParams(temperature=0, max_tokens=30, stop=["the", "and "]),
                SamplingParams(seed=4, max_tokens=30, stop_token_ids=[11, 14], include_stop_str_in_output=True),
                SamplingParams(seed=5, max_tokens=22, logprobs=2, prompt_logprobs=1),
                SamplingParams(temperature=0, max_tokens=30, repetition_penalty=1.2, min_tokens=3),
                SamplingParams(temperature=0, max_tokens=20, logits_processors=[lambda tokens, logits: -logits]),
                SamplingParams(temperature=0, max_tokens=1)]
    prompts = ["ROMEO: ", "JULIET: ", "ROMEO: O", "First", "ROMEO: ", "A", "B", "C"]
    small = dict(model="short", max_model_len=80, kv_cache_dtype=options.get("kv_cache_dtype", "auto"))
    outputs = load(**small, device="cpu").generate(prompts, settings, use_tqdm=False)
    for method in (knowing(outputs, 0.8), Liar):
        llm = drafting(method=method, **small | options)
        found = run(llm, prompts, settings)
        assert samples(found) == samples(outputs)
        for ours, theirs in zip(found[4].outputs[0].logprobs, outputs[4].outputs[0].logprobs, strict=True):
            assert {token: pytest.approx((one.logprob, one.rank), abs=1e-5) for token, one in ours.items()} == {
                token: (one.logprob, one.rank) for token, one in theirs.items()}
        assert llm.drafting.metrics.num_draft_tokens > 0


def test_every_token_of_a_request_that_ends_has_its_log_probability():
    """Also if the request ends with several tokens of a step, or of several steps that are read at once."""
    params = [SamplingParams(temperature=0, max_tokens=1 + i // 2, logprobs=0, repetition_penalty=1 + i % 2 / 10,
                             ignore_eos=True) for i in range(16)]  # with a penalty no drafts
    for output in drafting(lookahead=1).generate([PROMPT] * 16, params, use_tqdm=False):
        assert len(output.outputs[0].logprobs) == len(output.outputs[0].token_ids)


@pytest.mark.parametrize("options", [{}, dict(num_blocks=12, block_size=8), dict(max_num_batched_tokens=20)], ids=str)
def test_replayed_steps(monkeypatch, options, expected):
    """Drafts are rows of recorded decode steps."""
    from nanopaged.tests.test_graphs import record_graphs
    llm = drafting(method=knowing(expected[1], 0.8), graphs=True, device=DEVICE, max_num_seqs=8, **options)
    replayed = record_graphs(llm, monkeypatch)
    assert tokens_of(llm.generate(PROMPTS, SAMPLED, use_tqdm=False)) == tokens_of(expected[1])
    assert any(shape.num_tiles == 0 and shape.num_seqs > 8 for shape in replayed)  # more rows than sequences


@pytest.mark.parametrize("model", WITH_STATES)
def test_replayed_steps_of_models_with_states(monkeypatch, model):
    """A sequence's drafts are places of their own in attention, and one place elsewhere."""
    from nanopaged.tests.test_graphs import record_graphs
    outputs = load(model, device=DEVICE).generate(PROMPTS, SAMPLED, use_tqdm=False)
    llm = drafting(model, knowing(outputs, 0.8), graphs=True, device=DEVICE, max_num_seqs=8, snapshot_memory=0.5)
    replayed = record_graphs(llm, monkeypatch)
    assert tokens_of(llm.generate(PROMPTS, SAMPLED, use_tqdm=False)) == tokens_of(outputs)
    assert any(shape.num_tiles == 0 and shape.num_seqs > 8 for shape in replayed)  # more rows than sequences


def test_grammars():
    """A draft is cut to what the grammar allows, and each row has the mask after the drafts before it."""
    pytest.importorskip("llguidance", reason="structured outputs need it; .ci/run installs it for its last part")
    regex = dict(regex=r"(the (king|queen) of [a-z]{3,9}[,;] )+")
    settings = [SamplingParams(seed=seed, max_tokens=40, structured_outputs=regex) for seed in range(3)]
    settings += [SamplingParams(seed=5, max_tokens=40, structured_outputs=dict(json={
        "type": "array", "items": {"enum": ["a rose", "a road"]}, "minItems": 4, "maxItems": 6}))]
    reasoning = dict(choice=["yes, indeed", "no, never"], reasoning_token_ids=[198, 11])  # a line break, a comma
    settings += [SamplingParams(seed=6, max_tokens=30)]
    settings += [SamplingParams(seed=7, max_tokens=60, structured_outputs=reasoning)]
    outputs = load("shakespeare", device="cpu").generate(["A"] * 6, settings, use_tqdm=False)
    assert "," in outputs[5].outputs[0].text and outputs[5].outputs[0].text.endswith(("indeed", "never"))
    for method, options in ((knowing(outputs, 0.7), dict(block_size=4, num_blocks=40)), (Liar, {}),
                            ("ngram", dict(lookahead=1))):
        llm = drafting("shakespeare", method, **options)
        assert samples(run(llm, ["A"] * 6, settings)) == samples(outputs)
        assert method is Liar or llm.drafting.metrics.num_accepted_tokens > 0


def test_a_draft_that_the_grammars_tokenizer_lacks():
    from nanopaged.features.grammar import COMPILERS, GrammarCompiler
    pytest.importorskip("llguidance", reason="structured outputs need it; .ci/run installs it for its last part")
    params = SamplingParams(temperature=0, max_tokens=20, structured_outputs=dict(regex="[a-z ]{40}"))
    texts = []
    for llm in (load(device="cpu"), drafting("short", proposing(lambda _, k: [1010] * k))):
        COMPILERS[llm] = GrammarCompiler(llm.tokenizer, [10], 1000)  # the model has 1,024 tokens
        texts.append(samples(run(llm, ["A"], [params])))
    assert texts[0] == texts[1] and texts[0][0][0][1] == "length"


# ---- Guesses, and when they are made

def test_guesses_agree_with_a_search_through_the_text():
    rng = random.Random(0)
    for _ in range(200):
        text, ngram = [], Ngram(longest=rng.randint(2, 5), shortest=rng.randint(1, 2))
        for _ in range(60):
            text.append(rng.randint(0, 3))
            expected = []
            for n in range(ngram.longest, ngram.shortest - 1, -1):
                ends = [i for i in range(n, len(text)) if len(text) >= n and text[i - n:i] == text[-n:]]
                if ends:
                    expected = [text[ends[-1] + i % (len(text) - ends[-1])] for i in range(4)]
                    break
            assert ngram.propose(text, 4) == expected
    text, ngram = [5, 6, 7, 8, *range(100, 5000), 6, 7], Ngram()
    assert [ngram.propose(text, 2) for _ in range(6)][-1] == [8, 100]  # a long text is read bit by bit


def test_drafts_rest_until_they_pay(expected):
    """A sequence whose guesses come true drafts. One whose guesses do not, or beside too many others, does not."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    outputs = load("qwen3", device="cpu").generate([PROMPT], params, use_tqdm=False)

    def metrics_of(method, batch_size):
        llm = drafting(method=method, pays=0.5, lookahead=1)
        llm.drafting.most_drafting = 1
        found = llm.generate([PROMPT] * batch_size, params, use_tqdm=False)
        assert tokens_of(found) == tokens_of(outputs) * batch_size
        return llm.drafting.metrics

    assert metrics_of(Liar, 1).num_draft_steps == metrics_of(knowing(outputs), 2).num_draft_steps == 0
    metrics = metrics_of(knowing(outputs), 1)
    assert 7 <= metrics.num_draft_steps <= 9 and metrics.num_accepted_tokens == metrics.num_draft_tokens >= 40


@pytest.mark.parametrize("propose, reason", [
    (lambda token_ids, k: [10**6], "does not have all token ids"), (lambda token_ids, k: 1 / 0, "ZeroDivisionError"),
    (lambda token_ids, k: None, "TypeError"), (lambda token_ids, k: [1.0] * k, "TypeError")],
    ids=["unknown token", "error", "nothing", "floats"])
def test_a_proposer_that_fails(propose, reason, expected):
    llm = drafting(method=proposing(propose))
    with pytest.warns(UserWarning, match=f"without drafts.*{reason}"):
        assert run_all(llm, PROMPTS, GREEDY) == tokens_of(expected[0])


def test_a_proposer_that_exits(expected):
    """In the middle of `schedule`: the step is undone, and the texts go on without this proposer."""
    calls = count()

    def propose(token_ids, k):
        if next(calls) == 12:
            raise SystemExit
        return [1] * k

    llm = drafting(method=proposing(propose))
    requests = [llm.add_request(prompt, GREEDY) for prompt in PROMPTS]
    with pytest.raises(SystemExit):
        while True:
            llm.step()
    assert not llm.scheduler.running
    done = {}
    while llm.has_unfinished_requests():
        done |= {output.request_id: output for output in llm.step()}
    assert tokens_of(done[request] for request in requests) == tokens_of(expected[0])


@pytest.mark.parametrize("kind", [
    tuple, torch.tensor, lambda tokens: chain(tokens, repeat(1))], ids=["tuple", "tensor", "without an end"])
def test_integers_of_any_kind_are_drafts(kind, expected):
    """What a proposer is given is its own: it may change it."""
    def propose(token_ids, k):
        tokens = known.propose(token_ids, k)
        token_ids.clear()
        return kind(tokens)

    known = knowing(expected[0])()
    llm = drafting(method=proposing(propose))
    assert run_all(llm, PROMPTS, GREEDY) == tokens_of(expected[0])
    assert llm.drafting.metrics.num_accepted_tokens > 50


def test_a_bound_of_the_lookup_moves_the_other():
    def bounds(**config):
        ngram = Drafting(config, 10).make_proposer()
        return ngram.shortest, ngram.longest

    assert [bounds(), bounds(prompt_lookup_max=1), bounds(prompt_lookup_min=6)] == [(2, 4), (1, 1), (6, 6)]


def test_a_pool_whose_drafts_are_undecided_takes_no_more_requests_than_others(expected):
    """Its sequences cannot be planned, and count as a token each."""
    llm = drafting(method=knowing(expected[0]), data_parallel_size=2, lookahead=1)
    llm.add_request(PROMPTS[0], GREEDY)
    while not any(seq.drafter.metrics.num_draft_steps for seq in llm.scheduler.running):
        llm.step()
    [busy] = [one for one in llm.engines if one.scheduler.running]
    [idle] = [one for one in llm.engines if one is not busy]
    busy.launch()
    assert not busy.launched[-1][0].may_plan_ahead
    for i in range(4):
        llm.add_request([i + 3, 5, 9], GREEDY)
    llm.step()
    assert busy.launched and len(idle.scheduler.running) >= 2


@pytest.mark.parametrize("config, sentence", [
    (5, "speculative_config must be a dict such as"), ({"model": "x"}, "has the keys .*, not 'model'"),
    ({"method": "eagle"}, "must be 'ngram', or a function"), ({"num_speculative_tokens": 0}, "from 1 to 64, not 0"),
    ({"prompt_lookup_max": 1, "prompt_lookup_min": 2}, "prompt_lookup_min 2 is more"),
    ({"prompt_lookup_min": "2"}, "integer from 1")])
def test_settings_that_cannot_be(config, sentence):
    message = complaint(LLM, str(GOLDEN / "qwen3"), device="cpu", speculative_config=config)
    assert re.search(sentence, message) and "speculative_config" in message


# ---- What users see

def test_metrics_of_requests(expected):
    llm = drafting(method=knowing(expected[0]))
    both = SamplingParams(temperature=0, max_tokens=13, n=2, ignore_eos=True)
    one, two = run(llm, PROMPTS[:2], [GREEDY, both])
    assert one.metrics.num_accepted_tokens == one.metrics.num_draft_tokens == 24 - 1 - one.metrics.num_draft_steps
    assert one.metrics.mean_acceptance_length > 4
    assert two.metrics.num_draft_steps >= 4 and one.metrics + two.metrics == llm.drafting.metrics
    llm = drafting(method=knowing(expected[0], 0))
    assert run(llm, PROMPTS, repeat(GREEDY)) and llm.drafting.metrics.num_accepted_tokens == 0
    assert llm.drafting.metrics.num_draft_tokens > 99 and expected[0][0].metrics is None


def test_the_command_line_and_the_trace(capsys):
    argv = ["--prompt", "ROMEO:\nI love thee. I love", "--temperature", "0", "--max-tokens", "60", "--device", "cpu"]
    assert main(argv) == 0
    plain = capsys.readouterr()
    assert main([*argv, "--speculate", "4", "--trace"]) == 0
    out, err = capsys.readouterr()
    assert plain.out.removeprefix(argv[1]).strip() in out
    assert re.search(r"\d\.\d\d tokens per step with drafts", " ".join(err.split())) and "drafts" not in plain.err
    guess = re.search(r"decode (\d+) and 4 drafts -> (\d+) \[.*\n(?:.*\n)*?  drafted     A '.*'\n"
                      r"  sampled     A '.*' \((\d) of 4 drafts came true\)", err)
    assert int(guess[2]) == int(guess[1]) + 5 and int(guess[3]) <= 4
    for more, sentence in ((["--speculate", "0"], "num_speculative_tokens in speculative_config must be"),
                           (["--speculate", "2", "--speculative-config", "{}"], "does not go with"),
                           (["--speculative-config", '{"method": "eagle"}'], "must be 'ngram'")):
        assert main([*argv, *more]) == 2
        assert sentence in capsys.readouterr().err


def assert_prints_the_readmes_trace(capsys, section, option, *arguments):
    """The lines of the section's excerpt, in their order. Its text gives the option's value."""
    text, excerpt = (GOLDEN.parent / "README.md").read_text(encoding="utf-8").partition(section)[2].split("```")[:2]
    value = " ".join(re.search(rf'`{option}\s"(.*?)"', text, re.S)[1].split())
    assert main([option, value, *arguments, "--temperature", "0", "--trace", "--device", "cpu"]) == 0
    printed = iter(line.rstrip() for line in capsys.readouterr().err.splitlines())
    for line in filter(None, excerpt.splitlines()):
        assert line in printed, line


def test_the_readmes_trace(capsys):
    assert_prints_the_readmes_trace(capsys, "### Drafts", "--prompt", "--max-tokens", "40", "--speculate", "4")
