"""The conversation of `--chat` in a terminal: questions from the keyboard, answers to stdout, the rest to stderr.

The prompt of an answer is the whole conversation, but only its end has to be computed: the blocks of the rest are in
the pool. Ctrl-C stops an answer, and the conversation keeps the part that was printed.
"""
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from nanopaged.cli.status import say

try:
    import readline  # input() is a line editor with it
except ImportError:  # on Windows
    readline = None  # type: ignore[assignment]
try:
    import termios
except ImportError:
    termios = None  # type: ignore[assignment]

HELP = '''\
"""      begins a message of several lines, and ends it
/clear   forgets the conversation
/bye     leaves, and so does Ctrl-D
/?       prints this list
Ctrl-C stops an answer; the arrow keys bring earlier messages back'''
QUOTES = '"""'
COMMAND = re.compile(r"/(\?|[a-z]+)")
MOST_ENTRIES = 1000  # of the history file


def converse(system: list[dict], render: Callable[[list[dict]], dict], answer: Callable[[dict, list[str]], object],
             max_model_len: int, keyboard: "Keyboard") -> int:
    """Ask for questions and print answers until the user leaves; the exit code.

    system: the messages that are always kept
    render: makes a prompt of messages
    answer: prints the answer to a prompt, and appends its pieces to a list as they come
    """
    turns: list[dict] = []  # of the user and of the model
    render([*system, _user("Hello")])  # without a chat template say so now
    say("Ctrl-C stops an answer, Ctrl-D leaves, /? lists more")
    while True:
        try:
            text = keyboard.read_message()
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
        elif COMMAND.fullmatch(command):
            say(HELP if command == "/?" else f"there is no command {command}; /? lists the commands")
        elif command:
            asked, said = [*turns, _user(text)], list[str]()
            try:
                with keyboard.silent():
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


class Keyboard:
    """Reads messages with a line editor. history: the file that keeps them between sessions; None: none does."""

    def __init__(self, history: Path | None):
        self.history = history
        if readline:
            if os.environ.get("TERM") != "dumb":  # such a terminal would show the escape sequences
                readline.parse_and_bind("set enable-bracketed-paste on")  # lines pasted together are one message
            readline.set_auto_history(False)  # a message of several lines is one entry
            readline.clear_history()
            for line in self._load():
                with suppress(ValueError, TypeError):  # a line that is broken, or no text
                    readline.add_history(json.loads(line))

    def read_message(self) -> str:
        """A line, or the lines between two marks of three quotes."""
        text = self._ask("> ")
        if text.lstrip().startswith(QUOTES):
            text = text.lstrip().removeprefix(QUOTES)
            while not text.rstrip().endswith(QUOTES):
                text += "\n" + self._ask("... ")
            text = text.rstrip().removesuffix(QUOTES).strip("\n")
        if text.strip() and not COMMAND.fullmatch(text.strip()):
            if readline:
                readline.add_history(text)
            self._write([json.dumps(text)], "a")
        return text

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Meanwhile the terminal does not show what is typed. The next question begins with it."""
        if not (termios and sys.stdin.isatty() and hasattr(sys.stdin, "fileno")):
            yield
            return
        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
        quiet = before[:3] + [before[3] & ~termios.ECHO] + before[4:]
        termios.tcsetattr(terminal, termios.TCSADRAIN, quiet)
        try:
            yield
        finally:
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)

    def _ask(self, prompt: str) -> str:
        if sys.stdout.isatty():
            return input(prompt)  # the line editor has to know where the line begins
        print(prompt, end="", file=sys.stderr, flush=True)
        return input()

    # ---- the history file: a JSON string per line, since an entry may have several lines

    def _load(self) -> list[str]:
        lines: list[str] = []
        with self._or_without():
            if self.history and self.history.exists():
                lines = self.history.read_text(encoding="utf-8").splitlines()
                if len(lines) > 2 * MOST_ENTRIES:
                    lines = lines[-MOST_ENTRIES:]
                    self._write(lines, "w")
        return lines

    def _write(self, lines: list[str], mode: str) -> None:
        """Write lines to the file, which only its owner may read."""
        with self._or_without():
            if self.history:
                self.history.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with open(self.history, mode, encoding="utf-8", opener=partial(os.open, mode=0o600)) as file:
                    self.history.chmod(0o600)  # it may have been there with another mode
                    file.writelines(line + "\n" for line in lines)

    @contextmanager
    def _or_without(self) -> Iterator[None]:
        """If the file cannot be used, go on without it."""
        try:
            yield
        except (OSError, ValueError) as error:
            say(f"no history of messages is kept: {error}")
            self.history = None


def history_file() -> Path:
    """In the user's directory for state: XDG_STATE_HOME, by default ~/.local/state, on Windows %LOCALAPPDATA%."""
    home = os.environ.get("XDG_STATE_HOME") or os.environ.get("LOCALAPPDATA") or Path.home() / ".local" / "state"
    return Path(home) / "nanopaged" / "chat_history.jsonl"


def _user(text: str) -> dict:
    return {"role": "user", "content": text}
