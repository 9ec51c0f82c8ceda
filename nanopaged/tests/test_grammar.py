"""Structured output: every text fits its grammar, and no other request notices. Needs the package llguidance."""
import asyncio
import contextlib
import json
import random
import re
import sys
from itertools import count
from types import SimpleNamespace
from unittest.mock import Mock, call, patch

import pytest
import torch

from nanopaged import SamplingParams, StructuredOutputsParams
from nanopaged.cli.main import main
from nanopaged.device import runner
from nanopaged.features import grammar as grammars
from nanopaged.features.grammar import compiler_of, source_of
from nanopaged.tests.helpers import BUNDLED, GOLDEN, complaint, freed_at_once, load, write_files
from nanopaged.tests.helpers import run as run_checked
from nanopaged.tests.test_tokenizer import DEEPSEEK
from nanopaged.text.tokenizer import load_tokenizer

WORDS = ["red", "green", "a\"b", "ünï", "日本", "x y", "\\n"]


# --------------------------------------------------------------------------------------------------
# Parameters, and what is refused
# --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("fields, words", [
    *((fields, "one of json, regex, choice, grammar and json_object")
      for fields in ({}, dict(regex="a", choice=["b"]), dict(json_object=False))),
    *((fields, "must be") for fields in (dict(json=5), dict(regex=["a"]), dict(choice="yes"), dict(choice=[]),
                                         dict(choice=[""]), dict(json_object="yes"), dict(grammar=1))),
    (dict(jsn={}), "no field 'jsn'"), ("yes", "must be StructuredOutputsParams")], ids=str)
def test_exactly_one_kind_is_given(fields, words):
    with pytest.raises(ValueError, match=words):
        SamplingParams(structured_outputs=fields)
    given = SamplingParams(structured_outputs={"choice": ["a"]}).structured_outputs
    assert given == StructuredOutputsParams(choice=["a"])


