"""SamplingParams takes what an engine can use, and answers anything else with one sentence."""
import math
from dataclasses import fields
from fractions import Fraction
from functools import partial
from inspect import signature

import pytest

import nanopaged
from nanopaged.sampling_params import SamplingParams, read_override
from nanopaged.tests.helpers import complaint, needs

FLAGS = ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output")
COUNTS = ("logprobs", "prompt_logprobs")
PENALTIES = ("presence_penalty", "frequency_penalty")
INTEGERS = ("n", "top_k", "seed", "max_tokens", "min_tokens", *COUNTS)
FLOATS = (*PENALTIES, "repetition_penalty", "temperature", "top_p", "min_p")
NO_INTEGER = ["1", b"1", 1.0, math.nan, 1j, True, [1], {}, object, -2**70]  # which is less than all may be
NO_NUMBER = ["0.5", b"1", math.nan, math.inf, -math.inf, 0.5j, True, [0.5], {}, object, None, 10**400, -10**400]
NO_IDS = [5, True, "12", b"12", {1: 2}]  # the elements are tested apart
NO_BOOL = [None, 1, 0.0, "yes", []]
BAD = {
    "n": [*NO_INTEGER, None, 0, 16_385],
    "repetition_penalty": [*NO_NUMBER, 0, -0.0, 9e-7, 1.1e6],
    "temperature": [*NO_NUMBER, -1e-300, 1.1e6],
    "top_p": [*NO_NUMBER, 0, 1.0000001],
    "top_k": [*NO_INTEGER, None, -2, 2**63],
    "min_p": [*NO_NUMBER, -1e-300, 1.0000001],
    "seed": [*NO_INTEGER, 2**63, -2**63 - 1],
    "stop": ["", b"x", 5, True, ["x", ""], [5], [b"x"], [["x"]], {"x"}, {"x": 1}, object],
    "stop_token_ids": [*NO_IDS, iter([1, 2])],  # the check would use an iterator up
    "max_tokens": [*NO_INTEGER, 0],
    "min_tokens": [*NO_INTEGER, None, -1, 17],  # max_tokens is 16
    "logit_bias": [5, "12", [], [(1, 2.0)], {1, 2}, object],  # what is in it is tested apart
    "allowed_token_ids": [*NO_IDS, [], set()],
    "bad_words": ["x", 5, True, ["x", ""], [5], [None], {"x"}, object, [[]]],
    "logits_processors": [5, "", len, [len, None], ["x"], {len}, object],
} | dict.fromkeys(FLAGS, NO_BOOL) | dict.fromkeys(COUNTS, [*NO_INTEGER, -2]) | dict.fromkeys(
    PENALTIES, [*NO_NUMBER, Fraction(10**400), -2.0001, 2.0001])
GOOD = {
    "n": [1, 16_384],
    "repetition_penalty": [1, 1.1, 1e-6, 10**6, Fraction(11, 10)],
    "temperature": [0, -0.0, 1e-300, 10**6, Fraction(1, 2)],
    "top_p": [1, 0.5, 1e-300, math.nextafter(1, 0)],
    "top_k": [-1, 0, 50, 2**63 - 1],
    "min_p": [0, 1, 0.05, 1e-300],
    "seed": [None, 0, 2**63 - 1, -2**63],
    "stop": [None, "x", "\n\n", [], ("x", "yz"), ["\u4e16", "x"]],
    "stop_token_ids": [None, [], [0, 3], (4, 5), {6}, frozenset({7})],
    "max_tokens": [None, 1, 10**9],
    "min_tokens": [0, 16],
    "logit_bias": [None, {}, {5: -100, 6: 100.0, 7: 0.5, 8: Fraction(1, 2)}],
    "allowed_token_ids": [None, [0, 3], (4, 5), {6}, frozenset({7})],
    "bad_words": [None, [], ["x"], ("x", " y z"), ["x", [5, 6]]],
    "logits_processors": [None, [], (max, lambda token_ids, logits: logits)],
} | dict.fromkeys(FLAGS, [True, False]) | dict.fromkeys(COUNTS, [None, -1, 0, 10**9]) | dict.fromkeys(
    PENALTIES, [0, -2, 2, 0.5, Fraction(1, 2)])


