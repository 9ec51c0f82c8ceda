r"""Stop strings: where a text ends, found while it is still being generated.

Text arrives in pieces, a token's each, and a stop string may begin in one piece and end in a later one, or in the
middle of one. A stream must not print the beginning of a stop string and then find that it was one. So the end of the
text is held back for as long as some stop string begins with it:

    stop ["\n\nUser:"]      piece  "Yes."  "\n\n"  "Us"    "eful" ...    or    "er: and"
                            shown  "Yes."  ""      ""      "\n\nUseful"        "", and that is the end
"""


class StopChecker:
    """Pieces of text in, the text that may be shown out, up to the stop string that is complete first; of several that
    end at the same character, the one listed first, as in vLLM.

    include: the stop string belongs to the text (include_stop_str_in_output); then nothing is held back
    matched: the stop string that ended the text, or None
    """

    def __init__(self, stop: list[str], include: bool = False):
        self.stop, self.include = stop, include
        self.matched: str | None = None
        self._tail = ""  # the end of the text: as much as a stop string can still begin in
        self._num_shown = 0  # leading characters of it that have been shown

    def add(self, piece: str, may_stop: bool = True) -> str:
        """What can be shown now. may_stop=False: a stop string does not count if it ends in this piece (min_tokens)."""
        if self.matched is not None:
            return ""
        before, shown, text = len(self._tail), self._num_shown, self._tail + piece
        ends = []
        for i, stop in enumerate(self.stop if may_stop else ()):
            start = text.find(stop, max(0, before + 1 - len(stop)))  # one that ends in this piece
            if start >= 0:
                ends.append((start + len(stop), i))
        if ends:
            end, i = min(ends)
            self.matched, self._tail = self.stop[i], ""
            return text[shown:end if self.include else end - len(self.stop[i])]
        end = len(text) if self.include else len(text) - self._num_held(text)
        cut = max(0, len(text) + 1 - max(map(len, self.stop), default=1))
        self._tail, self._num_shown = text[cut:], end - cut
        return text[shown:end]

    def finish(self) -> str:
        """The text has ended without a stop string: what was held back."""
        rest, self._tail, self._num_shown = self._tail[self._num_shown:], "", 0
        return rest

    def _num_held(self, text: str) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        for length in range(min(len(text), max(map(len, self.stop), default=1) - 1), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self.stop):
                return length
        return 0
