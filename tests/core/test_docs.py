"""Links between the pages lead somewhere, and what the pages show exists."""

import re

import pytest

from flashot_backends.config import Settings
from tests.core.conftest import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_exist(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert [page.name for page in PAGES[1:] if page.name != "index.md" and f"({page.name})" not in index] == []


@pytest.mark.parametrize("page", ["README.md", "docs/settings.md"])
def test_every_setting_is_described(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert [key for key in Settings._fields if f"| `{key}` |" not in text] == []
