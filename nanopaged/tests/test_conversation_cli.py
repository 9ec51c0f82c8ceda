"""`--chat`: one answer, and conversations at the keyboard, run as test_cli.py runs the command line."""
import importlib
import io
import re
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from nanopaged import LLM
from nanopaged.features import conversation
from nanopaged.tests.helpers import GOLDEN, complaint, needs, write_files
from nanopaged.tests.test_cli import (  # noqa: F401  call and asked_params are fixtures
    GREEDY,
    TEMPLATE,
    asked_params,
    assert_in_order,
    assert_refused,
    at_each_step,
    call,
    interrupted_at,
    no_llm,
    nothing_left,
    shared_llm,
    text_after,
)


@pytest.fixture
def chat(tmp_path) -> dict:
    """Options for a greedy chat with the bundled model, which has no chat template."""
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    return dict(chat=True, chat_template=tmp_path / "chat.jinja") | GREEDY


def answer_to(*turns: str, system: str = "", max_tokens: int = 12, **template) -> str:
    """The model's answer to a conversation, which is a list of the texts of user, assistant, user ..."""
    messages = [{"role": "system", "content": system}] * bool(system)
    messages += [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    prompt = shared_llm().chat_prompt(messages, chat_template=TEMPLATE, chat_template_kwargs=template)
    return text_after(prompt, max_tokens=max_tokens)


def answers_to(*questions: str) -> str:
    """What a conversation prints."""
    turns = []
    for question in questions:
        turns += [question, answer_to(*turns, question)]
    return "".join(answer + "\n" for answer in turns[1::2])


def test_chat_answers_messages(call, chat, monkeypatch):  # noqa: F811
    """One answer alone streams to stdout. What is piped in is one message; several are conversations of their own."""
    captured = call(**chat, prompt="Who is there?")
    assert captured.out == answers_to("Who is there?")
    assert "12 new at" in captured.err and "Who" not in captured.err
    captured = call(**chat, prompt="Hi", system="Brief!", chat_template_kwargs='{"speaker": "JULIET"}')
    assert captured.out == answer_to("Hi", system="Brief!", speaker="JULIET") + "\n" != answers_to("Hi")
    several = [f"=== {text!r}\n{answer_to(text)}\n" for text in ("Who is there?", "Hi")]
    assert_in_order(call(**chat, prompt=["Who is there?", "Hi"]).out, several)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Who\nis there?\n"))
    assert call(**chat).out == answers_to("Who\nis there?")
    del chat["temperature"]
    assert "=== 'Hi' [1] score -" in call(**chat, prompt="Hi", beam_width=2).out


def test_defaults_of_a_chat(asked_params, chat):  # noqa: F811
    """An answer is as long as the model likes, and every conversation draws anew."""
    del chat["max_tokens"]
    first, second = (asked_params(**chat, prompt="Hi") for _ in range(2))
    assert first.max_tokens is None and first.seed != second.seed and None not in (first.seed, second.seed)
    given = asked_params(**chat, prompt="Hi", max_tokens=3, seed=5)
    assert given.max_tokens == 3 and given.seed == 5


@pytest.fixture
def talk(call, chat, monkeypatch):  # noqa: F811
    """Holds a conversation: the keyboard gives the lines, raises what is to be raised, and ends with Ctrl-D."""
    def talk(*lines, **options):
        monkeypatch.setattr("builtins.input", Mock(side_effect=[*lines, EOFError]))
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
        return call(**chat | options)

    return talk


def cached_tokens(err: str) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for a, b in re.findall(r"(\d+) prompt tokens \((\d+) cached", err)]


def test_a_conversation(talk, capsys):
    """Every question comes with the turns before it, whose blocks are in the pool. Answers stream."""
    seen = []
    with at_each_step(lambda _: seen.append(capsys.readouterr())):
        seen.append(talk("What is your name?", "", "  ", "Whence come you?", "And whither?"))
    captured = SimpleNamespace(out="".join(part.out for part in seen), err="".join(part.err for part in seen))
    assert sum(part.out != "" for part in seen) > 20
    assert captured.out == answers_to("What is your name?", "Whence come you?", "And whither?")
    (first_prompt, _), (second_prompt, second), (third_prompt, third) = cached_tokens(captured.err)
    assert first_prompt - 16 < second < second_prompt and second_prompt - 16 < third < third_prompt
    assert captured.err.endswith("> \n") and "error" not in captured.err and nothing_left(shared_llm())


