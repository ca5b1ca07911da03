"""Cells as parts of a script: indented, shown, without IPython's syntax."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellmesh.magics.export.rewriting import (
    at_top_level,
    only_defines,
    show_last,
    to_python,
    under,
)

TRICKY = [
    'x = """one\n  two\nthree"""\ny = 1\n',
    'def f():\n    """Doc\n\n    more\n    """\n    return 1\n',
    'n = 1\nx = f"""a {n}\nb {\nn\n} c"""\n',
    'x = "one \\\ntwo"\n',
    "x = 1 + \\\n2\n",
    "x = [\n1,\n  2,\n]\n",
    "if True:\n    x = 1\n# a comment\n    y = 2\n",
    "x = 1\n\x0cy = 2\n",
    "x = 'a\u2028b'\n",
    "x = rb'''a\n\\b'''\n",
    "x = '''a\nb''' '''c\nd'''\n",
    "if True:\n\tx = 1\n",
    "x = 1",
]


@given(
    st.lists(st.sampled_from(TRICKY), min_size=1, max_size=4),
    st.text("ab\n '\\{}", max_size=9),
)
def test_any_cells_mean_the_same_under_an_if(cells: list[str], text: str) -> None:
    source = "".join(cell if cell.endswith("\n") else cell + "\n" for cell in cells)
    source += f"z = {text!r}\nw = '''{text.translate({39: 46, 92: 46})}'''\n"
    (block,) = ast.parse(under("if True", source)).body
    assert isinstance(block, ast.If)
    assert ast.dump(ast.Module(block.body, [])) == ast.dump(ast.parse(source))


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("x = 1\nx + 1  # more\n", "x = 1\nshow(x + 1)  # more\n"),
        ("a, b\n", "show((a, b))\n"),
        ("'é'; é\n", "'é'; show(é)\n"),
        ("x  # quiet\n;\n", "x  # quiet\n;\n"),
        ("print(x)\n", "print(x)\n"),
        ("losses.append(x)\n", "losses.append(x)\n"),
        ("if x:\n    y\n", "if x:\n    y\n"),
        ("await f()\n", "show(await f())\n"),
        ('"""a\nb"""\n', 'show("""a\nb""")\n'),
    ],
)
def test_the_value_of_a_last_expression_is_shown(source: str, shown: str) -> None:
    assert show_last(source, "show") == shown


@pytest.mark.parametrize(
    ("source", "features", "text"),
    [
        ("from __future__ import annotations\nx = 1\n", ["annotations"], "pass\nx = 1\n"),
        ("from __future__ import division, annotations; x = 1\n", ["division", "annotations"],
         "pass; x = 1\n"),
        ("if a:\n    global ü; ü = 1\n", [], "if a:\n    pass; ü = 1\n"),
        ("def f():\n    global a\n    a = 1\n", [], "def f():\n    global a\n    a = 1\n"),
        ("s = 'global a'\nglobal a  # why\n", [], "s = 'global a'\npass  # why\n"),
    ],
)  # fmt: skip
def test_what_stands_first_in_a_module_only_is_taken_out(
    source: str, features: list[str], text: str
) -> None:
    assert at_top_level(source) == (features, text)


@pytest.mark.parametrize(
    ("source", "defines"),
    [
        ("import a\nx = 1\n@f(2)\ndef g(): ...\n", True),
        ("import a; f()\n# why\ny = 1", False),
        ('if __name__ == "__main__":\n    f()\n', True),
    ],
)
def test_processes_that_are_spawned_only_define_names(source: str, defines: bool) -> None:
    assert only_defines(source) is defines


@pytest.mark.parametrize(
    ("source", "python", "left_out"),
    [
        (
            "x = !ls\n",
            "x = subprocess.run('ls', shell=True, capture_output=True, "
            "text=True).stdout.splitlines()\n",
            [],
        ),
        ("!echo {x}\n", "subprocess.run(f'echo {x}', shell=True)\n", []),
        ("%time x = f()\n", "x = f()\n", []),
        (
            "x = 1\n%matplotlib inline\n",
            "x = 1\n# left out: %matplotlib inline\n",
            ["%matplotlib inline"],
        ),
        ("x?\n", "# left out: %pinfo x\n", ["%pinfo x"]),
        (
            "if x:\n    %timeit f()\n",
            "if x:\n    pass\n    # left out: %timeit f()\n",
            ["%timeit f()"],
        ),
        ("%%html\n<b>\n", "# left out: %%html\n# left out: <b>\n", ["%%html"]),
        ("pip install x\n", "# left out: pip install x\n", ["pip install x"]),
    ],
)
def test_ipython_becomes_python_where_it_can(source: str, python: str, left_out: list[str]) -> None:
    plain = to_python(source)
    assert (plain.source, plain.left_out) == (python, left_out)
    compile(plain.source, "cell", "exec")
    assert ("import subprocess" in plain.imports) is ("subprocess" in python)


@pytest.mark.parametrize(
    ("line", "made"),
    [
        ("%run script.py a --lr '0 1'", ["a", "--lr", "0 1"]),
        ("%run script", []),
    ],
)
def test_run_becomes_runpy(
    line: str, made: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(
        "import sys\nmade = sys.argv[1:]\nif __name__ == '__main__': made\n"
    )
    plain = to_python(line + "\n")
    namespace: dict[str, Any] = {"__file__": "exported.py"}
    monkeypatch.setattr(sys, "argv", ["exported.py"])
    exec("\n".join([*plain.imports, plain.source]), namespace)
    assert (namespace["made"], namespace["__file__"]) == (made, "exported.py")
    assert (sys.argv, plain.left_out) == (["exported.py"], [])
    assert to_python("%run -i script.py\n").left_out == ["%run -i script.py"]
