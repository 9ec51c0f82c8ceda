"""A file of prompts in, a file of results out: every line has one result, whatever interrupts the run."""
import io
import itertools
import json
import os
import re
import sys
import time
from pathlib import Path

import pytest

from nanopaged import LLM, SamplingParams
from nanopaged.cli.batch import PromptFile
from nanopaged.cli.status import Progress
from nanopaged.progress import ProgressBar, counted
from nanopaged.tests.test_cli import (  # noqa: F401  call is a fixture
    GREEDY,
    JULIET,
    ROMEO,
    SMALL,
    TEMPLATE,
    Screen,
    assert_refused,
    call,
    generate,
    interrupted_at,
    let_go_wrong,
    no_llm,
    nothing_left,
    shared_llm,
    text_after,
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with in.txt and in.jsonl."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_text(f"{ROMEO}\n{JULIET}\nDUKE: So\n")
    write_lines({"prompt": ROMEO}, {"prompt": JULIET, "max_tokens": 2}, {"prompt": ROMEO, "n": 3})
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    return tmp_path


@pytest.fixture
def work(call, folder):  # noqa: F811
    """Runs in.jsonl, or another file, with results in out.jsonl, or none; what the program printed."""
    def work(prompts="in.jsonl", output="out.jsonl", code=0, **options):
        target = {} if output is None else dict(output=output)
        return call(code=code, prompts=prompts, **target | GREEDY | options)

    return work


class Pipe(io.BytesIO):
    def seekable(self):
        return False


def write_lines(*lines, path="in.jsonl") -> None:
    Path(path).write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))


def content(path="out.jsonl") -> bytes:
    return Path(path).read_bytes()


def results(path="out.jsonl") -> dict[int, dict]:
    """A dict from each line's number to its one result, which may supersede errors, without what depends on the other
    requests that ran."""
    results = {}
    for result in map(json.loads, content(path).splitlines()):
        assert results.get(result["line"], {"error": ""}).get("error") is not None, "a second result"
        results[result["line"]] = {key: value for key, value in result.items()
                                   if key not in ("line", "hash", "num_cached_tokens")}
    return dict(sorted(results.items()))


def texts(path="out.jsonl") -> dict[int, list[str]]:
    return {line: [sample["text"] for sample in result["outputs"]] for line, result in results(path).items()
            if "outputs" in result}


# ---- Lines and results

def test_a_text_file(work):
    captured = work("in.txt")
    assert captured.out == "" and "3 lines, " in captured.err and "36 new at" in captured.err
    assert "\r" not in captured.err  # no terminal, no bar
    for line, prompt in enumerate((ROMEO, JULIET, "DUKE: So"), 1):
        [expected] = generate(prompt)
        sample = dict(index=0, text=expected.outputs[0].text, token_ids=expected.outputs[0].token_ids,
                      finish_reason="length", num_tokens=12)
        num_tokens = len(expected.prompt_token_ids)
        assert results()[line] == dict(prompt=prompt, num_prompt_tokens=num_tokens, outputs=[sample])
        assert json.loads(content().splitlines()[line - 1])["num_cached_tokens"] <= num_tokens


def test_lines_with_settings_of_their_own(work):
    """The settings of a line win over those of the command line."""
    lines = [{"prompt": ROMEO}, {"prompt": ROMEO, "n": 2, "temperature": 1.2, "seed": 7},
             {"prompt_token_ids": [5, 6, 7], "max_tokens": 3}, {"prompt": ROMEO, "stop": "a", "max_tokens": 40},
             {"prompt": JULIET, "logprobs": 1, "prompt_logprobs": 0},
             {"prompt": ROMEO, "max_tokens": None, "stop_token_ids": [198]}]
    write_lines(*lines)
    work()
    expected = [generate(line.pop("prompt", None) or line.pop("prompt_token_ids"), **line)[0] for line in lines]
    found = results()
    assert texts() == {line: [sample.text for sample in output.outputs] for line, output in enumerate(expected, 1)}
    assert found[3]["prompt_token_ids"] == [5, 6, 7] and found[3]["outputs"][0]["num_tokens"] == 3
    assert (found[4]["outputs"][0]["finish_reason"], found[4]["outputs"][0]["stop_reason"]) == ("stop", "a")
    assert found[6]["outputs"][0]["stop_reason"] == 198
    [sample], [first] = found[5]["outputs"], expected[4].outputs
    assert sample["cumulative_logprob"] == pytest.approx(first.cumulative_logprob, abs=1e-3)
    for place, entries in zip(sample["logprobs"], first.logprobs, strict=True):
        assert place == {str(token): vars(entry) | {"logprob": pytest.approx(entry.logprob, abs=1e-3)}
                         for token, entry in entries.items()}
    assert found[5]["prompt_logprobs"][0] is None
    assert len(found[5]["prompt_logprobs"]) == len(expected[4].prompt_token_ids)


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
    asked, chat_prompt, add_request = [], LLM.chat_prompt, LLM.add_request
    monkeypatch.setattr(LLM, "chat_prompt", lambda llm, messages, **how: (
        asked.append(how["tools"]) or chat_prompt(llm, messages, **how)))
    monkeypatch.setattr(LLM, "add_request", lambda llm, prompt, params, priority: (
        asked.append(priority) or add_request(llm, prompt, params, priority)))
    work(chat_template="chat.jinja", chat_template_kwargs='{"speaker": "ME"}', scheduling_policy="priority")
    expected = text_after("USER:\nWho is there?\n\nME:\n")
    assert texts() == {1: [expected], 2: [expected]} and results()[1]["messages"] == messages
    assert asked == [None, -2, tools, 0]


