"""A file of prompts in, a file of results out: every line has one result, whatever interrupts the run."""
import io
import json
import os
import re
import sys
import time

import pytest

from nanopaged import LLM, SamplingParams
from nanopaged.cli import batch
from nanopaged.cli.batch import PromptFile
from nanopaged.cli.status import Progress
from nanopaged.device.runner import Runner
from nanopaged.progress import ProgressBar, plural
from nanopaged.tests.test_cli import JULIET, POOL, ROMEO, TEMPLATE, assert_refused, nothing_left, run, shared_llm

GREEDY = ["--temperature", "0", "--max-tokens", "5"]


def generate(prompt, **params):
    return shared_llm(num_blocks=128).generate(prompt, SamplingParams(**dict(max_tokens=5, temperature=0) | params))[0]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with in.txt and in.jsonl."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_text(f"{ROMEO}\n{JULIET}\nDUKE: So\n")
    write_lines(tmp_path / "in.jsonl",
                {"prompt": ROMEO}, {"prompt": JULIET, "max_tokens": 2}, {"prompt": ROMEO, "n": 3})
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    return tmp_path


class Pipe(io.BytesIO):
    def seekable(self):
        return False


def write_lines(path, *lines) -> None:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))


def results(path="out.jsonl") -> dict[int, dict]:
    """A dict from each line's number to its one result, which may supersede errors."""
    found, results = [json.loads(line) for line in open(path, encoding="utf-8")], {}
    for result in found:
        assert results.get(result["line"], {"error": ""}).get("error") is not None, "a second result"
        results[result["line"]] = {key: value for key, value in result.items() if key not in ("line", "hash")}
    return dict(sorted(results.items()))


def comparable(found: dict[int, dict]) -> dict[int, dict]:
    """The results without what depends on the other requests that ran."""
    return {line: {key: value for key, value in result.items() if key != "num_cached_tokens"}
            for line, result in found.items()}


def texts(path="out.jsonl") -> dict[int, list[str]]:
    return {line: [sample["text"] for sample in result["outputs"]] for line, result in results(path).items()
            if "outputs" in result}


# --------------------------------------------------------------------------------------------------
# Lines and results
# --------------------------------------------------------------------------------------------------

def test_a_text_file(capsys, folder):
    assert run("--prompts", "in.txt", "--output", "out.jsonl", *GREEDY, *POOL) == 0
    captured = capsys.readouterr()
    assert captured.out == "" and "3 lines" in captured.err and "15 new at" in captured.err
    assert "bad" not in captured.err and "\r" not in captured.err  # no terminal, no bar
    for line, prompt in enumerate((ROMEO, JULIET, "DUKE: So"), 1):
        expected, found = generate(prompt), results()[line]
        assert found.pop("num_cached_tokens") <= len(expected.prompt_token_ids)
        sample = dict(index=0, text=expected.outputs[0].text, token_ids=expected.outputs[0].token_ids,
                      finish_reason="length", num_tokens=5)
        assert found == dict(prompt=prompt, num_prompt_tokens=len(expected.prompt_token_ids), outputs=[sample])


def test_lines_with_settings_of_their_own(folder):
    """The settings of a line win over those of the command line."""
    write_lines(folder / "in.jsonl", {"prompt": ROMEO}, {"prompt": ROMEO, "n": 2, "temperature": 1.2, "seed": 7},
                {"prompt_token_ids": [5, 6, 7], "max_tokens": 3}, {"prompt": ROMEO, "stop": "a", "max_tokens": 40},
                {"prompt": JULIET, "logprobs": 1, "prompt_logprobs": 0},
                {"prompt": ROMEO, "max_tokens": None, "stop_token_ids": [198]})
    assert run("--prompts", "in.jsonl", "--output", "out.jsonl", *GREEDY, *POOL) == 0
    found, expected = results(), [
        generate(ROMEO), generate(ROMEO, n=2, temperature=1.2, seed=7), generate([5, 6, 7], max_tokens=3),
        generate(ROMEO, stop="a", max_tokens=40), generate(JULIET, logprobs=1, prompt_logprobs=0),
        generate(ROMEO, max_tokens=None, stop_token_ids=[198])]
    assert texts() == {line: [sample.text for sample in output.outputs] for line, output in enumerate(expected, 1)}
    assert found[3]["prompt_token_ids"] == [5, 6, 7] and found[3]["outputs"][0]["num_tokens"] == 3
    assert (found[4]["outputs"][0]["finish_reason"], found[4]["outputs"][0]["stop_reason"]) == ("stop", "a")
    assert found[6]["outputs"][0]["stop_reason"] == 198
    first = expected[4].outputs[0]
    assert found[5]["outputs"][0]["cumulative_logprob"] == pytest.approx(first.cumulative_logprob, abs=1e-3)
    assert [{int(token): (found["rank"], found["decoded_token"]) for token, found in place.items()}
            for place in found[5]["outputs"][0]["logprobs"]] == [
        {token: (found.rank, found.decoded_token) for token, found in place.items()} for place in first.logprobs]
    assert found[5]["prompt_logprobs"][0] is None
    assert len(found[5]["prompt_logprobs"]) == len(expected[4].prompt_token_ids)


