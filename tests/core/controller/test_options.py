"""What may be asked of a mesh, and how what cannot be is refused."""

from __future__ import annotations

from typing import Any

import pytest

from cellmesh.controller.options import MAX_RANKS, Options, make_options
from cellmesh.errors import MeshUsageError


@pytest.mark.parametrize(
    "dims",
    [
        {"dp": -2, "tp": -4},
        {"dp": 8.0},
        {"dp": True, "tp": 8},
        {"dp": "8"},
        {"": 8},
        {"data parallel": 8},
        {3: 8},
    ],
    ids=repr,
)
def test_a_mapping_that_names_no_dims_is_refused(dims: Any) -> None:
    with pytest.raises(MeshUsageError):
        make_options(8, mesh=dims)


def test_host_lease_is_seconds_or_text_within_bounds() -> None:
    assert make_options(2).host_lease_s == 10.0
    assert make_options(2, host_lease_s="2m").host_lease_s == 120.0
    for value in (0, 0.5, "2h", -1, True):
        with pytest.raises(MeshUsageError, match=r"host.lease"):
            make_options(2, host_lease_s=value)  # type: ignore[arg-type]


def test_leases_and_patience_are_seconds_or_text() -> None:
    options = make_options(2, lease_s="30m", settle_s=2, on_error="wait", auto_heal=True)
    assert (options.lease_s, options.settle_s, options.on_error, options.auto_heal) == (
        1800,
        2,
        "wait",
        True,
    )


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("lease_s", value) for value in (-1, True, None, [], "soon", float("inf"), float("nan"))),
        *(("settle_s", value) for value in (-0.5, "x")),
        *(("on_error", value) for value in ("stop", "", 1)),
        *(("auto_heal", value) for value in ("yes", 1, None)),
        *(("fold_numbers", value) for value in ("yes", 1, None)),
    ],
)
def test_invalid_options_are_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(MeshUsageError, match=f"{option} must be|is no span"):
        make_options(2, **{option: value})


@pytest.mark.parametrize("option", ["sync", "fold_numbers"])
@pytest.mark.parametrize(("value", "switch"), [("on", True), ("off", False), (False, False)])
def test_switches_are_on_or_off_or_true_or_false(option: str, value: Any, switch: bool) -> None:
    assert getattr(make_options(2), option) is True
    assert getattr(make_options(2, **{option: value}), option) is switch


def test_by_default_all_ranks_are_in_one_dim() -> None:
    assert make_options(8) == Options(8, {"dp": 8}, "auto", (), "")


def test_every_option_is_taken() -> None:
    options = make_options(
        8, mesh="dp=2,tp=4", backend="gloo", preload="numpy, a.b", name="my-mesh_1"
    )
    assert options == Options(8, {"dp": 2, "tp": 4}, "gloo", ("numpy", "a.b"), "my-mesh_1")


def test_the_dims_give_the_number_of_ranks() -> None:
    assert make_options(mesh={"dp": 2, "tp": 4}).num_ranks == 8
    assert make_options(mesh="dp=3").num_ranks == 3


@pytest.mark.parametrize("num_ranks", [0, -1, MAX_RANKS + 1, 10**30])
def test_a_number_of_ranks_that_cannot_be_is_refused(num_ranks: int) -> None:
    with pytest.raises(MeshUsageError, match=f"must be 1 to {MAX_RANKS}, not {num_ranks}"):
        make_options(num_ranks)


@pytest.mark.parametrize("num_ranks", [None, "eight", "8", 8.0, True, [8]], ids=repr)
def test_invalid_numbers_of_ranks_are_refused(num_ranks: Any) -> None:
    with pytest.raises(
        MeshUsageError, match=r"must be a whole number, not .*: say how many, like 8"
    ):
        make_options(num_ranks)


@pytest.mark.parametrize("num_ranks", [1, MAX_RANKS])
def test_the_limits_themselves_are_allowed(num_ranks: int) -> None:
    assert make_options(num_ranks).num_ranks == num_ranks


def test_dims_that_do_not_multiply_to_the_number_are_refused() -> None:
    with pytest.raises(MeshUsageError, match="dp=2 x tp=3 makes 6 ranks, and the mesh has 8"):
        make_options(8, mesh="dp=2,tp=3")


@pytest.mark.parametrize(("backend", "near"), [("glo", "gloo"), ("ncll", "nccl"), ("Auto", "auto")])
def test_an_unknown_backend_names_the_nearest(backend: str, near: str) -> None:
    with pytest.raises(MeshUsageError, match=f"no backend '{backend}'.*did you mean '{near}'"):
        make_options(2, backend=backend)


def test_an_unknown_backend_near_none_names_them_all() -> None:
    with pytest.raises(MeshUsageError, match=r"no backend 'xyz' \(auto, gloo or nccl\)$"):
        make_options(2, backend="xyz")


@pytest.mark.parametrize(
    "preload", ["my module", "a-b", "a..b", ".a", ["ok", "not ok"], "3d"], ids=repr
)
def test_invalid_module_names_are_refused(preload: Any) -> None:
    with pytest.raises(MeshUsageError, match=r"--preload .* is no module's name"):
        make_options(2, preload=preload)


@pytest.mark.parametrize("preload", ["a,b", "a, b,", ["a", "b"], ("a", "b")], ids=repr)
def test_modules_are_given_as_text_or_as_a_list(preload: Any) -> None:
    assert make_options(2, preload=preload).preload == ("a", "b")


@pytest.mark.parametrize(
    "name", ["a b", "a/b", "..", "x" * 41, "näme", "a\n", "-rf", "-"], ids=repr
)
def test_a_name_that_makes_no_directory_is_refused(name: str) -> None:
    with pytest.raises(MeshUsageError, match="is no name"):
        make_options(2, name=name)


WRONG_TYPES = {"mesh": 3, "backend": 3, "preload": 3, "name": 3}


@pytest.mark.parametrize(("option", "value"), WRONG_TYPES.items(), ids=WRONG_TYPES)
def test_a_value_of_the_wrong_type_is_refused(option: str, value: Any) -> None:
    with pytest.raises(MeshUsageError):
        make_options(2, **{option: value})