def test_texts_are_printed_without_an_output_file(work):
    write_lines({"prompt": ROMEO, "n": 2, "seed": 3, "temperature": 1}, {"prompt": JULIET},
                {"messages": [{"role": "user", "content": "Hi"}]})
    captured = work(output=None, chat_template="chat.jinja")
    texts = {f"line 1: {ROMEO!r} [{sample.index}]": sample.text
             for sample in generate(ROMEO, n=2, seed=3, temperature=1)[0].outputs}
    texts |= {f"line 2: {JULIET!r}": text_after(JULIET), "line 3: 'Hi'": text_after("USER:\nHi\n\nASSISTANT:\n")}
    assert sorted(captured.out.split("=== ")[1:]) == sorted(f"{title}\n{text}\n\n" for title, text in texts.items())
    assert "3 lines" in captured.err


@pytest.fixture
def stdin(monkeypatch):
    """Gives the program bytes on stdin."""
    return lambda raw, kind=Pipe: monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(kind(raw)))


@pytest.mark.parametrize("kind", [Pipe, io.BytesIO])
def test_stdin(work, stdin, kind):
    """Either format; and a second run goes on."""
    stdin(f'{{"prompt": "{ROMEO}"}}\n{{"prompt": "{JULIET}"}}\n'.encode(), kind)
    work("-", "json.jsonl")
    assert texts("json.jsonl") == {line: [text_after(prompt)] for line, prompt in ((1, ROMEO), (2, JULIET))}
    for raw, code, lines in ((b"ROMEO:\n", 0, [1]), (b"JULIET:\n", 2, [1]), (b"ROMEO:\nJULIET:", 0, [1, 2])):
        stdin(raw, kind)
        captured = work("-", code=code)
        assert list(results()) == lines and ("line 1" in captured.err) == (code == 2)


def test_kinds_of_line_ends_and_blank_lines(work, folder, stdin):
    """Lines end with \n or \r\n, and with nothing else; blank ones are no lines. The mark that Windows editors begin a
    file with is no text."""
    (folder / "in.txt").write_bytes(raw := "\ufeffeins\r\n\r\n \t\nzwei\u2028drei\n\n  vier\x0b \n\n".encode())
    assert work("in.txt").err.splitlines()[-1].startswith("3 lines, ")
    assert {line: result["prompt"] for line, result in results().items()} == {
        1: "eins", 4: "zwei\u2028drei", 6: "  vier\x0b "}
    stdin(raw)
    assert "3 lines, 3 of them done before" in work("-").err
    (folder / "in.txt").write_text("")
    assert "0 lines" in work("in.txt", "none.jsonl").err and results("none.jsonl") == {}


# ---- Bad lines

BAD_LINES = [
    ('{"prompt": "x"', "not JSON"), ("what light", "not JSON"), ("[" * 100_000, "not JSON"),
    ('{"prompt": "a", "seed": ' + "9" * 5000 + "}", "not JSON"), ("[1, 2]", "object"), ("null", "object"),
    ('{"max_tokens": 5}', "prompt"), ('{"prompt": "a", "prompt_token_ids": [5]}', "prompt_token_ids"),
    ('{"prompt": ""}', "empty"), ('{"prompt": null}', "prompt must be a string, not None"),
    ('{"prompt_token_ids": "a"}', "token ids"), ('{"prompt": "a", "temprature": 1}', "'temprature'"),
    ('{"prompt": "a", "temperature": "hot"}', "'hot'"), ('{"prompt": "a", "tools": []}', "tools"),
    ('{"prompt": "a", "logits_processors": []}', "logits_processors"), ('{"prompt": "a", "priority": 1.5}', "priority"),
    ('{"prompt": "\\ud800"}', "surrogate"), ('{"messages": [{"role": "user"}]}', "content"),
    ('{"messages": [{"role": "user", "content": "a"}], "tools": 5}', "tools")]


