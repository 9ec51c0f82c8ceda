"""The output of `--trace FILE.html`: a run as one page, for a reader who has never heard of paging. `--trace FILE.json`
writes the same frames (frames.py) as data.

page.html plays the frames: it adds their differences to a state, and draws the state. The page has no parts outside of
its file. FILE.html#12 opens it at its 12th picture.
"""
import json
from pathlib import Path
from typing import Any

from nanopaged.cli.frames import Frame, Frames

UNTOLD = vars(Frame("", 0, None))  # what a field says of a frame in which it is left out
TEMPLATE = Path(__file__).with_name("page.html")


class Page:
    """Notes the frames of an LLM until close(), as many as a browser plays; later ones of a run are left out."""

    def __init__(self, llm: Any, most_frames: int = 10_000):
        self.most_frames, self.num_left_out = most_frames, 0
        self.frames: list[dict[str, Any]] = []
        self.source = Frames(llm, self._note)

    def _note(self, frame: Frame) -> None:
        if len(self.frames) < self.most_frames:
            self.frames.append({name: value for name, value in vars(frame).items()
                                if value != UNTOLD[name] or name in ("pool", "step")})
        else:
            self.num_left_out += 1

    def close(self) -> None:
        self.source.close()

    def save(self, path: str, command: str) -> None:
        """Write a page, or the frames alone if the path ends with .json."""
        run = self.source.header() | dict(command=command, left_out=self.num_left_out, frames=self.frames)
        text = json.dumps(run, separators=(",", ":"))
        if not path.lower().endswith(".json"):  # in HTML a "<" could end the script, or begin a comment
            text = TEMPLATE.read_text(encoding="utf-8").replace("__RUN__", text.replace("<", "\\u003c"))
        Path(path).write_text(text, encoding="utf-8")
