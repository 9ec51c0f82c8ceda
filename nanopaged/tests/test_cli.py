"""The command line, mostly run inside this process: texts go to stdout, everything else to stderr, bad input gets one
sentence and exit code 2."""
import functools
import inspect
import io
import itertools
import re
import sys
from contextlib import contextmanager
from dataclasses import fields, replace
from types import NoneType
from unittest.mock import Mock

import pytest

import nanopaged
from nanopaged import LLM, SamplingParams
from nanopaged.api.request import Request
from nanopaged.cli import main as cli
from nanopaged.cli.main import main
from nanopaged.device.runner import Runner
from nanopaged.options import OPTIONS
from nanopaged.tests.helpers import BUNDLED, ROOT, without_notes, write_files

ROMEO, JULIET = "ROMEO: But soft", "JULIET: Ay me"
GREEDY = dict(temperature=0, max_tokens=12)
# A chat template for the bundled model, which has none
TEMPLATE = """{% for message in messages %}{{ message.role | upper }}:
{{ message.content }}

{% endfor %}{% if add_generation_prompt %}{{ speaker or 'ASSISTANT' }}:
{% endif %}"""

loaded = functools.cache(LLM)


def shared_llm(model: str = "shakespeare", **options) -> LLM:
    """The engine for main in place of the class LLM: the same options get the same engine, which is loaded once. (Its
    seed is for requests without one, which the command line does not make. test_package.py has a program on a GPU.)"""
    small = dict(device="cpu", num_blocks=128, block_size=16)  # so many engines fit beside each other
    options = small | options | dict(enforce_eager=True, seed=0)
    return loaded(model, **dict(sorted(options.items())))


def no_llm(*args, **options):
    pytest.fail("it is loaded")


def run(*argv: str, llm_class=shared_llm) -> int:
    """Run the program and return its exit code."""
    try:
        return main(list(argv), llm_class)
    except SystemExit as exit:  # argparse's own way out, after --help
        return exit.code or 0


def words(**options) -> list[str]:
    """dict(max_tokens=4, stop=["a", "b"], ignore_eos=True) as --max-tokens 4 --stop a --stop b --ignore-eos."""
    argv = []
    for name, value in options.items():
        for one in value if isinstance(value, list) else [value]:
            argv += ["--" + name.replace("_", "-")] + [str(one)] * (one is not True)
    return argv


@pytest.fixture
def call(capsys):
    """Runs the program with words and options, checks the exit code, and returns what was printed. ValueError with the
    program's sentence for what it refuses."""
    def call(*argv: str, code: int = 0, llm_class=shared_llm, **options):
        capsys.readouterr()
        found, captured = run(*argv, *words(**options), llm_class=llm_class), capsys.readouterr()
        if found == 2 != code:
            raise ValueError(captured.err.splitlines()[-1])
        assert found == code, captured.err
        return captured

    return call


def generate(prompts, **params):
    return shared_llm().generate(prompts, SamplingParams(**GREEDY | params))


def text_after(prompt, **params) -> str:
    return generate(prompt, **params)[0].outputs[0].text


def assert_refused(captured, *words: str):
    """stderr holds one sentence with the words, and stdout holds nothing."""
    err = without_notes(captured.err)
    assert captured.out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("error: ") and ". " not in err and "Traceback" not in err
    for word in words:
        assert word in err


def nothing_left(llm: LLM) -> bool:
    manager = llm.scheduler.block_manager
    return llm.engine.is_idle and not llm.requests and manager.num_free_blocks == manager.num_blocks


@contextmanager
def at_each_step(do):
    """Meanwhile do(step) is called where a step is computed."""
    launch = Runner.launch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "launch", lambda runner, step: (do(step), launch(runner, step))[1])
        yield


def interrupted_at(*steps: int):
    """Ctrl-C in the middle of the steps of these numbers."""
    def interrupt(_, numbers=itertools.count()) -> None:
        if next(numbers) in steps:
            raise KeyboardInterrupt

    return at_each_step(interrupt)


# ---- One prompt

@pytest.mark.parametrize("prompt", [ROMEO, " \n", "Ä 日本語 🙂 \x00", "two\nlines\n"], ids=repr)
def test_one_prompt_streams_with_its_continuation(call, capsys, prompt):
    """stdout holds the prompt and the text of LLM.generate, which grows with the steps, and the status is on stderr."""
    seen = []
    with at_each_step(lambda _: seen.append(capsys.readouterr().out)):
        captured = call(prompt=prompt, temperature=0, max_tokens=30, ignore_eos=True)
    expected = text_after(prompt, max_tokens=30, ignore_eos=True)
    assert seen[0] == prompt and sum(piece != "" for piece in seen) > 20
    assert "".join(seen) + captured.out == f"{prompt}{expected}\n"
    for word in ("128 blocks", "30 new at ", "/s, ", ", length"):
        assert word in captured.err and word not in captured.out
    assert ROMEO not in captured.err and "error" not in captured.err


