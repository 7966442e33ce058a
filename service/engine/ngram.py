"""Drafts without a model: what followed the last time that a slot's text went like this.

The look-up is that of zlib's deflate (`longest_match` in deflate.c): each run of `min_match` tokens is linked to the
one before it with the same tokens, and the longest match is found by going back along these links. Drafting from it is
known as prompt lookup decoding (Saxena, 2023).
"""

from __future__ import annotations

from collections.abc import Sequence

_TOKEN_BITS = 20  # of each token in a key; larger ids merely share keys, since the tokens themselves are compared too


class NgramIndex:
    """The tokens of one slot, prompt and output, and where each run of `min_match` of them ended.

    Of a match the last `max_match` tokens are looked at, and of its places in the text the `max_candidates` latest.
    It takes 50 (repetitive text) to 180 bytes a token.
    """

    def __init__(self, min_match: int = 3, max_match: int = 32, max_candidates: int = 64) -> None:
        """Raises ValueError for sizes that make no sense."""
        if not 1 <= min_match <= max_match or max_candidates < 1:
            raise ValueError(f"min_match {min_match}, max_match {max_match}, max_candidates {max_candidates}")
        self._min, self._max, self._candidates = min_match, max_match, max_candidates
        self._mask = (1 << _TOKEN_BITS * min_match) - 1
        self._tokens: list[int] = []
        self._previous: list[int] = []
        """For each position the latest earlier one at which the same run ends, or -1."""
        self._latest: dict[int, int] = {}
        """For each run, as a key, the latest position at which it ends."""
        self.match_length = 0
        """Tokens that agreed for the last proposal, up to `max_match`; 0 where there was none."""

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens, each in constant time."""
        position, key = len(self._tokens), self._key(len(self._tokens))
        mask, latest, previous = self._mask, self._latest, self._previous
        self._tokens.extend(tokens)
        for token in tokens:
            key = (key << _TOKEN_BITS | token) & mask
            previous.append(latest.get(key, -1))
            latest[key] = position
            position += 1

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens, and be as if no others had ever come.

        The time goes with the tokens dropped or those kept, whichever are fewer. Raises ValueError where there are not
        so many.
        """
        dropped = len(self._tokens) - length
        if length < 0 or dropped < 0:
            raise ValueError(f"cannot keep {length} of {len(self._tokens)} tokens")
        if length < dropped:
            self._rebuild(self._tokens[:length])
            return
        for position in range(len(self._tokens) - 1, length - 1, -1):
            before = self._previous.pop()
            if before < 0:
                del self._latest[self._key(position + 1)]
            else:
                self._latest[self._key(position + 1)] = before
        del self._tokens[length:]

    def propose(self, n: int, extra: Sequence[int] = ()) -> list[int]:
        """Up to `n` tokens that followed the latest of the longest earlier matches with the end of the text.

        The text is that of the index and `extra` behind it, which stays out of the index. A proposal that reaches the
        end of the text runs into itself: it goes on with the period that it found. Empty without a match.
        """
        if not extra:
            return self._continue(n)
        length = len(self._tokens)
        self.extend(extra)
        proposal = self._continue(n)
        self.truncate(length)
        return proposal

    def _continue(self, n: int) -> list[int]:
        end = self._longest_match()
        if end < 0 or n <= 0:
            return []
        follow = self._tokens[end + 1 : end + 1 + n]
        return follow if len(follow) == n else (follow * (n // len(follow) + 1))[:n]

    def _longest_match(self) -> int:
        """Where the latest of the longest matches ends, before the last token; -1 where there is none."""
        self.match_length = 0
        tokens, last = self._tokens, len(self._tokens) - 1
        best, longest = -1, self._min - 1
        end = self._previous[last] if last >= 0 else -1
        for _ in range(self._candidates):
            if end < longest or longest == self._max:
                break
            # Only a match that reaches further back than the best one is of interest.
            if tokens[end - longest] == tokens[last - longest]:
                length = self._agreement(end, last)
                if length > longest:
                    best, longest = end, length
            end = self._previous[end]
        if best >= 0:
            self.match_length = longest
        return best

    def _agreement(self, end: int, last: int) -> int:
        """How many tokens up to `end` equal those up to `last`, at most `max_match`."""
        tokens, length, most = self._tokens, 0, min(self._max, end + 1)
        while length < most and tokens[end - length] == tokens[last - length]:
            length += 1
        return length

    def _key(self, end: int) -> int:
        """Of the run that ends before position `end`; near the start of the text it is shorter than `min_match`."""
        key = 0
        for token in self._tokens[max(0, end - self._min) : end]:
            key = key << _TOKEN_BITS | token
        return key & self._mask

    def _rebuild(self, tokens: list[int]) -> None:
        self._tokens, self._previous, self._latest = [], [], {}
        self.extend(tokens)


class Shadow:
    """A proposal that is only watched: what would have been accepted is learned without computing a single row."""

    def __init__(self) -> None:
        self._proposal: list[int] = []
        self._agreed = 0
        self.match_length = 0
        """Of the proposal that is being watched."""

    @property
    def idle(self) -> bool:
        """Whether it wants a proposal."""
        return not self._proposal

    def watch(self, proposal: list[int], match_length: int) -> None:
        """Compare the next tokens with `proposal`, in place of one that was being watched."""
        self._proposal, self._agreed, self.match_length = proposal, 0, match_length

    def advance(self, tokens: Sequence[int]) -> tuple[int, int] | None:
        """Take the tokens that the text went on with. Returns (drafted, accepted) once the proposal is decided."""
        for token in tokens:
            if self.idle:
                return None
            agrees = token == self._proposal[self._agreed]
            self._agreed += agrees
            if not agrees or self._agreed == len(self._proposal):
                decided = len(self._proposal), self._agreed
                self._proposal = []
                return decided
        return None
