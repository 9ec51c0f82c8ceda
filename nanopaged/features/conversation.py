"""The conversation of `--chat` in a terminal: questions from the keyboard, answers to stdout, the rest to stderr.

The prompt of an answer is the whole conversation, but only its end has to be computed: the blocks of the rest are in
the pool. Ctrl-C stops an answer, and the conversation keeps the part that was printed. gpt-oss writes into channels:
the final one's text is the answer, and thoughts go to stderr. (Thoughts of other models are a part of the text.)
"""
import os
import re
import sys
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from nanopaged.cli.main import check_stdin, prepare_prompts, renderer, settings_of, stream
from nanopaged.cli.status import say
from nanopaged.options import feature

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
CHANNEL = "<|channel|>"  # in the chat template of a model that writes into channels


def prepare(args: Any) -> Callable[[Any], int]:
    """For the command line, with --chat: a conversation, if stdin is a terminal; else one message, all of stdin or each
    --prompt."""
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    if args.prompt is None:
        check_stdin()
        if not sys.stdin.isatty():
            args.prompt = [sys.stdin.read().rstrip("\n")]
            if not args.prompt[0]:
                raise ValueError("the message on stdin is empty: write one to it, or give --prompt TEXT")
        elif args.beam_width is not None or args.n not in (None, 1):
            raise ValueError("a conversation has one answer at a time; leave out --n and --beam-width, or give "
                             "--prompt")
    answer = prepare_prompts(args) if args.prompt else None

    def act(llm: Any) -> int:
        read, render = reader_of(args, llm), renderer(args, llm)
        if answer is None:
            return converse(system, render, partial(stream, llm, settings_of(args, llm), read=read), llm.max_model_len)
        return answer(llm, lambda text: render([*system, {"role": "user", "content": text}]), read)

    return act


def reader_of(args: Any, llm: Any) -> Callable[..., Generator] | None:
    """What takes the content out of an answer's pieces, if the model writes into channels. Their marks are special
    tokens, which the texts then have; whoever asks for these gets the text as it is."""
    found = feature("chat_template", "a chat").load_chat_template(llm.tokenizer_path, args.chat_template)
    if args.skip_special_tokens is False or not found or CHANNEL not in "".join(found.templates.values()):
        return None
    args.skip_special_tokens = False
    return partial(read_channels, feature("server.tools", "a chat with a model that writes into channels").Reader)


def read_channels(make_reader: Callable[[str], Any], pieces: Generator, shows_thoughts: bool = True) -> Generator:
    """The content in an answer's pieces. Thoughts, and calls of tools that nobody offered, go to stderr."""
    reader, ended, thinks, result = make_reader("openai"), False, False, None
    try:
        while not ended:
            try:
                piece = next(pieces)
            except StopIteration as end:
                piece, ended, result = "", True, end.value
            delta = reader.add(piece, ended)
            thought = delta.get("reasoning_content", "") + "".join(
                call["function"]["arguments"] for call in delta.get("tool_calls", ()))
            if thought and shows_thoughts:
                print(thought, end="", file=sys.stderr, flush=True)
                thinks = True
            if content := delta.get("content"):
                if thinks:
                    say("")
                thinks = False
                yield content
    finally:
        pieces.close()
    return result


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
