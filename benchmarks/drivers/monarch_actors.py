"""Monarch: endpoints of an actor on each of `num_ranks` processes of this host."""

from __future__ import annotations

from monarch.actor import Actor, endpoint, this_host  # type: ignore[import-not-found]

from .bulk import check_seen
from .protocol import NUM_SENDS, Counts, Sample, elapsed_s, main, summarize, time_calls


class Worker(Actor):  # type: ignore[misc]
    """Does nothing, on request, and counts."""

    def __init__(self) -> None:
        self._num = 0

    @endpoint  # type: ignore[untyped-decorator]
    def noop(self) -> None:
        """Do nothing."""

    @endpoint  # type: ignore[untyped-decorator]
    def add(self) -> None:
        """Count."""
        self._num += 1

    @endpoint  # type: ignore[untyped-decorator]
    def take_count(self) -> int:
        """Return the count, and begin again."""
        num, self._num = self._num, 0
        return num


def measure(num_ranks: int, counts: Counts) -> Sample:
    """A broadcast waits for nothing; the answer to a call behind 1,000 says that they arrived."""
    processes = this_host().spawn_procs(per_host={"gpus": num_ranks})
    workers = processes.spawn("workers", Worker)

    def send() -> None:
        for _ in range(NUM_SENDS):
            workers.add.broadcast()
        check_seen([*workers.take_count.call().get().values()], [NUM_SENDS] * num_ranks)

    sample = {
        **summarize("method", time_calls(lambda: workers.noop.call().get(), counts)),
        **summarize("sends", [elapsed_s(send) for _ in range(1 + counts.num_transfers)][1:]),
    }
    processes.stop().get()
    return sample


if __name__ == "__main__":
    main(measure)
