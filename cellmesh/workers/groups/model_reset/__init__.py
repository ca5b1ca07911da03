"""Removes the half-finished state that a failed step leaves in models."""

from .ddp import note_comm_hooks as note_comm_hooks
from .survey import Survey as Survey
from .survey import look_after_failure as look_after_failure
