"""A run on the page while it goes on: what is shown is what the watch saw."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from headwise.apps.look.serving import view_file
from headwise.apps.look.session import Progress, Session
from headwise.apps.look.watched_folder import WatchedFolder
from tests.apps.look.conftest import Served, Visits
from tests.apps.look.test_page_narrow import LANGUAGES, try_widths
from tests.apps.look.test_watch_api import Training


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    training = Training(tmp_path / "first-try")
    yield training
    training.close()


@pytest.fixture
def address(training: Training, serve: Callable[..., Served]) -> str:
    """The address of the run, served without a model, as `headwise look RUN` does."""
    session = Session(run=WatchedFolder(training.writer.folder), progress=Progress("ready", None))
    return serve(session).url


def choose(page: Page, layer: int, head: int) -> None:
    """Choose a head in the grid by its keys, as someone without a mouse would."""
    grid = page.get_by_role("application", name="Heads: one row per layer, one column per head")
    grid.focus()
    for key in ("ArrowDown",) * (layer + 1) + ("ArrowRight",) * head + ("Enter",):
        grid.press(key)


def written(value: float) -> str:
    return f"{value:.3g}"


def test_a_growing_run_updates_the_page(address: str, visit: Visits, training: Training) -> None:
    page = visit("#/watch", base=address)
    expect(page.get_by_text("No step has been recorded yet")).to_be_visible()
    training.go_on(3)
    expect(page.get_by_role("heading", name="first-try")).to_be_visible()
    expect(page.get_by_text("step 2", exact=True)).to_be_visible()
    training.go_on(2)
    expect(page.get_by_text("step 4", exact=True)).to_be_visible()
    expect(page.get_by_role("slider", name="Step")).to_have_attribute("max", "4")


def test_a_head_s_number_is_the_library_s(address: str, visit: Visits, training: Training) -> None:
    training.go_on(3)
    page = visit("#/watch?step=1", base=address)
    choose(page, layer=1, head=2)
    expect(page).to_have_url(re.compile(r"step=1&heads=1\.2$"))
    (row,) = training.watch.series[1].table.where(layer=1, head=2)
    said = page.locator(".told")
    expect(said).to_have_text(re.compile(rf"^1\.2 .* {re.escape(written(row['entropy_mean']))}$"))
    page.get_by_label("Figure").select_option("max_logit_max")
    expect(page).to_have_url(re.compile("statistic=max_logit_max"))
    expect(said).to_have_text(re.compile(rf"{re.escape(written(row['max_logit_max']))}$"))


def test_an_alarm_leads_to_its_step_and_head(
    address: str, visit: Visits, training: Training
) -> None:
    training.go_on(4)
    training.sharpen(layer=0, head=1)
    training.go_on(2)
    page = visit("#/watch", base=address)
    alarms = page.get_by_role("region", name="Alarms")
    first = alarms.get_by_role("button", name=re.compile("Logit growth.*0.1"))
    expect(first).to_have_attribute("aria-expanded", "true")  # it is the first, and told at once
    expect(alarms.get_by_text("try a lower learning rate")).to_be_visible()
    first.click()
    first.click()
    expect(page).to_have_url(re.compile(r"step=4&heads=0\.1&statistic=max_logit_max$"))
    curves = page.get_by_role("img", name="Over the steps")
    expect(curves.get_by_text("alarm at 100")).to_be_visible()
    expect(page.get_by_role("listitem").filter(has_text="head 0.1").first).to_be_visible()
    alarms.get_by_text("Logit growth: the rule and its source").click()
    expect(alarms.get_by_text("Kimi K2")).to_be_visible()


def test_the_loss_is_drawn_above_the_steps_and_told_with_the_alarms(
    address: str, visit: Visits, training: Training
) -> None:
    page = visit("#/watch", base=address)
    for step, loss in enumerate((3.0, 2.0, 1.0, 1.0, 4.0, 4.0, 4.0)):
        if step == 3:
            training.sharpen(layer=0, head=1)
        training.watch.log(step, loss=loss)
        training.go_on(1)
    expect(page.get_by_role("img", name="Loss")).to_be_visible()
    told = page.locator("[data-headline]")
    expect(told).to_have_text(re.compile("the first alarm came at step 3: logit growth, head 0.1"))
    expect(told).to_have_text(re.compile("the loss turned 1 steps? later, at step 4"))


def test_two_runs_stand_side_by_side(
    tmp_path: Path, serve: Callable[..., Served], visit: Visits, training: Training
) -> None:
    other = Training(tmp_path / "second-try")
    for each, steps in ((training, 3), (other, 4)):
        each.watch.log(loss=2.0)
        each.go_on(steps)
    folders = [WatchedFolder(each.writer.folder) for each in (training, other)]
    session = Session(run=folders[0], beside=folders[1], progress=Progress("ready", None))
    page = visit("#/watch", base=serve(session).url)
    expect(page.get_by_role("heading", name="second-try")).to_be_visible()
    expect(page.get_by_text("mean of all heads · second-try")).to_be_visible()
    expect(page.get_by_role("application")).to_have_count(2)
    other.close()


def test_a_run_is_told_by_a_file_of_its_own(
    visit: Visits, training: Training, tmp_path: Path
) -> None:
    training.go_on(2)
    training.sharpen(layer=0, head=1)
    training.go_on(2)
    file = tmp_path / "run.html"
    assert view_file.write_run(training.writer.folder, file) == file.stat().st_size
    page = visit(f"{file.as_uri()}#/watch", offline=True)
    expect(page.get_by_role("heading", name="first-try")).to_be_visible()
    expect(page.locator("[data-headline]")).to_contain_text("logit growth")
    page.get_by_label("Figure").select_option("max_logit_max")
    expect(
        page.get_by_role("img", name="Over the steps").get_by_text("alarm at 100")
    ).to_be_visible()


def test_the_slider_and_the_keys_go_through_the_steps(
    address: str, visit: Visits, training: Training
) -> None:
    training.go_on(5)
    page = visit("#/watch", base=address)
    expect(page.get_by_text("step 4", exact=True)).to_be_visible()
    page.get_by_role("slider", name="Step").press("ArrowLeft")
    expect(page).to_have_url(re.compile("step=3$"))
    page.get_by_role("heading", name="first-try").click()
    page.keyboard.press("[")
    expect(page.get_by_text("step 2", exact=True)).to_be_visible()
    page.get_by_role("button", name="Latest").click()
    expect(page).to_have_url(re.compile("#/watch$"))
    page.get_by_role("button", name="Play").click()
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    expect(page).to_have_url(re.compile("step=1$"))


def test_the_page_speaks_chinese_and_shows_a_run_by_itself(
    address: str, visit: Visits, training: Training
) -> None:
    training.go_on(2)
    page = visit("", base=address, locale="zh-CN", color_scheme="dark")
    expect(page.get_by_role("link", name="训练监控")).to_be_visible()
    expect(page.get_by_role("heading", name="警报")).to_be_visible()
    expect(page.get_by_text("第 1 步")).to_be_visible()


@pytest.mark.parametrize("locale", LANGUAGES)
def test_no_part_of_a_run_sticks_out_of_a_narrow_window(
    address: str, visit: Visits, training: Training, locale: str
) -> None:
    training.go_on(2)
    training.sharpen(layer=0, head=1)
    training.go_on(1)
    page = visit("#/watch?heads=0.1", base=address, locale=locale)
    expect(page.locator("section li").first).to_be_visible()
    try_widths(page)


def test_a_folder_that_is_no_run_is_named(address: str, visit: Visits, training: Training) -> None:
    (training.writer.folder / "manifest.json").write_text('{"format": 99}')
    page = visit("#/watch", base=address, allowed="400")
    expect(page.get_by_role("alert")).to_contain_text("was written by a newer headwise")


def test_a_page_that_a_run_has_not_leads_to_the_run(
    address: str, visit: Visits, training: Training
) -> None:
    training.go_on(1)
    page = visit("#/heads", base=address)
    expect(page.get_by_text("There is no such page")).to_be_visible()
    page.get_by_role("button", name="Go to Watch").click()
    expect(page.get_by_role("heading", name="first-try")).to_be_visible()


def test_alarms_speak_the_language_of_the_page(
    address: str, visit: Visits, training: Training
) -> None:
    training.go_on(1)
    training.sharpen(layer=1, head=2)
    training.go_on(1)
    page = visit("#/watch", base=address)
    alarms = page.get_by_role("region", name="Alarms")
    expect(alarms.get_by_text(re.compile(r"its largest logit is .*, above 100"))).not_to_have_count(
        0
    )
    page.keyboard.press("L")
    alarms = page.get_by_role("region", name="警报")
    expect(alarms.get_by_text(re.compile("它的最大 logit 是 .*，超过 100"))).not_to_have_count(0)
    expect(alarms.get_by_text("一个头的最大 logit 超过 100，或为 NaN")).to_have_count(1)
    expect(page.locator("[data-headline]")).to_contain_text("第一个警报出现在第 1 步：logit 过大")
    expect(alarms).not_to_contain_text(re.compile("its |token"))
