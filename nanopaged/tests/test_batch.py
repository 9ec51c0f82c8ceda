"""A file of prompts in, a file of results out: every line has one result, whatever interrupts the run."""
import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from nanopaged import LLM, SamplingParams
from nanopaged.features.batch import read_line, result_of, run_lines
from nanopaged.features.progress import ProgressBar, Runs
from nanopaged.tests.test_cli import (  # noqa: F401  call is a fixture
    GREEDY,
    JULIET,
    ROMEO,
    TEMPLATE,
    Screen,
    assert_refused,
    at_each_step,
    call,
    generate,
    interrupted_at,
    let_go_wrong,
    no_llm,
    nothing_left,
    shared_llm,
    text_after,
)

LINES = [{"prompt": ROMEO}, {"prompt": JULIET, "max_tokens": 2}, {"prompt": ROMEO, "n": 3}]


@pytest.fixture
def work(call, tmp_path, monkeypatch):  # noqa: F811
    """In a folder with in.txt and in.jsonl: runs in.jsonl, or another file, with results in out.jsonl, or on stdout;
    what the program printed."""
    monkeypatch.chdir(tmp_path)
    Path("in.txt").write_text(f"{ROMEO}\n{JULIET}\nDUKE: So\n")
    Path("chat.jinja").write_text(TEMPLATE)
    write_lines(*LINES)

    def work(prompts="in.jsonl", output="out.jsonl", code=0, **options):
        target = {} if output is None else dict(output=output)
        return call(code=code, prompts=prompts, **target | GREEDY | options)

    return work


def write_lines(*lines) -> None:
    Path("in.jsonl").write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))


def openais(custom_id, body, url="/v1/completions", **more) -> dict:
    """A line in OpenAI's batch format."""
    return dict(custom_id=custom_id, method="POST", url=url, body=body) | more


def content(path="out.jsonl") -> bytes:
    return Path(path).read_bytes()


def results(path="out.jsonl") -> dict[int, dict]:
    """A dict from each line's number to its last result, without what depends on the other requests that ran."""
    results = {result["line"]: {key: value for key, value in result.items()
                                if key not in ("line", "hash", "num_cached_tokens")}
               for result in map(json.loads, content(path).splitlines())}
    return dict(sorted(results.items()))


def texts(path="out.jsonl") -> dict[int, list[str]]:
    return {line: [sample["text"] for sample in result["outputs"]] for line, result in results(path).items()
            if "outputs" in result}


# ---- Lines and results

def test_a_text_file(work):
    captured = work("in.txt")
    assert captured.out == "" and "3 lines, 0 bad, " in captured.err and "36 new at" in captured.err
    outputs = generate([ROMEO, JULIET, "DUKE: So"])
    assert results() == {line: dict(
        prompt=output.prompt, num_prompt_tokens=len(output.prompt_token_ids), outputs=[dict(
            index=0, text=output.outputs[0].text, token_ids=output.outputs[0].token_ids, finish_reason="length",
            num_tokens=12)]) for line, output in enumerate(outputs, 1)}
    assert all("num_cached_tokens" in json.loads(line) for line in content().splitlines())


def test_lines_with_settings_of_their_own(work):
    """The settings of a line win over those of the command line."""
    lines = [{"prompt": ROMEO, "n": 2, "temperature": 1.2, "seed": 7}, {"prompt_token_ids": [5, 6, 7], "max_tokens": 3},
             {"prompt": ROMEO, "stop": "a", "max_tokens": 40}, {"prompt": JULIET, "logprobs": 1, "prompt_logprobs": 0}]
    write_lines(*lines)
    work()
    expected = [generate(line.pop("prompt", None) or line.pop("prompt_token_ids"), **line)[0] for line in lines]
    found = results()
    assert texts() == {line: [sample.text for sample in output.outputs] for line, output in enumerate(expected, 1)}
    assert found[2]["prompt_token_ids"] == [5, 6, 7] and found[3]["outputs"][0]["stop_reason"] == "a"
    for place, entries in zip(found[4]["outputs"][0]["logprobs"], expected[3].outputs[0].logprobs, strict=True):
        assert place == {str(token): vars(entry) | {"logprob": pytest.approx(entry.logprob, abs=1e-3)}
                         for token, entry in entries.items()}
    assert len(found[4]["prompt_logprobs"]) == len(expected[3].prompt_token_ids)


