"""What this machine can run: a list of checks, each a function from facts to a finding.

Facts come from `gathering` and `trial`; nothing here asks the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .facts import Facts
from .findings import Finding, ok, problem, warning
from .host_checks import HOST_CHECKS
from .torch_checks import TORCH_CHECKS

Check = Callable[[Facts], Finding | None]


def check_meshes(facts: Facts) -> Finding:
    """What earlier meshes left behind."""
    title, meshes = "meshes", facts.meshes
    if meshes.strange:
        path, why = next(iter(meshes.strange.items()))
        more = f" (and {len(meshes.strange) - 1} more)" if len(meshes.strange) > 1 else ""
        return warning(
            title,
            f"{path}{more} is in the place of a mesh and is none: {why}",
            f"if no other version of cellmesh uses it: `rm -r {path}`",
        )
    if meshes.stale:
        return warning(
            title,
            f"left over by a crash: {', '.join(meshes.stale)}",
            "`cellmesh ps` removes what is dead; `cellmesh stop NAME` ends lost processes too",
        )
    return ok(
        title, f"running: {', '.join(meshes.running)}" if meshes.running else "none is running"
    )


def check_trial(facts: Facts) -> Finding | None:
    """Whether a small mesh really starts, works and stops."""
    title, trial = "a real mesh", facts.trial
    if trial is None:
        return None
    if trial.error:
        return problem(
            title,
            f"a mesh of {trial.num_ranks} ranks did not work: {trial.error}",
            "mend what else is found here; if that is nothing, report this with `cellmesh doctor "
            "--json`",
        )
    if trial.leftovers:
        return problem(
            title,
            f"after the stop this was left: {', '.join(trial.leftovers)}",
            "`cellmesh stop --all`, and report this with `cellmesh doctor --json`",
        )
    return ok(
        title,
        f"{trial.num_ranks} ranks with {trial.backend}: ready in {trial.start_s:.1f} s, "
        f"all_reduce in {trial.collective_s * 1e3:.1f} ms, stopped in {trial.stop_s:.1f} s",
    )


CHECKS: Sequence[Check] = (*TORCH_CHECKS, *HOST_CHECKS, check_meshes, check_trial)


def examine(facts: Facts) -> list[Finding]:
    """Run all checks; those that have nothing to look at say nothing.

    Args:
        facts: of this machine.
    """
    return [finding for check in CHECKS if (finding := check(facts)) is not None]
