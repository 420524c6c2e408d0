"""All heads at a glance, the comparison of two, and the frame around every view."""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Page, expect

from headwise.apps.look.serving.page_file import write
from headwise.apps.look.serving.server import listening
from headwise.apps.look.session import Progress
from tests.apps.look.conftest import Served, Visits


def names(page: Page) -> list[str]:
    """The heads as they stand in the grid."""
    heads = page.locator("[data-head]")
    expect(heads.first).to_be_visible()
    return heads.evaluate_all("heads => heads.map(head => head.dataset.head)")


def figures(served: Served, name: str) -> dict[str, float]:
    """A figure of every head, as the library has it."""
    group = served.session.atlases["0"].input.main
    return {head.name: head.figures[name] for head in group.heads}


def test_every_head_is_drawn_layer_by_layer(visit: Visits, served: Served) -> None:
    page = visit()
    assert names(page) == list(figures(served, "entropy_mean"))
    wait_for_maps(page)


def test_one_head_opens_the_head_that_is_highlighted(visit: Visits) -> None:
    page = visit()
    selected = page.locator("aside h2")
    name = selected.inner_text().removeprefix("Head ")
    assert name != "0.0"
    page.get_by_role("link", name="One head").click()
    layer, head = name.split(".")
    expect(page.get_by_label("Layer", exact=True)).to_have_value(layer)
    expect(page.get_by_label("Head", exact=True)).to_have_value(head)


def test_the_maps_of_a_comparison_stand_abreast_whatever_their_names(
    serve: Callable[..., Served], visit: Visits
) -> None:
    served = serve("translate", "她从来没有见过这么大的黑狗，从来没有。" * 3).wait_until_read()
    served.session.add("The cat is black, and the dog has never been seen in the garden.")
    page = visit("#/compare", base=served.wait_until_read().url)
    figures = page.locator(".maps figure")
    expect(figures).to_have_count(3)
    tops = figures.evaluate_all("all => all.map(each => each.getBoundingClientRect().top)")
    assert len(set(tops)) == 1


def test_heads_are_sorted_by_the_library_s_figure(visit: Visits, served: Served) -> None:
    page = visit("#/heads")
    page.get_by_label("Statistic").select_option("previous_mass_mean")
    page.get_by_role("radio", name="highest first").click()
    values = figures(served, "previous_mass_mean")
    assert names(page) == sorted(values, key=lambda name: -values[name])


def test_the_filter_takes_layers_heads_figures_and_types(visit: Visits, served: Served) -> None:
    page = visit("#/heads")
    names(page)
    page.keyboard.press("/")
    page.keyboard.type("5")
    expect(page.locator("[data-head]")).to_have_count(8)
    field = page.get_by_label("Filter")
    field.fill("5.1 4.6")
    assert names(page) == ["4.6", "5.1"]
    field.fill("entropy<2")
    values = figures(served, "entropy_mean")
    few = [name for name, value in values.items() if value < 2]
    expect(page.locator("[data-head]")).to_have_count(len(few))
    assert names(page) == few
    field.fill("zebra")
    expect(page.get_by_text("No head passes the filter")).to_be_visible()
    expect(page.get_by_role("status").filter(has_text="“zebra”")).to_be_visible()
    page.get_by_role("button", name="Clear the filter").click()
    expect(page.locator("[data-head]")).to_have_count(len(values))


def test_a_chip_shows_the_heads_of_a_type_only(visit: Visits, served: Served) -> None:
    page = visit("#/heads")
    group = served.session.atlases["0"].input.main
    local = [head.name for head in group.heads if head.type == "local"]
    assert local
    page.get_by_role("button", name=re.compile(r"^local \d+$")).click()
    expect(page.locator("[data-head]")).to_have_count(len(local))
    assert names(page) == local


def test_a_point_of_the_scatter_names_its_head_and_opens_it(visit: Visits, served: Served) -> None:
    page = visit("#/heads?x=entropy_mean&y=previous_mass_mean")
    values = figures(served, "previous_mass_mean")
    first = max(values, key=lambda name: values[name])
    point = page.locator(f"[data-point='{first}']")
    point.hover(force=True)
    expect(page.locator("svg text", has_text=f"{first} ·")).to_be_visible()
    point.click(force=True)
    layer, head = first.split(".")
    expect(page).to_have_url(re.compile(rf"#/head\?.*layer={layer}&head={head}"))


