"""A part of the table in which every fault and everything that ranks do comes up: see `CHOSEN`.

``python -m tests.faults --full`` runs all of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from .rig import Losses
from .rows import DOINGS, FAULTS, doing_named, fault_named
from .table import Pair, Table, in_order
from .watching import PATIENCE

pytestmark = pytest.mark.timeout(300)

# fault -> what the ranks are doing, and why that pair
CHOSEN = {
    "raise": (
        "all_reduce",  # a plain collective
        "DDP backward",  # some buckets reduced, some not
        "TP forward",  # a subgroup: the other one comes to its end
        "background run",  # what waits behind it runs
        "output flood",  # the report comes through the flood
    ),
    "sys.exit": ("Python",),  # an exception like others, and no end of the rank
    "os._exit": ("FSDP2 backward",),  # shards are lost: a checkpoint is loaded
    "os.execvp": ("DDP backward",),  # the process lives on as another program
    "os.closerange": ("P2P recv",),
    "SIGKILL": ("idle", "DDP backward", "background run"),  # no cell; copied; the queue
    "segmentation fault": ("sleep",),
    "SIGSTOP, SIGCONT": ("all_reduce",),
    "out of memory, RLIMIT_AS": ("DDP backward",),
    "infinite loop": ("all_reduce",),  # the live line names the rank that loops
    "exception in a thread": ("output flood",),  # no run fails, and it is told
    "interrupt": ("idle", "sleep", "P2P recv", "DDP backward", "TP forward"),
    "double interrupt": ("FSDP2 backward", "background run"),  # with and without somebody who waits
    "zygote SIGKILL": ("idle",),  # a rank is replaced afterwards
    "store SIGKILL": ("all_reduce",),  # as the groups are then made over another one
    "controller socket cut": ("output flood",),  # nothing is lost on the way
    "agent SIGKILL": ("DDP backward",),  # everything ends, and nothing is left
}
# While an actor serves on every rank, and each rank waits for another one's answer.
SERVING = {
    "raise": ("all_reduce", "TP forward", "background run"),
    "SIGKILL": ("idle", "DDP backward", "background run"),
    "interrupt": ("DDP backward",),  # the press is for the cell
}
PAIRS, SERVING_PAIRS = (
    in_order((fault_named(name), doing_named(d)) for name, ds in chosen.items() for d in ds)
    for chosen in (CHOSEN, SERVING)
)


@pytest.fixture(scope="module")
def table(losses: Losses) -> Iterator[Table]:
    """Runs cells, on one mesh as long as that lives."""
    table = Table(losses)
    yield table
    table.close()


def check(table: Table, pair: Pair, is_serving: bool) -> None:
    fault, doing = pair
    fault = dataclasses.replace(fault, within_s=PATIENCE * fault.within_s)
    result = table.run(fault, doing, is_serving)
    assert not result.failure, result.failure


@pytest.mark.parametrize("pair", SERVING_PAIRS, ids=lambda pair: f"{pair[0].name}-{pair[1].name}")
def test_a_fault_leaves_calls_that_wait_on_living_ranks(pair: Pair, table: Table) -> None:
    check(table, pair, is_serving=True)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0].name}-{pair[1].name}")
def test_a_fault_costs_what_it_must_and_no_more(pair: Pair, table: Table) -> None:
    check(table, pair, is_serving=False)


def test_table_covers_every_fault_and_every_activity() -> None:
    assert set(CHOSEN) == {fault.name for fault in FAULTS}
    assert {doing for doings in CHOSEN.values() for doing in doings} == {
        doing.name for doing in DOINGS
    }