@pytest.mark.parametrize("schema, names", [
    ({"properties": {"a": {"properties": {"b": {}}}}}, ["", "a"]),
    ({"properties": {"properties": {"type": "object"}, "const": {"const": {"properties": {}}}}}, [""]),
    ({"properties": {"a": {}}, "additionalProperties": True}, []), ({"type": "object"}, []),
    ({"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}, {"properties": {"c": {}}}]}, []),
    ({"anyOf": [{"properties": {"b": {}}}, {"$ref": "#/$defs/c"}], "$defs": {"c": {"properties": {}}}}, ["b", "c"]),
    ({"items": {"properties": {"x": {}}}}, ["x"]),
    ({"properties": {"a": {}}, "allOf": [{"properties": {"b": {}}}]}, [])])
def test_objects_with_properties_are_closed_as_in_xgrammar(schema, names):
    given = json.dumps(schema)
    for source in (schema, given):
        _, found = source_of(StructuredOutputsParams(json=source))
        assert found.count('"additionalProperties": false') == len(names)
        if names:
            assert json.loads(found.replace(', "additionalProperties": false', "")) == schema
        assert source_of(StructuredOutputsParams(json=source, disable_additional_properties=False)) == ("json", given)
    assert json.dumps(schema) == given


@pytest.mark.parametrize("package, words", [
    (None, "pip install llguidance"),
    (SimpleNamespace(TokenizerWrapper=lambda vocabulary: vocabulary, LLTokenizer=lambda _: 0),  # knows no eos_token
     "pip install -U llguidance")])
def test_a_missing_or_old_package_is_named(monkeypatch, capsys, package, words):
    monkeypatch.setitem(sys.modules, "llguidance", package)
    with pytest.raises(ValueError, match=words):
        load().generate([1], SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")))
    assert main(["--prompt", "A", "--device", "cpu", "--regex", "a"]) == 2
    assert words in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------
# With llguidance
# --------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def llguidance():
    return pytest.importorskip("llguidance", reason="structured outputs need it; .ci/run installs it for its last part")


@pytest.fixture(scope="module")
def llm(llguidance):
    return load(device="cpu", enforce_eager=True, max_model_len=512, num_blocks=512)


@pytest.fixture(scope="module")
def whole(llguidance):
    """Its sentences have commas."""
    return load("shakespeare", device="cpu", max_model_len=512, num_blocks=512)


def params(max_tokens=80, **fields):
    names = StructuredOutputsParams.__dataclass_fields__
    structured = StructuredOutputsParams(**{name: fields.pop(name) for name in list(fields) if name in names})
    return SamplingParams(**dict(temperature=1, seed=1, max_tokens=max_tokens) | fields, structured_outputs=structured)


def run(llm, *settings, prompt="A"):
    """The sample of each request, all of them run together."""
    return [output.outputs[0] for output in llm.generate([prompt] * len(settings), settings, use_tqdm=False)]


def random_schema(rng, depth=0):
    """A schema of some kind, nested at most twice."""
    def inner():
        return random_schema(rng, depth + 1)

    def an_object():
        names = rng.sample(["name", "age", "größe", "a b", "tags"], rng.randint(1, 3))
        return {"type": "object", "properties": {name: inner() for name in names},
                "required": names[:rng.choice((1, None))], "additionalProperties": False}

    kinds = [lambda: {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 6)},
             lambda: {"enum": rng.sample(WORDS, rng.randint(1, 4))},
             lambda: {"type": "integer", "minimum": rng.randint(-200, 0), "maximum": rng.randint(0, 300)},
             lambda: {"type": rng.choice(["number", "boolean", "null"])},
             lambda: {"const": rng.choice([*WORDS, 7, True, None])},
             lambda: {"type": "string", "pattern": rng.choice(["^[a-c]{1,4}$", "^x+y?$", "^[0-9]{3}-[A-Z]$"])}]
    nested = [lambda: {"type": "array", "items": inner(), "minItems": rng.randint(0, 1), "maxItems": 3},
              lambda: {"anyOf": [inner(), inner()]}, an_object]
    return rng.choice(kinds + nested * (depth < 2))()


def random_structure(rng, index):
    if index % 10 == 9:
        return [dict(json_object=True), dict(grammar='root ::= "a" ("b" | "c")+ "d"'),  # GBNF, and Lark's syntax
                dict(grammar='start: "a" ("b" | "c")+ "d"'), dict(json=json.dumps(random_schema(rng)))][index // 10 % 4]
    if index % 3 == 0:
        return dict(choice=rng.sample(WORDS, rng.randint(1, 5)))
    if index % 3 == 1:
        parts = ["[a-f]{1,3}", "(yes|no|maybe)", "[0-9]{1,2}", "x*", "é?", " ", r"\.", "(ab)+"]
        return dict(regex="".join(rng.choices(parts, k=rng.randint(1, 5))))
    return dict(json=random_schema(rng))


def check_fits(structure, text):
    jsonschema = pytest.importorskip("jsonschema", reason="checks the texts; .ci/run installs it for its last part")
    if "choice" in structure:
        assert text in structure["choice"]
    elif "json" in structure or "json_object" in structure:
        schema = structure.get("json", {"type": "object"})
        jsonschema.validate(json.loads(text), json.loads(schema) if isinstance(schema, str) else schema)
    else:
        assert re.fullmatch(structure.get("regex", "a[bc]+d"), text)


@pytest.mark.parametrize("is_random", [False, True])
def test_every_finished_text_fits_and_every_other_one_is_a_beginning(is_random, llguidance):
    llm, rng = load(device="cpu", enforce_eager=True, max_model_len=512, num_blocks=512), random.Random(0)
    if is_random:  # such weights care for no grammar
        torch.manual_seed(0)
        for parameter in llm.runner.model.parameters():
            parameter.normal_(std=0.1)
    structures = [random_structure(rng, i) for i in range(60 if is_random else 150)]
    settings = [params(**structure, seed=i) for i, structure in enumerate(structures)]
    outputs = run(llm, *settings, prompt="ROMEO:")
    for structure, output, setting in zip(structures, outputs, settings):
        if output.finish_reason == "stop":
            check_fits(structure, output.text)
        else:
            assert output.finish_reason == "length"
            matcher = compiler_of(llm).compile(setting.structured_outputs).matcher
            assert matcher.validate_tokens(output.token_ids) == len(output.token_ids)
    assert sum(output.finish_reason == "stop" for output in outputs) > 0.8 * len(outputs)


PERSON = {"type": "object", "properties": {"first name": {"type": "string", "maxLength": 6},
                                           "age": {"type": "integer", "minimum": -9, "maximum": 99},
                                           "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 2}},
          "required": ["first name", "age", "pets"], "additionalProperties": False}


ET, COMMA, NEWLINE = 314, 11, 198  # tokens of the bundled model


def mixed(llm):
    """Requests with and without grammars, run together; the books are checked after each step."""
    settings = [params(json=PERSON), SamplingParams(temperature=0.8, seed=2, max_tokens=30, ignore_eos=True),
                params(json=PERSON, n=3, seed=5), params(regex=r"\d{4}-\d{2}-\d{2} [a-z]{3,9}", presence_penalty=1.5),
                params(choice=["yes, indeed", "no, never"], temperature=0), params(json=PERSON, logprobs=2, top_p=0.9),
                SamplingParams(temperature=0, max_tokens=20, repetition_penalty=1.2), params(json=PERSON, top_k=3),
                params(choice=["yes, indeed", "no, never"], reasoning_token_ids=[ET], n=2)]
    outputs = run_checked(llm, ["ROMEO: what is it"] * len(settings), settings)
    return [[(sample.text, sample.token_ids) for sample in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def expected(llguidance):
    return mixed(load(device="cpu", lookahead=0))


@pytest.mark.parametrize("options", [
    dict(lookahead=1), dict(num_blocks=30, block_size=4), dict(num_blocks=30, block_size=4, lookahead=1),
    dict(num_blocks=30, block_size=4, swap_space=0.01, lookahead=1), dict(max_num_batched_tokens=3, lookahead=1),
    dict(enable_prefix_caching=False), dict(data_parallel_size=2, lookahead=1, block_size=4, num_blocks=30)], ids=str)
def test_outputs_do_not_depend_on_how_the_work_is_cut(options, expected):
    assert mixed(load(**dict(device="cpu") | options)) == expected


@pytest.mark.parametrize("method, options, is_bad", [
    ("launch", {}, lambda call: call % 3 == 2),
    ("launch", dict(num_blocks=30, block_size=4), lambda call: call % 3 == 2),
    ("sample", {}, lambda call: call % 6 < 3)], ids=["launch", "few blocks", "sample"])
def test_steps_that_fail_are_undone(method, options, is_bad, expected, monkeypatch):
    """Also while a void token is under way, and several times."""
    llm, calls = load(device="cpu", lookahead=1, **options), count()
    owner = runner if method == "sample" else llm.runner
    works = getattr(owner, method)

    def fails_often(*args):
        if is_bad(next(calls)):
            raise ConnectionError
        return works(*args)

    def step_or_nothing(works=llm.step):
        with contextlib.suppress(ConnectionError):
            return works()
        return []

    monkeypatch.setattr(owner, method, fails_often)
    llm.step = step_or_nothing
    assert mixed(llm) == expected


@pytest.mark.parametrize("lookahead", [0, 1])
def test_an_engine_that_is_deleted_is_freed_at_once(llguidance, lookahead):
    llm = load(device="cpu", lookahead=lookahead)
    run(llm, params(regex="[a-c]{1,20}", max_tokens=9))
    with freed_at_once(llm.runner, llm.runner.model, llm.runner.pool):
        del llm


@pytest.mark.parametrize("lookahead", [0, 1])
def test_forced_tokens_change_no_text_and_save_steps(lookahead, expected, monkeypatch):
    def num_steps():
        with patch.object(llm.runner, "launch", wraps=llm.runner.launch) as launch:
            run(llm, params(json=PERSON))
        return launch.call_count

    llm = load(device="cpu", lookahead=lookahead)
    with_forced = num_steps()
    monkeypatch.setattr(grammars.Grammar, "propose", lambda self, token_ids, k: [])
    assert mixed(llm) == expected and num_steps() > with_forced + 5


@pytest.mark.parametrize("more", [{}, dict(logprobs=1), dict(repetition_penalty=1.1), dict(n=3), dict(max_tokens=9)])
def test_a_grammar_begins_when_the_reasoning_ends(whole, more):
    """Until then the text is that of a request without a grammar."""
    llm, structure = whole, dict(choice=["yes, indeed", "no, never"], reasoning_token_ids=[COMMA])
    given = params(**structure, **more)
    found = llm.generate("ROMEO: what", given, use_tqdm=False)[0].outputs
    plain = SamplingParams(temperature=1, seed=1, **more | dict(max_tokens=max(len(one.token_ids) for one in found)))
    free = llm.generate("ROMEO: what", plain, use_tqdm=False)[0].outputs
    for sample, other in zip(found, free, strict=True):
        reasoning, comma, text = sample.text.partition(",")
        assert other.text.startswith(reasoning + comma)
        assert text in structure["choice"] if sample.finish_reason == "stop" else given.max_tokens == 9
    if not more:
        assert "".join(llm.stream("ROMEO: what", given)) == found[0].text


def test_reasoning_that_may_begin_and_does_not_end_the_text(llm):
    eos = min(llm.eos_token_ids)
    for bias, pattern in (({NEWLINE: 100}, "\n.*"), ({NEWLINE: -100}, ""), ({NEWLINE: 100, eos: 100}, "\n.+")):
        # The bias to the end is not for the first token: with two that are as likely, either would be drawn.
        outputs = run(llm, *(params(regex="[0-9]{3}", reasoning_token_ids=[NEWLINE, COMMA], seed=seed, logit_bias=bias,
                                    min_tokens=1, max_tokens=9) for seed in range(4)))
        for output in outputs:
            assert re.fullmatch(pattern + ("" if pattern else "[0-9]{3}"), output.text, re.S)
            assert output.finish_reason == ("length" if pattern else "stop")
    for ids, words in (([], "one or two"), ([1, 2, 3], "one or two"), ([-1], "one or two"), (["x"], "one or two"),
                       ([[]], "one or two"), ([[1], 2], "one or two"), ([2, [1, 10**9]], "token id 1000000000"),
                       ([10**9], "reasoning_token_ids has token id 1000000000")):
        with pytest.raises(ValueError, match=words):
            run(llm, params(regex="a", reasoning_token_ids=ids))


@pytest.mark.parametrize("more", [{}, dict(logprobs=1), dict(n=2)])
def test_reasoning_that_ends_with_tokens_in_a_row_and_a_later_one(llm, more):
    """As gpt-oss's does, whose channel is named before its text begins. Each of the tokens comes before, too."""
    prompt, choice = "ROMEO: what", ["yes, indeed", "no, never"]
    [free] = llm.generate(prompt, SamplingParams(temperature=1, seed=1, max_tokens=80), use_tqdm=False)[0].outputs
    ids = free.token_ids
    first = next(i for i in range(20, 40) if (ids[i], ids[i + 1]) not in [*zip(ids[:i], ids[1:])] and ids[i] in ids[:i])
    last = next(i for i in range(first + 5, 70) if ids[i] in ids[:first] and ids[i] not in ids[first + 2:i])
    found = llm.generate(prompt, params(choice=choice, reasoning_token_ids=[[ids[first], ids[first + 1], ids[last]]],
                                        **more), use_tqdm=False)[0].outputs[0]
    assert found.token_ids[:last + 1] == ids[:last + 1] and found.finish_reason == "stop"
    assert llm.tokenizer.decode(found.token_ids[last + 1:], skip_special_tokens=True) in choice


def test_stop_strings_log_probabilities_and_streams(llm):
    def text(**settings):
        return run(llm, params(json=PERSON, **settings))[0]

    plain, stopped = text(), text(stop='"age":')
    assert stopped.text == plain.text.split('"age":')[0] and stopped.finish_reason == "stop"
    assert plain.token_ids[:len(stopped.token_ids)] == stopped.token_ids
    with_logprobs = text(logprobs=1)
    assert with_logprobs.token_ids == plain.token_ids and len(with_logprobs.logprobs) == len(plain.token_ids)
    assert all(token in found for token, found in zip(with_logprobs.token_ids, with_logprobs.logprobs))
    assert "".join(llm.stream("A", params(json=PERSON))) == plain.text
    assert len(text(max_tokens=5).token_ids) == 5  # in the middle of forced tokens


def test_the_mask_is_last(llm):
    def favour(token_ids, logits):
        logits[5] = 1e9
        return logits

    processed, without_tokens, ignoring = run(llm, *(params(regex="[xy]{3}", **more) for more in (
        dict(logits_processors=[favour]), dict(allowed_token_ids=[5]), dict(ignore_eos=True))))
    assert re.fullmatch("[xy]{3}", processed.text)
    assert without_tokens.finish_reason == "error" and "no token is allowed" in without_tokens.stop_reason
    assert ignoring.finish_reason == "stop" and ignoring.token_ids[-1] in llm.eos_token_ids
    llm.scheduler.block_manager.check_idle()


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_complete_text_ends_whatever_bans_its_end(llguidance, lookahead):
    llm = load(device="cpu", lookahead=lookahead)
    ends = dict.fromkeys(llm.eos_token_ids, -1e9)
    structures = [dict(choice=["yes", "no"]), dict(json={"type": "boolean"}), dict(regex="[xy]{3}")]
    edits = [dict(min_tokens=70), dict(min_tokens=70, logprobs=2, temperature=0), dict(min_tokens=70, top_k=2),
             dict(min_tokens=70, presence_penalty=0.5), dict(logit_bias=ends), dict(min_tokens=70, n=2)]
    pairs = [(structure, edit) for structure in structures for edit in edits]
    outputs = llm.generate(["A"] * len(pairs), [params(**structure, **edit) for structure, edit in pairs])
    for (structure, _), sample in ((pair, sample) for pair, output in zip(pairs, outputs) for sample in output.outputs):
        assert sample.finish_reason == "stop" and sample.token_ids[-1] in llm.eos_token_ids
        check_fits(structure, sample.text)
    longer, = run(llm, params(regex="[xy]*", min_tokens=20))  # it may go on
    assert re.fullmatch("[xy]*", longer.text) and len(longer.token_ids) >= 20 and longer.finish_reason != "error"


def test_ids_that_the_tokenizer_does_not_have_are_masked(llguidance, monkeypatch):
    llm = load(device="cpu")
    tokens = llm.tokenizer.token_bytes()
    monkeypatch.setattr(llm.tokenizer, "token_bytes", lambda: tokens[:300])
    llm.eos_token_ids = frozenset({299})
    plain = SamplingParams(temperature=1, seed=3, max_tokens=25, ignore_eos=True)
    (alone,) = run(llm, plain)
    beside, *outputs = run(llm, plain, *(params(regex="[a-z ]{20,30}", seed=seed) for seed in range(20)))
    assert all(token < 300 for output in outputs for token in output.token_ids)
    assert beside.token_ids == alone.token_ids and max(alone.token_ids) >= 300  # a neighbour keeps all tokens


def test_a_grammar_that_cannot_be_compiled_is_refused_on_arrival(llm):
    circular, deep = {}, {}
    circular["not"] = circular
    for _ in range(9999):
        deep = {"properties": {"a": deep}}
    for fields, reason in ((dict(json={"enum": {1}}), "no JSON"), (dict(json=circular), "no JSON"),
                           (dict(json=deep), "no JSON"), (dict(regex="("), "unclosed group"),
                           (dict(json={"type": "blah"}), "Invalid type"), (dict(json="{"), "EOF"),
                           (dict(grammar="start: x"), "unknown name")):
        with pytest.raises(ValueError, match=f"structured_outputs cannot be used: .*{reason}") as caught:
            llm.add_request("A", params(**fields))
        assert "\n" not in str(caught.value)
    assert not llm.has_unfinished_requests()


def test_an_engine_without_a_tokenizer_says_why(tmp_path):
    (tmp_path / "tokenizer.json").write_text("[]")
    for options, reason in ((dict(skip_tokenizer_init=True), "with skip_tokenizer_init there is no tokenizer"),
                            (dict(tokenizer=str(tmp_path)), f"{tmp_path}/tokenizer.json: expected")):
        message = complaint(load(**options).generate, [1], params(regex="a"))
        assert message.startswith(f"structured outputs need the checkpoint's tokenizer: {reason}")


def test_compiled_grammars_are_kept_in_bounds_and_failures_are_too(llm, monkeypatch):
    compiler = compiler_of(llm)
    monkeypatch.setattr(compiler, "_compile", compile_one := Mock(wraps=compiler._compile))
    monkeypatch.setattr(compiler, "most_compiled", 4)
    for i in range(10):
        run(llm, params(regex=f"a{{{i % 6 + 1}}}"))
        run(llm, params(regex="a{1}"))  # the one used last is kept
        with pytest.raises(ValueError, match="unclosed group"):
            llm.add_request("A", params(regex="(unclosed"))
    assert len(compiler.compiled) == 4
    assert [compile_one.mock_calls.count(call("regex", source)) for source in ("(unclosed", "a{1}")] == [1, 1]


def takes_hours(index):
    parts = [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i + index}}}"} for i in range(16)]
    return StructuredOutputsParams(json={"allOf": parts})


def test_a_grammar_that_takes_hours_is_given_up(llguidance):
    compiler = compiler_of(load(device="cpu"))
    compiler.compile_seconds = 0.3
    good = StructuredOutputsParams(regex="[ab]")

    async def run():
        with pytest.raises(ValueError, match="more than 0.3 seconds to compile"):
            await compiler.compile_safely(takes_hours(0))
        assert compiler.process is None  # it has ended
        await compiler.compile_safely(good)
        process = compiler.process
        leaves = asyncio.create_task(compiler.compile_safely(takes_hours(1)))
        waits = asyncio.create_task(compiler.compile_safely(StructuredOutputsParams(regex="(")))
        await asyncio.sleep(0.05)
        leaves.cancel()
        with pytest.raises(ValueError, match="unclosed group"):
            await waits
        assert await process.wait() and process is not compiler.process
        await compiler.close()

    asyncio.run(run())
    with pytest.raises(ValueError, match="more than 0.3 seconds to compile"):
        compiler.compile(takes_hours(0))
    assert set(source for _, source in compiler.compiled) == {source_of(takes_hours(0))[1], "[ab]", "("}
    with pytest.raises(ValueError, match="unclosed group"):
        compiler.compile(StructuredOutputsParams(regex="("))
    compiler.compile(good)


def test_thousands_of_choices_and_hundreds_of_optional_properties(llm):
    names = [f"the {i}th" for i in range(3000)]
    schema = {"type": "object", "properties": {f"field {i}": {"type": "integer"} for i in range(300)}}
    first, second = run(llm, params(choice=names), params(json=schema | {"additionalProperties": False}))
    assert first.text in names and second.finish_reason != "error" and second.text.startswith("{")


@pytest.mark.parametrize("name", ["llama2", "qwen", "smollm2", "flags", "opt"])
def test_forced_tokens_have_the_bytes_of_the_text(name, llguidance):
    """SentencePiece puts a space in front, Qwen composes characters, and a small SmolLM2 lacks bytes."""
    if name in ("llama2", "flags"):
        pytest.importorskip("tokenizers", reason="reads this tokenizer; .ci/run installs it for its last part")
    tokenizer = load_tokenizer(GOLDEN / "tokenizers" / name)
    compiler = grammars.GrammarCompiler(tokenizer, [tokenizer.eos_token_id], tokenizer.vocab_size)
    token_bytes, missing = tokenizer.token_bytes(), set(range(256))
    missing -= {token[0] for token in token_bytes if len(token) == 1}
    ids = tokenizer.encode("Jo \u65e5", add_special_tokens=False)
    assert b"".join(token_bytes[token] for token in ids).strip() == bytes(
        byte for byte in "Jo \u65e5".encode() if byte not in missing)
    for text in ("yes, indeed", " e\u0301 is", '{"first name":"Jo \u65e5"}', "'s a\nb"):
        grammar = compiler.compile(StructuredOutputsParams(choice=[text]))
        tokens = grammar.propose([], 100)
        forced = b"".join(token_bytes[token] for token in tokens)
        assert forced == text.encode() or text.encode()[len(forced)] in missing and text.encode().startswith(forced)
        assert grammar.matcher.validate_tokens(tokens) == len(tokens)


def test_a_byte_level_tokenizer_of_the_package_tokenizers(llguidance, tmp_path):
    """The bundled one, which cuts a text in more steps, as DeepSeek's."""
    pytest.importorskip("tokenizers", reason="reads this tokenizer; .ci/run installs it for its last part")
    spec = json.loads((BUNDLED / "tokenizer.json").read_text())
    folder = write_files(tmp_path, {"tokenizer.json": spec | DEEPSEEK})
    llm = load("shakespeare", device="cpu", enforce_eager=True, tokenizer=str(folder), num_blocks=512)
    assert llm.tokenizer.token_bytes() == load().tokenizer.token_bytes()
    structures = [dict(json=PERSON), dict(choice=["yes, indeed", "no, never"])] * 4
    outputs = run(llm, *(params(**structure, seed=i) for i, structure in enumerate(structures)), prompt="ROMEO:")
    for structure, output in zip(structures, outputs):
        assert output.finish_reason == "stop"
        check_fits(structure, output.text)


def test_forced_tokens_are_the_models(llguidance):
    """A tokenizer may have more tokens than the model. Qwen's first 256 are single bytes."""
    tokenizer = load_tokenizer(GOLDEN / "tokenizers" / "qwen")
    compiler = grammars.GrammarCompiler(tokenizer, [7], 256)
    tokens = compiler.compile(StructuredOutputsParams(choice=["yes, indeed"])).propose([], 100)
    assert max(tokenizer.encode("yes, indeed")) >= 256 > max(tokens)
    assert b"".join(tokenizer.token_bytes()[token] for token in tokens) == b"yes, indeed"


@pytest.mark.parametrize("limited, reason", [
    (dict(grammar='start: e\ne: e e | "a" | e "a" | "a" e | e e e'), "items"),
    (dict(regex="((a{1,1000}b?){1,1000}c?){1,1000}"), "")], ids=["ambiguous", "many states"])
def test_a_grammar_that_reaches_a_limit_ends_before_its_masks_take_long(llm, capfd, limited, reason):
    only_a = {token: -100 for token, text in enumerate(llm.tokenizer.token_bytes()) if text not in (b"a", b"aa")}
    output, = run(llm, params(**limited, max_tokens=200, logit_bias=only_a))
    assert output.finish_reason == "error" and output.stop_reason.startswith("the grammar failed: ")
    assert reason in output.stop_reason and "<state>" not in output.stop_reason
    assert "Warning" not in capfd.readouterr().err


def test_the_command_line_and_prompt_files(llguidance, tmp_path, capsys):
    def printed(*arguments, status=0):
        assert main([*arguments, "--device", "cpu", "--seed", "3", "--max-tokens", "80"]) == status
        return capsys.readouterr()

    (tmp_path / "person.json").write_text(json.dumps(PERSON), encoding="utf-8-sig")  # as editors on Windows write it
    text = printed("--prompt", "A", "--json-schema", str(tmp_path / "person.json")).out
    check_fits(dict(json=PERSON), text.strip().removeprefix("A"))
    assert printed("--prompt", "A", "--choice", "yes", "--choice", "no").out.strip() in ("Ayes", "Ano")
    printed("--prompt", "A", "--regex", "a", "--choice", "b", status=2)
    printed("--prompt", "A", "--json-schema", str(tmp_path / "none.json"), status=2)
    assert "unclosed group" in printed("--prompt", "A", "--regex", "(", status=2).err
    (tmp_path / "in.jsonl").write_text('{"prompt": "A", "structured_outputs": {"regex": "[xy]{4}"}}\n')
    printed("--prompts", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl"))
    assert re.search('"text": "[xy]{4}"', (tmp_path / "out.jsonl").read_text())


def test_steps_replayed_by_pretended_graphs(expected, monkeypatch):
    llm = load(device="cpu", max_num_seqs=16, num_blocks=30, block_size=4)
    from nanopaged.tests.test_graphs import record_graphs
    monkeypatch.setattr("nanopaged.tests.test_graphs.CUDA", False)
    replayed = record_graphs(llm, monkeypatch)
    assert mixed(llm) == expected
    assert replayed and llm.runner.use(grammars.Masks).recorded


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; the test above pretends one")
def test_replayed_steps_wait_for_the_masks(llguidance):
    expected = mixed(load(lookahead=0))
    assert mixed(load(graphs=True)) == expected
    assert mixed(load(graphs=True, num_blocks=9)) == expected  # with preemptions


def test_the_readmes_trace(llguidance, capsys):
    from nanopaged.tests.test_drafts import assert_prints_the_readmes_trace
    assert_prints_the_readmes_trace(capsys, "### Structured output", "--regex", "--prompt", "ROMEO: ",
                                    "--block-size", "4")
