"""The site: all pages of the guide, every public name in one group, and versions that agree.

The site is built from .site, by MkDocs. All but the last two tests read its files as text: MkDocs
need not be installed.
"""

import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import pureaccum as pa


pytestmark = [pytest.mark.laws, pytest.mark.promise("pages")]
ROOT = Path(__file__).parents[2]
SITE = ROOT / ".site"
CONFIG = (SITE / "mkdocs.yml").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CITATION = dict(re.findall(r"^([\w-]+): (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE))
HOOKS = runpy.run_path(str(SITE / "hooks.py"))
REPOSITORY = "https://github.com/pureaccum/pureaccum"


# Pages and names -----------------------------------------------------------------------------


def test_every_page_of_the_guide_is_in_the_navigation_once():
    listed = re.findall(r"^ +- .+: (\S+\.md)$", CONFIG, re.MULTILINE)
    reference = [f"reference/{name}.md" for name in ("index", *HOOKS["groups"]())]
    elsewhere = [page for page in HOOKS["PAGES"].values() if page.endswith(".md")]
    assert sorted(listed) == sorted([*reference, *elsewhere])
    guide = (ROOT / "examples" / "guide").glob("*.md")
    assert {f"guide/{path.name}" for path in guide} <= set(listed)


def test_every_page_comes_from_a_file():
    assert [source for source in HOOKS["PAGES"] if not (ROOT / source).is_file()] == []


def test_every_public_name_is_in_one_group_of_the_reference():
    assert HOOKS["faults"]() == []
    names = [name for group in HOOKS["groups"]().values() for name in group]
    assert {"pureaccum.grad", "pureaccum.curvature.cg", "pureaccum.testing.unchanged"} <= set(names)
    assert len(names) > 90


def test_a_name_without_a_place_is_found(monkeypatch):
    names, groups = HOOKS["public"](), HOOKS["groups"]()
    space = HOOKS["faults"].__globals__
    monkeypatch.setitem(space, "public", lambda: names | {"pureaccum.grand"})
    monkeypatch.setitem(space, "first_sentence", lambda name: "" if "rand" in name else "It is.")
    groups["disk"] = groups["disk"] | {"pureaccum.grad": "", "pureaccum.loan": ""}
    monkeypatch.setitem(space, "groups", lambda: groups)
    assert HOOKS["faults"]() == [
        "pureaccum.grand is on no page of .site/pages/reference",
        "pureaccum.loan is on a page, and is not public",
        "pureaccum.grad is on two pages",
        "pureaccum.grand has no docstring",
    ]


def test_all_names_have_a_line_each():
    page = HOOKS["all_names"](["gradient", "curvature"])
    assert page.count("\n## ") == 2
    line = "| [`pa.grad`](gradient.md#pureaccum.grad) | ``torch.func.grad`` in the memory of one"
    assert line in page
    assert "| [`pa.curvature.cg`](curvature.md#pureaccum.curvature.cg.cg) | " in page


# Markdown ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "link", "there"),
    [
        ("README.md", "examples/guide/ideas.md#a-b", "guide/ideas.md#a-b"),
        ("README.md", f"{REPOSITORY}/blob/main/examples/guide/ideas.md#a", "guide/ideas.md#a"),
        (
            "README.md",
            "https://raw.githubusercontent.com/pureaccum/pureaccum/main/examples/guide/memory.svg",
            "guide/memory.svg",
        ),
        ("README.md", ".github/SECURITY.md", f"{REPOSITORY}/blob/main/.github/SECURITY.md"),
        ("README.md", f"{REPOSITORY}/issues", f"{REPOSITORY}/issues"),
        ("README.md", "https://arxiv.org/abs/1812.06162", "https://arxiv.org/abs/1812.06162"),
        ("README.md", "#here", "#here"),
        ("examples/README.md", "costs.ipynb", "costs.md"),
        ("examples/README.md", "guide/ideas.md", "../guide/ideas.md"),
        ("examples/guide/ideas.md", "training.md#x", "training.md#x"),
        ("examples/guide/ideas.md", "../README.md", "../examples/index.md"),
        ("examples/guide/ideas.md", "../../CHANGELOG.md", "../changelog.md"),
        ("examples/guide/ideas.md", "../digits.py", f"{REPOSITORY}/blob/main/examples/digits.py"),
        ("examples/guide/ideas.md", "../../tests/zoo", f"{REPOSITORY}/tree/main/tests/zoo"),
        ("README.md", "examples/nothing.md", "no-such-file/examples/nothing.md"),
        ("README.md", f"{REPOSITORY}/blob/main/nothing.py", "no-such-file/nothing.py"),
    ],
)
def test_a_link_leads_to_a_page_or_to_a_file_of_the_repository(source, link, there):
    page = "[`f[0](x)`]({0}) and `[no](no.md)`\n```python\n[no](no.md)\n```\n![a\nb]({0})\n"
    assert HOOKS["with_links"](page.format(link), source, REPOSITORY) == page.format(there)


def test_what_python_markdown_reads_otherwise_is_rewritten():
    page = "Text\n- a\n  more\n  - b\n\n```python optax\n- x\n  - y\n```\n\n1. c\n   - d\n"
    rewritten = "Text\n\n- a\n  more\n    - b\n\n```python\n- x\n  - y\n```\n\n1. c\n      - d\n"
    assert HOOKS["as_python_markdown"](page) == rewritten


def test_a_notebook_becomes_a_page():
    cells = [
        {"cell_type": "markdown", "source": ["# A\n", "b"]},
        {"cell_type": "code", "source": ["print(1)"], "outputs": [{"text": ["1\n"]}]},
    ]
    page = "# A\nb\n\n```python\nprint(1)\n```\n\n```text\n1\n```\n"
    assert HOOKS["notebook"](json.dumps({"cells": cells})) == page


# Versions and addresses ----------------------------------------------------------------------


def test_versions_agree():
    assert PROJECT["version"] == pa.__version__ == CITATION["version"]


def test_the_style_is_checked_by_one_version_of_ruff():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    [rev] = re.findall(r"ruff-pre-commit\n +rev: v([\d.]+)", hooks)
    assert f"ruff=={rev}" in PROJECT["optional-dependencies"]["dev"]


def test_all_of_the_site_is_pinned():
    assert all("==" in package for package in PROJECT["optional-dependencies"]["docs"])


def test_addresses_agree():
    config = dict(re.findall(r"^(\w+): (\S+)$", CONFIG, re.MULTILINE))
    urls = PROJECT["urls"]
    assert config["repo_url"] == urls["Source"] == CITATION["repository-code"] == REPOSITORY
    assert config["site_url"] == urls["Documentation"] == CITATION["url"]
    assert {url.startswith(f"{REPOSITORY}/") for url in (urls["Changelog"], urls["Issues"])} == {
        True
    }
    assert [x["name"] for x in PROJECT["authors"]] == ["The pureaccum authors"]
    assert "- name: The pureaccum authors" in (ROOT / "CITATION.cff").read_text()
    assert PROJECT["license"] == CITATION["license"]


# The site itself -----------------------------------------------------------------------------


class Page(HTMLParser):
    """Where a page's links lead, what it loads, and its anchors."""

    def __init__(self, path):
        super().__init__()
        self.links, self.loaded, self.anchors = [], [], set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.anchors |= {attrs.get("id"), attrs.get("name")}
        self.links += filter(None, (attrs.get("href"), attrs.get("src")))
        if tag in ("script", "img", "iframe"):
            self.loaded += filter(None, [attrs.get("src")])
        elif tag == "link" and attrs.get("rel") != "canonical":
            self.loaded.append(attrs["href"])


def build(folder, config=SITE / "mkdocs.yml"):
    env = os.environ | {"OFFLINE": "true", "NO_MKDOCS_2_WARNING": "1"}
    command = ["build", "--config-file", str(config), "--site-dir", str(folder)]
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", *command], env=env, capture_output=True, text=True
    )