def received_by_llm(*argv: str) -> dict:
    engine = Mock(side_effect=ValueError("seen enough"))
    assert run("--prompt", "x", *argv, llm_class=engine) == 2
    [model], options = engine.call_args
    return options | dict(model=model)


RIGHT = {None: ("file", "file"), int: ("2", 2), float: ("0.5", 0.5), str: ("my/own", "my/own"),
         list: ("two words", ["two words"]), cli._ids: ("5,6", [5, 6]), cli._object: ('{"5": -1.5}', {"5": -1.5}),
         cli._file: (str(ROOT / "requirements.txt"), (ROOT / "requirements.txt").read_text())}
WRONG = {int: ("many", "1.5", "", "nan"), float: ("warm", "", "1,5", "0.5x"),
         cli._ids: ("five", "", "5,", "5 6", "[5]", "1.5"), cli._object: ("five", "", "5", "[5]", "{", "{5: 1}")}


def given(name: str) -> tuple[list[str], object]:
    """An option on the command line, and its value."""
    kind = cli.KINDS[name]
    text, value = (None, kind) if isinstance(kind, bool) else (kind[0],) * 2 if isinstance(kind, tuple) else RIGHT[kind]
    return [cli.option_name(name)] + [text] * (text is not None), value


@pytest.mark.parametrize("name", OPTIONS)
def test_engine_options_reach_the_engine(name):
    """What is not given is left to the engine."""
    argv, value = given(name)
    assert received_by_llm(*argv) == dict(model="shakespeare") | {name: value}


def test_a_value_of_another_type_is_refused(capsys):
    for name, kind in cli.KINDS.items():
        for value in WRONG.get(kind, ()):
            assert run("--prompt", "x", f"{cli.option_name(name)}={value}", llm_class=no_llm) == 2
            assert_refused(capsys.readouterr(), cli.option_name(name), repr(value))


def test_short_names_and_underscores():
    assert received_by_llm("-m", "my/model") == dict(model="my/model")
    assert cli._read_arguments(["--prompt", "x", "-n2", "--stop", "a", "--stop", " b"]).stop == ["a", " b"]
    assert received_by_llm("--max_num_seqs", "7", "--seed=5", "--speculate", "3") == dict(
        model="shakespeare", max_num_seqs=7, seed=5, speculative_config={"num_speculative_tokens": 3})
    assert cli._read_arguments(["--prompt", "a_b", "--system=--c_d", "--chat", "--model", "x"]).system == "--c_d"


def test_the_signature_of_llm_has_the_options_of_the_table():
    parameters = list(inspect.signature(LLM).parameters.values())
    assert {parameter.name: parameter.default for parameter in parameters[:-1]} == {
        name: option.default for name, option in OPTIONS.items()}


@pytest.fixture
def asked_params(monkeypatch, call):
    """Returns the sampling parameters that a command line ends in."""
    def asked_params(*argv, **options) -> SamplingParams:
        note = Mock(side_effect=ValueError("seen enough"))
        with monkeypatch.context() as patch:
            patch.setattr(LLM, "stream", note)
            patch.setattr(LLM, "read_request", note)
            call(*argv, code=2, **options)
        note.assert_called_once()
        return note.call_args.args[1]

    return asked_params


@pytest.mark.parametrize("name", [name for name in cli.SAMPLING if "logprobs" not in name])  # these need --output
def test_sampling_options_become_sampling_parameters(asked_params, name):
    argv, value = given(name)
    ours = SamplingParams(max_tokens=256, temperature=0.8, seed=0)
    assert asked_params(prompt="x") == ours
    assert asked_params(*argv, prompt="x") == replace(ours, **{name: value}) != ours


def test_the_checkpoint_may_say_the_defaults(asked_params, monkeypatch, tmp_path):
    """The command line goes before what the checkpoint recommends, and the checkpoint before our defaults."""
    settings = {"generation_config.json": dict(temperature=0.5, top_k=9, max_new_tokens=20)}
    plain = dict(prompt="x", model=write_files(tmp_path, settings, BUNDLED.iterdir()))
    without = plain | dict(generation_config="vllm")
    ours = SamplingParams(max_tokens=256, temperature=0.8, seed=0)
    theirs = SamplingParams(max_tokens=20, temperature=0.5, top_k=9, seed=0)
    for options, read in ((plain, theirs), (plain | dict(generation_config="auto"), theirs), (without, ours),
                          (plain | dict(top_k=0, max_tokens=5), replace(theirs, top_k=0, max_tokens=5))):
        assert asked_params(**options) == read
    for is_sampled, temperature in ((True, 0.8), (False, 0.0)):
        monkeypatch.setattr(shared_llm(), "default_params", dict(do_sample=is_sampled))
        assert asked_params(prompt="x") == replace(ours, temperature=temperature)


