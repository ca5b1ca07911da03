"""The table's rows and columns: faults, what ranks are doing, and what is to come of each pair.

One rank, the victim, has the fault. A fault of its own strikes at the place named by what the ranks
are doing, in the midst of a backward pass for one; the others are then held up by the victim. For a
fault from outside another rank, the holder, holds the others up until a gate opens (a file), so
that all of them are in place when it strikes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Striker = Literal["victim", "outside", "user"]
Outcome = Literal["raised", "died", "stopped", "killed", "unharmed", "ended"]


@dataclass(frozen=True)
class Doing:
    """What the ranks are doing."""

    name: str
    place: str = ""  # where the fault strikes (`models.SETUP`)
    source: str = ""  # what all ranks run
    waits_in: str = ""  # words of the collective in which ranks then wait
    # Whether all ranks wait for the one that holds them up, or only its neighbour in ``tp``.
    concerns_all: bool = True
    waits_for_gate: bool = False  # it ends only when the gate is open, whoever holds it up


@dataclass(frozen=True)
class Fault:
    """What goes wrong."""

    name: str
    # The victim's own code, another process, or the user.
    striker: Striker
    # Of the run: ``raised`` (an exception of the victim's), ``died`` (the victim), ``stopped``
    # (RanksInterrupted), ``killed`` (likewise, and the victim was replaced), ``unharmed`` (it ends
    # well), ``ended`` (the mesh does).
    outcome: Outcome
    source: str = ""  # what the victim runs, if it is its own
    error: str = ""  # name of the exception's type on the victim
    words: str = ""  # a regular expression that the report matches
    idle_outcome: Outcome = "unharmed"  # of the mesh where no run is struck
    within_s: float = 5.0  # how soon after it struck the run has ended, at the latest


FLOOD = "x" * 60  # in every line of the flood that ranks print

DOINGS = (
    Doing("idle"),
    Doing(
        "Python",
        "python",
        "reach('python')\nwhile not is_open():\n    sum(range(1000))",
        waits_for_gate=True,
    ),
    Doing("sleep", "sleep", "reach('sleep')\ntime.sleep(sleep_s)"),
    Doing(
        "all_reduce",
        "all_reduce",
        "reach('all_reduce')\ntotal = torch.ones(1000)\ndist.all_reduce(total)\n"
        "assert total[0] == world_size",
        waits_in="all_reduce",
    ),
    Doing(
        "P2P recv",
        "recv",
        "reach('recv')\nletter = torch.zeros(4)\nif rank == holding:\n    for other in "
        "set(range(world_size)) - {rank}:\n        dist.send(torch.ones(4), other)\nelse:\n    "
        "dist.recv(letter, src=holding)\n    assert letter[0] == 1",
        waits_in="recv",
    ),
    Doing(
        "DDP backward",
        "ddp backward",
        "ddp_optimizer.zero_grad()\nloss_of(ddp, 10_000, rank).backward()",
        waits_in="all_reduce",
    ),
    Doing(
        "FSDP2 backward",
        "fsdp backward",
        "fsdp_optimizer.zero_grad()\nloss_of(fsdp, 10_000, rank).backward()",
        waits_in="reduce_scatter|all_gather|all_reduce",
    ),
    Doing(
        "TP forward",
        "tp forward",
        "tp_forward(10_000)",
        waits_in="all_reduce",
        concerns_all=False,
    ),
    Doing(
        "background run",
        "background",
        "reach('background')\nwhile not is_open():\n    time.sleep(0.005)\n"
        "total = torch.ones(1)\ndist.all_reduce(total)",
        waits_for_gate=True,
    ),
    Doing(
        "output flood",
        "flood",
        "number = 0\n"
        "while not is_open():\n"
        f"    print(number, {FLOOD!r})\n    number += 1\n"
        "    if number == 500:\n        reach('flood')",
        waits_for_gate=True,
    ),
)

# Loops end when a test binds `gate` to None: a thread that has one must not outlive its cell's
# test.
_LOOP = "while gate is not None:\n    pass"
_RAISE = "raise ValueError('boom')"
_EXEC = "os.execvp('sleep', ['sleep', '1000'])"
_CLOSING = "os.closerange(3, 256)\nwhile True:\n    pass"
_STUBBORN = """
while gate is not None:
    try:
        while gate is not None:
            time.sleep(0.005)
    except KeyboardInterrupt:
        pass