def test_an_id_comes_back_with_its_result(work):
    """The id may be any value, and a bad line's id comes back too."""
    write_lines({"id": "a\ud800", "prompt": ROMEO}, {"custom_id": [5], "prompt_token_ids": [5, 6]},
                {"id": 0, "custom_id": None, "prompt": ROMEO, "n": 0}, {"prompt": ROMEO})
    work(code=1)
    labels = [{key: result[key] for key in ("id", "custom_id") if key in result} for result in results().values()]
    assert labels == [{"id": "a\ud800"}, {"custom_id": [5]}, {"id": 0, "custom_id": None}, {}]
    assert "n must be" in results()[3]["error"] and texts()[1] == texts()[4]


def test_conversations_tools_and_priorities(work, monkeypatch):
    messages, tools = [{"role": "user", "content": "Who is there?"}], [{"type": "function", "function": {"name": "f"}}]
    write_lines({"messages": messages, "priority": -2}, {"messages": messages, "tools": tools})
    asked, chat_prompt, read_request = [], LLM.chat_prompt, LLM.read_request
    monkeypatch.setattr(LLM, "chat_prompt", lambda llm, messages, **how: (
        asked.append(how["tools"]) or chat_prompt(llm, messages, **how)))
    monkeypatch.setattr(LLM, "read_request", lambda *request: asked.append(request[-1]) or read_request(*request))
    work(chat_template="chat.jinja", chat_template_kwargs='{"speaker": "ME"}', scheduling_policy="priority")
    assert asked == [None, -2, tools, 0]
    expected = text_after("USER:\nWho is there?\n\nME:\n")
    assert texts() == {1: [expected], 2: [expected]} and results()[1]["messages"] == messages


def test_openais_batch_format(work):
    """Also with a line in our own form among the others."""
    hello = dict(messages=[{"role": "user", "content": "Hi"}], max_tokens=3)
    write_lines(openais("a", dict(model="bard", prompt=[ROMEO, JULIET], **GREEDY)),
                openais("b", dict(prompt=ROMEO, frobnicate=1)), openais("c", dict(prompt=[ROMEO, [5000]])),
                openais("d", hello, "/v1/chat/completions"), openais("e", {}, "/v1/embeddings"),
                openais("f", {}, ["a"]), {"prompt": ROMEO}, openais("h", dict(prompt="x"), temperature=0))
    options = dict(chat_template="chat.jinja", served_model_name="bard", code=1)
    errors, found = work(**options).err, results()
    assert [result.get("custom_id") for result in found.values()] == [*"abcdef", None, "h"]
    whole, chat = (found[line]["response"]["body"]["choices"] for line in (1, 4))
    assert [choice["text"] for choice in whole] == [text_after(ROMEO), text_after(JULIET)]
    assert found[1]["error"] is None and found[1]["response"]["status_code"] == 200 and found[1]["id"]
    assert chat[0]["message"]["content"] and texts() == {7: [text_after(ROMEO)]}
    for line, word in ((2, "frobnicate"), (3, "5000"), (5, "/v1/embeddings"), (6, "['a']"), (8, "temperature")):
        assert found[line]["response"]["status_code"] == 400 and word in found[line]["error"]["message"]
        assert errors.count(f"line {line}:") == 1
    assert "5 lines, 5 bad, 3 done before" in work(**options).err


def test_stdin_and_stdout(work, monkeypatch):
    """Stdin may be a pipe, and a second run goes on. Without --output results are printed."""
    for output, before in (("out.jsonl", 0), ("out.jsonl", 2), (None, 0)):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=iter(content("in.jsonl").splitlines(True)[:2])))
        captured = work("-", output)
        assert f"0 bad, {before} done before" in captured.err
    Path("printed.jsonl").write_text(captured.out)
    assert texts() == texts("printed.jsonl") == {1: [text_after(ROMEO)], 2: [text_after(JULIET, max_tokens=2)]}


