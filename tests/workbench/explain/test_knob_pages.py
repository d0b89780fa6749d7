"""Links from `explain` to the pages of the knobs, where the package runs from its source tree."""

from __future__ import annotations

import re

import pytest
from explain_cases import EAGER, HOPPER_PLAIN, CommandLine, explained

from flashwright import parse_config
from flashwright.workbench.explain.knob_pages import SOURCE_TREE, knob_links, knob_pages
from flashwright.workbench.explain.page import config_page


@pytest.mark.parametrize("config", [EAGER, HOPPER_PLAIN])
def test_every_knob_of_a_config_has_a_page(config):
    parsed = parse_config(config)
    assert knob_pages(parsed).keys() == parsed.__dataclass_fields__.keys()


def test_links_lead_from_the_page_to_the_pages(tmp_path):
    links = knob_links(parse_config(EAGER), tmp_path)
    for link in links.values():
        assert (tmp_path / link).resolve().is_relative_to(SOURCE_TREE / "docs/knobs")
        assert (tmp_path / link).is_file()
    page = config_page(explained(EAGER), links)
    assert f'<a href="{links["swizzled"]}">swizzled</a>' in page


def test_an_installed_package_has_no_links(tmp_path):
    assert knob_links(parse_config(EAGER), tmp_path, tree=tmp_path) == {}
    assert not re.findall(r'href="(?!#)[^"]*\.md"', config_page(explained(EAGER), {}))


def test_the_command_writes_links_and_names_the_folder(monkeypatch, capsys, tmp_path):
    command = CommandLine(monkeypatch, capsys)
    code, _, error = command("explain", EAGER, "--no-neighbours", "--html", str(tmp_path / "page.html"))
    assert code == 0, error
    (link,) = re.findall(r'href="([^"]*/B_c\.md)"', (tmp_path / "page.html").read_text("utf-8"))
    assert (tmp_path / link).is_file()
    _, out, _ = command("explain", EAGER, "--no-neighbours")
    assert f"A page on each knob: {SOURCE_TREE / 'docs/knobs'}" in out