def test_bad_lines_do_not_end_the_rest(work):
    """Each bad line is told with its number, has its result, and makes the exit code 1."""
    lines = [line for bad, _ in BAD_LINES for line in (bad, {"prompt": ROMEO})]
    write_lines(*lines)
    errors = work(chat_template="chat.jinja", code=1).err.splitlines()
    found, expected = results(), text_after(ROMEO)
    assert len(found) == 2 * len(BAD_LINES) and f"{len(lines)} lines, {len(BAD_LINES)} bad" in errors[-1]
    for i, (bad, word) in enumerate(BAD_LINES):
        [told] = [line for line in errors if line.startswith(f"line {2 * i + 1}: ")]
        assert word in told and ". " not in told and len(told) < 300, bad
        assert found[2 * i + 1] == {"error": told.split(": ", 1)[1]}
        assert found[2 * i + 2]["outputs"][0]["text"] == expected
    assert nothing_left(shared_llm(**SMALL))


def test_bad_lines_of_text_and_conversations_without_a_template(work, folder):
    (folder / "in.txt").write_bytes(b"ROMEO:\n\nJos\xe9:\nJULIET:\n")
    captured = work("in.txt", None, code=1)
    assert "line 3: byte 4, 0xe9, is not UTF-8" in captured.err and "3 lines, 1 bad" in captured.err
    assert captured.out.count("===") == 2 and "=== line 4: 'JULIET:'" in captured.out
    write_lines({"messages": [{"role": "user", "content": "Hi"}]}, {"prompt": ROMEO})
    captured = work(output=None, code=1)
    assert "line 1: the checkpoint has no chat template" in captured.err and "--chat-template" in captured.err
    assert ROMEO in captured.out


@pytest.mark.parametrize("source, encoding", [("in.txt", "utf-16-le"), ("in.jsonl", "utf-16-be"), ("-", "utf-16-be")])
def test_a_file_in_utf_16_is_refused_as_such(work, folder, stdin, source, encoding):
    """Nothing is loaded, unless the text comes through a pipe."""
    raw = f"\ufeff{ROMEO}\r\n".encode(encoding)
    stdin(raw, io.BytesIO)
    if source != "-":
        (folder / source).write_bytes(raw)
    assert_refused(work(source, None, llm_class=no_llm, code=2), "--prompts", repr(source), "UTF-16", "UTF-8")
    stdin(raw)
    assert "UTF-16" in work("-", None, code=2).err


def test_an_output_that_went_wrong_is_a_bad_line(work, monkeypatch):
    let_go_wrong(monkeypatch, JULIET)
    assert "line 2: it is not a number" in work("in.txt", code=1).err
    assert results()[2] == {"error": "it is not a number"} and texts().keys() == {1, 3}


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
        assert nothing_left(shared_llm(**SMALL, max_num_seqs=max_num_seqs)) and "Traceback" not in captured.err
        last = captured.err.splitlines()[-1]
        assert last == (f"interrupted: out.jsonl has results for {counted(len(found), 'line')}, and the "
                        "same command goes on from there")
    captured = work(max_num_seqs=max_num_seqs, code=1)
    num_good = sum("error" not in result for result in found.values())
    assert results() == whole and f"8 lines, {num_good} of them done before, 1 bad" in captured.err
    raw = content()
    monkeypatch.setattr(LLM, "add_request", lambda *_: pytest.fail("it is done"))
    work(max_num_seqs=max_num_seqs, code=1)  # there is nothing left to do, and there is a bad line still
    assert content() == raw  # whose error is there already


def test_a_line_that_failed_is_tried_again(work, monkeypatch):
    """Corrected or not, or taken out at the end: its error stands in nobody's way. So does a result that is taken
    out."""
    body = {"prompt": ROMEO, "temperature": 0, "max_tokens": 0}
    in_openais_form = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    lines = [{"prompt": ROMEO, "temperature": "hot"}, {"prompt": JULIET}, in_openais_form, "{", "{"]
    write_lines(*lines)

    def full(llm, prompt, *_):
        raise ValueError("there is no room at present")

    with monkeypatch.context() as patch:
        patch.setattr(LLM, "add_request", full)
        work(code=1)
    assert [result["error"] is None for result in results().values()] == [False] * 5
    body["max_tokens"] = 12
    write_lines({"prompt": ROMEO}, *lines[1:4])
    assert "4 lines, 1 bad" in work(code=1).err
    assert texts() == {1: [text_after(ROMEO)], 2: [text_after(JULIET)]}
    assert results()[3]["response"]["body"]["choices"][0]["text"] == text_after(ROMEO) and "error" in results()[4]
    write_lines({"prompt": ROMEO}, *lines[1:3])
    assert "3 lines, 3 of them done before, " in work().err
    good = [line for line in content().decode().splitlines() if json.loads(line).get("error") is None]
    write_lines(*good[1:], path="out.jsonl")
    write_lines({"prompt": "DUKE:"}, *lines[1:3])
    assert "3 lines, 2 of them done before, " in work().err and texts()[1] == [text_after("DUKE:")]