def beams(**settings):
    return nanopaged.BeamSearchParams(**dict(beam_width=4) | settings)


BAD_BEAMS = {
    "beam_width": [*NO_INTEGER, None, 0, 16_385, 2**70],
    "max_tokens": [*NO_INTEGER, None, 0],
    "length_penalty": [*NO_NUMBER, 30.1, -31],
    "ignore_eos": NO_BOOL,
    "early_stopping": [None, 0, 1, 1.0, "", "Never", "always", [], [True]],
    "temperature": [0.5, "0", None, math.nan, -1],
}
GOOD_BEAMS = {
    "beam_width": [1, 4, 1000], "max_tokens": [1, 10**9], "length_penalty": [0, 1, -1.0, -30, 30.0, Fraction(1, 2)],
    "ignore_eos": [True, False], "early_stopping": [True, False, "never"], "temperature": [0, 0.0],
}
PARTS = [(name, [*before, token], token) for name in ("stop_token_ids", "allowed_token_ids") for before in ([], [0, 1])
         for token in ("1", 1.0, math.nan, True, None, [1], -1)]
PARTS += [("logit_bias", {0: 0.5, token: 1}, token) for token in ("x", "", "-1", "\u0663", 1.0, True, None, -1)]
PARTS += [("bad_words", ["x", [5], [6, token]], token) for token in ("1", 1.0, None, -1)]
PARTS += [("logit_bias", {0: 0.5, 1: number}, number) for number in ("1", None, True, 1j, [1], math.nan)]


def cases(make, table, marks=()):
    return [pytest.param(make, name, value, value, marks=marks) for name, values in table.items() for value in values]


def refusal(**settings) -> str:
    return complaint(SamplingParams, **settings)


def test_the_tables_name_every_field():
    assert set(BAD) == set(GOOD) == {field.name for field in fields(SamplingParams)} - {"structured_outputs"}
    assert set(BAD_BEAMS) == set(GOOD_BEAMS) == {field.name for field in fields(nanopaged.BeamSearchParams)}


@pytest.mark.parametrize("make, name, value, wrong", [
    *((SamplingParams, *part) for part in PARTS), *cases(SamplingParams, BAD), *cases(beams, BAD_BEAMS, needs("beam"))],
    ids=lambda value: f"{value!r:.30}".partition(" at 0x")[0])
def test_a_wrong_value_is_refused_with_its_name(make, name, value, wrong):
    """The sentence quotes what is wrong, in a list or a dict the wrong part."""
    message = complaint(make, **{name: value})
    assert message.startswith(f"{name} must be ") and message.endswith(f", not {wrong!r:.80}") and len(message) < 1000


def test_logit_bias_is_clamped_and_takes_the_ids_of_json():
    given = {1: 5, "2": -1.5, 3: 1000, 4: -math.inf, "05": math.inf}
    assert SamplingParams(logit_bias=given).logit_bias == {1: 5, 2: -1.5, 3: 100, 4: -100, 5: 100}
    assert given["2"] == -1.5 and given[3] == 1000  # the caller's dict stays as it is


def test_min_tokens_may_be_max_tokens_and_fits_the_device():
    for max_tokens, min_tokens in ((40, 40), (None, 2**31 - 1)):
        assert SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens).min_tokens == min_tokens
    assert refusal(max_tokens=40, min_tokens=41) == "min_tokens must be at most max_tokens 40, not 41"
    for max_tokens in (None, 2**40):
        expected = "min_tokens must be an integer from 0 to 2147483647, not 2147483648"
        assert refusal(max_tokens=max_tokens, min_tokens=2**31) == expected


@pytest.mark.parametrize("name, value", [("logit_bias", {5: 1.0, 99: 1.0, 7: 1.0}), ("allowed_token_ids", [5, 99, 7])])
def test_tokens_that_the_model_does_not_have_are_refused(name, value):
    params = SamplingParams(**{name: value})
    params.check_vocabulary(100)
    assert complaint(params.check_vocabulary, 99) == f"{name} has token id 99; the model's ids are 0 to 98"


