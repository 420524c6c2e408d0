"""Refusals and missing things on the page, in both languages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Locator, Page, expect

from headwise.apps.look.readers import reader as reading
from headwise.apps.look.readers.builtin import TextReader
from headwise.apps.look.session import Progress
from tests.apps.look.conftest import Served, Visits, start


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    """The built-in GPT, to which texts may be added."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        served = start("gpt", "to be or not to be").wait_until_read()
    yield served
    served.stop()


@pytest.fixture
def own(shared: Served) -> Served:
    """The same, after what others were refused is forgotten."""
    shared.session.progress = Progress("ready", None)
    return shared


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine tokens are too many, which is only noticed while they are read."""
    monkeypatch.setitem(reading.MOST_TOKENS, "cpu", 8)
    monkeypatch.setattr(TextReader, "count", lambda self, text: 1)


def add(page: Page, text: str, chinese: bool = False) -> None:
    page.get_by_role("button", name="新文本" if chinese else "New text").click()
    page.get_by_role("textbox").fill(text)
    page.get_by_role("button", name="读入" if chinese else "Read it").click()


def refused(page: Page) -> Locator:
    """The banner over a text of too many tokens."""
    add(page, "one two three four five six seven eight nine ten")
    return page.get_by_role("alert").filter(has_text="tokens are too many to look at on cpu")


def test_tokens_are_counted_while_one_types_and_too_many_are_not_sent(
    own: Served, visit: Visits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(reading.MOST_TOKENS, "cpu", 8)
    page = visit("#/heads", base=own.url)
    page.get_by_role("button", name="New text").click()
    text, send = page.get_by_role("textbox"), page.get_by_role("button", name="Read it")
    said = page.get_by_role("dialog").get_by_role("status")
    text.fill("to be or not to be")
    expect(said).to_have_text("7 tokens, at most 8")
    expect(send).to_be_enabled()
    text.fill("to be or not to be or not to be")
    expect(said).to_have_text("11 tokens, at most 8")
    expect(send).to_be_disabled()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.get_by_role("button", name="New text").click()
    expect(text).to_have_value("to be or not to be or not to be")  # nothing typed is lost


def test_a_text_that_the_server_refuses_stays_and_escape_closes_its_window(
    own: Served, visit: Visits, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = visit("#/head?layer=5&head=1&row=3", base=own.url, allowed="413")
    page.get_by_role("button", name="New text").click()
    text, long = page.get_by_role("textbox"), "to be or not to be"
    text.fill(long)
    expect(page.get_by_role("dialog").get_by_role("status")).to_contain_text("7 tokens")
    monkeypatch.setitem(reading.MOST_TOKENS, "cpu", 6)
    page.get_by_role("button", name="Read it").click()
    refused = "7 tokens are too many to look at on cpu: at most 6; a GPU takes more"
    expect(page.get_by_role("dialog").get_by_role("alert")).to_have_text(refused)
    expect(text).to_have_value(long)
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page).to_have_url(re.compile("row=3"))  # the view below has not heard the key


def test_a_text_that_is_refused_while_it_is_read_is_kept(
    own: Served, visit: Visits, short: None
) -> None:
    page = visit("#/heads", base=own.url)
    expect(refused(page)).to_be_visible()
    page.get_by_role("button", name="New text").click()
    expect(page.get_by_role("textbox")).to_have_value(re.compile("^one two three"))


@pytest.mark.usefixtures("short")
def test_a_text_that_is_refused_says_so_and_can_be_put_away(own: Served, visit: Visits) -> None:
    page = visit("#/heads", base=own.url)
    banner = refused(page)
    expect(banner).to_contain_text("at most 8; a GPU takes more")
    expect(banner).to_contain_text("the model is ready for another one")
    expect(banner).not_to_contain_text("start headwise look again")
    banner.get_by_role("button", name="Close").click()
    expect(banner).to_be_hidden()
    expect(page.locator("[data-head]")).to_have_count(48)


@pytest.mark.usefixtures("short")
def test_escape_puts_the_banner_away_first_and_then_the_choice(own: Served, visit: Visits) -> None:
    page = visit("#/head?layer=5&head=1&row=3", base=own.url)
    banner = refused(page)
    expect(banner).to_be_visible()
    page.keyboard.press("Escape")
    expect(banner).to_be_hidden()
    expect(page).to_have_url(re.compile("row=3"))
    page.keyboard.press("Escape")
    expect(page).not_to_have_url(re.compile("row=3"))
    expect(refused(page)).to_be_visible()  # it is said again of the next one


def test_a_banner_goes_when_the_next_text_is_read(
    own: Served, visit: Visits, short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = visit("#/heads", base=own.url)
    banner = refused(page)
    expect(banner).to_be_visible()
    page.get_by_role("button", name="中文").click()
    said = page.get_by_role("alert").filter(
        has_text="个词元太多，在 cpu 上最多看 8 个；GPU 上可以更多"
    )
    expect(said).to_contain_text("模型可以读别的输入")
    monkeypatch.setitem(reading.MOST_TOKENS, "cpu", 8000)
    add(page, "so it goes", chinese=True)
    expect(page.get_by_label("输入").locator("option:checked")).to_contain_text("so it goes")
    expect(page.get_by_role("alert")).to_have_count(0)


def test_a_first_text_that_is_refused_leaves_a_model_that_reads(
    serve: Callable[..., Served], visit: Visits
) -> None:
    page = visit(base=serve("gpt", "   ").wait_until_read().url)
    message = page.get_by_role("alert")
    expect(message).to_contain_text("This could not be shown")
    expect(message).to_contain_text("there is no word to look at in '   '")
    message.get_by_role("button", name="New text").click()
    page.get_by_role("textbox").fill("so it goes")
    page.get_by_role("button", name="Read it").click()
    expect(page.locator("[data-head]")).to_have_count(48)


ABSENT = [
    ("head?input=99", "There is no input 99", "没有输入 99", "to be or not to be"),
    ("heads?group=cross", "There is no group cross", "没有 cross 这一组", "Self"),
    ("head?layer=77&head=1", "There is no head 77.1", "没有头 77.1", "5.7"),
    ("heads?layer=0&head=8", "There is no head 0.8", "没有头 0.8", "0.0"),
    ("head?layer=two", "There is no head two.0", "没有头 two.0", "2.0"),
    ("compare?layer2=6", "There is no head 6.0", "没有头 6.0", "3.3"),
]


def test_what_an_address_names_and_is_not_there_is_said(own: Served, visit: Visits) -> None:
    page = visit(base=own.url)
    message = page.get_by_role("alert")
    for asked, english, chinese, there in ABSENT:
        page.goto(f"{own.url}/#/{asked}")
        expect(message).to_contain_text(english)
        page.keyboard.press("L")
        expect(message).to_contain_text(chinese)
        page.keyboard.press("L")
        message.get_by_role("button", name=there).first.click()
        expect(message).to_be_hidden()


def test_the_server_s_refusals_speak_it_too(own: Served, visit: Visits) -> None:
    page = visit("#/why/scale?d=48", base=own.url, allowed="400", locale="zh-CN")
    message = page.get_by_role("alert")
    expect(message).to_contain_text("d=48 超出范围")
    expect(message).to_contain_text("可以是 1 到 1024 之间的 2 的幂")