def test_a_run_that_was_killed_goes_on_from_any_byte(work, folder):
    work()
    whole, raw = results(), content()
    line_end = raw.index(b"\n")
    for cut in {0, 1, 8, 9, 10, len(raw) - 1, *range(20, len(raw), 797), line_end, line_end + 1}:
        (folder / "out.jsonl").write_bytes(raw[:cut])
        work()
        assert results() == whole, cut


@pytest.mark.parametrize("lines, more, word", [
    ([{"prompt": "other"}, {"prompt": JULIET, "max_tokens": 2}, {"prompt": ROMEO, "n": 3}], {}, "line 1"),
    ([{"prompt": ROMEO}, {"prompt": JULIET, "max_tokens": 3}, {"prompt": ROMEO, "n": 3}], {}, "line 2"),
    ([{"prompt": ROMEO}, {"prompt": JULIET, "max_tokens": 2}], {}, "2 lines"),
    *(([], more, "settings") for more in (
        dict(max_tokens=6), dict(seed=6), dict(stop=6), dict(generation_config="vllm"), dict(model="no/other"),
        dict(chat_template="chat.jinja")))])
def test_results_of_something_else_are_noticed(work, lines, more, word):
    """Nothing runs, nothing is loaded, and the results stay as they are."""
    work()
    before = content()
    if lines:
        write_lines(*lines)
    assert_refused(work(code=2, llm_class=no_llm, **more), "--output", "out.jsonl", word)
    assert content() == before


def test_what_may_change_between_two_runs(work, folder):
    """The results depend neither on how the engine computes nor on where the files and the model are."""
    work()
    before = content()
    (folder / "in.jsonl").rename(folder / "moved.jsonl")
    work("moved.jsonl", num_blocks=100, max_num_seqs=2, block_size=8)
    assert content() == before


@pytest.mark.parametrize("raw", [
    b"my notes", b"my notes\nof yesterday", b"[]\n", b"{}\n", b"\xff\xfe\n", b'{"lx', b'{"line": 1}\n',
    b'{"line": 5, "hash": "5"}\n{"line": 0, "hash": "5"}\n', b'{"line": "1", "hash": "5"}\n',
    b'{"line": 1, "hash": 5}\n', b'{"line": 1, "hash": "-5"}\n', b'{"line": 1, "hash": "12345678123456781"}\n',
    b'{"line": 100000000000000000, "hash": "5"}\n'])
def test_a_file_that_holds_something_else_is_left_alone(work, folder, raw):
    (folder / "out.jsonl").write_bytes(raw)
    assert_refused(work(llm_class=no_llm, code=2), "--output", "'out.jsonl'", "is not the result of a prompt")
    assert content() == raw


@pytest.mark.parametrize("source, target, words", [
    ("folder.txt", None, ["folder.txt", "directory"]), ("in.csv", None, ["in.csv", ".jsonl"]),
    ("", None, ["''", ".jsonl"]), ("in.txt", "folder.txt", ["folder.txt", "directory"]),
    ("in.txt", "no/such/out.jsonl", ["no/such/out.jsonl", "No such file"]), ("in.txt", "", ["''", "No such file"]),
    ("in.jsonl", "in.jsonl", ["in.jsonl", "--prompts"]), ("in.jsonl", "linked.jsonl", ["linked.jsonl", "--prompts"]),
    ("nowhere.txt", "out.jsonl", ["nowhere.txt", "No such file"]),
    ("in.txt", "/dev/null", ["--output", "'/dev/null'", "a device or a pipe"]),  # the run reads nothing from a file
    ("in.txt", "pipe", ["--output", "'pipe'", "a device or a pipe"])])  # that may never end, such as /dev/full