def test_a_clone_is_deep_and_shares_the_processors():
    params = SamplingParams(n=3, stop=["x"], logit_bias={1: 2.0}, logits_processors=[partial(max)],
                            structured_outputs=dict(choice=["a"]))
    clone = params.clone()
    assert clone == params and clone.logits_processors[0] is params.logits_processors[0]
    clone.stop.append("y"), clone.logit_bias.clear(), clone.structured_outputs.choice.append("b")
    assert (params.stop, params.logit_bias, params.structured_outputs.choice) == (["x"], {1: 2.0}, ["a"])


# ---- generation_config.json

QWEN3 = dict(bos_token_id=151643, do_sample=True, eos_token_id=[151645, 151643], pad_token_id=151643, temperature=0.6,
             top_k=20, top_p=0.95, transformers_version="4.51.0")
EVERY = dict(repetition_penalty=1.05, temperature=0.7, top_k=50, top_p=0.8, min_p=0.1)
BANS = dict(suppress_tokens=[5, 6], bad_words_ids=[[7], [8, 9]])
NOT_SAMPLED = dict(do_sample=False, temperature=0.6, top_k=20)


@pytest.mark.parametrize("config, given, expected", [
    ({}, {}, {}), (QWEN3, {}, dict(temperature=0.6, top_k=20, top_p=0.95)),
    (EVERY | dict(max_new_tokens=200, num_beams=4, typical_p=0.5), {}, EVERY | dict(max_tokens=200)),
    (dict(temperature=None, top_k=None, do_sample=None), {}, {}),
    # What is given goes before the file.
    (QWEN3 | dict(max_new_tokens=9), dict(temperature=0, max_tokens=None, n=3, top_k=0),
     dict(n=3, temperature=0, top_p=0.95, max_tokens=None)),
    (dict(min_new_tokens=9, stop_strings=["x", "y"]), {}, dict(min_tokens=9, stop=["x", "y"])),
    (dict(stop_strings="x"), dict(stop=None), {}),
    # The file's min_new_tokens does not make a request longer.
    *((dict(min_new_tokens=99), given, dict(max_tokens=16, min_tokens=16) | given | least)
      for given, least in (({}, {}), (dict(max_tokens=3), dict(min_tokens=3)), (dict(min_tokens=1), {}),
                           (dict(max_tokens=None), dict(min_tokens=99)))),
    (BANS, {}, dict(bad_words=[[5], [6], [7], [8, 9]])), (BANS, dict(bad_words=["x"]), dict(bad_words=["x"])),
    (dict(suppress_tokens=[], bad_words_ids=None), {}, {}),
    # A model that is not to be sampled is decoded greedily, unless a temperature is given.
    (dict(do_sample=False), {}, dict(temperature=0)), (NOT_SAMPLED, {}, dict(temperature=0, top_k=20)),
    (NOT_SAMPLED, dict(temperature=0.9), dict(temperature=0.9, top_k=20)),
    (NOT_SAMPLED | dict(do_sample=True), {}, dict(temperature=0.6, top_k=20))], ids=str)
def test_a_generation_config_gives_defaults(config, given, expected):
    params = SamplingParams.from_generation_config(config, **given)
    assert params == SamplingParams(**expected) and params.is_greedy == (params.temperature == 0)


def test_a_generation_config_out_of_range_is_blamed():
    for config, name in ((dict(top_p=1.5), "top_p"), (dict(temperature="hot"), "temperature"),
                         (dict(max_new_tokens=0), "max_tokens"), (dict(min_new_tokens="2"), "min_tokens"),
                         (dict(min_new_tokens=9, max_new_tokens=8), "min_tokens"), (dict(stop_strings=[1]), "stop"),
                         *((dict(suppress_tokens=value), "bad_words") for value in (5, "5", ["5"], [-1], {5: 6})),
                         *((dict(bad_words_ids=value), "bad_words") for value in (5, [5], [[]], [["5"]]))):
        assert complaint(SamplingParams.from_generation_config, config).startswith(
            f"generation_config.json (without it, config.json) cannot be used: {name} must be ")
    assert complaint(SamplingParams.from_generation_config, QWEN3, min_p=2).startswith("min_p must be ")