def test_quotes_begin_and_end_a_message_of_several_lines(talk):
    captured = talk('"""Who', "", 'is there?""" ', '"""', " Hi", '"""', '"""one line"""', '"""', "dropped",
                    KeyboardInterrupt, "Go on.", '"""', "no end")
    assert captured.out == answers_to("Who\n\nis there?", " Hi", "one line", "Go on.")


def test_commands_of_a_conversation(talk):
    """/clear forgets the turns and not the system message; other words after a slash are messages."""
    questions = "Hi", "/etc/hosts is what?"
    captured = talk(questions[0], "/clear", questions[1], "/?", "/quit", "/bye ", AssertionError("asked again"),
                    system="Brief!")
    assert captured.out == "".join(answer_to(question, system="Brief!") + "\n" for question in questions)
    assert "forgotten, but not the system message" in captured.err and "no command /quit" in captured.err
    assert all(word in captured.err for word in ('"""', "/clear ", "/bye ", "/? "))


def test_ctrl_c_stops_an_answer_and_ctrl_d_leaves(talk):
    """The part of an answer that came belongs to the conversation; a question without any answer does not."""
    with interrupted_at(5, 6):  # after five tokens of the first answer, and before the second
        captured = talk("Speak, speak!", "Too soon.", KeyboardInterrupt, "Go on.")
    half = answer_to("Speak, speak!", max_tokens=5)
    assert captured.out == f"{half}\n\n{answer_to('Speak, speak!', half, 'Go on.')}\n"
    assert captured.err.count("stopped") == 2 and captured.err.count("Ctrl-D leaves") == 2
    assert nothing_left(shared_llm())


def test_a_bad_question_does_not_end_the_conversation(talk):
    """And nothing is forgotten for it."""
    captured = talk("Who is there?", "la " * 2000, "broken \udce9 text", "Hi")
    assert captured.out == answers_to("Who is there?", "Hi")
    assert captured.err.count("error: ") == 2 and "max_model_len" in captured.err and "surrogate" in captured.err
    assert "forgotten" not in captured.err