def test_an_id_comes_back_with_its_result(folder):
    """The id may be any value, and a bad line's id comes back too."""
    write_lines(folder / "in.jsonl", {"id": "a", "prompt": ROMEO}, {"custom_id": [5], "prompt_token_ids": [5, 6]},
                {"id": 0, "custom_id": None, "prompt": ROMEO, "n": 0}, {"prompt": ROMEO})
    assert run("--prompts", "in.jsonl", "--output", "out.jsonl", *GREEDY, *POOL) == 1
    labels = [{key: result[key] for key in ("id", "custom_id") if key in result} for result in results().values()]
    assert labels == [{"id": "a"}, {"custom_id": [5]}, {"id": 0, "custom_id": None}, {}]
    assert "n must be" in results()[3]["error"] and texts()[1] == texts()[4]


def test_conversations_and_tools(folder, monkeypatch):
    messages, tools = [{"role": "user", "content": "Who is there?"}], [{"type": "function", "function": {"name": "f"}}]
    write_lines(folder / "in.jsonl", {"messages": messages}, {"messages": messages, "tools": tools})
    asked, chat_prompt = [], LLM.chat_prompt
    monkeypatch.setattr(LLM, "chat_prompt", lambda llm, messages, **how: (
        asked.append(how) or chat_prompt(llm, messages, **how)))
    argv = ["--prompts", "in.jsonl", *GREEDY, *POOL, "--chat-template", "chat.jinja"]
    assert run(*argv, "--output", "out.jsonl", "--chat-template-kwargs", '{"speaker": "ME"}') == 0
    expected = generate("USER:\nWho is there?\n\nME:\n").outputs[0].text
    assert texts() == {1: [expected], 2: [expected]} and results()[1]["messages"] == messages
    assert [how["tools"] for how in asked] == [None, tools]


def test_texts_are_printed_without_an_output_file(capsys, folder):
    write_lines(folder / "in.jsonl", {"prompt": ROMEO, "n": 2, "seed": 3, "temperature": 1}, {"prompt": JULIET},
                {"messages": [{"role": "user", "content": "Hi"}]})
    assert run("--prompts", "in.jsonl", "--chat-template", "chat.jinja", *GREEDY, *POOL) == 0
    captured = capsys.readouterr()
    samples = generate(ROMEO, n=2, seed=3, temperature=1).outputs
    for part in (
            f"=== line 1: {ROMEO!r} [0]\n{samples[0].text}\n\n", f"=== line 1: {ROMEO!r} [1]\n{samples[1].text}\n\n",
            f"=== line 2: {JULIET!r}\n{generate(JULIET).outputs[0].text}\n\n", "=== line 3: 'Hi'\n"):
        assert part in captured.out
    assert "3 lines" in captured.err


@pytest.mark.parametrize("content", [f"{ROMEO}\n{JULIET}", f'{{"prompt": "{ROMEO}"}}\n{{"prompt": "{JULIET}"}}\n'],
                         ids=["txt", "jsonl"])
@pytest.mark.parametrize("is_pipe", [True, False])
def test_stdin(folder, monkeypatch, content, is_pipe):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper((Pipe if is_pipe else io.BytesIO)(content.encode())))
    assert run("--prompts", "-", "--output", "out.jsonl", *GREEDY, *POOL) == 0
    assert texts() == {line: [generate(prompt).outputs[0].text] for line, prompt in ((1, ROMEO), (2, JULIET))}


def test_kinds_of_line_ends(folder):
    """Lines end with \n or \r\n, and with nothing else; the mark that Windows editors begin a file with is no text."""
    (folder / "in.txt").write_bytes("\ufeffeins\r\nzwei\u2028drei\n  vier\x0b ".encode())
    assert run("--prompts", "in.txt", "--output", "out.jsonl", *GREEDY, *POOL) == 0
    assert [result["prompt"] for result in results().values()] == ["eins", "zwei\u2028drei", "  vier\x0b "]