installed = pytest.mark.skipif(
    not (find_spec("mkdocs") and find_spec("mkdocstrings")), reason="needs the extra docs"
)


@installed
@pytest.mark.slow  # half a minute
def test_the_site_is_built_and_no_link_is_dead_and_nothing_comes_from_elsewhere(tmp_path):
    built = build(tmp_path)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {path.resolve(): Page(path) for path in tmp_path.rglob("*.html")}
    for path, page in pages.items():
        assert not [address for address in page.loaded if urlsplit(address).netloc], path
        for link in page.links if path.name != "404.html" else ():
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            to = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert to.exists(), (path, link)
            if parts.fragment and not parts.fragment.startswith("__"):
                assert unquote(parts.fragment) in pages[to].anchors, (path, link)
    names = [name for group in HOOKS["groups"]().values() for name in group]
    text = (tmp_path / "reference" / "index.html").read_text(encoding="utf-8")
    assert [name for name in names if name.replace("pureaccum", "pa", 1) not in text] == []


@installed
@pytest.mark.slow
def test_a_dead_link_or_a_name_that_is_none_ends_the_build(tmp_path):
    """Of one page, without the hooks."""
    pages = tmp_path / "pages"
    pages.mkdir()
    config = re.sub(r"^nav:\n(?: .+\n)+|^hooks:\n(?: .+\n)+", "", CONFIG, flags=re.MULTILINE)
    for here, there in {
        "docs_dir: pages": f"docs_dir: {pages}",
        "custom_dir: overrides": f"custom_dir: {SITE / 'overrides'}",
        "paths: [..]": f"paths: [{ROOT}]",
        "[docstrings.py]": f"[{SITE / 'docstrings.py'}]",
        "extra.css": "",
        "[iframe-worker.js]": "[]",
    }.items():
        assert here in config
        config = config.replace(here, there)
    (tmp_path / "mkdocs.yml").write_text(config.replace("extra_css:\n  - \n", ""))
    for text, good in {
        "# A page\n\n[alive](#a-page)\n\n::: pureaccum.global_norm\n": True,
        "# A page\n\n[dead](nothing.md)\n": False,
        "# A page\n\n[dead](#nothing)\n": False,
        "# A page\n\n::: pureaccum.grand\n": False,
    }.items():
        (pages / "index.md").write_text(text)
        built = build(tmp_path / "built", tmp_path / "mkdocs.yml")
        assert (built.returncode == 0) == good, built.stdout + built.stderr
