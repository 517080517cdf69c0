"""Read and use the leaderboard's page in a browser, as a reader does."""

from __future__ import annotations

from typing import Any

CSS = "css selector"  # what selenium calls it
HOSTILE = '<img src=x onerror="document.title=1"></script><script>alert(1)</script>'
ROWS = "#rows > tr:not(.panel-row)"


def pictures(page: Any) -> set[str]:
    return {image.get_attribute("src") for image in all_of(page, "img")}


def all_of(page: Any, css: str) -> list[Any]:
    return page.find_elements(CSS, css)


def one(page: Any, css: str) -> Any:
    return page.find_element(CSS, css)


def column(page: Any, key: str) -> list[str]:
    """The cells of a column from top to bottom, as a reader sees their main number or name."""
    script = """
    const names = [...document.querySelectorAll("thead .names th")];
    const place = names.findIndex((th) => th.dataset.column === arguments[0]);
    return [...document.querySelectorAll("%s")].map((tr) => {
      const cell = tr.children[place];
      return (cell.querySelector(".value, .method") || cell).textContent.trim();
    });
    """
    return page.execute_script(script % ROWS, key)


def follow(page: Any, link: str) -> None:
    """Follow a link within the page, and wait until the page has acted on it."""
    script = """
    addEventListener("hashchange", () => setTimeout(arguments[1]), {once: true});
    location.hash = arguments[0];
    """
    page.execute_async_script(script, link)


def choose(page: Any, name: str) -> None:
    """The protocol whose name starts so."""
    (option,) = [o for o in all_of(page, "#protocol option") if o.text.startswith(name)]
    option.click()


def sort_by(page: Any, key: str) -> Any:
    button = one(page, f'thead button[data-key="{key}"]')
    page.execute_script("arguments[0].scrollIntoView({block: 'nearest', inline: 'center'})", button)
    button.click()
    return one(page, f'thead th[data-column="{key}"]')


def method_button(page: Any, number: int) -> Any:
    return all_of(page, f"{ROWS} button.open")[number]
