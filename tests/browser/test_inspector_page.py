"""The inspector in a bare page: values of many kinds, both themes, a narrow page, a late kernel."""

from __future__ import annotations

import msgspec
import pytest
import torch
from playwright.sync_api import Browser, expect

from cellmesh.wire.inspect import Overview, ValueSummary
from tests.browser.inspector_page import (
    element_at,
    keep,
    opacity,
    open_heatmap,
    open_page,
    shown,
    value_at,
    wait_for_new_picture,
)
from tests.support.inspected_ranks import LocalAnswers

EVIL = "<script>window.stolen = 1</script><img src=x onerror='window.stolen = 1'>"


@pytest.fixture(scope="module")
def weights() -> dict[int, dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    weight = torch.randn(300, 400)  # small enough that each element has pixels of its own
    return {rank: {"w": weight + rank // 2} for rank in range(4)}


def test_the_number_under_the_pointer_is_the_tensors(
    browser: Browser, weights: dict[int, dict[str, torch.Tensor]]
) -> None:
    with open_page(browser, LocalAnswers("w", weights)) as (page, kernel):
        canvas = open_heatmap(page)
        for x, y in ((0.0113, 0.0213), (0.5003, 0.5003), (0.9313, 0.7113)):
            index, value = value_at(page, canvas, x, y)
            assert index == element_at(canvas, x, y)
            assert torch.tensor(float(value)) == weights[0]["w"][index]

        count = shown(canvas)
        canvas.click(position={"x": 200, "y": 100})
        page.mouse.wheel(0, -400)
        wait_for_new_picture(canvas, count)
        before = element_at(canvas, 0.5, 0.5)
        index, value = value_at(page, canvas, 0.25, 0.75)
        assert index == element_at(canvas, 0.25, 0.75)
        assert torch.tensor(float(value)) == weights[0]["w"][index]

        count = shown(canvas)
        box = canvas.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 300, box["y"] + 200)
        page.mouse.down()
        page.mouse.move(box["x"] + 220, box["y"] + 150, steps=4)
        page.mouse.up()
        wait_for_new_picture(canvas, count)
        after = element_at(canvas, 0.5, 0.5)
        assert after[0] > before[0]
        assert after[1] > before[1]
        index, value = value_at(page, canvas, 0.5, 0.25)
        assert index == element_at(canvas, 0.5, 0.25)
        assert torch.tensor(float(value)) == weights[0]["w"][index]

        page.get_by_label("rank", exact=True).select_option("3")
        index, value = value_at(page, canvas, 0.3, 0.3)
        assert torch.tensor(float(value)) == weights[3]["w"][index]
        assert max(kernel.sent_bytes) <= 1_000_000


def test_keys_pan_zoom_and_choose(
    browser: Browser, weights: dict[int, dict[str, torch.Tensor]]
) -> None:
    with open_page(browser, LocalAnswers("w", weights)) as (page, _):
        canvas = open_heatmap(page)
        canvas.focus()
        for key in ("+", "+", "+", "ArrowRight", "ArrowDown"):
            count = shown(canvas)
            canvas.press(key)
            wait_for_new_picture(canvas, count)
        canvas.press("Shift+ArrowLeft")
        value = page.locator(".cmi-value[data-final=true]")
        expect(value).to_be_visible()
        index = tuple(map(int, (value.get_attribute("data-index") or "").split(",")))
        assert (
            torch.tensor(float(value.get_attribute("data-value") or "")) == weights[0]["w"][index]
        )
        count = shown(canvas)
        canvas.press("0")
        wait_for_new_picture(canvas, count)
        expect(canvas).to_have_attribute("data-view", "0.000 300.000 0.000 400.000")


def test_a_pixel_of_several_elements_is_marked_until_one_zooms_in(browser: Browser) -> None:
    value = torch.arange(1500.0).repeat(1500, 1)
    with open_page(browser, LocalAnswers("w", {0: {"w": value}})) as (page, _):
        canvas = open_heatmap(page)
        index, text = value_at(page, canvas, 0.5, 0.5)
        assert text.startswith("≈ ")
        assert abs(float(text.removeprefix("≈ ")) - index[1]) < 4
        for _ in range(4):
            count = shown(canvas)
            page.get_by_role("button", name="Zoom in (+)").click()
            wait_for_new_picture(canvas, count)
        index, text = value_at(page, canvas, 0.25, 0.75)
        assert int(text) == index[1]


def test_a_page_looks_again_after_a_cell(browser: Browser) -> None:
    names = {"w": torch.zeros(2)}
    with open_page(browser, LocalAnswers("w", {0: names})) as (page, kernel):
        page.get_by_role("button", name="Look again after each cell").click()
        expect(page.get_by_role("button", name="Look again after each cell")).to_have_attribute(
            "aria-pressed", "true"
        )
        names["w"] = torch.full((2,), 3.0)
        kernel.inspector.note_cell_end()  # of the cell that shows it
        kernel.inspector.note_cell_end()
        expect(page.locator("[data-ranks='0'] [data-key=max]")).to_have_text("3")
        assert not kernel.inspector.widget.outdated


@pytest.mark.parametrize(("theme", "width"), [("light", 1000), ("dark", 700)])
def test_looks(browser: Browser, theme: str, width: int) -> None:
    torch.manual_seed(2)
    rows, cols = torch.meshgrid(
        torch.linspace(-3, 3, 160), torch.linspace(-4, 4, 240), indexing="ij"
    )
    wave = torch.sin(rows * cols) * torch.exp(-(rows**2) / 4)
    wave[20:26, 30:44] = float("nan")
    wave[60:66, 190:204] = float("inf")
    wave[100:106, 40:54] = float("-inf")
    namespaces: dict[int, dict[str, torch.Tensor]] = {rank: {"wave": wave} for rank in range(3)}
    namespaces[1] = {"wave": wave + 0.25}
    namespaces[3] = {}
    answers = LocalAnswers("wave", namespaces)
    with open_page(browser, answers, dark=theme == "dark", width=width) as (page, _):
        rows_shown = page.locator(".cmi-panel[data-tab=overview] tr[data-ranks]")
        assert [row.get_attribute("data-ranks") for row in rows_shown.all()] == ["0,2", "1", "3"]
        expect(rows_shown.nth(0).locator("[data-key=NaN]")).to_have_text("84")
        expect(rows_shown.nth(0).locator("[data-key=NaN]")).to_have_class(
            "cm-mono cmi-number cmi-bad"
        )
        expect(rows_shown.nth(0).locator("[data-key=histogram]")).to_contain_text("█")
        expect(rows_shown.nth(2)).to_contain_text("NameError: name 'wave' is not defined")
        keep(page, f"inspector-overview-{theme}-{width}")
        open_heatmap(page)
        page.get_by_label("scale", exact=True).select_option("symmetric")
        expect(page.locator(".cmi-legend")).to_have_attribute("data-oddities", "nan inf ninf")
        middle = page.locator(".cmi-legend-ticks span").nth(2)
        expect(middle).to_have_text("0")
        keep(page, f"inspector-heatmap-{theme}-{width}")
        wide = page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        assert wide <= 0


def test_an_nd_tensor_is_sliced_as_chosen(browser: Browser) -> None:
    cube = torch.arange(3 * 5 * 7 * 2).reshape(3, 5, 7, 2)
    with open_page(browser, LocalAnswers("cube", {0: {"cube": cube}})) as (page, _):
        canvas = open_heatmap(page)
        index, value = value_at(page, canvas, 0.7, 0.9)
        assert int(value) == cube[index]
        assert index[:2] == (0, 0)
        page.get_by_label("rows: dim").select_option("1")
        page.get_by_label("columns: dim").select_option("2")
        page.get_by_label("index in dim 0").fill("2")
        page.get_by_label("index in dim 0").press("Enter")
        page.get_by_label("index in dim 3").fill("1")
        page.get_by_label("index in dim 3").press("Enter")
        expect(page.locator(".cmi-notes")).to_contain_text("rows 0–4 of 5, columns 0–6 of 7")
        index, value = value_at(page, canvas, 0.99, 0.99)
        assert index == (2, 4, 6, 1)
        assert int(value) == cube[index]


def test_values_without_a_picture_show_their_text(browser: Browser) -> None:
    for text, value in (("'text'", "text"), ("(3, 3)", torch.empty(3, 3, device="meta"))):
        with open_page(browser, LocalAnswers("value", {0: {"value": value}})) as (page, _):
            expect(page.get_by_role("tab", name="Overview")).to_be_visible()
            expect(page.get_by_role("tab", name="Heatmap")).to_be_hidden()
            expect(page.locator("tr[data-ranks]")).to_contain_text(text)


def test_thousands_of_tensors_are_filtered_at_once(browser: Browser) -> None:
    nest = {f"layer{index}": torch.full((2, 2), float(index)) for index in range(3000)}
    nest["layer2024"][0, 0] = float("nan")
    with open_page(browser, LocalAnswers("nest", {0: {"nest": nest}, 1: {"nest": nest}})) as (
        page,
        kernel,
    ):
        said = page.locator(".cmi-panel[data-tab=overview] .cmi-bar")
        expect(said).to_contain_text("3,000 tensors, the first 150 shown")
        assert len(kernel.inspector.widget.summary["items"]) == 200
        page.get_by_label("filter", exact=True).fill("layer2024")
        expect(said).to_contain_text("1 of 3,000 tensors")
        row = page.locator(".cmi-panel[data-tab=overview] tbody tr").first
        expect(row).to_contain_text("NaN")
        row.get_by_role("button").click()
        expect(page.locator(".cmi-heading")).to_contain_text("layer2024")
        expect(page.locator("[data-ranks='0-1'] [data-key=max]")).to_have_text("2024")
        canvas = open_heatmap(page)
        assert value_at(page, canvas, 0.9, 0.9) == ((1, 1), "2024")


def test_names_from_users_are_no_html(browser: Browser) -> None:
    odd = type(EVIL, (), {})()  # a value of one's own is told by its type
    nest = {EVIL: torch.ones(2, 2), "other": torch.ones(2)}
    for expression, value in (("nest", nest), ("odd", odd), (f"missing  # {EVIL}", 0)):
        names = {"nest": value, "odd": value}
        with open_page(browser, LocalAnswers(expression, {0: names, 1: {}})) as (page, kernel):
            expect(page.locator("#root")).to_have_attribute("data-live", "true")
            for tab in page.get_by_role("tab").all():
                tab.click()
            assert page.evaluate("window.stolen") is None
            assert page.locator("#root script, #root img").count() == 0
            assert "<script" not in kernel.inspector.static().html
    with open_page(browser, LocalAnswers("nest", {0: {"nest": nest}})) as (page, _):
        expect(page.locator(".cmi-panel[data-tab=overview]")).to_contain_text(
            "<script>window.stolen"
        )


def sharded(rank: int, subject: object, answer: object) -> object:
    """An answer as of a DTensor of 10 x 6 over (dp=2, tp=4): rows over tp, uneven (3, 3, 3, 1)."""
    if not isinstance(subject, Overview) or not isinstance(answer, ValueSummary):
        return answer
    index = rank % 4
    facts = msgspec.structs.replace(
        answer.items[0], mesh_dim_names=("dp", "tp"), coordinate=(rank // 4, index), shape=(10, 6),
        placements="R, S(0)", offset=(3 * index, 0), shard=(-1, index),
    )  # fmt: skip
    return ValueSummary("DTensor", "", (facts.at(""),))


def test_a_click_on_a_shard_opens_its_rank(browser: Browser) -> None:
    whole = torch.arange(60.0).reshape(10, 6)
    namespaces = {rank: {"d": whole[3 * (rank % 4) : 3 * (rank % 4) + 3]} for rank in range(8)}
    with open_page(browser, LocalAnswers("d", namespaces, sharded)) as (page, _):
        page.get_by_role("tab", name="Shards").click()
        blocks = page.locator(".cmi-block")
        titles = [block.get_attribute("title") or "" for block in blocks.all()]
        assert [title.partition(", (")[0] for title in titles] == [
            "ranks 0,4: [0:3, 0:6]",
            "ranks 1,5: [3:6, 0:6]",
            "ranks 2,6: [6:9, 0:6]",
            "ranks 3,7: [9:10, 0:6]",
        ]
        board = page.locator(".cmi-board").bounding_box()
        last = blocks.nth(3).bounding_box()
        assert board is not None
        assert last is not None
        assert last["height"] == pytest.approx(board["height"] / 10, rel=0.15)
        assert last["y"] + last["height"] == pytest.approx(board["y"] + board["height"], abs=2)
        keep(page, "inspector-shards")
        blocks.nth(3).press("Enter")
        expect(page.get_by_label("rank", exact=True)).to_have_value("3")
        canvas = page.locator("canvas")
        expect(canvas).to_be_visible()
        index, value = value_at(page, canvas, 0.99, 0.5)
        assert index == (0, 5)
        assert float(value) == whole[9, 5]
        expect(page.locator(".cmi-value")).to_have_attribute("data-whole", "9,5")


def test_gradients_are_sorted_and_flagged(browser: Browser) -> None:
    namespaces = {}
    for rank in range(2):
        torch.manual_seed(4)
        model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 4))
        model(torch.randn(8, 6)).square().mean().backward()
        grads = [parameter.grad for parameter in model.parameters()]
        assert grads[0] is not None
        assert grads[1] is not None
        assert grads[3] is not None
        grads[0][0, 0] = float("nan")
        grads[1].zero_()
        model[1].weight.grad = None
        grads[3] += rank
        namespaces[rank] = {"model": model}
    with open_page(browser, LocalAnswers("model", namespaces, grads=True)) as (page, _):
        rows = page.locator("tr[data-name]")
        flags = {
            row.get_attribute("data-name"): row.locator(".cmi-flag").all_inner_texts()
            for row in rows.all()
        }
        assert flags == {
            "0.weight.grad": ["NaN"],
            "0.bias.grad": ["dead"],
            "1.weight.grad": [],
            "1.bias.grad": ["unequal"],
        }
        expect(page.locator("tr[data-name='1.weight.grad']")).to_contain_text("None")

        def names() -> list[str | None]:
            return [row.get_attribute("data-name") for row in rows.all()]

        page.get_by_role("button", name="sort by norm").first.click()
        assert names()[-2:] == ["0.bias.grad", "1.weight.grad"]
        page.get_by_role("button", name="sort by name").click()
        assert names() == sorted(flags)
        page.get_by_role("button", name="look at 1.bias.grad").click()
        expect(page.locator(".cmi-heading")).to_contain_text("model.1.bias.grad")
        keep(page, "inspector-gradients")


def test_a_kernel_that_answers_late_is_waited_for(
    browser: Browser, weights: dict[int, dict[str, torch.Tensor]]
) -> None:
    with open_page(browser, LocalAnswers("w", weights), is_deaf=True) as (page, kernel):
        page.clock.fast_forward(6000)
        expect(page.locator(".cmi-notice")).to_contain_text("no kernel answers")
        expect(page.get_by_role("button", name="Look again now")).to_be_disabled()
        kernel.listen()
        expect(page.locator("#root")).to_have_attribute("data-live", "true")
        expect(page.locator(".cmi-notice")).to_be_hidden()
        expect(page.get_by_role("button", name="Look again now")).to_be_enabled()
        canvas = open_heatmap(page)
        assert opacity(canvas) == 255

        kernel.is_deaf = True
        page.get_by_label("rank", exact=True).select_option("3")
        expect(canvas).to_have_attribute("data-stale", "true")
        assert 0 < opacity(canvas) < 128
        box = canvas.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 50, box["y"] + 50)
        expect(page.locator(".cmi-value b")).to_have_text("…")
        page.clock.fast_forward(31_000)
        expect(page.locator(".cmi-value")).to_contain_text("no answer yet")
        kernel.listen()
        expect(canvas).to_have_attribute("data-stale", "false")
        index, value = value_at(page, canvas, 0.3, 0.3)
        assert torch.tensor(float(value)) == weights[3]["w"][index]
