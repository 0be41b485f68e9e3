"""Links in the pages lead somewhere: files and headings exist, addresses are well-formed."""

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest


pytestmark = [pytest.mark.laws, pytest.mark.promise("pages")]
ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "examples" / "guide").glob("*.md")),
    ROOT / ".github" / "SECURITY.md",
    ROOT / "examples" / "README.md",
]
FENCED = re.compile(r"^(```+|~~~+).*?^\1$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[(?:[^][]|\[[^][]*\])*\]\(\s*([^()\s]*)[^()]*\)|^\[[^]^]+\]:\s*(\S+)", re.M)
BARE = re.compile(r"(?<![(\w])(?:https?|ftp)://[^\s)>]+")
HEADING = re.compile(r"^ {0,3}#{1,6} +(.+?)(?: +#+)? *$", re.MULTILINE)
# What a package index shows has links to the repository itself; they are looked up here.
HOME = re.compile(
    r"https://(?:github\.com/pureaccum/pureaccum/blob|raw\.githubusercontent\.com/pureaccum/pureaccum)"
    r"/main/"
)
HOST = re.compile(r"(?:[a-z0-9](?:[a-z0-9-]*[a-z0-9])?\.)+[a-z]{2,}")


def links(page):
    """Where the links of a page point, those in code left out."""
    text = re.sub(r"`[^`\n]+`", "``", FENCED.sub("", page))
    for link in LINK.finditer(text):
        yield link[1] if link[1] is not None else link[2]
    yield from BARE.findall(text)


def anchors(page):
    """The anchors that GitHub gives a page's headings."""
    found = {}
    for heading in HEADING.findall(FENCED.sub("", page)):
        text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", heading)  # of a link its words
        # letters, digits, hyphens and underscores stay; each blank becomes a hyphen
        name = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        found[name] = found.get(name, -1) + 1
        if found[name]:
            found[f"{name}-{found[name]}"] = 0
    return set(found)


def wrong(link, page):
    """What is wrong with a link on a page."""
    if HOME.match(link):
        return wrong(HOME.sub("", link), ROOT / "README.md")
    parts = urlsplit(link)
    if parts.scheme or link.startswith("//"):
        if parts.scheme != "https":
            return "not https"
        return None if HOST.fullmatch(parts.netloc) else "no such host"
    to = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if ROOT not in (to, *to.parents):
        return "outside of the project"
    if not to.exists():
        return "no such file"
    if parts.fragment and (to.suffix != ".md" or parts.fragment not in anchors(to.read_text())):
        return "no such heading"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    found = {link: wrong(link, page) for link in links(page.read_text(encoding="utf-8"))}
    assert not {link: why for link, why in found.items() if why}


def test_the_readme_has_absolute_links():
    """Others break on a package index."""
    found = [*links((ROOT / "README.md").read_text(encoding="utf-8"))]
    assert all(link.startswith("https://") for link in found)
    assert len([*filter(HOME.match, found)]) > 10


def test_links_are_found_as_markdown_writes_them():
    page = (
        "[a](a.md) ![b](b.png 'title') [`c`](c.md#d) [e [f]](#g)\n[h]: i.md\n<https://j.org>\n"
        "`[no](no.md)`\n```sh\n[no](no.md) http://no.org\n```\nhttp://k.org\n"
    )
    expected = ["a.md", "b.png", "c.md#d", "#g", "i.md", "https://j.org", "http://k.org"]
    assert sorted(links(page)) == sorted(expected)


def test_anchors_are_those_of_github():
    page = (
        "# `loss / k`, and more\n## A [link](x.md)\n## Several  blanks\n## Twice\n## Twice\n"
        "```sh\n# no heading\n```\n### snake_case-and-ünïcode: 1.5×\n####### no heading\n"
    )
    assert anchors(page) == {
        *("loss--k-and-more", "a-link", "several--blanks", "twice", "twice-1"),
        "snake_case-and-ünïcode-15",
    }


@pytest.mark.parametrize(
    ("link", "why"),
    [
        ("CONTRIBUTING.md", None),
        ("CONTRIBUTING.md#rules", None),
        ("examples", None),
        ("https://github.com/pureaccum/pureaccum/blob/main/CONTRIBUTING.md#rules", None),
        ("https://github.com/pureaccum/pureaccum/blob/main/no.md", "no such file"),
        ("https://arxiv.org/abs/1812.06162#part", None),
        ("#nowhere", "no such heading"),
        ("CONTRIBUTING.md#nowhere", "no such heading"),
        ("pyproject.toml#rules", "no such heading"),
        ("examples/nothing.py", "no such file"),
        ("../elsewhere.md", "outside of the project"),
        ("http://arxiv.org", "not https"),
        ("mailto:a@b.org", "not https"),
        ("https://arxiv", "no such host"),
        ("https://user@arxiv.org", "no such host"),
    ],
)
def test_what_is_wrong_with_a_link_is_said(link, why):
    assert wrong(link, ROOT / "README.md") == why
