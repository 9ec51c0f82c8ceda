"""The output of `--trace FILE.html`: a run as one page, for a reader who has never heard of paging. page.html adds the
frames (frames.py) up to a state, and draws it. `--trace FILE.json` writes the frames as data.
"""
import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ContextManager

from nanopaged.cli.status import say
from nanopaged.features.frames import Frame, Frames
from nanopaged.inputs import open_file

UNTOLD = vars(Frame("", 0))  # what a field says of a frame in which it is left out


def prepare(args: Any) -> Callable[[Any], ContextManager]:
    """For the command line, with --trace FILE: see that it can be written. The result notes what an LLM does meanwhile,
    and writes the file at the end."""
    file = args.trace
    if not file.lower().endswith((".html", ".json")):
        raise ValueError(f"--trace takes FILE.html or FILE.json, or no file to print the steps on stderr, not {file!r}")
    open_file("--trace", file, "ab").close()

    @contextmanager
    def noted(llm: Any) -> Iterator[None]:
        page = Page(llm)
        try:
            yield
        finally:
            say(page.save(file, "python engine.py " + shlex.join(args.words)))

    return noted


class Page:
    """Notes the frames of an LLM until close(), as many as a browser plays; later ones of a run are left out."""

    def __init__(self, llm: Any, most_frames: int = 10_000):
        self.llm, self.most_frames, self.left_out = llm, most_frames, 0
        self.frames: list[dict[str, Any]] = []
        self.tokens: set[int] = set()  # in these frames
        self.source = Frames(llm, self._note)
        self.close = self.source.close

    def _note(self, frame: Frame) -> None:
        if len(self.frames) == self.most_frames:
            self.left_out += 1
            return
        self.frames.append({name: value for name, value in vars(frame).items()
                            if value != UNTOLD[name] or name in ("pool", "step")})
        for event in frame.arrived + frame.beams + frame.drafted + frame.sampled:
            self.tokens.update(*(item for item in event if isinstance(item, tuple)))

    def save(self, path: str, command: str) -> str:
        """Write a page, or the frames alone if the path ends with .json; a sentence that says so."""
        llm, pool, run = self.llm, self.llm.runner.pool, self.source.header()
        table = llm.tokenizer and llm.tokenizer.token_bytes()
        words = {token: b"".join(table[token:token + 1]).decode("latin-1") if table else f"{token} "
                 for token in self.tokens}  # bytes, as characters: a token may be a part of a character
        run |= dict(model=llm.path.name, layers=llm.config.num_layers, max_num_seqs=llm.scheduler.max_num_seqs,
                    bytes_per_token=pool.block_bytes * llm.runner.num_ranks // run["block_size"], command=command,
                    left_out=self.left_out, words=words, frames=self.frames)
        text, says = json.dumps(run, separators=(",", ":")), "has the frames of the run"
        if not path.lower().endswith(".json"):  # in HTML a "<" could end the script, or begin a comment
            page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
            text, says = page.replace("__RUN__", text.replace("<", "\\u003c")), "plays the run; open it in a browser"
        Path(path).write_text(text, encoding="utf-8")
        return f"{path} {says}"
