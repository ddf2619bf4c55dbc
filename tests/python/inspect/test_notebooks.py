"""How results are shown in notebooks: HTML in which names are only names."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

import torch

import tenure
from tenure.inspect import verdicts

EVIL = "<script>alert('x')</script>&\"<b>"


class Page(HTMLParser):
    """The elements, what is open at the end, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.open: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, _: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def shown(result: Any) -> Page:
    page = Page(result._repr_html_())
    assert page.open == []
    assert page.tags <= {"div", "ul", "li", "table", "tr", "th", "td"}
    return page


def test_an_explanation() -> None:
    kind = type(EVIL, (), {})
    holder = kind()
    holder.kept = torch.zeros(1000)
    page = shown(tenure.explain(holder.kept))
    assert EVIL in page.text
    assert "held by" in page.text


def leak() -> verdicts.Document:
    with tenure.watch(quiet=True) as session:
        model = torch.nn.Linear(64, 64)
        optimizer, kept = torch.optim.SGD(model.parameters()), []
        for _ in range(40):
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            tenure.step()  # optimizers may not be counted, after tests that announce steps
            kept.append(model(torch.randn(64, 64)))
        return session.verdict()


def test_a_verdict() -> None:
    verdict = leak()
    assert verdict["verdict"] == "leak"
    assert json.loads(json.dumps(verdict)) == verdict
    page = shown(verdict)
    assert "LEAK +" in page.text
    assert "kept (local of leak)" in page.text
    assert "table" in page.tags
    verdict["suspects"][0]["module"] = EVIL
    verdict["suspects"][0]["site"] = EVIL.replace("/", "")  # of a path the last part is shown
    verdict["suspects"][0]["holders"][0][0]["text"] = EVIL
    page = shown(verdict)
    assert page.text.count(EVIL) >= 2
    assert EVIL.replace("/", "") in page.text
    assert "table" in page.tags


def test_a_flat_verdict_of_several_processes() -> None:
    verdict = leak()
    verdict["verdict"] = verdict["ranks"][0]["verdict"] = "flat"
    verdict["ranks"][0]["why"] = EVIL
    verdict["suspects"] = []
    page = shown(verdicts.merged([verdict, verdict]))
    assert page.text.startswith("FLAT over")
    assert EVIL in page.text