def test_a_conversation_may_go_on_for_ever(talk, monkeypatch):
    """The oldest part of the conversation is forgotten, and the system message is not."""
    asked, prompt_of = [], LLM.chat_prompt
    monkeypatch.setattr(LLM, "chat_prompt", lambda llm, messages, **how: (
        asked.append(messages) or prompt_of(llm, messages, **how)))
    captured = talk(*(f"Question {i}, my lord?" for i in range(8)), system="Brief!", max_model_len=96)
    assert captured.out.count("\n") >= 8 and "error" not in captured.err and captured.err.count("forgotten") >= 4
    roles = ["system", *["user", "assistant"] * (len(asked[-1]) // 2 - 1), "user"]
    assert [message["role"] for message in asked[-1]] == roles
    assert asked[-1][0]["content"] == "Brief!" and asked[-1][-1]["content"] == "Question 7, my lord?"
    assert all(prompt <= 72 for prompt, _ in cached_tokens(captured.err))


HARMONY = ("<|channel|>analysis<|message|>A greeting.<|end|><|start|>assistant<|channel|>final<|message|>Hi there.",
           "<|channel|>final<|message|>Yes, a > b.<|return|>")


@pytest.fixture
def with_channels(chat):
    chat["chat_template"].write_text(f"{{# it writes <|channel|> #}}{TEMPLATE}")
    return chat


@needs("server")
def test_of_channels_the_final_one_is_the_answer(talk, with_channels, monkeypatch):
    """In a conversation it is what later turns see. Thoughts go to stderr, as they come."""
    texts, asked, prompt_of, closed = iter(HARMONY), [], LLM.chat_prompt, []

    def answer(llm, prompt, params):
        assert params.skip_special_tokens is False
        try:
            for piece in re.findall("(?s).{1,5}", next(texts)):
                yield piece
        finally:
            closed.append(prompt)
        return shared_llm().generate("a", params)[0]

    monkeypatch.setattr(LLM, "stream", answer)
    monkeypatch.setattr(LLM, "chat_prompt", lambda llm, messages, **how: (
        asked.append(messages) or prompt_of(llm, messages, **how)))
    captured = talk("Hi", "Is a > b?", **with_channels)
    assert captured.out == "Hi there.\nYes, a > b.\n" and "> A greeting.\n" in captured.err and len(closed) == 2
    assert [message["content"] for message in asked[-1]] == ["Hi", "Hi there.", "Is a > b?"]
    assert "<|" not in captured.err


@needs("server", "progress")
def test_channels_of_several_answers_and_texts_as_they_are(call, with_channels, monkeypatch):  # noqa: F811
    from nanopaged.features.progress import Runs
    run = Runs.run

    def answers(runs, requests):
        for (key, output), text in zip(run(runs, requests), HARMONY):
            output.outputs[0].text = text
            yield key, output

    monkeypatch.setattr(Runs, "run", answers)
    captured = call(prompt=["Hi", "Is a > b?"], **with_channels)
    assert {*captured.out.splitlines()} == {"=== 'Hi'", "=== 'Is a > b?'", "Hi there.", "Yes, a > b.", ""}
    assert "greeting" not in captured.err
    assert HARMONY[0] in call("--no-skip-special-tokens", prompt=["Hi", "Is a > b?"], **with_channels).out


@needs("server", "progress", "beam", "gpt_oss")
def test_channels_of_beams(call, tmp_path, monkeypatch):  # noqa: F811
    """A beam's text has no special tokens, so it is made again. A tiny gpt-oss searches, and what it finds is replaced
    by the tokens of such answers."""
    from nanopaged.features.beam import BeamGroup
    marks = dict.fromkeys(re.findall(r"<\|\w+\|>", "".join(HARMONY)) + ["<|endoftext|>"])
    letters = "".join(map(chr, range(33, 127))) + "\u0120\u010a"  # as a byte-level BPE writes a blank and a newline
    config = {"added_tokens_decoder": {199 - i: dict(content=mark, special=True) for i, mark in enumerate(marks)}}
    files = {"vocab.json": {letter: i for i, letter in enumerate(letters)}, "merges.txt": "",
             "tokenizer_config.json": config, "chat_template.jinja": f"{{# it writes <|channel|> #}}{TEMPLATE}"}
    model = str(write_files(tmp_path, files, (GOLDEN / "gpt-oss").iterdir()))
    encode, extend = shared_llm(model).tokenizer.encode, BeamGroup.extend
    found = [encode(HARMONY[0] + "<|endoftext|>"), encode(HARMONY[1])]

    def answers(group, candidates):
        origins = extend(group, candidates)
        if not origins:
            group.ended = [replace(beam, token_ids=ids, finish_reason="stop") for beam, ids in zip(group.ended, found)]
        return origins

    monkeypatch.setattr(BeamGroup, "extend", answers)
    captured = call(chat=True, prompt="Hi", model=model, beam_width=2, max_tokens=3)
    assert re.sub(r"score \S+", "score", captured.out) == (
        "=== 'Hi' [0] score\nHi there.\n\n=== 'Hi' [1] score\nYes, a > b.\n\n")
    assert "greeting" not in captured.err


@pytest.mark.parametrize("more", [{}, dict(prompt="Hi")], ids=["conversation", "message"])
def test_what_a_conversation_needs(talk, chat, more):
    """The program says so before it asks for anything, in the sentence of LLM.chat."""
    if not more:
        assert_refused(talk(n=2, llm_class=no_llm, code=2), "--n", "a conversation has one answer at a time")
    del chat["chat_template"]
    sentence = complaint(shared_llm().chat, [{"role": "user", "content": "Hi"}])
    captured = talk(AssertionError("asked"), code=2, **more)
    assert captured.out == "" and "Qwen/Qwen3-0.6B" in sentence
    assert captured.err.endswith(f"\nerror: {sentence.replace('chat_template=', '--chat-template')}\n")


@pytest.mark.parametrize("term, is_one", [("xterm", True), ("dumb", False)])
def test_lines_that_are_pasted_together_are_one_message(monkeypatch, term, is_one):
    """If the line editor marks them: a dumb terminal would show its escape sequences, and Windows has no readline."""
    monkeypatch.setenv("TERM", term)
    for readline in (None, editor := Mock()):
        monkeypatch.setitem(sys.modules, "readline", readline)
        importlib.reload(conversation)
    assert [one.args for one in editor.parse_and_bind.mock_calls] == [("set enable-bracketed-paste on",)] * is_one
