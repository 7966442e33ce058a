"""What speculation did for one request, counted while it runs."""

from __future__ import annotations

from service.engine.types import Speculation


class Tally:
    """Counts rounds. See `types.Speculation` for what the counts mean."""

    def __init__(self) -> None:
        self.drafted = self.accepted = self.rounds = self.replayed = 0
        self.draft_seconds = 0.0
        self._accepted_at: list[int] = []

    def round(self, drafted: int, accepted: int) -> None:
        """A draft of `drafted` tokens was verified, and its first `accepted` ones became text."""
        self.drafted += drafted
        self.accepted += accepted
        self.rounds += 1
        self._accepted_at += [0] * (drafted - len(self._accepted_at))
        for position in range(accepted):
            self._accepted_at[position] += 1

    def result(self) -> Speculation:
        return Speculation(
            drafted=self.drafted,
            accepted=self.accepted,
            rounds=self.rounds,
            accepted_at=tuple(self._accepted_at),
            replayed=self.replayed,
            draft_seconds=self.draft_seconds,
        )
