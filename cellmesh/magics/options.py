"""The options of the magics: a table, from which click's commands are made, and the parser of a
magic's line.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import click
from click.shell_completion import CompletionItem

from ..errors import MeshUsageError

# Of all magics but those that name a mesh otherwise, or act on none.
_ON = "--on MESH: The mesh, by its name; by default the one in use."
_OF_NO_MESH = ("dist_start", "dist_attach", "dist_use", "local")

# Magics that run the rest of their cell.
CELL_MAGICS = ("dist", "dist_profile", "local")

# A magic and its summary; an example; its arguments and options. The name of an argument or option,
# if it differs from its flag, precedes it or is in parentheses.
_TABLE = """
dist_start: Start a mesh of persistent ranks on this machine.
    %dist_start 8 --mesh dp=2,tp=4
    num_ranks [NUM_RANKS]
    --fresh: End a mesh of this notebook that runs, and start a new one.
    --mesh DIMS: Dims of the DeviceMesh, like dp=2,tp=4.
    --backend auto|gloo|nccl: What the process groups use.
    --preload MODULES: Import these once for all ranks: a,b,c.
    --name TEXT: A name for `cellmesh ps` and %dist_attach.
    --settle SECONDS (settle_s): After a rank fails, how long the others may take before they are
released (1).
    --hosts HOSTS: Run on these hosts, by ssh: a:4,b:4. Ranks are numbered host by host.
    --nproc-per-host N: Ranks on each host that names no number.
    --launch COMMAND: What starts an agent on a host, in place of ssh: slurm, ray, torchrun, hand
(you do), or 'docker exec -i {host} {command}'.
    --nodes N: Nodes to ask Slurm or Ray for, or hosts that announce themselves.
    --launch-args ARGUMENTS: Further options of srun, in quotes, like '--time=2:00:00 --gres=gpu:4';
of Ray what each node gives: 'CPU=8 GPU=4'.
    --host-lease TIME (host_lease_s): How long a host may be without a connection before its ranks
count as lost (10s).
    --interface INTERFACE: The hosts' network interface, for the wire, gloo, NCCL and the store.
    --env VARIABLE...: Pass on this environment variable to the ranks of all hosts, or NAME=value.
    --gpus LIST: GPUs that the ranks of each host use: 0,2, or none.
    --address ADDRESS: This host's address or interface, for hosts that announce themselves.
    --sync on|off: Bring the modules beside the notebook to other hosts as they are here (on).
    --lease TIME (lease_s): How long the ranks outlive their notebook, one that is shut down, too:
30m, 2h, 0.
    --auto-heal: Replace ranks that die by themselves.
    --fold-numbers on|off: Show lines of ranks that differ only in numbers as one (on).
    --group on|off: A process group and `mesh`; off for one rank without them (on).

dist: Run this cell on the ranks.
    %%dist --ranks 0,2-3
    --ranks SET: Ranks, like 0,2-3.
    --at COORD: A mesh coordinate, like tp=0 or dp=1,tp=0.
    --nowait: Return a Run at once; output is shown here when it is printed.
    -q, --quiet: Show nothing but errors.
    --time (timed): Tell how long each rank took, and which one the others waited for.
    --argv ARGUMENTS: sys.argv behind the program's name, in quotes, like '--lr 0.1'.

dist_profile: Run this cell on the ranks under torch.profiler; show where time went on each rank.
    %%dist_profile -o trace.json
    --ranks SET: Ranks, like 0,2-3.
    --at COORD: A mesh coordinate, like tp=0 or dp=1,tp=0.
    -o, --output FILE (trace): Write one Chrome trace, for Perfetto: a process for each rank.
    --rows COUNT=10 (num_rows): How many operators of each kind the tables have.
    --argv ARGUMENTS: sys.argv behind the program's name, in quotes, like '--lr 0.1'.

dist_use: Have magics act on this mesh of the notebook, where several run, and `mesh` be it.
    %dist_use generator
    name MESH

dist_auto: Run every cell on the ranks from here on; %%local and %dist... cells stay here.
    %dist_auto on
    switch on|off
    --ranks SET: Ranks, like 0,2-3.
    --at COORD: A mesh coordinate, like tp=0 or dp=1,tp=0.

local: Run this cell in the notebook's own process.
    %%local