def test_an_empty_file_has_no_results(capsys, folder):
    (folder / "in.txt").write_text("")
    assert run("--prompts", "in.txt", "--output", "out.jsonl", *POOL) == 0
    assert results() == {} and "0 lines" in capsys.readouterr().err


def test_priorities_reach_the_engine(folder, monkeypatch):
    asked, add_request = [], LLM.add_request
    monkeypatch.setattr(LLM, "add_request", lambda llm, prompt, params, priority: (
        asked.append(priority) or add_request(llm, prompt, params, priority)))
    write_lines(folder / "in.jsonl", {"prompt": ROMEO, "priority": -2}, {"prompt": ROMEO})
    assert run("--prompts", "in.jsonl", *GREEDY, *POOL, "--scheduling-policy", "priority") == 0
    assert asked == [-2, 0]


# --------------------------------------------------------------------------------------------------
# Bad lines
# --------------------------------------------------------------------------------------------------

BAD_LINES = [
    ('{"prompt": "x"', "not JSON"), ("what light", "not JSON"),
    ('"what light"', "object"), ("[1, 2]", "object"), ("null", "object"), ("{}", "prompt"),
    ('{"max_tokens": 5}', "prompt"), ('{"prompt": "a", "prompt_token_ids": [5]}', "prompt_token_ids"),
    ('{"prompt": ""}', "empty"), ('{"prompt": 5}', "prompt must be a string, not 5"), ('{"prompt": null}', "not None"),
    ('{"prompt": [5, 6]}', "prompt must be a string"), ('{"prompt": {"prompt": "a"}}', "prompt must be a string"),
    ('{"prompt_token_ids": "a"}', "token ids"), ('{"prompt_token_ids": []}', "empty"),
    ('{"prompt_token_ids": [1024]}', "1024"), ('{"prompt_token_ids": [-1]}', "-1"),
    ('{"prompt_token_ids": [1.5]}', "token ids"), ('{"prompt_token_ids": [true]}', "token ids"),
    ('{"prompt": "a", "temprature": 1}', "'temprature'"),
    ('{"prompt": "a", "logits_processors": []}', "logits_processors"), ('{"prompt": "a", "tools": []}', "tools"),
    ('{"prompt": "a", "temperature": "hot"}', "'hot'"), ('{"prompt": "a", "temperature": NaN}', "nan"),
    ('{"prompt": "a", "temperature": -1}', "-1"), ('{"prompt": "a", "max_tokens": 0}', "max_tokens"),
    ('{"prompt": "a", "max_tokens": 2.0}', "2.0"), ('{"prompt": "a", "min_tokens": 6}', "min_tokens"),
    ('{"prompt": "a", "n": true}', "True"), ('{"prompt": "a", "n": 0}', "n must be"),
    ('{"prompt": "a", "seed": 1e400}', "inf"), ('{"prompt": "a", "stop": [""]}', "stop"),
    ('{"prompt": "a", "logit_bias": {"5000": 1}}', "5000"),
    ('{"prompt": "a", "allowed_token_ids": []}', "allowed_token_ids"),
    ('{"prompt": "a", "priority": "high"}', "priority"), ('{"prompt": "a", "priority": 1.5}', "priority"),
    ('{"prompt": "' + "la " * 2000 + '"}', "max_model_len"), ('{"prompt": "\\ud800"}', "surrogate"),
    ('{"messages": "Hi"}', "messages"), ('{"messages": []}', "messages"), ('{"messages": [5]}', "message 0"),
    ('{"messages": [{"role": "user"}]}', "content"),
    ('{"messages": [{"role": "user", "content": "a"}], "tools": 5}', "tools"), ("[" * 100_000, "not JSON"),
    ('{"prompt": "a", "seed": ' + "9" * 5000 + "}", "not JSON")]


def test_bad_lines_do_not_end_the_rest(capsys, folder):
    """Each bad line is told with its number, has its result, and makes the exit code 1."""
    lines = [line for bad, _ in BAD_LINES for line in (bad, {"prompt": ROMEO})]
    write_lines(folder / "in.jsonl", *lines)
    assert run("--prompts", "in.jsonl", "--output", "out.jsonl", "--chat-template", "chat.jinja", *GREEDY, *POOL) == 1
    errors, found, expected = capsys.readouterr().err.splitlines(), results(), generate(ROMEO).outputs[0].text
    assert len(found) == 2 * len(BAD_LINES) and f"{len(lines)} lines, {len(BAD_LINES)} bad" in errors[-1]
    for i, (bad, word) in enumerate(BAD_LINES):
        [told] = [line for line in errors if line.startswith(f"line {2 * i + 1}: ")]
        assert word in told and ". " not in told and len(told) < 300, bad
        assert found[2 * i + 1] == {"error": told.split(": ", 1)[1]}
        assert found[2 * i + 2]["outputs"][0]["text"] == expected
    assert nothing_left(shared_llm(num_blocks=128))