def test_the_status_line_tells_of_tokens_time_and_blocks(call):
    statuses = [call(prompt="What news on the Rialto? " * 5, max_tokens=4, **more).err.splitlines()[-1]
                for more in ({}, {}, dict(n=2))]
    pattern = (r"(\d+) (?:prompt )?tokens \((\d+) cached\), first token \d+\.\d\d s, "
               r"(\d+) new at \d+/s, (\d+)/128 blocks")
    assert statuses[2].startswith("1 prompt, ")
    first, second, third = ([*map(int, re.search(pattern, status).groups())] for status in statuses)
    blocks, rest = divmod(first[0], 16)  # of the prompt
    assert first[1:3] == [0, 4] and first[3] >= blocks and second[1] == first[0] - rest
    assert third[0] == 2 * first[0] and third[2] == 8
    options = dict(ignore_eos=True, num_blocks=30, block_size=10, data_parallel_size=2)
    for num_tokens, blocks in ((40, 8), (20, 4)):  # of two texts: the most of this run, which is less than of the first
        assert f", {blocks}/60 blocks" in call(prompt=["O", "A"], max_tokens=num_tokens, **options).err


def let_go_wrong(monkeypatch, prompt: str) -> None:
    """From now on the texts after this prompt end with an error."""
    def broken(request, make_output=Request.output):
        output = make_output(request)
        for sample in output.outputs if output.finished and output.prompt == prompt else ():
            sample.finish_reason, sample.stop_reason = "error", "it is not a number"
        return output

    monkeypatch.setattr(Request, "output", broken)


def test_a_text_that_went_wrong_says_so(call, monkeypatch):
    let_go_wrong(monkeypatch, ROMEO)
    for n in (1, 2):  # one text streams
        assert call(prompt=ROMEO, max_tokens=3, code=1, n=n).err.count("went wrong: it is not a number") == n


POOL_ENDED = "the pool of {} ended {}; raise --num-blocks or --gpu-memory-utilization"


@pytest.mark.parametrize("options, said", [
    (dict(num_blocks=2), POOL_ENDED.format("2 blocks", "the text")),
    (dict(num_blocks=1), POOL_ENDED.format("1 block", "the text")),  # no plural
    (dict(num_blocks=2, n=2), POOL_ENDED.format("2 blocks", "2 texts")),
    (dict(num_blocks=2, beam_width=2), POOL_ENDED.format("2 blocks", "2 texts")),
    (dict(num_blocks=2, data_parallel_size=2), POOL_ENDED.format("2 blocks", "the text")),
    (dict(max_model_len=24), "max_model_len 24 ended the text; raise --max-model-len"),
    (dict(max_tokens=2000, prompt="what light " * 335), "the model's limit of 1024 tokens ended the text"),
    (dict(max_tokens=4), None), (dict(max_tokens=4, n=2), None)])
def test_the_last_line_says_what_cut_a_text(call, options, said):
    """max_tokens is what was asked for."""
    last = call(**dict(prompt=ROMEO, ignore_eos=True) | options).err.splitlines()[-1]
    assert last == said if said else "ended" not in last


# ---- Several texts

def assert_in_order(text: str, parts: list[str]):
    position = 0
    for part in parts:
        assert part in text[position:], f"{part!r} is missing after {text[:position]!r}"
        position = text.index(part, position) + len(part)
    assert text[position:].strip() == "", "something else follows"


@pytest.mark.parametrize("prompts, n", [([ROMEO], 3), ([JULIET, ROMEO, JULIET], 2)])
def test_several_texts_are_printed_each_under_its_prompt(call, prompts, n):
    params = dict(n=n, max_tokens=15, seed=3, temperature=0.9)
    captured, outputs = call(prompt=prompts, **params), generate(prompts, **params)
    assert len({sample.text for sample in outputs[0].outputs}) == n
    assert_in_order(captured.out, [
        part for output in outputs for sample in output.outputs for part in (output.prompt, sample.text)])
    assert captured.out.count(ROMEO) == n * prompts.count(ROMEO)
    assert f"{15 * n * len(prompts)} new at " in captured.err
    assert not any(prompt in captured.err for prompt in prompts)


