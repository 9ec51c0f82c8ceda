"""The conversation of `--chat` in a terminal: questions from the keyboard, answers to stdout, the rest to stderr.

The prompt of an answer is the whole conversation, but only its end has to be computed: the blocks of the rest are in
the pool. Ctrl-C stops an answer, and the conversation keeps the part that was printed.
"""
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from nanopaged.cli.main import check_stdin, prepare_prompts, renderer, settings_of, stream
from nanopaged.cli.status import say

try:
    import readline  # gives input() arrow keys and a history
    if os.environ.get("TERM") != "dumb":  # such a terminal would show the escape sequences
        readline.parse_and_bind("set enable-bracketed-paste on")  # lines pasted together are one message
except ImportError:  # on Windows input() reads plain lines
    pass

HELP = '''\
"""      begins a message of several lines, and ends it
/clear   forgets the conversation
/bye     leaves, and so does Ctrl-D
/?       prints this list
Ctrl-C stops an answer; the arrow keys bring earlier messages back'''
QUOTES = '"""'


def prepare(args: Any) -> Callable[[Any], int]:
    """For the command line, with --chat: a conversation, if stdin is a terminal; else one message, all of stdin or each
    --prompt."""
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    if args.prompt is None:
        check_stdin()
        if sys.stdin.isatty():
            if args.beam_width is not None or args.n not in (None, 1):
                raise ValueError("a conversation has one answer at a time; leave out --n and --beam-width, or give "
                                 "--prompt")
            return lambda llm: converse(system, renderer(args, llm), partial(stream, llm, settings_of(args, llm)),
                                        llm.max_model_len)
        args.prompt = [sys.stdin.read().rstrip("\n")]
        if not args.prompt[0]:
            raise ValueError("the message on stdin is empty: write one to it, or give --prompt TEXT")
    answer = prepare_prompts(args)
    return lambda llm: answer(llm, lambda text: renderer(args, llm)([*system, {"role": "user", "content": text}]))


def converse(system: list[dict], render: Callable[[list[dict]], dict], answer: Callable[[dict, list[str]], object],
             max_model_len: int) -> int:
    """Ask for questions and print answers until the user leaves; the exit code.

    system: the messages that are always kept
    render: makes a prompt of messages
    answer: prints the answer to a prompt, and appends its pieces to a list as they come
    """
    turns: list[dict] = []  # of the user and of the model
    render([*system, {"role": "user", "content": "Hello"}])  # without a chat template say so now
    say("Ctrl-C stops an answer, Ctrl-D leaves, /? lists more")
    while True:
        try:
            text = _read_message()
        except EOFError:
            say("")
            return 0
        except KeyboardInterrupt:
            say("\nCtrl-D leaves")
            continue
        if (command := text.strip()) == "/bye":
            return 0
        if command == "/clear":
            turns = []
            say("the conversation is forgotten" + ", but not the system message" * bool(system))
        elif re.fullmatch(r"/(\?|[a-z]+)", command):
            say(HELP if command == "/?" else f"there is no command {command}; /? lists the commands")
        elif command:
            asked, said = [*turns, {"role": "user", "content": text}], list[str]()
            try:
                answer(_fit(system, asked, render, max_model_len), said)
            except ValueError as error:
                say(f"error: {error}")
            except KeyboardInterrupt:
                say("stopped")
            if any(said):
                turns = [*asked, {"role": "assistant", "content": "".join(said)}]


def _fit(system: list[dict], asked: list[dict], render: Callable[[list[dict]], dict], max_model_len: int) -> dict:
    """The prompt of the conversation, whose oldest part is removed where it would leave no room for an answer."""
    room = max_model_len // 4  # at least, for the answer
    prompt, num_before = render(system + asked), len(asked)
    while len(prompt["prompt_token_ids"]) > max_model_len - room and len(asked) > 1:
        del asked[:2]
        prompt = render(system + asked)
    if len(asked) < num_before and len(prompt["prompt_token_ids"]) < max_model_len:
        say("the conversation is too long, its oldest questions and answers are forgotten")
    return prompt


def _read_message() -> str:
    """A line, or the lines between two marks of three quotes."""
    text = _ask("> ")
    if text.lstrip().startswith(QUOTES):
        text = text.lstrip().removeprefix(QUOTES)
        while not text.rstrip().endswith(QUOTES):
            text += "\n" + _ask("... ")
        text = text.rstrip().removesuffix(QUOTES).strip("\n")
    return text


def _ask(prompt: str) -> str:
    if sys.stdout.isatty():
        return input(prompt)  # the line editor has to know where the line begins
    print(prompt, end="", file=sys.stderr, flush=True)
    return input()