def test_a_figure_that_all_heads_share_has_no_bar(visit: Visits, served: Served) -> None:
    page = visit("#/heads?layer=5&head=1")
    # The first row sees one key only: its weight is one, in some heads but for rounding.
    assert set(figures(served, "entropy_min").values()) == {0.0}
    rounding = 32 * torch.finfo(torch.float32).eps  # of exp(logit - lse), both computed apart
    assert list(figures(served, "sink_mass_max").values()) == pytest.approx([1] * 48, abs=rounding)
    page.get_by_text("more figures").click()
    for name in ("entropy, min", "first-token weight, max"):
        shared = page.get_by_role("button", name=name)
        expect(shared).to_have_attribute("title", re.compile("the same in all heads$"))
        expect(shared.locator(".bar")).to_have_count(0)
    other = page.get_by_role("button", name="effective keys")
    expect(other).to_have_attribute("title", re.compile(r"rank \d+ of 48, highest first$"))
    expect(other.locator(".bar")).to_have_count(1)


def test_arrows_move_over_heads_and_enter_opens_one(visit: Visits) -> None:
    page = visit("#/heads")
    names(page)
    expect(page.locator("[data-head='5.1'][aria-current]")).to_be_visible()  # an induction head
    for key in ("ArrowDown", "ArrowUp", "ArrowUp", "ArrowUp", "ArrowUp"):  # first the focus
        page.keyboard.press(key)
    expect(page.locator("[data-head='1.1']")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(r"#/head\?.*layer=1&head=1"))
    page.go_back()
    expect(page.locator("[data-head='1.1'][aria-current]")).to_be_visible()


def test_the_address_leads_back_to_the_view(visit: Visits) -> None:
    page = visit("#/heads?by=distance_mean&order=rising&filter=4&how=max&scale=linear&drop=1")
    before = names(page)
    page.reload()
    assert names(page) == before
    assert len(before) == 8
    expect(page.get_by_role("radio", name="max")).to_be_checked()
    expect(page.get_by_role("radio", name="linear")).to_be_checked()
    expect(page.get_by_label("without first token")).to_be_checked()
    expect(page.get_by_label("Statistic")).to_have_value("distance_mean")


def test_the_page_speaks_the_browser_s_language_until_told_otherwise(visit: Visits) -> None:
    page = visit("#/heads", locale="zh-CN")
    expect(page.get_by_role("link", name="所有注意力头")).to_be_visible()
    expect(page.locator("html")).to_have_attribute("lang", "zh-Hans")
    expect(page.get_by_title("平均往回看多少个词元").first).to_be_visible()
    page.get_by_role("button", name="English").click()
    expect(page.get_by_role("link", name="All heads")).to_be_visible()
    page.reload()
    expect(page.get_by_role("link", name="All heads")).to_be_visible()


def test_light_and_dark_follow_the_system_until_told_otherwise(visit: Visits) -> None:
    page = visit("#/heads", color_scheme="dark")
    frame = page.locator(".headwise")
    expect(frame).to_have_attribute("data-theme", "dark")
    page.get_by_role("button", name="Theme: system").click()
    expect(frame).to_have_attribute("data-theme", "light")
    page.reload()
    expect(frame).to_have_attribute("data-theme", "light")


def test_help_names_the_keys_of_the_view(visit: Visits) -> None:
    page = visit("#/heads")
    names(page)
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("move over the heads")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_two_heads_are_compared_in_the_library_s_figures(visit: Visits, served: Served) -> None:
    page = visit("#/compare?layer=4&head=6&layer2=5&head2=1")
    row = page.get_by_role("row").filter(has_text="previous-token weight")
    expect(row).to_be_visible()
    values = figures(served, "previous_mass_mean")
    said = [float(cell) for cell in row.get_by_role("cell").all_inner_texts()[:2]]
    for name, number in zip(("4.6", "5.1"), said, strict=True):
        assert abs(number - values[name]) <= 0.005 * abs(values[name])
    expect(page.get_by_role("figure", name="First − second").locator("canvas")).to_be_visible()


def test_a_new_text_is_read_and_compared_with_the_first(
    visit: Visits, serve: Callable[..., Served]
) -> None:
    own = serve("gpt", "to be or not to be, that is the question").wait_until_read()
    page = visit("#/heads", base=own.url)
    names(page)
    page.get_by_role("button", name="New text").click()
    page.get_by_role("textbox").fill("<img src=x onerror=alert(1)> one two one two")
    page.get_by_role("button", name="Read it").click()
    expect(page).to_have_url(re.compile("input=1"))
    chosen = page.get_by_label("Input").locator("option:checked")
    expect(chosen).to_contain_text("<img src=x onerror")
    page.goto(f"{own.url}/#/compare?of=inputs")
    expect(page.locator("[data-point]")).to_have_count(48)
    page.get_by_role("listitem").first.get_by_role("button").click()
    expect(page.get_by_text("The two maps have different shapes")).to_be_visible()