dist_mesh: Give `mesh` on every rank other dims; without dims, show them.
    %dist_mesh dp=2 tp=4
    dims [DIMS]...

dist_push: Copy values of the notebook to the ranks, under the same names.
    %dist_push batch lr
    names NAME...
    --shard DIM: Give each rank a part, along this dim.
    --placements LIST: Make DTensors: "Shard(0), Replicate()", one for each dim of the mesh.
    --ranks SET: Ranks, like 0,2-3.

dist_pull: Bring a value from the ranks into the notebook.
    %dist_pull loss --all
    expression EXPRESSION...
    --rank RANK: Whose; 0 by default.
    --all: All ranks' values, as Results (rank -> value).
    --gather: All ranks' parts, put together.
    --reduce mean|sum|stack: Of all ranks' values.
    --dim DIM=0: Along which plain parts are gathered.
    --as TEXT (target): Bind it to this name.

dist_inspect: Describe a value on every rank: shape, dtype, placements, statistics, replicas equal
or not.
    %dist_inspect model.weight
    expression EXPRESSION...
    --ranks SET: Ranks, like 0,2-3.
    --watch: Look again after each cell.
    --grads: The gradients of a model, layer by layer.

dist_who: Show the ranks' names: types, shapes, sizes, and where they differ between ranks.
    %dist_who
    pattern [PATTERN]
    --ranks SET: Ranks, like 0,2-3.

dist_status: Show each rank of the notebook's meshes: process, device, what it is doing, memory.
    %dist_status --live
    --live: A dashboard that goes on, with buttons.
    --debug: Below, modules imported before the fork, and the last steps of failed runs and heals.

dist_actors: Show the actors of the notebook's meshes: class, ranks, calls in flight, what they do.
    %dist_actors

dist_timeline: Show when each rank computed, and when it waited in which collective, in the last
cells.
    %dist_timeline --cells 3
    --cells COUNT=5 (num_cells): How many of the last cells.
    -o, --output FILE (trace): Write a Chrome trace as well.
    --ranks SET: Ranks, like 0,2-3.

dist_plot: Plot numbers that ranks report with `cellmesh.log(loss=..., step=...)`, also while a
cell runs.
    %dist_plot loss
    names NUMBERS...
    --mean: The ranks' mean, and a band from least to most.
    --ranks SET: Ranks, like 0,2-3.

dist_mem: Show each rank's memory: now, its peak, and the change that the last cell made. `memory`
is what is resident (RSS) of the rank's process; pages that ranks share, like torch's code and what
was imported before they were forked, count in each. `peak` is the most since the rank began; `peak
rose by` is of the last cell's own peak, where it was a new one. Memory that is freed may stay with
the process. On a GPU: what torch's allocator has given to tensors, the most of that since the rank
began or torch.cuda.reset_peak_memory_stats(), what it holds of the GPU, and the last cell's change
of what is allocated. Calls from Python are no cells.
    %dist_mem
    --ranks SET: Ranks, like 0,2-3.

dist_logs: Show the end of all that ranks have printed, also what was too much for the notebook.
    %dist_logs 3 --lines 200
    ranks [SET]
    --lines COUNT=50: How much.

dist_interrupt: Interrupt what the ranks run; a second time within 5 s, kill and replace what did
not stop.
    %dist_interrupt
    --ranks SET: Ranks, like 0,2-3.

dist_heal: Replace dead ranks and rebuild the process groups; living ranks keep everything.
    %dist_heal --from 0
    --from RANK (source): Copy this rank's names to ranks that are new, as far as possible.
    --hosts HOSTS: Put these hosts in the places of lost ones: c:4, or c for the ranks of any.

dist_resize: Give the mesh another number of ranks, between cells: the highest end, or new ones
follow. Ranks that stay keep their process and their names. What holds groups of the old size
(DTensors, models in DDP or FSDP) must be made again: %dist_save before and %dist_load after carry
its values over.
    %dist_resize 6 --mesh dp=3,tp=2
    num_ranks [NUM_RANKS]
    --mesh DIMS: Dims of the DeviceMesh then, like dp=3,tp=2.
    --hosts HOSTS: New ranks run on these hosts, which join: c:2.

dist_stacks: Show where every rank is: its Python stack, also while it is blocked.
    %dist_stacks 3
    ranks [SET]
    --all (all_threads): All threads, not only the main one.