def test_kinds_of_line_ends_and_blank_lines(work):
    """Only \n and \r\n end a line. The mark that Windows editors begin a file with is no text."""
    Path("in.txt").write_bytes("\ufeffeins\r\n\r\n \t\nzwei\u2028drei\n\n  vier\x0b \n\n".encode())
    assert "3 lines, 0 bad" in work("in.txt").err
    assert {line: result["prompt"] for line, result in results().items()} == {
        1: "eins", 4: "zwei\u2028drei", 6: "  vier\x0b "}


# ---- Bad lines

BAD_LINES = [
    ('{"prompt": "x"', "not JSON"), ("what light", "not JSON"), ("[" * 100_000, "not JSON"), ("[1, 2]", "object"),
    ("null", "object"), ('{"max_tokens": 5}', "prompt"), ('{"prompt": "a", "messages": []}', "messages"),
    ('{"prompt": ""}', "empty"), ('{"prompt": null}', "a prompt is a string"), ('{"prompt_token_ids": "a"}', "ids"),
    ('{"prompt": "a", "temprature": 1}', "'temprature'"), ('{"prompt": "a", "temperature": "hot"}', "'hot'"),
    ('{"prompt": "a", "tools": []}', "tools"), ('{"prompt": "a", "logits_processors": ["f"]}', "logits_processors"),
    ('{"prompt": "a", "priority": 1.5}', "priority"), ('{"prompt": "\\ud800"}', "surrogate"),
    ('{"messages": [{"role": "user"}]}', "content"),
    ('{"messages": [{"role": "user", "content": "a"}], "tools": 5}', "tools")]


def test_bad_lines_do_not_end_the_rest(work):
    """Each bad line is told with its number, has its result, and makes the exit code 1."""
    lines = [line for bad, _ in BAD_LINES for line in (bad, {"prompt": ROMEO})]
    write_lines(*lines)
    errors = work(chat_template="chat.jinja", code=1).err
    found, expected = results(), text_after(ROMEO)
    assert len(found) == len(lines) and f"{len(lines)} lines, {len(BAD_LINES)} bad" in errors
    for i, (bad, word) in enumerate(BAD_LINES):
        [told] = [line for line in errors.splitlines() if line.startswith(f"line {2 * i + 1}: ")]
        assert word in told and ". " not in told and len(told) < 300, bad
        assert found[2 * i + 1] == {"error": told.split(": ", 1)[1]}
        assert found[2 * i + 2]["outputs"][0]["text"] == expected
    assert nothing_left(shared_llm())


def test_bad_bytes_a_missing_template_and_an_output_that_went_wrong(work, monkeypatch):
    Path("in.txt").write_bytes(b"ROMEO:\n\nJos\xe9:\nJULIET:\n")
    captured = work("in.txt", code=1)
    assert "line 3: this is not text in UTF-8" in captured.err and "0xe9" in captured.err
    assert "3 lines, 1 bad" in captured.err and texts().keys() == {1, 4}
    write_lines({"messages": [{"role": "user", "content": "Hi"}]}, {"prompt": ROMEO}, {"prompt": JULIET})
    let_go_wrong(monkeypatch, JULIET)
    captured = work(output="chat.jsonl", code=1)
    assert "line 1: the checkpoint has no chat template" in captured.err and "--chat-template" in captured.err
    assert results("chat.jsonl")[3] == {"error": "it is not a number"} and texts("chat.jsonl").keys() == {2}


# ---- Going on

@pytest.mark.parametrize("max_num_seqs", [256, 1], ids=["together", "one after the other"])
def test_an_interrupted_run_goes_on(work, monkeypatch, max_num_seqs):
    write_lines(*({"prompt": f"{i}. {ROMEO}", "max_tokens": 1 + 3 * i % 8, "n": 1 + i % 2, "temperature": 1}
                  for i in range(6)), "{", {"prompt": ROMEO})
    work(output="whole.jsonl", max_num_seqs=max_num_seqs, code=1)
    whole, found = results("whole.jsonl"), {}
    for steps in (2, 3, 4, 6):
        with interrupted_at(steps):
            captured = work(max_num_seqs=max_num_seqs, code=130)
        before, found = len(found), results()
        assert all(whole[line] == result for line, result in found.items()) and before <= len(found) < 8
        assert nothing_left(shared_llm(max_num_seqs=max_num_seqs)) and "Traceback" not in captured.err
        assert captured.err.splitlines()[-1] == "interrupted"
    num_good = sum("error" not in result for result in found.values())
    captured = work(max_num_seqs=max_num_seqs, code=1)
    assert results() == whole and f"{8 - num_good} lines, 1 bad, {num_good} done before" in captured.err
    assert sum("outputs" in json.loads(line) for line in content().splitlines()) == 7  # none ran twice