def test_bad_lines_of_text(capsys, folder):
    (folder / "in.txt").write_bytes(b"ROMEO:\n\nJos\xe9:\nJULIET:\n")
    assert run("--prompts", "in.txt", *GREEDY, *POOL) == 1
    captured = capsys.readouterr()
    assert "line 3: byte 4, 0xe9, is not UTF-8" in captured.err and "3 lines, 1 bad" in captured.err
    assert captured.out.count("===") == 2 and "=== line 4: 'JULIET:'" in captured.out


@pytest.mark.parametrize("name, content", [
    ("in.txt", f"\n{ROMEO}\n\r\n \t\n{JULIET}\n\n"),
    ("in.jsonl", f'\n{{"prompt": "{ROMEO}"}}\n\n \n{{"prompt": "{JULIET}"}}\n\n')])
def test_blank_lines_are_no_lines(capsys, folder, monkeypatch, name, content):
    (folder / name).write_text(content)
    assert run("--prompts", name, "--output", "out.jsonl", *GREEDY, *POOL) == 0
    captured = capsys.readouterr()
    assert results().keys() == {2, 5} and captured.err.splitlines()[-1].startswith("2 lines, ")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(Pipe(content.encode())))
    assert run("--prompts", "-", "--output", "out.jsonl", *GREEDY, *POOL) == 0
    assert "2 lines, 2 of them done before" in capsys.readouterr().err


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("source", ["in.txt", "in.jsonl", "-"])
def test_a_file_in_utf_16_is_refused_as_such(capsys, folder, monkeypatch, source, encoding):
    """Nothing is loaded, unless the text comes through a pipe."""
    content = f"\ufeff{ROMEO}\r\n".encode(encoding)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    if source != "-":
        (folder / source).write_bytes(content)
    assert run("--prompts", source, llm_class=lambda *_, **__: pytest.fail("it is loaded")) == 2
    assert_refused(capsys.readouterr(), "--prompts", repr(source), "UTF-16", "UTF-8")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(Pipe(content)))
    assert run("--prompts", "-", *POOL) == 2 and "UTF-16" in capsys.readouterr().err


def test_conversations_without_a_template_are_bad_lines(capsys, folder):
    write_lines(folder / "in.jsonl", {"messages": [{"role": "user", "content": "Hi"}]}, {"prompt": ROMEO})
    assert run("--prompts", "in.jsonl", *GREEDY, *POOL) == 1
    captured = capsys.readouterr()
    assert "line 1: the checkpoint has no chat template" in captured.err and "--chat-template" in captured.err
    assert ROMEO in captured.out


def test_an_output_that_went_wrong_is_a_bad_line(capsys, folder, monkeypatch):
    step = LLM.step

    def broken(llm):
        outputs = step(llm)
        for output in outputs:
            if output.finished and output.prompt == JULIET:
                output.outputs[0].finish_reason, output.outputs[0].stop_reason = "error", "it is not a number"
        return outputs

    monkeypatch.setattr(LLM, "step", broken)
    assert run("--prompts", "in.txt", "--output", "out.jsonl", *GREEDY, *POOL) == 1
    assert "line 2: it is not a number" in capsys.readouterr().err
    assert results()[2] == {"error": "it is not a number"} and texts().keys() == {1, 3}


# --------------------------------------------------------------------------------------------------
# Going on
# --------------------------------------------------------------------------------------------------

def interrupt(patch, after: int):
    """Ctrl-C in the middle of a step."""
    steps, launch = [], Runner.launch

    def launched(runner, step):
        steps.append(step)
        if len(steps) > after:
            raise KeyboardInterrupt
        return launch(runner, step)

    patch.setattr(Runner, "launch", launched)