"""
_LIMITED = """
soft, hard = resource.getrlimit(resource.RLIMIT_AS)
with open("/proc/self/statm") as file:
    size = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (256 << 20), hard))
try:
    hoard = bytearray(1 << 30)
finally:
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
"""
_IN_A_THREAD = """
def fail():
    raise ValueError("boom in a thread")

thread = threading.Thread(target=fail)
thread.start()
thread.join()
del thread
"""

FAULTS = (
    Fault("raise", "victim", "raised", _RAISE, "ValueError", "raised ValueError: boom"),
    Fault("sys.exit", "victim", "raised", "sys.exit(3)", "SystemExit", "SystemExit"),
    *(
        Fault(name, striker, "died", source, "RankDied", words, idle_outcome="died")
        for name, striker, source, words in (
            ("os._exit", "victim", "os._exit(3)", "exited with code 3"),
            ("os.execvp", "victim", _EXEC, "closed its connection"),
            # A thread of gloo's may miss its sockets first.
            ("os.closerange", "victim", _CLOSING, "closed its connection|killed by SIGABRT"),
            ("SIGKILL", "outside", "", "killed by SIGKILL"),
            ("segmentation fault", "victim", "faulthandler._sigsegv()", "killed by SIGSEGV"),
        )
    ),
    Fault("SIGSTOP, SIGCONT", "outside", "unharmed"),
    Fault("out of memory, RLIMIT_AS", "victim", "raised", _LIMITED, "MemoryError", "MemoryError"),
    Fault("infinite loop", "victim", "stopped", _LOOP, within_s=12.0),
    Fault("exception in a thread", "victim", "unharmed", _IN_A_THREAD),
    Fault("interrupt", "user", "stopped"),
    Fault("double interrupt", "victim", "killed", _STUBBORN, within_s=8.0),
    Fault("agent SIGKILL", "outside", "ended", "", "RankDied", "agent", idle_outcome="ended"),
    Fault("zygote SIGKILL", "outside", "unharmed"),
    Fault("store SIGKILL", "outside", "unharmed"),
    Fault("controller socket cut", "outside", "unharmed"),
)


def doing_named(name: str) -> Doing:
    """The column of that name."""
    return next(doing for doing in DOINGS if doing.name == name)


def fault_named(name: str) -> Fault:
    """The row of that name."""
    return next(fault for fault in FAULTS if fault.name == name)


def outcome_of(fault: Fault, doing: Doing) -> Outcome:
    """What is to come of a fault while the ranks are doing that."""
    return fault.outcome if doing.place else fault.idle_outcome


def holder_for(victim: int) -> int:
    """Who holds the victim up: its neighbour in ``tp``."""
    return victim ^ 1


def cell_for(fault: Fault, doing: Doing, gate: str, victim: int = 1) -> str:
    """The cell that all ranks run, with the victim's own fault in it; those that wait go on when
    the file `gate` is there.
    """
    is_own = fault.striker == "victim"
    ends_alone = outcome_of(fault, doing) == "unharmed"
    body = "\n".join(
        f"    {line}" for line in (fault.source if is_own else "wait_for_gate()").splitlines()
    )
    holding = victim if is_own else holder_for(victim)
    head = (
        f"gate, holding, sleep_s = {gate!r}, {holding}, {3.0 if ends_alone else 600.0}\n"
        "kept['counter'] += 1\n"
    )
    if not doing.place:
        act = f"def act():\n    wait_for_gate()\n{body}\n"
        return f"{head}{act}arrive()\nif rank == {victim} and {is_own}:\n" + (
            "    threading.Thread(target=act, daemon=True).start()"
        )
    return (
        f"{head}def act():\n    arrive()\n{body}\n"
        f"places[{doing.place!r}] = act if rank == holding else arrive\n{doing.source}"
    )