dist_why: Say why nothing goes on: operations of ranks that can never meet, or who waits for whom.
    %dist_why

dist_check: Check that what should be equal on ranks is: parameters, buffers, optimizers, RNG state.
    %dist_check model
    expression [EXPRESSION]...
    --ranks SET: Ranks, like 0,2-3.

dist_sync: Make replicas equal again.
    %dist_sync model --from 0
    expression EXPRESSION...
    --from RANK=0 (source): The rank that is right.

dist_seed: Seed the generators of random, numpy and torch on all ranks: alike, or each with its rank
more.
    %dist_seed 0
    seed SEED
    --per-rank: Seed each rank with the seed plus its rank.

dist_reload: Reload modules of yours on the ranks whose files have changed; objects go on with the
new code, on all meshes. As IPython's %autoreload does, which a cell of the ranks can turn on. On
many hosts, these have the notebook's files.
    %dist_reload

dist_export: Write what ran on the ranks of one mesh, in its order, as a script for torchrun.
    %dist_export train.py
    path FILE
    --force: Overwrite the file.

dist_save: Save names of the ranks as one checkpoint (torch.distributed.checkpoint), whole or not at
all.
    %dist_save model optimizer step runs/latest
    names NAME... PATH

dist_load: Load a checkpoint into the names it was saved from, in place; on any number of ranks.
    %dist_load model optimizer runs/latest
    names [NAME...] PATH
    --ranks SET: Ranks, like 0,2-3.

dist_debug: Open the debugger where a rank's last exception was raised.
    %dist_debug --ranks 3
    ranks_argument [SET]
    --ranks SET: Ranks, like 0,2-3.

dist_attach: Find a living mesh again, after this kernel or another one has left it.
    %dist_attach
    name [MESH]
    --steal: Take it from who holds it.

dist_detach: Leave the mesh; it lives on until its lease ends, and %dist_attach finds it again.
    %dist_detach

dist_restart: Replace all ranks by new ones, with the notebook's environment and directory of now;
what they held is gone.
    %dist_restart

dist_stop: End the mesh and everything in it; with a name, a mesh that no process holds.
    %dist_stop
    name [MESH]
"""


class Choices(NamedTuple):
    """The completions of a word in a magic's line.

    Attributes:
        typed: typed part of the word, which the choices replace.
        texts: the choices.
        kind: kind of the choices, in front ends' terms.
    """

    typed: str
    texts: tuple[str, ...]
    kind: str = "instance"


# Meaning of a word: an expression on the ranks, the name of a variable there, or in the notebook,
# or of a mesh.
Meaning = Literal["expression", "name", "notebook's name", "mesh"]
# Completes the typed part of a word.
CompleteWord = Callable[[str, Meaning], Choices]


class Named(click.ParamType):  # type: ignore[type-arg]
    """The click type of an argument whose words name values on ranks or in the notebook, so that
    Tab completes them.

    Args:
        meaning: meaning of each word.
    """

    name = "text"

    def __init__(self, meaning: Meaning) -> None:
        self._meaning = meaning

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[Any]]:
        """Return the completions of a word in click's form, see `click.ParamType`."""
        found = ctx.obj(incomplete, self._meaning)
        return [CompletionItem(text, found.kind, typed=found.typed) for text in found.texts]


_KINDS: dict[str, Any] = {
    "EXPRESSION": Named("expression"),
    "PATTERN": Named("name"),
    "NAME": Named("notebook's name"),
    "PATH": Named("name"),  # names of variables come before it
    "MESH": Named("mesh"),
    "RANK": int,
    "COUNT": click.IntRange(1),
    "SEED": click.IntRange(0),
    "NUM_RANKS": int,
    "N": int,
    "DIM": int,
}
_OPTION = re.compile(
    r"(-[\w-]+(?:, -[\w-]+)*)(?: ([\w|]+)(\.\.\.)?)?(?:=(\w+))?(?: \((\w+)\))?: (.+)"
)


def _read_table() -> Iterator[click.Command]:
    for paragraph in _TABLE.strip().split("\n\n"):
        summary, example, *params = re.sub(r"\n(?! )", " ", paragraph).split("\n    ")
        name, _, text = summary.partition(": ")
        yield click.Command(
            name,
            params=[
                *map(read_param, params),
                *([] if name in _OF_NO_MESH else [read_param(_ON)]),
            ],
            help=f"{text}\n\n\b\nExample:\n  {example}",
            add_help_option=False,
        )


