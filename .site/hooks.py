"""Where the pages of the site come from: the repository's own Markdown, and the docstrings.

``PAGES`` maps files of the repository to pages. A link in one of them is written for GitHub; here
it becomes a link to another page, or to the file on GitHub. The page of all names is made of the
``:::`` lines of the pages in ``pages/reference`` and of docstrings. No file is changed.

Nothing of MkDocs is imported at the top: tests read this file where it is not installed.
"""

import inspect
import json
import os
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


SITE = Path(__file__).parent
ROOT = SITE.parent
REFERENCE = SITE / "pages" / "reference"
GUIDE = "examples/guide"
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/README.md": "examples/index.md",
    "examples/costs.ipynb": "examples/costs.md",
    f"{GUIDE}/memory.svg": "guide/memory.svg",
    **{f"{GUIDE}/{path.name}": f"guide/{path.name}" for path in (ROOT / GUIDE).glob("*.md")},
}
SOURCES = {page: source for source, page in PAGES.items()}
REF = os.environ.get("SITE_REF", "main")  # the branch or tag that links to files on GitHub name

# The modules whose functions and classes are public.
MODULES = (
    "pureaccum",
    "pureaccum.curvature",
    "pureaccum.distributed",
    "pureaccum.testing",
    "pureaccum.testing.strategies",
)


# Names ---------------------------------------------------------------------------------------


def public() -> set[str]:
    """Every public function and class, as ``__all__`` lists them."""
    found: set[str] = set()
    for path in MODULES:
        module = import_module(path)
        for name in module.__all__:
            it = getattr(module, name)
            if inspect.isroutine(it) or inspect.isclass(it):
                found.add(f"{path}.{name}")
    return found


def groups() -> dict[str, dict[str, str]]:
    """The public names on each page of the reference, and the anchor of each.

    A function that has the name of its file, as ``curvature.cg`` has, is found under
    ``curvature.cg.cg``. The records that functions return are not public names.
    """
    found: dict[str, dict[str, str]] = {}
    for page in sorted(REFERENCE.glob("*.md")):
        anchors = re.findall(r"^::: ([\w.]+)$", page.read_text("utf-8"), re.MULTILINE)
        names = {re.sub(r"\.(\w+)\.\1$", r".\1", anchor): anchor for anchor in anchors}
        if len(names) < len(anchors):
            raise ValueError(f"{page} lists a name twice")
        found[page.stem] = {name: at for name, at in names.items() if is_public(name)}
    return found


def is_public(name: str) -> bool:
    """Whether a user writes this name."""
    return "._" not in name and ".fixtures." not in name


def first_sentence(name: str) -> str:
    """The first paragraph of the docstring of a name."""
    module, _, last = name.rpartition(".")
    doc = inspect.getdoc(getattr(import_module(module), last)) or ""
    return " ".join(doc.split("\n\n")[0].split())


def all_names(order: list[str]) -> str:
    """The page of all names, by group."""
    listed = groups()
    text = "# All names\n\nEvery public name and what it does. `import pureaccum as pa`.\n"
    for stem in order:
        page = (REFERENCE / f"{stem}.md").read_text("utf-8")
        title = re.search(r"^# (.+)$", page, re.MULTILINE)
        text += f"\n## [{title[1] if title else stem}]({stem}.md)\n\n| | |\n|---|---|\n"
        for name, anchor in listed[stem].items():
            says = first_sentence(name).replace("|", r"\|")
            shown = name.replace("pureaccum", "pa", 1)
            text += f"| [`{shown}`]({stem}.md#{anchor}) | {says} |\n"
    return text


def faults() -> list[str]:
    """What is wrong with the reference: a name on no page or on two, or without a docstring."""
    names = public()
    placed = [name for page in groups().values() for name in page]
    return [
        *(f"{name} is on no page of .site/pages/reference" for name in sorted(names - {*placed})),
        *(f"{name} is on a page, and is not public" for name in sorted({*placed} - names)),
        *(f"{name} is on two pages" for name in sorted({x for x in placed if placed.count(x) > 1})),
        *(f"{name} has no docstring" for name in sorted(names) if not first_sentence(name)),
    ]


# Pages ---------------------------------------------------------------------------------------

LINK = re.compile(
    r"^(?P<fence>```+|~~~+).*?^(?P=fence)[ \t]*$"  # code, left alone
    r"|(?P<ticks>`+)(?:[^`\n]|\n(?!\n))+?(?P=ticks)"
    r"|(?<=\]\()(?P<link>[^()\s]+)",
    re.MULTILINE | re.DOTALL,
)


def with_links(text: str, source: str, repository: str) -> str:
    """Markdown of a file of the repository, with links as they are on its page."""
    base = f"{repository}/blob/main/"
    raw = base.replace("github.com", "raw.githubusercontent.com").replace("/blob/", "/")

    def there(found: re.Match[str]) -> str:
        link = found["link"]
        if link is None or link.startswith("#"):
            return found[0]
        start = next((x for x in (base, raw) if link.startswith(x)), None)
        if start is None and "://" in link:
            return link
        path, mark, anchor = link.removeprefix(start or "").partition("#")
        to = os.path.normpath(path if start else os.path.join(os.path.dirname(source), path))
        if to in PAGES:
            here = os.path.dirname(PAGES[source])
            return os.path.relpath(PAGES[to], here or ".") + mark + anchor
        if not (ROOT / to).exists():
            return f"no-such-file/{to}"  # which MkDocs reports
        kind = "tree" if (ROOT / to).is_dir() else "blob"
        return f"{repository}/{kind}/{REF}/{to}{mark}{anchor}"

    return LINK.sub(there, text)


def as_python_markdown(text: str) -> str:
    """The few things that Python-Markdown reads otherwise than GitHub does.

    A nested list is indented by four, a list begins after a blank line, and a fence names a
    language alone.
    """
    lines: list[str] = []
    fence = ""
    for line in text.split("\n"):
        mark = re.match(r"(```+|~~~+)", line)
        if mark:
            if not fence:
                line = re.sub(r"^(```+\w+) .*", r"\1", line)
            fence = "" if fence else mark[1]
        item = not fence and re.match(r"( *)([-*+]|\d+\.) ", line)
        if item:
            before = lines[-1] if lines else ""
            listed = re.match(r" *(?:[-*+]|\d+\.) | +\S", before)
            if before and not listed and item[2] in "-*+1.":
                lines.append("")
            line = item[1] + line
        lines.append(line)
    return "\n".join(lines)


def notebook(text: str) -> str:
    """A notebook as Markdown: its cells, and what they printed."""
    parts: list[str] = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            shown = output.get("text") or output["data"]["text/plain"]
            parts.append(f"```text\n{''.join(shown).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


# What MkDocs calls ---------------------------------------------------------------------------


def on_files(files: Any, config: Any, **_: Any) -> None:
    """Add the pages that lie elsewhere in the repository, and the page of all names."""
    from mkdocs.exceptions import PluginError
    from mkdocs.structure.files import File

    sys.path.insert(0, str(ROOT))
    if wrong := faults():
        raise PluginError("\n".join(wrong))
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    order = re.findall(r"'reference/(?!index)(\w+)\.md'", str(config.nav))
    files.append(File.generated(config, "reference/index.md", content=all_names(order)))


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Rewrite a page that lies elsewhere."""
    source = SOURCES.get(page.file.src_uri)
    if not source:
        return markdown
    if source.endswith(".ipynb"):
        markdown = notebook(markdown)
    return as_python_markdown(with_links(markdown, source, config.repo_url))
