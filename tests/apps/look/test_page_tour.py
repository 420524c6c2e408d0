"""The first minute of a newcomer: the tour, sentences about heads, definitions, examples."""

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from headwise.apps.look.head_sentences import seen_by, sentence
from tests.apps.look.conftest import Served, Visits

TOUR = "A short tour"


def said_of(served: Served, name: str) -> str:
    """The sentence about a head."""
    read = served.session.atlases["0"].input
    head = read.main.head(name)
    return sentence(head.type, head.scores, head.figures, seen_by(read, read.main))


def test_the_tour_opens_once_and_leads_to_a_head(visit: Visits) -> None:
    page = visit(newcomer=True)
    tour = page.get_by_role("dialog", name=TOUR)
    expect(tour).to_contain_text("48 attention heads")
    for said in ("How to read a map", "Why a head is interesting", "Where to click"):
        tour.get_by_role("button", name="Next").click()
        expect(tour).to_contain_text(said)
    tour.locator("[data-example='5.1']").click()
    expect(page).to_have_url(re.compile("#/head.*layer=5&head=1"))
    expect(tour).to_have_count(0)
    page.goto(page.url.split("#")[0])
    page.reload()
    expect(page.locator("[data-head='5.1']")).to_be_visible()
    expect(tour).to_have_count(0)


@pytest.mark.parametrize("how", ["key", "button"])
def test_the_tour_can_be_dismissed_and_taken_again(visit: Visits, how: str) -> None:
    page = visit("#/heads", newcomer=True)
    tour = page.get_by_role("dialog", name=TOUR)
    expect(tour).to_be_focused()
    if how == "key":
        page.keyboard.press("Escape")
    else:
        tour.get_by_role("button", name="Skip the tour").click()
    expect(tour).to_have_count(0)
    page.keyboard.press("?")
    page.get_by_role("button", name="Take the tour").click()
    expect(tour).to_be_visible()


def test_a_shared_address_of_a_head_shows_no_tour(visit: Visits) -> None:
    page = visit("#/head?layer=4&head=6", newcomer=True)
    expect(page.get_by_role("application")).to_be_visible()
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_a_head_says_in_a_sentence_what_it_does(visit: Visits, served: Served) -> None:
    page = visit("#/heads?layer=4&head=6")
    expect(page.locator("[data-says]")).to_have_text(said_of(served, "4.6"))
    assert said_of(served, "4.6").startswith("looks at the token before: 8")
    page.locator("[data-head='5.1']").hover()
    expect(page.locator("[data-says]")).to_have_text(said_of(served, "5.1"))
    expect(page.get_by_text("On this input; its type starts at 30%.")).to_be_visible()


def test_a_head_says_it_in_chinese_too(visit: Visits) -> None:
    page = visit("#/head?layer=5&head=1", locale="zh-CN")
    expect(page.locator("[data-says]")).to_contain_text(re.compile("看同一词元上次.*：归纳，占"))


def test_a_figure_is_defined_where_it_stands(visit: Visits) -> None:
    page = visit("#/heads")
    expect(page.locator(".definition")).to_contain_text("entropy · −Σ p log p, in nats")
    keys = page.get_by_role("button", name="effective keys")
    keys.focus()
    expect(page.locator(".definition")).to_contain_text("how many keys a row spreads over")
    described = keys.get_attribute("aria-describedby")
    assert described is not None
    assert page.locator(".definition").get_attribute("id") == described
    page.goto(f"{page.url.split('#')[0]}#/compare")
    term = page.locator(".term", has_text="distance")
    tip = term.get_by_role("tooltip", include_hidden=True)
    expect(tip).to_be_hidden()
    term.hover()
    expect(tip).to_be_visible()


def test_help_says_how_to_read_a_map_and_names_heads_to_open(visit: Visits) -> None:
    page = visit("#/heads")
    expect(page.locator("[data-head='5.1']")).to_be_visible()
    page.keyboard.press("?")
    help = page.get_by_role("dialog")
    expect(help).to_contain_text("How to read a map")
    help.locator("[data-example='4.6']").click()
    expect(page).to_have_url(re.compile("layer=4&head=6"))


def test_example_texts_are_offered_and_read(visit: Visits, serve: Callable[..., Served]) -> None:
    own = serve("gpt", "My dog chased the ball. My dog").wait_until_read()
    page = visit("#/heads?layer=5&head=1", base=own.url)
    expect(page.get_by_text("Too few tokens return in this input")).to_be_visible()
    page.get_by_role("button", name="New text").click()
    page.get_by_role("button", name="random words, three times").click()
    page.get_by_role("button", name="Read it").click()
    expect(page).to_have_url(re.compile("input=1"))
    expect(page.locator("[data-says]")).to_contain_text("induction,")
    page.goto(f"{own.url}/#/compare?of=inputs")
    expect(page.get_by_text("The inputs have")).to_be_visible()
    expect(page.get_by_label("Statistic")).to_have_value("entropy_share")
    shares = page.get_by_role("listitem").all_inner_texts()
    assert all(0 <= float(x) <= 1.01 for said in shares for x in re.findall(r"0\.\d+", said))
