from __future__ import annotations

from typing import Any

from cellmesh.wire.faults import Faults
from cellmesh.workers.agent.agent import Agent


class Supervisor:
    """Notes why it was made to fail, and returns actions that cannot be carried out."""

    def __init__(self, state: str) -> None:
        self.state, self.texts, self.actions = state, list[str](), list[Any]()

    def fail(self, text: str) -> list[Any]:
        self.texts.append(text)
        return []

    def tick(self, now: float) -> list[Any]:
        actions, self.actions = self.actions, []
        return actions


class Attachment:
    may_be_readable = False

    def tick(self, now: float) -> None: ...


def _agent(state: str) -> tuple[Any, Supervisor]:
    agent: Any = Agent.__new__(Agent)
    supervisor = Supervisor(state)
    agent._faults, agent._num_faults = Faults("the agent", lambda text: None), 0
    agent._start_error = None
    agent._supervisor, agent._controller = supervisor, Attachment()

    def refuse(action: Any) -> None:
        raise action

    agent._carry_out = refuse
    return agent, supervisor


def test_an_action_that_fails_fails_a_start_that_would_wait_for_ever() -> None:
    agent, supervisor = _agent("starting")
    agent._tick(0.0)
    assert supervisor.texts == []
    supervisor.actions = [OSError(99, "Cannot assign requested address")]
    agent._tick(0.0)
    agent._tick(1.0)
    agent._tick(2.0)
    assert supervisor.texts == ["OSError: [Errno 99] Cannot assign requested address"]


def test_an_action_that_fails_ends_no_mesh_that_runs() -> None:
    agent, supervisor = _agent("ready")
    supervisor.actions = [OSError(5, "odd")]
    agent._tick(0.0)
    agent._tick(1.0)
    assert supervisor.texts == []
    assert agent._faults.num == 1