@pytest.mark.parametrize("more", [[], ["--max-num-seqs", "1"]], ids=["together", "one after the other"])
def test_an_interrupted_run_goes_on(capsys, folder, monkeypatch, more):
    lines = [{"prompt": f"{i}. {ROMEO}", "max_tokens": 1 + 3 * i % 8, "n": 1 + i % 2, "temperature": 1}
             for i in range(6)]
    write_lines(folder / "in.jsonl", *lines, "{", {"prompt": ROMEO})
    argv = ["--prompts", "in.jsonl", *GREEDY, *POOL, *more]
    assert run(*argv, "--output", "whole.jsonl") == 1
    whole = comparable(results("whole.jsonl"))
    capsys.readouterr()
    numbers = [0]
    for _ in range(40):
        with monkeypatch.context() as patch:
            interrupt(patch, after=3)
            code = run(*argv, "--output", "out.jsonl")
        found = comparable(results())
        captured = capsys.readouterr()
        assert all(whole[line] == result for line, result in found.items()) and len(found) >= numbers[-1]
        assert nothing_left(shared_llm(num_blocks=128, **{"max_num_seqs": 1} if more else {}))
        assert "Traceback" not in captured.err
        if code != 130:
            break
        numbers.append(len(found))
        last = captured.err.splitlines()[-1]
        assert last == (f"interrupted: out.jsonl has results for {len(found)} {plural('line', len(found))}, "
                        "and the same command goes on from "
                        "there")
        if len(numbers) > 2 and numbers[-1] == numbers[-2]:  # three steps are not enough for the longest
            code = run(*argv, "--output", "out.jsonl")
            captured = capsys.readouterr()
            break
    assert code == 1 and comparable(results()) == whole and len(numbers) > 2
    num_good = sum("error" not in result for result in found.values())
    assert f"8 lines, {num_good} of them done before, 1 bad" in captured.err
    before = (folder / "out.jsonl").read_bytes()
    monkeypatch.setattr(LLM, "add_request", lambda *_: pytest.fail("it is done"))
    assert run(*argv, "--output", "out.jsonl") == 1  # there is nothing left to do, and there is a bad line still
    assert (folder / "out.jsonl").read_bytes() == before  # whose error is there already


def test_a_line_that_failed_is_tried_again(capsys, folder, monkeypatch):
    """Corrected or not, or taken out at the end: its error stands in nobody's way."""
    body = {"prompt": ROMEO, "temperature": 0, "max_tokens": 0}
    call = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    lines = [{"prompt": ROMEO, "temperature": "hot"}, {"prompt": JULIET}, call, "{", "{"]
    write_lines(folder / "in.jsonl", *lines)
    argv = ["--prompts", "in.jsonl", "--output", "out.jsonl", *GREEDY, *POOL]

    def full(llm, prompt, *_):
        raise ValueError("there is no room at present")

    with monkeypatch.context() as patch:
        patch.setattr(LLM, "add_request", full)
        assert run(*argv) == 1
    assert [result["error"] is None for result in results().values()] == [False] * 5
    body["max_tokens"] = 5
    write_lines(folder / "in.jsonl", {"prompt": ROMEO}, *lines[1:4])
    capsys.readouterr()
    assert run(*argv) == 1
    expected = [generate(prompt).outputs[0].text for prompt in (ROMEO, JULIET)]
    assert texts() == {1: expected[:1], 2: expected[1:]}
    assert results()[3]["response"]["body"]["choices"][0]["text"] == expected[0] and "error" in results()[4]
    assert "4 lines, 1 bad" in capsys.readouterr().err
    write_lines(folder / "in.jsonl", {"prompt": ROMEO}, *lines[1:3])
    assert run(*argv) == 0 and "3 lines, 3 of them done before, " in capsys.readouterr().err


def test_a_run_that_was_killed_goes_on_from_any_byte(folder):
    assert run("--prompts", "in.jsonl", "--output", "out.jsonl", *GREEDY, *POOL) == 0
    whole, content = comparable(results()), (folder / "out.jsonl").read_bytes()
    line_end = content.index(b"\n")
    for cut in {0, 1, 8, 9, 10, len(content) - 1, *range(20, len(content), 151), line_end, line_end + 1}:
        (folder / "out.jsonl").write_bytes(content[:cut])
        assert run("--prompts", "in.jsonl", "--output", "out.jsonl", *GREEDY, *POOL) == 0
        assert comparable(results()) == whole, cut


def test_stdin_goes_on_too(folder, monkeypatch):
    for content, lines in ((b"ROMEO:\n", [1]), (b"ROMEO:\nJULIET:\n", [1, 2])):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(Pipe(content)))
        assert run("--prompts", "-", "--output", "out.jsonl", *GREEDY, *POOL) == 0
        assert list(results()) == lines


