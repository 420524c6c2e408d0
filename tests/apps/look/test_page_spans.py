"""The page's spans in a real browser: the weight on chosen keys, and a head that can't see them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import expect

from headwise.apps.look.readers.reader import Illustrated
from tests.apps.look.conftest import Served, Visits
from tests.apps.look.test_opening import save_llava
from tests.apps.look.test_page_head import picture_of_a_ball, save_vit, the_map


def test_a_span_is_weighed_and_hidden(served: Served, visit: Visits) -> None:
    page = visit("#/head?layer=5&head=1&side=spans&first=1&last=4&row=40")
    share = page.locator("[data-share]")
    wanted = float(the_map(served)[0, 0, :, 1:5].sum(-1).mean())
    assert float(share.get_attribute("data-share") or "") == pytest.approx(wanted, rel=1e-4)
    page.get_by_label("to", exact=True).fill("9")
    page.keyboard.press("Tab")
    expect(page).to_have_url(re.compile("last=9"))
    page.get_by_label("words of the text").fill("edmund harrowgate")
    page.get_by_role("button", name="Find").click()
    expect(page.locator(".spans .text")).to_have_text("Edmund Harrowgate")
    page.get_by_label("words of the text").fill("nowhere in it")
    page.keyboard.press("Enter")
    expect(page.get_by_text("not in the text")).to_be_visible()
    page.get_by_role("button", name="Hide these keys from head 5.1").click()
    moved = page.locator("[data-moved]")
    expect(moved).to_contain_text("of the probability has moved")
    assert 0 < float(moved.get_attribute("data-moved") or "") < 1
    expect(page.locator("tbody tr").first).to_contain_text("%")
    page.locator(".spans li button").first.click()  # the head with the most weight on it
    expect(moved).to_have_count(0)


def test_a_span_of_patches_is_drawn_on_the_image(
    serve: Callable[..., Served], visit: Visits, tmp_path: Path
) -> None:
    save_vit(tmp_path)
    read = serve(str(tmp_path), picture_of_a_ball()).wait_until_read()
    page = visit("#/head?layer=1&head=0&side=spans&first=9&last=12", base=read.url, locale="zh-CN")
    image = page.get_by_role("application", name="区段中有 4 个图块")
    expect(image).to_have_attribute("data-chosen", "4")
    box = image.bounding_box()
    assert box is not None
    side = box["width"] / 8
    page.mouse.move(box["x"] + 0.5 * side, box["y"] + 2.5 * side)
    page.mouse.down()
    page.mouse.move(box["x"] + 5.5 * side, box["y"] + 3.5 * side, steps=3)
    page.mouse.up()
    expect(page).to_have_url(re.compile(r"first=17&last=30|last=30&first=17"))
    page.get_by_role("button", name="让头 1.0 看不到这些键").click()
    expect(page.locator("[data-moved]")).to_contain_text("图像的类别：")
    expect(page.locator("[data-moved]")).to_contain_text("概率发生了转移")


def test_the_image_in_a_prompt_is_drawn_weighed_and_hidden(
    serve: Callable[..., Served], visit: Visits, tmp_path: Path
) -> None:
    asked = Illustrated((picture_of_a_ball(),), "What is round?")
    read = serve(save_llava(tmp_path), asked).wait_until_read()
    (image,) = read.session.atlases["0"].input.main.pictures
    first = image.cells[0]
    page = visit(f"#/head?layer=3&head=0&side=spans&first={first}&last={first + 5}", base=read.url)
    expect(page.locator(".spans .grid")).to_have_attribute("data-chosen", "6")
    page.get_by_role("button", name="Hide these keys from head 3.0").click()
    expect(page.locator("[data-moved]")).to_contain_text("The token after row")
    page.get_by_label("words of the text").fill("round")
    page.get_by_role("button", name="Find").click()
    expect(page.locator(".spans .text")).to_contain_text("round")
    expect(page.locator(".spans .grid")).to_have_attribute("data-chosen", "0")
    page.get_by_text("Image", exact=True).click()
    expect(page.get_by_role("button", name="the last token of the text")).to_be_visible()
    expect(page.get_by_role("button", name="New image")).to_be_visible()