class Screen(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self):
        return True


@pytest.mark.parametrize("more", [{}, dict(beam_width=2)], ids=["samples", "beams"])
def test_several_prompts_have_a_progress_bar(call, monkeypatch, more):
    """A trace takes its place on stderr. The texts are the same."""
    options = dict(prompt=[ROMEO, JULIET], max_tokens=5, device="cpu") | more
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    plain = call(**options)
    assert re.search(r"\r\[\.{20}\] 0/2 prompts, \d:\d\d, \d+ tokens/s", screen.getvalue())
    assert re.fullmatch("2 prompts, .*\n", screen.getvalue().split("\r")[-1])
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    assert call(**options, num_blocks=20, trace=True, llm_class=LLM).out == plain.out
    assert "step 1" in screen.getvalue() and "\r" not in screen.getvalue()


def test_beams_with_their_scores(call):
    options = dict(beam_width=3, max_tokens=6)
    captured = call(prompt=[ROMEO, JULIET], length_penalty=0.5, ignore_eos=True, **options)
    outputs = shared_llm().beam_search([ROMEO, JULIET], nanopaged.BeamSearchParams(
        length_penalty=0.5, ignore_eos=True, **options))
    assert_in_order(captured.out, [f"=== {output.prompt!r} [{beam.index}] score {beam.score:.4f}\n{beam.text}\n"
                                   for output in outputs for beam in output.outputs])
    assert captured.out.count("===") == 6
    assert "36 new at" in captured.err and "2 prompts, " in captured.err
    assert call(prompt=[ROMEO, JULIET], **options).out != captured.out
    assert f"\n{text_after(ROMEO)}\n" in call(prompt=ROMEO, beam_width=1, max_tokens=12).out


# ---- Bad input

@pytest.mark.parametrize("argv, words", [
    ("--max-tokens 8", ["--prompt"]), ("--prompt x -p 2", ["-p"]), ("--prompt x --top-k", ["--top-k"]),
    ("--prompt x --max-tok 8", ["--max-tok"]),  # no abbreviations: what they mean changes as options are added
    ("hi", ['hi; write a prompt as --prompt "TEXT"']), ("--prompt But soft,", ['soft,; write a prompt as --prompt']),
    ("--prompt x --ignore-eos=1", ["--ignore-eos"]),
    ("--prompt x --max_tokes=8", ["no option '--max-tokes'; did you mean '--max-tokens'?"]),
    ("--prompt x --no-prefix-caching", ["; did you mean '--no-enable-prefix-caching'?"]),
    ("--prompts FILE.txt --output ./FILE.txt", ["--output", "FILE.txt"]),
    ("--chat --prompt x --chat-template nowhere.jinja", ["--chat-template", "nowhere.jinja", "No such file"]),
    ("--chat --prompt x --chat-template latin.txt", ["--chat-template", "latin.txt", "UTF-8"]),
    ("--prompt x --beam-width 2 --length-penalty nan", ["length_penalty", "nan"]),
    ("--prompt x --max-tokens 4 --min-tokens 5", ["min_tokens", "max_tokens 4", "5"]),
    ("--prompt x --min-tokens 300 --generation-config vllm", ["max_tokens 256"]),
    ("--prompt x --trace run.txt", ["--trace takes FILE.html or FILE.json", "not 'run.txt'"]),
    ("--prompt x --trace nowhere/run.html", ["--trace 'nowhere/run.html' cannot be opened: No such file"]),
    ("--chat --model x", ["stdin", "--prompt"])])  # the tests' stdin is empty
