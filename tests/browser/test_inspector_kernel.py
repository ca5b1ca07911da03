"""The inspector in a bare page, and a kernel that is late, or gone, or runs cells."""

from __future__ import annotations

import torch
from playwright.sync_api import Browser, expect

from tests.browser.inspector_page import opacity, open_heatmap, open_page, value_at
from tests.support.inspected_ranks import LocalAnswers


def test_a_kernel_that_answers_late_is_waited_for(browser: Browser) -> None:
    weights = {rank: {"w": torch.randn(700, 1100)} for rank in range(4)}
    answers = LocalAnswers("w", weights)
    with open_page(browser, answers, is_deaf=True, watch=True) as (page, kernel):
        page.clock.fast_forward(6000)
        expect(page.locator(".cmi-notice")).to_contain_text("no kernel answers")
        expect(page.get_by_role("button", name="Look again now")).to_be_disabled()
        kernel.listen()
        expect(page.locator("#root")).to_have_attribute("data-live", "true")
        expect(page.locator(".cmi-notice")).to_be_hidden()
        expect(page.get_by_role("button", name="Look again now")).to_be_enabled()
        canvas = open_heatmap(page)
        assert kernel.inspector.is_seen()
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


def test_inspector_refreshes_after_a_cell_and_while_one_runs(browser: Browser) -> None:
    names = {"w": torch.zeros(3, 3)}
    answers = LocalAnswers("w", {0: names})
    with open_page(browser, answers, watch=True, period_s=0.02) as (page, kernel):
        expect(page.locator("#root")).to_have_attribute("data-live", "true")
        most = page.locator("[data-key=max]")
        expect(most).to_have_text("0")
        expect(page.get_by_role("button", name="Look again after each cell")).to_have_attribute(
            "aria-pressed", "true"
        )
        refresher = kernel.inspector.refresher
        refresher.before_cell()
        names["w"] = torch.full((3, 3), 5.0)
        refresher.after_cell()
        expect(most).to_have_text("5")

        page.get_by_role("button", name="Look again each second while a cell runs").click()
        expect(
            page.get_by_role("button", name="Look again each second while a cell runs")
        ).to_have_attribute("aria-pressed", "true")
        answers.busy = True
        refresher.before_cell()
        names["w"] = torch.full((3, 3), 6.0)
        expect(most).to_have_text("6")
        expect(page.locator(".cmi-notice")).to_contain_text("values may be torn")
        answers.busy = False
        names["w"] = torch.full((3, 3), 7.0)
        refresher.after_cell()
        expect(most).to_have_text("7")
        expect(page.locator(".cmi-notice")).to_be_hidden()