def test_a_translator_has_a_tab_for_each_kind_of_attention(
    visit: Visits, serve: Callable[..., Served]
) -> None:
    own = serve("translate", "The cat is black.").wait_until_read()
    page = visit("#/heads", base=own.url)
    expect(page.get_by_role("radio", name="Cross")).to_be_checked()
    page.get_by_role("radio", name="Encoder").click()
    names(page)
    expect(page).to_have_url(re.compile("group=encoder"))


def test_a_page_that_waits_says_for_what_and_how_far_it_is(
    visit: Visits, serve: Callable[..., Served]
) -> None:
    own = serve(None)
    own.session.progress = Progress("loading", "loading the model")
    page = visit(base=own.url)
    expect(page.get_by_role("status")).to_contain_text("Loading the model")
    own.session.progress = Progress("loading", "running the model", 0.25)
    expect(page.get_by_role("progressbar", name="Running the model")).to_have_attribute(
        "value", "0.25"
    )


def test_a_broken_model_says_what_is_wrong(
    visit: Visits, serve: Callable[..., Served], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    page = visit(base=serve(str(tmp_path), "hello").url)
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("could not be shown")
    expect(alert).to_contain_text(str(tmp_path))


def test_a_page_left_open_says_that_its_server_has_stopped_and_finds_the_next(
    visit: Visits, serve: Callable[..., Served]
) -> None:
    port = port_of_one_s_own()
    own = serve("gpt", "to be or not to be", port).wait_until_read()
    page = visit("#/heads", base=own.url, allowed="Failed to load resource")
    names(page)
    own.stop()
    expect(page.get_by_role("alert")).to_contain_text("The server has stopped")
    assert len(names(page)) == 48
    serve("translate", "The cat is black.", port)
    expect(page.get_by_role("radio", name="Cross")).to_be_visible()
    expect(page.locator("[data-head]")).to_have_count(24)
    expect(page.get_by_role("alert")).to_have_count(0)


def test_a_page_nobody_made_offers_the_way_back(visit: Visits) -> None:
    page = visit("#/nowhere")
    expect(page.get_by_text("There is no such page")).to_be_visible()
    page.get_by_role("button", name="Go to all heads").click()
    names(page)


def test_a_narrow_and_a_huge_window_show_all_of_a_row(visit: Visits) -> None:
    for width, height in ((900, 600), (3840, 2160)):
        page = visit("#/heads", viewport={"width": width, "height": height})
        names(page)
        last = page.locator("[data-head='0.7']").bounding_box()
        aside = page.locator("aside").bounding_box()
        assert last is not None
        assert aside is not None
        assert last["x"] + last["width"] <= aside["x"]
        scrolls = page.evaluate("document.documentElement.scrollWidth > innerWidth")
        assert not scrolls


def test_a_recording_opens_from_disk_without_a_network(
    visit: Visits, served: Served, tmp_path: Path
) -> None:
    file = tmp_path / "heads.html"
    write(served.session, file, ["4.6", "5.1"], 20 << 20)
    page = visit(file.as_uri(), offline=True)
    assert len(names(page)) == 48
    said = "A recording: 2 of 48 heads open, 2 of them down to single weights."
    expect(page.get_by_text(said)).to_be_visible()
    closed = page.locator("[data-head][aria-disabled='true']")
    expect(closed).to_have_count(46)
    closed.first.click(force=True)
    expect(page.get_by_role("button", name="Open")).to_be_disabled()
    expect(page).not_to_have_url(re.compile("#/head\\?"))  # it is chosen, and the page stays
    page.get_by_role("radio", name="max").click()
    wait_for_maps(page)
    page.get_by_role("link", name="Compare").click()
    expect(page.get_by_role("row").filter(has_text="entropy, min")).to_be_visible()
    page.goto(f"{file.as_uri()}#/compare?layer=4&head=6")
    expect(page.get_by_role("figure", name="Head 5.1").locator("canvas")).to_be_visible()
    expect(page.get_by_role("button", name="New text")).to_have_count(0)
    expect(page.get_by_role("link", name="Why")).to_have_count(0)


def port_of_one_s_own() -> int:
    """A free port that no other program is given by chance while nobody listens on it."""
    for port in range(20_000 + os.getpid() % 9_000, 30_000):
        with suppress(ValueError), listening(port):
            return port
    raise AssertionError("no port is free")


def wait_for_maps(page: Page) -> None:
    """Wait until the canvas of all heads has many colours."""
    page.wait_for_function(
        "() => { const canvas = document.querySelector('canvas');"
        " const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);"
        " return new Set(new Uint32Array(data.buffer)).size > 100; }"
    )