def test_half_a_result_is_no_result(work):
    """A run goes on from any byte at which it was killed. Results are in the file as soon as their lines are done."""
    lengths = []
    with at_each_step(lambda _: lengths.append(len(content()))):
        work(max_num_seqs=1)
    assert len(set(lengths)) == 3 and lengths[0] == 0
    whole, raw = results(), content()
    line_end = raw.index(b"\n")
    for cut in {0, 1, 8, 9, 10, len(raw) - 1, *range(20, len(raw), 797), line_end, line_end + 1}:
        Path("out.jsonl").write_bytes(raw[:cut])
        assert f"{raw[:cut].count(bytes([10]))} done before" in work().err
        assert results() == whole, cut


def test_a_line_that_failed_is_tried_again(work, monkeypatch):
    """Corrected or not, or taken out at the end: its error stands in nobody's way."""
    lines = [{"prompt": ROMEO}, {"prompt": JULIET}, openais("a", {"prompt": ROMEO} | GREEDY), "{", "{"]
    write_lines({"prompt": ROMEO, "temperature": "hot"}, *lines[1:])
    with monkeypatch.context() as patch:
        patch.setattr(LLM, "read_request", Mock(side_effect=ValueError("there is no room at present")))
        work(code=1)
    assert [result["error"] is None for result in results().values()] == [False] * 5
    write_lines(*lines[:4])
    assert "4 lines, 1 bad, 0 done before" in work(code=1).err
    assert texts() == {1: [text_after(ROMEO)], 2: [text_after(JULIET)]}
    assert results()[3]["response"]["body"]["choices"][0]["text"] == text_after(ROMEO) and "error" in results()[4]
    write_lines(*lines[:3])
    assert "0 lines, 0 bad, 3 done before" in work().err


@pytest.mark.parametrize("lines, more, again", [
    ([{"prompt": "DUKE: So"}, *LINES[1:]], {}, [1]), ([LINES[0], LINES[2], LINES[1]], {}, [2, 3]),
    *((LINES, more, [1, 2, 3]) for more in (dict(max_tokens=6), dict(seed=6), dict(chat_template="chat.jinja"))),
    (LINES, dict(num_blocks=100, max_num_seqs=2, block_size=8), [])])  # how the engine computes changes no text
def test_a_changed_line_is_not_taken_for_done(work, lines, more, again):
    """Nor is a line of other settings. Its last result counts, and the other results stay as they are."""
    work()
    before = content()
    write_lines(*lines)
    assert f"{3 - len(again)} done before" in work(**more).err
    new = content().removeprefix(before)
    assert content().startswith(before) and sorted(json.loads(line)["line"] for line in new.splitlines()) == again
    work(output="afresh.jsonl", **more)
    assert results() == results("afresh.jsonl")


@pytest.mark.parametrize("raw", [
    b"my notes", b"my notes\nof yesterday", b"[]\n", b"{}\n", b"\xff\xfe\n", b'{"lx', b'{"line": 1}\n',
    b'{"line": 5, "hash": "5"}\n{"a": 0, "hash": "5"}\n', b'{"line": [1], "hash": "5"}\n'])
def test_a_file_that_holds_something_else_is_left_alone(work, raw):
    Path("out.jsonl").write_bytes(raw)
    assert_refused(work(llm_class=no_llm, code=2), "--output", "'out.jsonl'", "has a line that is no result")
    assert content() == raw


