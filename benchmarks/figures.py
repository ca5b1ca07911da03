"""The samples of all rounds, and their medians."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from .drivers.protocol import Sample


class Figures:
    """Medians over rounds: ``figures["monarch", "start_s"]``.

    Args:
        samples: contestant -> one sample a round.
    """

    def __init__(self, samples: Mapping[str, Sequence[Sample]]) -> None:
        self._samples = samples

    def __getitem__(self, key: tuple[str, str]) -> float:
        """The median of a measure.

        Raises:
            KeyError: it was not measured.
        """
        rounds = self.rounds(*key)
        if not rounds:
            raise KeyError(key)
        return statistics.median(rounds)

    def get(self, contestant: str, measure: str) -> float | None:
        """The median, or None if it was not measured."""
        rounds = self.rounds(contestant, measure)
        return statistics.median(rounds) if rounds else None

    def rounds(self, contestant: str, measure: str) -> list[float]:
        """A measure's values, round by round."""
        return [
            sample[measure] for sample in self._samples.get(contestant, ()) if measure in sample
        ]