def test_files_that_cannot_be_used(work, folder, source, target, words):
    (folder / "folder.txt").mkdir()
    os.link("in.jsonl", "linked.jsonl")
    os.mkfifo("pipe")
    before = content("in.jsonl")
    assert_refused(work(source, target, llm_class=no_llm, code=2), *words)
    assert content("in.jsonl") == before and not (folder / "out.jsonl").exists()


def test_two_runs_do_not_write_to_one_file(work, monkeypatch):
    """The second run is refused before anything is loaded. When the first has ended, another may go on."""
    fcntl = pytest.importorskip("fcntl")
    first = PromptFile("in.txt", "out.jsonl")
    assert_refused(work("in.txt", llm_class=no_llm, code=2), "another run", "--output 'out.jsonl'")
    first.results.close()
    for _ in range(2):
        work("in.txt")
    assert len(results()) == 3
    monkeypatch.setattr(fcntl, "flock", lambda *_: os.stat("nowhere"))  # a file system without locks
    work("in.txt", "unlocked.jsonl")
    assert texts("unlocked.jsonl") == texts()


def test_a_full_disk(work, folder):
    """The disk takes half of the only result. A limit for the size of files is a full disk, with another reason."""
    resource = pytest.importorskip("resource")
    (folder / "in.txt").write_text(ROMEO)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
    try:
        error = work("in.txt", code=2).err.splitlines()[-1]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.startswith("error: --output 'out.jsonl' cannot be written: File too large; ")
    assert ". " not in error and "goes on where it stopped" in error and nothing_left(shared_llm(**SMALL))
    assert len(content()) == 200


# ---- How much at once

def test_requests_are_taken_up_as_there_is_room():
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
    """Requests of others, which the engine computes beside it, are neither waited for nor given out nor aborted."""
    llm = shared_llm(**SMALL)
    others = [llm.add_request(JULIET, SamplingParams(max_tokens=n)) for n in (2, 90)]
    running = Progress(llm).run((i, ROMEO, SamplingParams(max_tokens=3 + 90 * i), 0) for i in range(3))
    assert next(running)[0] == 0
    running.close()
    [(key, output)] = Progress(llm).run([("mine", ROMEO, SamplingParams(max_tokens=5), 0)])
    assert key == "mine" and output.prompt == ROMEO and llm.has_unfinished_requests()
    for request_id in others:
        llm.abort_request(request_id)
    assert nothing_left(llm)


def test_lines_that_are_done_take_eight_bytes_each(folder):
    (folder / "in.txt").write_text("y\n" * 5000)
    write_lines(*({"line": number, "hash": f"{digest:016x}", "prompt": "y" * 300}
                  for number, _, digest in PromptFile("in.txt")._read_lines()), path="out.jsonl")
    run = PromptFile("in.txt", "out.jsonl")
    assert run.num_done == run.num_lines == 5000 and run.hashes.itemsize * len(run.hashes) == 40_000


# ---- The progress bar

def test_the_progress_bar(work, stdin, monkeypatch):
    """The bar is drawn on a terminal only; it is gone when a line has to be told, and at the end."""
    def drawn_by(stream, **options) -> str:
        with monkeypatch.context() as patch:
            patch.setenv("COLUMNS", "80")
            patch.setattr(time, "perf_counter", itertools.count().__next__)  # a clock that ticks at every look
            patch.setattr(sys, "stderr", stream)
            work(**dict(output=None, max_num_seqs=1, device="cpu", code=1) | options)
        return stream.getvalue()

    write_lines(*[{"prompt": ROMEO}] * 3, "{", {"prompt": JULIET, "max_tokens": 30})
    drawn = drawn_by(Screen()).split("\r")
    bars = [text.rstrip(" ") for text in drawn if text.startswith("[")]
    assert not any("\x1b" in text for text in drawn)  # which TERM=dumb would show
    assert re.fullmatch(r"\[\.{20}\] 0/5 lines, \d:\d\d, \d+ tokens/s, 1/128 blocks", bars[0])
    assert re.match(r"\[################\.{4}\] 4/5 lines, \d:\d\d, \d:\d\d left, \d+ tokens/s, 1 bad", bars[-1])
    assert all(len(text) < 80 for text in bars)
    assert drawn[-1].startswith("5 lines, 1 bad, ") and drawn[-1].endswith("/128 blocks\n")
    assert drawn[-2].isspace() and any(text.startswith("line 4: this is not JSON") for text in drawn)
    assert "\r" not in drawn_by(Screen(), trace=True, llm_class=LLM) + drawn_by(io.StringIO())
    stdin(b"ROMEO:\nJULIET:\n")
    drawn = drawn_by(Screen(), prompts="-", code=0)  # nobody knows how many lines there are
    assert "\r0 lines, " in drawn and "[" not in drawn


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