def test_a_result_that_is_taken_out_is_made_again(folder):
    write_lines(folder / "in.jsonl", {"prompt": ROMEO}, {"prompt": 5}, {"prompt": JULIET})
    argv = ["--prompts", "in.jsonl", "--output", "out.jsonl", *GREEDY, *POOL]
    assert run(*argv) == 1
    kept = [line for line in (folder / "out.jsonl").read_text().splitlines() if "error" not in line]
    write_lines(folder / "out.jsonl", *kept)
    write_lines(folder / "in.jsonl", {"prompt": ROMEO}, {"prompt": "5"}, {"prompt": JULIET})
    assert run(*argv) == 0 and texts()[2] == [generate("5").outputs[0].text]


@pytest.mark.parametrize("lines, more, word", [
    ([{"prompt": "other"}, {"prompt": JULIET, "max_tokens": 2}, {"prompt": ROMEO, "n": 3}], [], "line 1"),
    ([{"prompt": ROMEO}, {"prompt": JULIET, "max_tokens": 3}, {"prompt": ROMEO, "n": 3}], [], "line 2"),
    ([{"prompt": ROMEO}, {"prompt": JULIET, "max_tokens": 2}], [], "2 lines"),
    ([], ["--max-tokens", "6"], "settings"), ([], ["--seed", "6"], "settings"), ([], ["--stop", "6"], "settings"),
    ([], ["--generation-config", "vllm"], "settings"), ([], ["--model", "no/other"], "settings"),
    ([], ["--chat-template", "chat.jinja"], "settings")])
def test_results_of_something_else_are_noticed(capsys, folder, lines, more, word):
    """Nothing runs, nothing is loaded, and the results stay as they are."""
    argv = ["--prompts", "in.jsonl", "--output", "out.jsonl", *GREEDY, *POOL]
    assert run(*argv) == 0
    before = (folder / "out.jsonl").read_bytes()
    capsys.readouterr()
    if lines:
        write_lines(folder / "in.jsonl", *lines)
    assert run(*argv, *more, llm_class=lambda *args, **options: pytest.fail("it is loaded")) == 2
    assert_refused(capsys.readouterr(), "--output", "out.jsonl", word)
    assert (folder / "out.jsonl").read_bytes() == before


def test_results_of_something_else_are_noticed_on_stdin(capsys, folder, monkeypatch):
    for content, code in ((b"ROMEO:\n", 0), (b"JULIET:\n", 2)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(Pipe(content)))
        assert run("--prompts", "-", "--output", "out.jsonl", *GREEDY, *POOL) == code
    assert "line 1" in capsys.readouterr().err and results()[1]["prompt"] == "ROMEO:"


def test_what_may_change_between_two_runs(folder):
    """The results depend neither on how the engine computes nor on where the files and the model are."""
    argv = ["--prompts", "in.jsonl", "--output", "out.jsonl", *GREEDY]
    assert run(*argv, *POOL) == 0
    before = (folder / "out.jsonl").read_bytes()
    (folder / "in.jsonl").rename(folder / "moved.jsonl")
    assert run("--prompts", "moved.jsonl", *argv[2:],
               "--num-blocks", "100", "--max-num-seqs", "2", "--block-size", "8") == 0
    assert (folder / "out.jsonl").read_bytes() == before


@pytest.mark.parametrize("content", [
    b"my notes", b"my notes\nof yesterday", b"[]\n", b"{}\n", b"\n", b"\xff\xfe\n", b'{"lx', b'{"line": 1}\n',
    b'{"line": 0, "hash": "5"}\n', b'{"line": 5, "hash": "5"}\n{"line": -1, "hash": "5"}\n',
    b'{"line": "1", "hash": "5"}\n', b'{"line": 1, "hash": 5}\n', b'{"line": 1, "hash": "-5"}\n',
    b'{"line": 1, "hash": "12345678123456781"}\n', b'{"line": 100000000000000000, "hash": "5"}\n'])
def test_a_file_that_holds_something_else_is_left_alone(capsys, folder, content):
    (folder / "out.jsonl").write_bytes(content)
    assert run("--prompts", "in.txt", "--output", "out.jsonl", llm_class=None) == 2
    assert_refused(capsys.readouterr(), "--output", "'out.jsonl'", "line ")
    assert (folder / "out.jsonl").read_bytes() == content


@pytest.mark.parametrize("source, target, words", [
    ("nowhere.txt", None, ["nowhere.txt", "No such file"]), ("folder.txt", None, ["folder.txt", "directory"]),
    (".", None, [".txt", ".jsonl"]), ("in.csv", None, ["in.csv", ".jsonl"]), ("", None, ["''", ".jsonl"]),
    ("in.txt", "folder.txt", ["folder.txt", "directory"]),
    ("in.txt", "no/such/out.jsonl", ["no/such/out.jsonl", "No such file"]), ("in.txt", "", ["''", "No such file"]),
    ("in.jsonl", "in.jsonl", ["in.jsonl", "--prompts"]), ("in.jsonl", "linked.jsonl", ["linked.jsonl", "--prompts"]),
    ("nowhere.txt", "out.jsonl", ["nowhere.txt", "No such file"])])