@pytest.mark.parametrize("make, name, value, _", [
    *cases(SamplingParams, GOOD), *cases(beams, GOOD_BEAMS, needs("beam"))],
    ids=lambda value: getattr(value, "__name__", f"{value!r:.30}"))
def test_edge_values_pass_unchanged(make, name, value, _):
    """Only fractions change, which become floats, and collections of token ids, which become lists."""
    kept = getattr(make(**{name: value}), name)
    if name.endswith("token_ids"):
        value = value if value is None else list(value)
    if isinstance(value, Fraction):
        value = float(value)
    assert kept == value and type(kept) is type(value)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", "int8 uint8 int64 uint64 float16 float32 float64 longdouble".split())
def test_numbers_of_numpy_become_those_of_python(kind):
    """Sums of numpy's integers wrap around: uint8(200) + 57 is 1. A float16 cannot even be compared with 1e6."""
    one, is_integer = getattr(pytest.importorskip("numpy"), kind)(1), "int" in kind
    names = (*INTEGERS, *FLOATS) if is_integer else FLOATS
    ids = dict(stop_token_ids=[one], allowed_token_ids={one}, logit_bias={one: one}) if is_integer else {}
    params = SamplingParams(**{"logit_bias": {1: one}} | {name: one for name in names} | ids)
    numbers = [*(getattr(params, name) for name in names), *params.logit_bias.values()]
    search = nanopaged.BeamSearchParams(one if is_integer else 2, length_penalty=one, temperature=one - one)
    assert {(type(x), x) for x in [*numbers, search.length_penalty]} == {(int if is_integer else float, 1)}
    if is_integer:
        numbers = [*params.stop_token_ids, *params.allowed_token_ids, *params.logit_bias, search.beam_width]
        assert {(type(x), x) for x in numbers} == {(int, 1)}
    else:
        assert refusal(temperature=one * math.inf) == "temperature must be a number from 0 to 1e6, not inf"


def test_the_defaults_are_valid_and_those_of_the_design():
    assert SamplingParams() == SamplingParams(
        n=1, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, seed=None, max_tokens=16, stop_token_ids=None,
        ignore_eos=False, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0, stop=None, min_tokens=0,
        logprobs=None, prompt_logprobs=None, detokenize=True, skip_special_tokens=True,
        include_stop_str_in_output=False, logit_bias=None, allowed_token_ids=None, bad_words=None,
        logits_processors=None)
    assert nanopaged.BeamSearchParams(4) == nanopaged.BeamSearchParams(
        beam_width=4, max_tokens=16, length_penalty=1.0, ignore_eos=False, early_stopping=False, temperature=0.0)


@pytest.mark.parametrize("call, name, advice", [
    (SamplingParams, "max_token", "did you mean 'max_tokens'?"),
    pytest.param(beams, "beam_widths", "did you mean 'beam_width'?", marks=needs("beam")),
    (SamplingParams, "guided_decoding", "help(nanopaged.SamplingParams) lists its settings"),
    *(pytest.param(*case, marks=needs("structured")) for case in (
        (lambda **given: nanopaged.StructuredOutputsParams(**given), "jsn", "did you mean 'json'?"),
        (lambda **given: SamplingParams(structured_outputs=given), "rgex", "did you mean 'regex'?"),
        (lambda **given: SamplingParams(structured_outputs=given), "x", "there are json, regex, choice, grammar, js"))),
    (lambda **given: read_override(given), "top_n", "did you mean 'top_p'?")])
def test_an_unknown_setting_is_refused_with_the_nearest(call, name, advice):
    message = complaint(call, **{name: 1})
    assert " has no " in message and f"{name!r}; {advice}" in message
    assert "max_tokens: int | None = 16" in str(signature(SamplingParams))  # which help() shows


def test_a_beam_width_has_no_default():
    with pytest.raises(TypeError, match="beam_width"):
        nanopaged.BeamSearchParams()
