"""The leaderboard's page from the keyboard, in light and dark."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.page.board_page import (
    column,
    method_button,
    one,
)
from tests.helpers.page.browser import MISSING

if MISSING:
    pytest.skip(MISSING, allow_module_level=True)

from selenium.webdriver.common.keys import Keys

pytestmark = pytest.mark.full


def test_everything_works_from_the_keyboard(page):
    first = method_button(page, 0)
    page.execute_script("arguments[0].focus()", first)
    focused = page.switch_to.active_element
    focused.send_keys(Keys.ENTER)
    assert first.get_attribute("aria-expanded") == "true"
    focused.send_keys(Keys.ARROW_DOWN)
    assert page.switch_to.active_element == method_button(page, 1)
    page.switch_to.active_element.send_keys(Keys.END)
    assert page.switch_to.active_element == method_button(page, -1)
    page.switch_to.active_element.send_keys(Keys.HOME)
    page.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert first.get_attribute("aria-expanded") == "false"
    assert page.switch_to.active_element == first
    first.send_keys("/")
    assert page.switch_to.active_element == one(page, "#search")
    header = one(page, 'thead button[data-key="method"]')
    page.execute_script("arguments[0].focus()", header)
    header.send_keys(Keys.SPACE)
    assert column(page, "method") == sorted(column(page, "method"))


def test_tab_reaches_every_control_and_what_has_the_focus_is_seen(page):
    page.execute_script("document.activeElement.blur()")
    seen = []
    for _ in range(14):
        one(page, "body").send_keys(
            Keys.TAB
        ) if not seen else page.switch_to.active_element.send_keys(Keys.TAB)
        seen.append(page.switch_to.active_element)
    ids = {element.get_attribute("id") for element in seen}
    assert {"theme", "protocol", "search", "frame"} <= ids
    outline = "return getComputedStyle(document.activeElement).outlineStyle"
    assert page.execute_script(outline) == "solid"


def brightness(page: Any) -> int:
    color = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    return sum(int(part) for part in color.strip("rgb()").split(",")[:3])


def test_it_is_light_or_dark_as_the_system_or_the_reader_wishes(page):
    def system(scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    try:
        system("dark")
        assert brightness(page) < 150
        system("light")
        assert brightness(page) > 600
        theme = one(page, "#theme")
        theme.click()
        theme.click()
        assert theme.text == "Theme: dark"
        assert brightness(page) < 150
        system("dark")
        theme.click()
        theme.click()
        assert theme.text == "Theme: light"
        assert brightness(page) > 600
    finally:
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
