"""Where a cursor stands in code that is not finished."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellmesh.workers.completion.cursor import Spot, find_spot


@pytest.mark.parametrize(
    ("text", "kind", "expression", "typed"),
    [
        ("", "name", "", ""),
        ("mo", "name", "", "mo"),
        ("x = mo", "name", "", "mo"),
        ("model.", "attribute", "model", ""),
        ("model.layers[0].we", "attribute", "model.layers[0]", "we"),
        ("print(model.la", "attribute", "model", "la"),
        ("a + b.c", "attribute", "b", "c"),
        ("y if x.z", "attribute", "x", "z"),
        ("return x.", "attribute", "x", ""),
        ("(a + b).", "attribute", "(a + b)", ""),
        ("f(x, (1, 2))[3].", "attribute", "f(x, (1, 2))[3]", ""),
        ("d['a.b'].", "attribute", "d['a.b']", ""),
        ('d["it\'s"].x', "attribute", 'd["it\'s"]', "x"),
        ("[1].", "attribute", "[1]", ""),
        ("'abc'.up", "attribute", "'abc'", "up"),
        ("x = 1\ny.z", "attribute", "y", "z"),
        ("it's\ny.z", "attribute", "y", "z"),
        ("'''it's'''\ny.z", "attribute", "y", "z"),
        ("# it's\ny.z", "attribute", "y", "z"),
        ("%timeit model.la", "attribute", "model", "la"),
        ("{'a': b.", "attribute", "b", ""),
        ("f'{model.he", "attribute", "model", "he"),
        ("größe.ma", "attribute", "größe", "ma"),
        ("d['", "key", "d", ""),
        ('d["lay', "key", "d", "lay"),
        ("d[", "key", "d", ""),
        ("d['a']['b", "key", "d['a']", "b"),
        ("x = opt.param_groups[0]['l", "key", "opt.param_groups[0]", "l"),
        ("f'{d[\"x", "key", "d", "x"),
        ("import torch.nn.fu", "module", "torch.nn", "fu"),
        ("import a as b, torch.n", "module", "torch", "n"),
        ("from torch.n", "module", "torch", "n"),
        ("import to", "module", "", "to"),
        ("from torch.nn import Li", "member", "torch.nn", "Li"),
        ("from torch.nn import (A,\n    B", "member", "torch.nn", "B"),
        ("x = 1; import torch.n", "module", "torch", "n"),
        ("'abc", "nothing", "", ""),
        ("'''a\nx.", "nothing", "", ""),
        ("['a", "nothing", "", ""),
        ("# x.", "nothing", "", ""),
        ("1.", "nothing", "", ""),
        ("f'{{x.", "nothing", "", ""),
        ("..x", "nothing", "", "x"),
        ("import x.y as z", "nothing", "", "z"),
    ],
)
def test_spots(text: str, kind: str, expression: str, typed: str) -> None:
    spot = find_spot(text)
    assert (spot.kind, spot.expression, spot.typed) == (kind, expression, typed)
    assert spot.begin == len(text) - len(typed)


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("f(", "f"),
        ("f(x, ", "f"),
        ("m.forward(x, ma", "m.forward"),
        ("f(g(1), ", "f"),
        ("f(g(", "g"),
        ("f(\n    x,\n    ", "f"),
        ("f(x=", ""),
        ("f(x + ", ""),
        ("f[1, ", ""),
        ("(1, ", ""),
        ("f(1)", ""),
    ],
)
def test_arguments_of_a_call(text: str, call: str) -> None:
    assert find_spot(text).call == call


@given(st.text(alphabet="ab. ([{'\"\\\n#f{}])=,:1%?é", max_size=40))
def test_any_text_has_a_spot_at_its_end(text: str) -> None:
    spot = find_spot(text)
    assert isinstance(spot, Spot)
    assert 0 <= spot.begin <= len(text)
    assert spot.kind == "nothing" or text[spot.begin :] == spot.typed
