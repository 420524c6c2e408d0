"""The page in a notebook: the bundle as anywidget loads it, answers as the kernel gives them."""

import base64
import json
from typing import Any

from playwright.sync_api import Page, expect

from headwise.apps.look.serving.widget import replied
from tests.apps.look.conftest import Served, Visits

NOTEBOOK = """async () => {
  const { default: widget } = await import('/headwise.js');
  const listeners = {};
  const traits = { height: 500, view: '#/heads?order=rising' };
  const model = {
    get: (name) => traits[name],
    set: (name, value) => { traits[name] = value; },
    save_changes: () => { window.saved = { ...traits }; },
    on: (event, listener) => { (listeners[event] ??= []).push(listener); },
    off: (event, gone) => { listeners[event] = listeners[event].filter((each) => each !== gone); },
    send: async (content) => {
      const { message, base64 } = await window.kernel(content);
      const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
      const padded = new Uint8Array(bytes.length + 3);
      padded.set(bytes, 3);  // a buffer inside a larger one, as they come
      const buffers = base64 ? [new DataView(padded.buffer, 3)] : [];
      for (const listener of listeners['msg:custom']) listener(message, buffers);
    },
  };
  document.body.innerHTML = '<p>A cell above.</p><div id="cell"></div>';
  const link = document.createElement('link');
  link.rel = 'stylesheet';
  link.href = '/headwise.css';
  document.head.append(link);
  window.close_widget = widget.render({ model, el: document.getElementById('cell') });
  window.change = (view) => { traits.view = view; listeners['change:view'].forEach((f) => f()); };
  window.listening = () => Object.values(listeners).flat().length;
}"""
"""A page that does what anywidget does in JupyterLab and VS Code."""


def open_notebook(visit: Visits, served: Served) -> Page:
    """A page like a notebook's, whose kernel answers from the session."""
    # A style sheet names no icon, so the browser asks for one that is not there.
    page = visit("headwise.css", allowed="404 (Not Found)")

    def kernel(content: dict[str, Any]) -> dict[str, Any]:
        given = replied(served.session, content, [])
        message = {"id": content["id"], "status": given.status, "headers": given.headers}
        if given.media == "application/json":
            return {"message": message | {"json": json.loads(given.body)}, "base64": ""}
        return {"message": message, "base64": base64.b64encode(given.body).decode()}

    page.expose_function("kernel", kernel)
    page.evaluate(NOTEBOOK)
    return page


def test_the_widget_shows_the_view_its_trait_names(visit: Visits, served: Served) -> None:
    page = open_notebook(visit, served)
    heads = page.locator("[data-head]")
    expect(heads).to_have_count(48)
    expect(heads.first).to_have_attribute("data-head", "4.6")
    box = page.locator("#cell").bounding_box()
    assert box is not None
    assert box["height"] == 500
    expect(page.locator("p").first).to_have_css("font-size", "16px")  # the notebook's own style


def test_the_widget_s_view_is_a_trait_both_ways(visit: Visits, served: Served) -> None:
    page = open_notebook(visit, served)
    page.get_by_role("link", name="Compare").click()
    expect(page.get_by_role("figure", name="First − second")).to_be_visible()
    assert page.evaluate("saved.view").startswith("#/compare")
    assert page.evaluate("location.hash") == ""
    page.evaluate("change('#/heads?filter=5.1')")
    expect(page.locator("[data-head]")).to_have_count(1)


def test_a_closed_widget_leaves_nothing_behind(visit: Visits, served: Served) -> None:
    page = open_notebook(visit, served)
    expect(page.locator("[data-head]")).to_have_count(48)
    page.evaluate("close_widget()")
    expect(page.locator("#cell > *")).to_have_count(0)
    assert page.evaluate("listening()") == 0


def test_keys_outside_the_widget_stay_the_notebook_s(visit: Visits, served: Served) -> None:
    page = open_notebook(visit, served)
    first = page.locator("[data-head]").first
    expect(first).to_have_attribute("data-head", "4.6")
    page.keyboard.press("s")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(first).to_have_attribute("data-head", "4.6")
    first.focus()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