def test_files_that_cannot_be_used(capsys, folder, source, target, words):
    (folder / "folder.txt").mkdir()
    os.link(folder / "in.jsonl", folder / "linked.jsonl")
    before = (folder / "in.jsonl").read_bytes()
    assert run("--prompts", source, *(["--output", target] if target is not None else []), llm_class=None) == 2
    assert_refused(capsys.readouterr(), *words)
    assert (folder / "in.jsonl").read_bytes() == before and not (folder / "out.jsonl").exists()


def test_two_runs_do_not_write_to_one_file(capsys, folder):
    """The second run is refused before anything is loaded. When the first has ended, another may go on."""
    pytest.importorskip("fcntl")
    argv = ["--prompts", "in.txt", "--output", "out.jsonl", *GREEDY, *POOL]
    first = PromptFile("in.txt", "out.jsonl")
    assert run(*argv, llm_class=None) == 2
    assert_refused(capsys.readouterr(), "another run", "--output 'out.jsonl'")
    first.results.close()
    assert run(*argv) == run(*argv) == 0 and len(results()) == 3


def test_a_file_system_without_locks(folder, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def flock(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert run("--prompts", "in.txt", "--output", "out.jsonl", *GREEDY, *POOL) == 0 and len(results()) == 3


@pytest.mark.parametrize("target", ["/dev/null", "pipe"])
def test_results_go_to_a_file_only(capsys, folder, target):
    """The run reads nothing from a file that may never end, such as /dev/full."""
    os.mkfifo(folder / "pipe")
    assert run("--prompts", "in.txt", "--output", target, llm_class=None) == 2
    assert_refused(capsys.readouterr(), "--output", repr(target), "a device or a pipe")


class FullDisk(io.FileIO):
    """A file on a disk that has room for some of what is written to the file."""

    def write(self, raw):
        if not (room := max(0, 300 - self.tell())):
            raise OSError(28, "No space left on device")
        return super().write(raw[:room])


def test_a_full_disk(capsys, folder, monkeypatch):
    """The disk takes half a result. Once there is room, the same command goes on."""
    argv = ["--prompts", "in.txt", *GREEDY, *POOL, "--output"]
    assert run(*argv, "whole.jsonl") == 0
    whole, open_file = comparable(results("whole.jsonl")), batch.open_file
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(batch, "open_file", lambda option, path, mode: (
            io.BufferedRandom(FullDisk(path, mode)) if option == "--output" else open_file(option, path, mode)))
        assert run(*argv, "out.jsonl") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: --output 'out.jsonl' cannot be written: No space left on device; ")
    assert ". " not in error
    assert "goes on where it stopped" in error and nothing_left(shared_llm(num_blocks=128))
    assert (folder / "out.jsonl").stat().st_size == 300
    assert run(*argv, "out.jsonl") == 0 and comparable(results()) == whole


# --------------------------------------------------------------------------------------------------
# How much at once
# --------------------------------------------------------------------------------------------------

def test_requests_are_taken_up_as_there_is_room(folder):
    """At most one step's worth of sequences runs and about as many wait, however many requests there are."""
    llm = shared_llm(num_blocks=128, max_num_seqs=4)
    taken, finished, most = 0, [], 0

    def requests():
        nonlocal taken
        for taken in range(1, 61):
            yield taken, f"{taken} {ROMEO}", SamplingParams(max_tokens=1 + taken % 3, n=1 + taken % 2), 0

    for key, output in Progress(llm).run(requests()):
        finished.append(key)
        assert output.finished and len(output.outputs) == 1 + key % 2
        most = max(most, taken - len(finished))
    assert sorted(finished) == list(range(1, 61)) and 4 <= most <= 10 and nothing_left(llm)


def test_what_is_under_way_is_aborted_with_the_generator():
    llm = shared_llm(num_blocks=128)
    requests = ((i, ROMEO, SamplingParams(max_tokens=2 + 90 * i), 0) for i in range(3))
    running = Progress(llm).run(requests)
    assert next(running)[0] == 0 and not nothing_left(llm)
    running.close()
    assert nothing_left(llm)


def test_requests_of_others_are_theirs():
    """Requests that an engine computes beside those of the run are neither waited for nor given out."""
    llm = shared_llm(num_blocks=128)
    stranger = (llm.add_request(JULIET, SamplingParams(max_tokens=2)),
                llm.add_request(JULIET, SamplingParams(max_tokens=50)))
    [(key, output)] = Progress(llm).run([("mine", ROMEO, SamplingParams(max_tokens=5), 0)])
    assert key == "mine" and output.prompt == ROMEO and llm.has_unfinished_requests()
    for request_id in stranger:
        llm.abort_request(request_id)
    assert nothing_left(llm)


def test_lines_that_are_done_take_eight_bytes_each(folder):
    (folder / "in.txt").write_text("y\n" * 5000)
    write_lines(folder / "out.jsonl", *({"line": number, "hash": f"{digest:016x}", "prompt": "y" * 300}
                                        for number, _, digest in PromptFile("in.txt")._read_lines()))
    run = PromptFile("in.txt", "out.jsonl")
    assert run.num_done == run.num_lines == 5000 and run.hashes.itemsize * len(run.hashes) == 40_000


# --------------------------------------------------------------------------------------------------
# The progress bar
# --------------------------------------------------------------------------------------------------

class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_progress_bar(folder, monkeypatch):
    """The bar is drawn on a terminal only; it is gone when a line has to be told, and at the end."""
    terminal, clock = Terminal(), iter(range(10**6))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(sys, "stderr", terminal)
    write_lines(folder / "in.jsonl", *[{"prompt": ROMEO}] * 3, "{", {"prompt": JULIET, "max_tokens": 30})
    argv = ["--prompts", "in.jsonl", "--output", "out.jsonl", *GREEDY, *POOL, "--max-num-seqs", "1", "--device", "cpu"]
    assert run(*argv) == 1
    drawn = terminal.getvalue().split("\r")
    bars = [text.rstrip(" ") for text in drawn if text.startswith("[")]
    assert "\x1b" not in terminal.getvalue()  # which TERM=dumb would show
    assert re.fullmatch(r"\[\.{20}\] 0/5 lines, \d:\d\d, \d+ tokens/s, 1/128 blocks", bars[0])
    assert re.match(r"\[################\.{4}\] 4/5 lines, \d:\d\d, \d:\d\d left, \d+ tokens/s, 1 bad", bars[-1])
    assert all(len(text) < 80 for text in bars)
    assert drawn[-1].startswith("5 lines, 1 bad, ") and drawn[-1].endswith("/128 blocks\n")
    assert drawn[-2].isspace() and any(text.startswith("line 4: this is not JSON") for text in drawn)
    for more, stream in ((["--trace"], Terminal()), ([], io.StringIO())):
        (folder / "out.jsonl").unlink()
        monkeypatch.setattr(sys, "stderr", stream)
        assert run(*argv, *more, llm_class=LLM) == 1
        assert "\r" not in stream.getvalue()


def test_the_remaining_time(monkeypatch):
    """The estimate counts only the lines done since the start, and not those of earlier runs."""
    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "stderr", terminal)
    bar = ProgressBar(30, unit="line", num_before=10)
    bar.started -= 3600
    bar.update(14, 7200)
    assert terminal.getvalue() == "\r[#########...........] 14/30 lines, 1:00:00, 4:00:00 left, 2 tokens/s"
    assert not bar.due
    bar.update(30, 7200)
    *_, longer, last = terminal.getvalue().split("\r")
    assert last.endswith(", 0:00 left, 2 tokens/s   ") and len(last) == len(longer)  # blanks cover the longer line
    bar.clear()
    assert terminal.getvalue().endswith("\r" + " " * len(last.rstrip()) + "\r")


def test_the_progress_bar_when_nobody_knows_how_many_lines_there_are(folder, monkeypatch):
    terminal, clock = Terminal(), iter(range(10**6))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(Pipe(b"ROMEO:\nJULIET:\n")))
    assert run("--prompts", "-", *GREEDY, *POOL) == 0
    assert "\r0 lines, " in terminal.getvalue() and "[" not in terminal.getvalue()


def test_a_notebooks_cell_has_a_progress_bar(monkeypatch):
    """Its stderr is no terminal, but draws over a line after a carriage return."""
    out_stream = type("OutStream", (io.StringIO,), dict(__module__="ipykernel.iostream"))
    monkeypatch.setattr(sys, "stderr", cell := out_stream())
    shared_llm(num_blocks=128).generate([ROMEO, JULIET], SamplingParams(max_tokens=5))
    assert cell.getvalue().startswith("\r[....................] 0/2 prompts, 0:00, ") and cell.getvalue()[-1] == "\r"
    assert not ProgressBar(2, enabled=False).enabled
