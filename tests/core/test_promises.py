"""Each promise of docs/reliability.md and docs/security.md has its tests, and they are there.

A promise is named by the bold words, or the words of a cell of a table, with which the document
makes it. Whoever adds a promise, or removes a test, changes the table.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs"

# Promise -> the tests that keep it: FILE:TEST, with the file below tests/.
RELIABILITY = {
    "A rank keeps its objects, whatever fails elsewhere": (
        "faults/test_table.py:a_fault_costs_what_it_must_and_no_more "
        "faults/test_soak.py:random_faults_lose_nothing"
    ),
    "No rank waits forever for a rank that has failed": (
        "mesh/test_groups.py:every_wait_is_ended_and_everything_works_again "
        "mesh/test_hostile_code.py:a_failure_that_cannot_be_described_releases_the_others"
    ),
    "This holds for every backend": (
        "mesh/test_other_backends.py:waits_end_and_the_group_works_after_the_heal "
        "mesh/test_other_backends.py:with_debug_level_detail_waits_end_and_models_train_on "
        "programs/test_cpp_backend.py:waits_in_cpp_end_and_the_group_is_made_again"
    ),
    "The same models continue to train": (
        "mesh/test_groups.py:a_hundred_heals_change_no_loss "
        "mesh/test_model_reset.py:trainers mesh/test_model_reset.py:pipelines "
        "programs/test_programs.py:program"
    ),
    "The report names what was not kept": (
        "mesh/test_model_reset.py:"
        "dropped_and_unresettable_state_is_reported_and_the_next_step_works"
    ),
    "Every failure is reported": (
        "mesh/test_faults.py:a_rank_that_dies_in_a_cell_is_reported_and_the_others_stay "
        "mesh/test_deaths.py:a_rank_that_the_kernel_kills_for_want_of_memory_says_so "
        "mesh/test_output.py:an_error_is_shown_while_others_wait"
    ),
    "The stop button works": (
        "mesh/test_faults.py:an_interrupt_ends_the_cell_and_keeps_the_ranks "
        "mesh/test_faults.py:the_stop_button_frees_ranks_from_a_collective "
        "browser/test_jupyterlab.py:"
        "hanging_cell_shows_where_and_the_stop_button_ends_it"
    ),
    "A stop ends all ranks at the same point of the program": (
        "mesh/test_stopping.py:all_ranks_have_made_the_same_rounds "
        "mesh/test_stopping.py:each_way_to_stop_is_a_consistent_one "
        "faults/test_stops.py:ranks_of_a_stopped_loop_have_made_the_same_steps"
    ),
    "Optimizer steps are counted": (
        "mesh/test_stopping.py:a_stop_after_different_numbers_of_steps_says_so"
    ),
    "Your code may change Python": (
        "mesh/test_hostile_code.py:stop_release_and_heal_work_all_the_same "
        "mesh/test_hostile_code.py:groups_are_rebuilt_under_a_timer_whose_handler_raises"
    ),
    "A dead rank can be replaced": (
        "mesh/test_faults.py:a_rank_that_dies_in_a_cell_is_reported_and_the_others_stay "
        "mesh/test_losses.py:auto_heal_replaces_an_idle_rank_and_the_next_cell_says_so"
    ),
    "An error in cellmesh itself does not end the mesh": (
        "mesh/test_hostile_code.py:an_exception_does_not_end_the_control_thread"
    ),
    "The notebook may end": (
        "mesh/test_attach.py:the_ranks_and_their_cell_outlive_the_notebook "
        "mesh/test_kernel_end.py:a_kernel_that_is_shut_down_ends_its_idle_mesh"
    ),
    "Meshes of one notebook fail apart": (
        "mesh/test_several.py:the_stop_button_reaches_the_mesh_that_the_cell_waits_for "
        "mesh/test_several.py:a_mesh_may_have_no_process_group "
        "mesh/test_several.py:left_meshes_are_attached_one_by_one_and_ended"
    ),
    "A call that waits ends with its own rank only": (
        "mesh/test_waiting_calls.py:"
        "a_death_ends_calls_on_that_rank_only_and_a_heal_keeps_the_others "
        "mesh/test_waiting_calls.py:a_failing_call_holds_back_nothing "
        "mesh/test_waiting_calls.py:cancel_reaches_one_call_as_it_waits_and_as_it_computes "
        "mesh/test_waiting_calls.py:a_mesh_stops_beside_calls_that_wait "
        "pair/test_pair.py:a_restart_ends_runs_in_flight_and_begins_afresh "
        "pair/test_pair_waiting_calls.py:a_resize_names_the_calls_that_it_would_end "
        "pair/test_pair_waiting_calls.py:a_controller_that_attaches_finds_calls_that_wait "
        "faults/test_table.py:a_fault_leaves_calls_that_wait_on_living_ranks"
    ),
    "An actor lives as long as its rank": (
        "mesh/test_supervision.py:calls_on_a_dead_rank_fail_and_those_on_others_go_on "
        "mesh/test_supervision.py:a_notebook_that_attaches_has_the_actors "
        "mesh/test_actors.py:a_handle_ends_with_its_actor"
    ),
    "An actor with `on_death` is made again": (
        "mesh/test_supervision.py:an_actor_is_made_again_and_given_weights "
        "mesh/test_supervision.py:"
        "ranks_that_die_together_are_one_restart_which_a_heal_by_hand_awaits "
        "mesh/test_supervision.py:a_restart_that_fails_is_shown_and_ends_it "
        "mesh/test_supervision.py:an_actor_is_made_again_three_times_within_a_minute "
        "mesh/test_supervision.py:a_notebook_that_attaches_has_the_actors "
        "pair/test_pair_supervision.py:a_rank_is_replaced_once_no_rank_has_work"
    ),
    "A call from rank to rank ends with either of them": (
        "mesh/test_handles.py:a_call_of_a_rank_that_ends_raises_at_once "
        "mesh/test_handles.py:a_cycle_raises_where_it_is_closed "
        "mesh/test_peer_calls.py:"
        "a_dead_rank_is_replaced_at_the_end_of_a_call_and_a_caller_ends_its_calls "
        "pair/test_pair_peer_calls.py:a_heal_names_the_call_that_does_not_end "
        "pair/test_pair_peer_calls.py:a_resize_names_the_call_that_it_would_end "
        "pair/test_pair_routing.py:the_others_hear_of_a_restart_and_of_the_end "
        "pair/test_pair_routing.py:the_others_hear_of_ranks_that_a_resize_removes "
        "hosts/test_handles.py:calls_fail_at_once_without_a_notebook "
        "hosts/test_handles.py:calls_fail_after_their_notebook_was_killed"
    ),
    "A copy of weights is whole or nothing": (
        "mesh/test_weights.py:nothing_is_copied_if_a_rank_fails_before_all_hold_their_parts "
        "mesh/test_weights.py:a_copy_waits_for_busy_ranks_and_can_be_interrupted "
        "mesh/test_weights.py:targets_that_work_meanwhile_see_old_or_new_values "
        "mesh/test_weights.py:dead_ranks_on_either_side_are_named "
        "pair/test_pair.py:a_restart_ends_runs_in_flight_and_begins_afresh "
        "hosts/test_bulk.py:weights_are_copied_from_host_to_host"
    ),
    "A link costs neither mesh": (
        "mesh/test_links.py:"
        "failures_on_either_side_release_the_other_and_the_link_works_again "
        "mesh/test_links.py:a_rank_that_is_killed_costs_neither_mesh "
        "mesh/test_links.py:a_mesh_without_a_group_takes_part_until_it_ends "
        "core/controller/test_links.py:a_restart_and_a_resize_make_the_link_again "
        "core/controller/test_links.py:"
        "the_end_of_a_mesh_drops_the_link_and_what_follows_is_ignored"
    ),
    "No process, file, socket or descriptor is left behind": (
        "mesh/test_left_behind.py:no_process_is_left_when_processes_of_the_mesh_are_killed "
        "mesh/test_left_behind.py:the_next_command_ends_what_is_left_where_all_are_killed "
        "mesh/test_kept.py:a_mesh_that_has_ended_keeps_no_descriptor_and_no_thread"
    ),
    "A rank without free descriptors": (
        "mesh/test_faults.py:a_heal_without_descriptors_fails_and_says_what_to_do"
    ),
    "The agent's death ends the mesh, or its host's part.": (
        "mesh/test_faults.py:agents_death_ends_everything_and_is_reported "
        "hosts/test_faults.py:killed_host_costs_its_ranks_and_no_others"
    ),
    "A rank that had finished the cell keeps its changes.": (
        "mesh/test_stopping.py:a_stop_after_different_numbers_of_steps_says_so"
    ),
    "An optimizer step that was interrupted stays half done": (
        "mesh/test_replicas.py:an_interrupted_adam_step_is_found_and_repaired"
    ),
    "`rpc.rpc_sync` and a future's `wait()` stop at the first press": (
        "mesh/test_rpc.py:a_call_that_is_waited_for_can_be_interrupted"
    ),
    "Data-parallel code of your own": (
        "mesh/test_model_reset.py:own_data_parallel_code_is_named_and_its_reset_is_called"
    ),
    "External effects stay:": (
        "mesh/test_checkpoint_faults.py:rank_killed_during_a_save_leaves_the_old_checkpoint "
        "mesh/test_checkpoint_faults.py:mesh_killed_during_a_save_leaves_the_old_checkpoint"
    ),
    "Failures of the machine": "hosts/test_faults.py:killed_host_costs_its_ranks_and_no_others",
}
SECURITY = {
    "who may read a mesh's ticket may run code on its ranks, and nobody else may.": (
        "hosts/test_security.py:process_on_another_host_without_a_ticket_is_refused "
        "hosts/test_security.py:tickets_and_sockets_belong_to_their_user_alone"
    ),
    "it is in no command line and in no environment": (
        "hosts/test_security.py:keys_are_in_no_argument_environment_log_or_output"
    ),
    "A ticket that others may read, or that another user owns, is refused by name": (
        "mesh/test_attach.py:tickets_that_do_not_fit_or_that_others_may_read_are_refused"
    ),
    "tracebacks that show variables": (
        "mesh/test_secrets.py:failing_start_shows_no_secret "
        "mesh/test_secrets.py:failing_attach_shows_no_secret"
    ),
    "CURVE": (
        "hosts/test_security.py:replayed_bytes_of_a_controller_are_refused "
        "hosts/test_security.py:peer_without_a_key_of_the_mesh_is_refused_and_counted"
    ),
    "An allow-list": ("hosts/test_security.py:peer_with_curve_but_without_the_mesh_key_is_refused"),
    "Nothing is unpickled": (
        "hosts/test_security.py:hostile_controller_cannot_break_the_agent "
        "mesh/test_hostile.py:messages_without_the_key_do_nothing"
    ),
    "One address": "hosts/test_security.py:what_listens_is_what_is_documented",
    "is closed. Each peer that was refused is counted": (
        "hosts/test_security.py:connections_that_say_nothing_are_closed_and_cost_nothing "
        "hosts/test_security.py:refusals_are_shown_on_the_host_of_the_notebook_and_of_the_agent"
    ),
    "another user of a host": (
        "hosts/test_security.py:other_user_of_a_host_reaches_nothing "
        "hosts/test_security.py:other_user_of_the_notebook_host_cannot_connect_to_a_local_mesh"
    ),
    "who has the ticket of a mesh that has ended": (
        "hosts/test_security.py:stolen_ticket_is_worth_nothing_after_the_stop"
    ),
    "hosts with the invitation": (
        "hosts/test_security.py:listener_for_hosts_lets_in_nobody_without_the_invitation"
    ),
    "a test compares it with the first table": (
        "hosts/test_security.py:what_listens_is_what_is_documented"
    ),
    "Calls from rank to rank": (
        "core/workers/rank/test_handles.py:nothing_is_sent_to_a_socket_of_another_user "
        "core/workers/rank/test_handles.py:a_process_of_another_user_gets_no_challenge "
        "mesh/test_handles.py:nothing_is_read_from_a_process_without_the_key"
    ),
    "mode 0600 in a directory of mode 0700": (
        "mesh/test_start.py:every_file_of_a_mesh_is_its_users_alone"
    ),
}


@functools.cache
def names_of_tests(file: str) -> frozenset[str]:
    tree = ast.parse((TESTS / file).read_text())
    return frozenset(
        node.name.removeprefix("test_")
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )


@pytest.mark.parametrize(
    ("document", "promises"), [("reliability.md", RELIABILITY), ("security.md", SECURITY)]
)
def test_each_promise_is_made_and_has_its_tests(document: str, promises: dict[str, str]) -> None:
    text = (DOCS / document).read_text()
    assert [promise for promise in promises if promise not in text] == []
    named = [test.split(":") for tests in promises.values() for test in tests.split()]
    assert [f"{file}:{test}" for file, test in named if test not in names_of_tests(file)] == []


def test_each_thing_that_users_can_rely_on_is_in_the_table() -> None:
    text = (DOCS / "reliability.md").read_text()
    section = text.split("\n## What you can rely on\n")[1].split("\n## ")[0]
    bold = re.findall(r"^\*\*(.+?)\.?\*\*", section, re.MULTILINE)
    assert len(bold) > 10
    assert [promise for promise in bold if promise not in RELIABILITY] == []