def test_unknown_and_missing_options_and_those_that_do_not_go_together(capsys, tmp_path, monkeypatch, argv, words):
    """Such options are refused before anything is loaded. A typo gets a hint."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE.txt").write_text("ROMEO:\n")
    (tmp_path / "latin.txt").write_bytes(b"\xe9t\xe9")
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert run(*argv.split(), llm_class=no_llm) == 2
    captured = capsys.readouterr()
    assert_refused(captured, *words)
    assert ("did you mean" in captured.err) == ("did you mean" in words[0] or "max-tok " in argv)
    assert not (tmp_path / "OUT.jsonl").exists()


def test_options_that_need_others_or_exclude_them(capsys, monkeypatch):
    """They are refused before anything is loaded, with both names."""
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    pairs = [(name, "prompt") for name in cli.NEEDS]
    pairs += [(name, other) for name, others in cli.EXCLUDES.items() for other in others]
    for name, other in pairs:
        argv = given(name)[0] + given(other)[0]
        argv += [] if {name, other} & {"prompt", "prompts", "chat", "serve"} else given("prompt")[0]
        assert run(*argv, llm_class=no_llm) == 2
        expected = cli.NEEDS.get(name) or cli.NEEDS.get(other) or [other]
        assert_refused(capsys.readouterr(), *map(cli.option_name, expected))


@pytest.mark.parametrize("options, word", [
    (dict(prompt=[ROMEO, ""]), "empty"), (dict(prompt="", beam_width=2), "empty"),
    (dict(prompt="broken \udce9 text"), "surrogate"), (dict(prompt="x", allowed_token_ids="5,1024"), "1024"),
    (dict(prompt="x", chat=True), "--chat-template"), (dict(prompt="x", model="./nowhere"), "./nowhere"),
    (dict(prompt="x", dtype="int8"), "dtype must be")], ids=lambda value: repr(value)[:50])
def test_models_and_prompts_that_can_never_run(call, options, word):
    """stderr may say that the model is loaded. (test_params.py and test_llm.py have all values that are refused.)"""
    captured = call(**options, code=2)
    assert captured.out == ""
    *status, error = captured.err.splitlines()
    assert error.startswith("error: ") and word in error and len(error) < 300
    assert len(status) <= 1 and not any("error" in line for line in status)
    assert nothing_left(shared_llm())


# ---- Edges that are no errors

def test_help_names_every_option_with_its_default(capsys):
    """A number or a word that is an option's default stands in brackets behind it."""
    assert run("--help") == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert captured.err == "" and max(map(len, lines)) <= 100
    named = set(re.findall(r"(?<![\w-])--[a-z-]+", captured.out.replace("--[no-]", "--no-")))
    assert named - {"--version"} == set(map(cli.option_name, cli.KINDS))
    # Functions have no place on a command line, and neither have the refused parameters.
    assert {field.name for field in fields(SamplingParams)} - set(cli.SAMPLING) == {
        "logits_processors", "detokenize", "structured_outputs"}
    defaults = {name: option.default for name, option in OPTIONS.items()} | vars(nanopaged.BeamSearchParams(2))
    defaults |= vars(SamplingParams(max_tokens=256, temperature=0.8, seed=0))
    told = {name: default if isinstance(default, str) else f"{default:g}" for name, default in defaults.items()
            if name in cli.KINDS and name != "beam_width" and not isinstance(default, (bool, NoneType))}
    assert len(told) > 20
    for name, default in told.items():
        told_of = re.search(rf"^(?=  -).*{cli.option_name(name)} .*(\n   .*)*$", captured.out, re.M)[0]
        assert name in ("swap_space", "data_parallel_size", "tensor_parallel_size") or re.search(
            rf"\[.*\b{default}\b.*\]", told_of), told_of


# ---- Streams that are closed or full

class Full(io.StringIO):
    """A stream as /dev/full is: it still has what it could not write when the interpreter flushes it at its end."""

    def flush(self):
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("name, stream", [("stdin", None), ("stdout", None), ("stderr", None), ("stderr", Full())])
def test_a_closed_or_full_stream(call, monkeypatch, name, stream):
    """After <&- in the shell the interpreter has None for stdin. What stderr cannot take is lost."""
    monkeypatch.setattr(sys, name, stream)
    for options in (dict(chat=True), dict(prompts="-")) if name == "stdin" else ():
        assert_refused(call(**options, llm_class=no_llm, code=2), "stdin is closed", "--prompt TEXT")
    captured = call(prompt=ROMEO, **GREEDY)
    assert captured.out == ("" if name == "stdout" else f"{ROMEO}{text_after(ROMEO)}\n")
    assert ("12 new at" in captured.err) == (name != "stderr") and "error" not in captured.err
    assert call(prompt=ROMEO, top_p=2, code=2).out == ""
    if name == "stderr":
        sys.stderr.flush()


# ---- Ctrl-C

@pytest.mark.parametrize("options", [{}, dict(prompt=[ROMEO, JULIET], n=2)], ids=["streaming", "several texts"])
@pytest.mark.parametrize("when", [0, 4])
def test_an_interrupt_inside_a_step_ends_cleanly(call, options, when):
    with interrupted_at(when):
        captured = call(**dict(prompt=ROMEO, temperature=0, max_tokens=50) | options, code=130)
    assert "Traceback" not in captured.err and "error" not in captured.err
    assert nothing_left(shared_llm())
    if options:
        assert captured.out == ""
    else:
        assert captured.out.startswith(ROMEO) and captured.out.endswith("\n")
        assert f"{ROMEO}{text_after(ROMEO, max_tokens=50)}".startswith(captured.out[:-1])
    call(prompt=ROMEO, **GREEDY)  # with the same engine
