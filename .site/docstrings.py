"""Docstrings as Markdown: what ``help()`` shows well becomes what the site shows well.

A link is `` `text <address>`_ ``, code follows ``::``, several arguments may share one entry, and
"As for ``grad``." stands for what ``grad`` says of the same argument. Annotations that are names of
a few literals are written out.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from textwrap import dedent, indent

import griffe


LINK = re.compile(r"`([^`<>]+?)\s+<([^<>`\s]+)>`_")
CODE = re.compile(r"^(.*)::\n\n((?: {4}.*\n|\n)*(?: {4}.*(?:\n|\Z)))", re.MULTILINE)
SECTION = re.compile(r"^([A-Z]\w+):\n((?: {4}.*(?:\n|\Z)|\n)+)", re.MULTILINE)
SEE = re.compile(r"\b(as for|see) ``(\w+)``", re.IGNORECASE)
TAG = re.compile(  # or code
    r"^```.*?^```$|^Examples:\n(?: {4}[^\n]*\n|\n)+|``.*?``|<(?=\w)", re.MULTILINE | re.DOTALL
)
SAME = re.compile(r"As for ``(\w+)``\.")
Docs = dict[str, tuple[str, str]]  # where each public name lies, and its docstring


def markdown(doc: str, docs: Docs) -> str:
    """A docstring as griffe's parser and Markdown take it."""
    doc = SECTION.sub(lambda found: _section(found[1], dedent(found[2]).strip(), docs), doc)
    doc = CODE.sub(lambda found: f"{found[1]}:\n\n{_fenced(found[2])}\n", doc)
    doc = LINK.sub(lambda found: f"[{' '.join(found[1].split())}]({found[2]})", doc)
    doc = TAG.sub(lambda found: "&lt;" if found[0] == "<" else found[0], doc)
    return SEE.sub(lambda found: _reference(found, docs), doc)


def _fenced(code: str) -> str:
    return f"```python\n{dedent(code).strip()}\n```"


def _section(title: str, text: str, docs: Docs) -> str:
    if title == "References":
        return f"**{title}:** {text}\n\n"
    if title in ("Args", "Attributes"):
        text = "\n".join(f"{name}: {about}" for name, about in _entries(text, docs))
    if title == "Returns":  # one value: its first words before a colon are no type
        text = re.sub(r"\A([^`\n]*?): ", r"\1&#58; ", text)
    title = {"Example": "Examples"}.get(title, title)
    return f"{title}:\n{indent(text, '    ')}\n\n"


def _entries(text: str, docs: Docs) -> Iterator[tuple[str, str]]:
    for entry in re.split(r"\n(?=\S)", text):
        names, _, about = entry.partition(":")
        for name in map(str.strip, names.split(",")):
            same = SAME.fullmatch(about.strip())
            known = same and same[1] in docs
            yield name, _of_another(name, docs[same[1]][1], docs) if known else about.strip()


def _of_another(name: str, doc: str, docs: Docs) -> str:
    sections = {title: dedent(text) for title, text in SECTION.findall(doc)}
    return dict(_entries(sections["Args"].strip(), docs))[name]


def _reference(found: re.Match[str], docs: Docs) -> str:
    word, name = found.groups()
    return f"{word} [`{name}`][{docs[name][0]}]" if name in docs else found[0]


def _attributes(module: griffe.Module) -> Iterator[griffe.Attribute]:
    for member in module.members.values():
        if isinstance(member, griffe.Module):
            yield from _attributes(member)
        elif isinstance(member, griffe.Attribute):
            yield member


class Docstrings(griffe.Extension):
    """Rewrites the docstrings and annotations of a package, once it is loaded."""

    def on_package(self, *, pkg: griffe.Module, **_: object) -> None:
        """Read what the public names say, then rewrite."""
        self._docs: Docs = {}
        self._literals = {
            it.path: it.value for it in _attributes(pkg) if "Literal[" in str(it.value)
        }
        for module in (pkg, *(pkg[name] for name in ("curvature", "distributed", "testing"))):
            for name, it in module.members.items():
                ours = not it.is_alias or it.target_path.startswith("pureaccum.")
                if ours and name[0] != "_" and (it.is_function or it.is_class) and it.docstring:
                    self._docs[name] = it.path, it.docstring.value
        self._rewrite(pkg)

    def _rewrite(self, it: griffe.Object) -> None:
        if it.docstring:
            it.docstring.value = markdown(it.docstring.value, self._docs)
        if isinstance(it, griffe.Function):
            for parameter in it.parameters:
                parameter.annotation = self._written_out(parameter.annotation)
            it.returns = self._written_out(it.returns)
        for member in it.members.values():
            if not member.is_alias:
                self._rewrite(member)

    def _written_out(self, it: str | griffe.Expr | None) -> str | griffe.Expr | None:
        if isinstance(it, griffe.ExprBinOp):
            return replace(it, left=self._written_out(it.left), right=self._written_out(it.right))
        if isinstance(it, griffe.ExprName | griffe.ExprAttribute):
            return self._literals.get(it.canonical_path, it)
        return it