def read_param(text: str) -> click.Parameter:
    """Return the option or argument that a line of a table describes."""
    option = _OPTION.fullmatch(text)
    if option is not None:
        flags, kind, dots, default, name, help_text = option.groups()
        return click.Option(
            [*flags.split(", "), *([name] if name else [])],
            type=_kind(kind) if kind else None,
            is_flag=kind is None,
            default=default if kind else False,
            multiple=bool(dots),
            show_default=default is not None,
            metavar=kind,
            help=help_text,
        )
    name, metavar = text.split(" ", 1)
    kind = re.findall(r"[\w|]+", metavar)[-1]
    is_required = not metavar.removesuffix("...").endswith("]")
    nargs = -1 if "..." in metavar else 1
    return click.Argument(
        [name], type=_kind(kind), nargs=nargs, required=is_required, metavar=metavar
    )


def _kind(word: str) -> Any:
    return click.Choice(word.split("|")) if "|" in word else _KINDS.get(word, str)


COMMANDS = {str(command.name): command for command in _read_table()}
# The options of a start by users, also for `cellmesh start`.
START_OPTIONS = tuple(param for param in COMMANDS["dist_start"].params if param.name != "fresh")

# A magic's options, as `parse` reads them: name -> value.
Given = dict[str, Any]


def chosen(options: Given) -> Given:
    """Return the options that the user has given."""
    return {n: v for n, v in options.items() if v is not False and v not in (None, ())}


def describe(name: str) -> str:
    """Return a magic's help, as ``%magic?`` shows it."""
    command = COMMANDS[name]
    with click.Context(
        command, info_name=f"{mark_of(name)}{name}", max_content_width=100
    ) as context:
        return command.get_help(context)


def mark_of(name: str) -> str:
    """Return ``%%`` for a magic of a cell, else ``%``."""
    return "%%" if name in CELL_MAGICS else "%"


# A word ends at white space outside of quotes; an unpaired quote is an ordinary character.
_WORD = re.compile(r"""(?:[^\s'"]|'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|['"])+""")


def words_of(line: str) -> list[str]:
    """Split a magic's line into words, with unchanged quotes and escapes."""
    return _WORD.findall(line)


def split(line: str) -> list[str]:
    """Split a magic's line into words; quotes stay, as arguments may be Python expressions.

    Quotes around the value of an option are removed.
    """
    words = words_of(line)
    for index, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option.startswith("--") and equals:
            words[index] = f"{option}={unquote(value)}"
        elif index and words[index - 1].startswith("--"):
            words[index] = unquote(word)
    return words


def unquote(word: str) -> str:
    """Return a word without the quotes around it."""
    quoted = len(word) > 1 and word[0] == word[-1] and word[0] in "'\""
    return word[1:-1] if quoted else word


def wants_help(line: str) -> bool:
    """Return whether a magic's line is ``--help`` or ``-h``."""
    return line.split() in (["--help"], ["-h"])


@functools.lru_cache(64)
def _values(name: str, line: str) -> dict[str, Any]:
    """Return the values that click reads, in hundreds of calls, from a magic's line."""
    with COMMANDS[name].make_context(name, split(line)) as context:
        return context.params


def parse(name: str, line: str) -> dict[str, Any]:
    """Read the options and arguments in a magic's line.

    Args:
        name: name of the magic.
        line: text after the magic. Quotes are kept: arguments may be Python expressions.

    Returns:
        Name of each option or argument -> its value.

    Raises:
        MeshUsageError: an option is unknown, or its value is of the wrong kind.
    """
    try:
        return dict(_values(name, line))
    except click.UsageError as e:
        if isinstance(e, click.NoSuchOption):  # click proposes several, in alphabetical order
            known = [option for each in COMMANDS[name].params for option in each.opts]
            near = difflib.get_close_matches(e.option_name, known, n=1)
            e = click.NoSuchOption(e.option_name, possibilities=near)
        mark = mark_of(name)
        quotes = (
            "; put what follows --argv into quotes, like --argv '--lr 0.1'"
            if "--argv" in line
            else ""
        )
        raise MeshUsageError(
            f"{mark}{name}: {e.format_message()} ({mark}{name}? shows its options{quotes})"
        ) from None
