"""A page of HTML as a test reads it."""

import re
from html.parser import HTMLParser

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Page(HTMLParser):
    """Follows a page: open elements, identifiers, what it would load, its text, and its tables by section."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.identifiers: list[str] = []
        self.loads: list[str] = []
        self.text = ""
        self.rows: dict[str, list[float]] = {}
        self._section = ""
        self._row = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        if "id" in named:
            self.identifiers.append(named["id"] or "")
        targets = [named.get(name) or "" for name in ("src", "href", "xlink:href", "srcset", "data", "action")]
        self.loads += [target for target in targets if target and not target.startswith("#")]
        self.loads += re.findall(r"url\((?!#)[^)]*\)|@import", named.get("style") or "")
        if tag == "h2":
            self._section = ""
        if tag == "tr":
            self._row = ""
        if tag == "data":
            self.rows.setdefault(f"{self._section}: {self._row}", []).append(float(named["value"] or ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1] == tag, f"</{tag}> closes <{self.open[-1]}> at {self.getpos()}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text += data
        if "h2" in self.open:
            self._section += data
        if "td" in self.open and not self._row:
            self._row = data