@pytest.mark.parametrize("source, target, words", [
    ("folder", None, ["folder", "directory"]), ("nowhere.txt", "out.jsonl", ["nowhere.txt", "No such file"]),
    ("in.txt", "folder", ["folder", "directory"]), ("in.txt", "", ["''", "No such file"]),
    ("in.jsonl", "linked.jsonl", ["linked.jsonl", "--prompts"]), ("in.txt", "pipe", ["--output 'pipe'", "seekable"])])
def test_files_that_cannot_be_used(work, source, target, words):
    Path("folder").mkdir()
    write_lines({"line": 1, "hash": "5"})  # results as prompts, which would be read as they are written
    os.link("in.jsonl", "linked.jsonl")
    os.mkfifo("pipe")
    assert_refused(work(source, target, llm_class=no_llm, code=2), *words)
    assert not Path("out.jsonl").exists()


# ---- How much at once

def test_requests_are_taken_up_as_there_is_room():
    """At most one step's worth of sequences runs and about as many wait, however many requests there are."""
    llm = shared_llm(max_num_seqs=4)
    taken, finished, most = 0, [], 0

    def requests():
        nonlocal taken
        for taken in range(1, 61):
            yield taken, f"{taken} {ROMEO}", SamplingParams(max_tokens=1 + taken % 3, n=1 + taken % 2), 0

    for key, output in Runs(llm).run(requests()):
        finished.append(key)
        assert output.finished and len(output.outputs) == 1 + key % 2
        most = max(most, taken - len(finished))
    assert sorted(finished) == list(range(1, 61)) and 4 <= most <= 10 and nothing_left(llm)


def test_several_threads_run_lines_of_one_engine_together():
    """Each gets its own results, though the steps of one thread serve all, and more would wait than have room."""
    llm, most = shared_llm(num_blocks=128, max_num_seqs=4), 0

    def watch(step):
        nonlocal most
        most = max(most, len(llm.requests))

    def work(thread):
        lines = [read_line(b'{"prompt": "%d %d", "max_tokens": %d}' % (thread, i, 1 + i % 4), True,
                           SamplingParams(temperature=0), None, {"line": i}) for i in range(9)]
        lines.insert(4, read_line(b"{", True, SamplingParams(), None, {"line": 9}))
        finished: list = []
        run_lines(lines, Runs(llm), finished.append)
        assert len(finished) == 10 and {id(line) for line in finished} == {id(line) for line in lines}
        return {result["line"]: result["outputs"][0]["text"] for result in map(result_of, lines) if "outputs" in result}

    with at_each_step(watch), ThreadPoolExecutor(6) as threads:
        found = list(threads.map(work, range(6)))
    for thread, texts_of_thread in enumerate(found):
        assert texts_of_thread == {i: text_after(f"{thread} {i}", max_tokens=1 + i % 4) for i in range(9)}
    assert most > 8 and nothing_left(llm)


# ---- The progress bar

def test_the_progress_of_a_file(work, monkeypatch):
    """It is gone when a line has to be told."""
    write_lines({"prompt": ROMEO}, {"prompt": ROMEO}, "{", {"prompt": JULIET, "max_tokens": 30})
    monkeypatch.setattr("nanopaged.features.progress.INTERVAL", 0)
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    work(max_num_seqs=1, code=1)
    drawn = screen.getvalue().split("\r")
    assert any(re.match(r"3 lines, \d:\d\d, \d+ tokens/s *$", text) for text in drawn)
    assert any(text.startswith("line 3: this is not JSON") for text in drawn)


def test_the_remaining_time(monkeypatch):
    """The estimate counts only the lines done since the start, and not those of earlier runs."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    bar = ProgressBar(30, unit="line", num_before=10)
    bar.started -= 3600
    bar.update(14, 7200)
    assert screen.getvalue() == "\r[#########...........] 14/30 lines, 1:00:00, 4:00:00 left, 2 tokens/s"
    assert not bar.due
    bar.update(30, 7200)
    *_, longer, last = screen.getvalue().split("\r")
    assert last.endswith(", 0:00 left, 2 tokens/s   ") and len(last) == len(longer)  # blanks cover the longer line
    bar.clear()
    assert screen.getvalue().endswith("\r" + " " * len(last.rstrip()) + "\r")
