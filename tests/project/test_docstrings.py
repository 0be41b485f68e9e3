"""Every public name says what it is in one form; names are found by looking, so none is left out.

sentence, The rule, Args or Attributes, Example (a doctest)

Returns stands where it says more than the annotation, References where there are any to others.
"""

import ast
import inspect
import re
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple, get_type_hints

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pureaccum as pa
from pureaccum.testing import strategies


pytestmark = [pytest.mark.laws, pytest.mark.promise("pages")]
OPTIONS = ["batch_argnums", "has_aux", "reduction", "aux_reduction", "microbatch_size", "nonfinite"]
PACKAGE = Path(pa.__file__).parent
LINK = re.compile(r"https://[\w-]+(\.[\w-]+)+(/[^\s<>`]*)?")


# Names ---------------------------------------------------------------------------------------


def is_named_tuple(it):
    return inspect.isclass(it) and issubclass(it, tuple) and hasattr(it, "_fields")


def of_module(module):
    """Its public functions and classes, as a user writes them."""
    path = "pa" + module.__name__.removeprefix("pureaccum")
    for name in module.__all__:
        it = getattr(module, name)
        if inspect.isfunction(it) or inspect.isclass(it):
            yield f"{path}.{name}", it


MODULES = (pa, pa.curvature, pa.distributed, pa.testing, strategies)
PUBLIC = dict(pair for module in MODULES for pair in of_module(module))
OURS = {"pa", "pureaccum", *(part for path in PUBLIC for part in path.split(".")[1:])}
FUNCTIONS = {path: it for path, it in PUBLIC.items() if inspect.isfunction(it)}
METHODS = {
    f"{path}.{name}": method
    for path, cls in PUBLIC.items()
    for name, method in (vars(cls).items() if inspect.isclass(cls) else ())
    if inspect.isfunction(method) and not name.startswith("_")
}


def loss(params, batch): ...


# What returns functions, in a NamedTuple that says how each is called.
MAKERS = {
    "pa.accumulator": lambda: pa.accumulator(loss),
    "pa.per_sample_accumulator": lambda: pa.per_sample_accumulator(loss),
    "pa.sgd": pa.sgd,
    "pa.adam": pa.adam,
    "pa.adamw": pa.adamw,
    "pa.from_torch": lambda: pa.from_torch(torch.optim.SGD),
    "pa.chain": lambda: pa.chain(pa.sgd()),
    "pa.lbfgs": pa.lbfgs,
    "pa.sam": lambda: pa.sam(pa.sgd()),
    "pa.partition": lambda: pa.partition({"": pa.sgd()}, str),
    "pa.clip_by_global_norm": lambda: pa.clip_by_global_norm(1.0),
    "pa.ema": lambda: pa.ema(0.9),
    "pa.dynamic_loss_scale": pa.dynamic_loss_scale,
    "pa.static_loss_scale": lambda: pa.static_loss_scale(1.0),
    "pa.running_noise_scale": pa.running_noise_scale,
    "pa.functional": lambda: pa.functional(torch.nn.Linear(1, 1)),
    "pa.make_step": lambda: pa.make_step(loss, pa.sgd()),
}


# What a docstring says -----------------------------------------------------------------------


class Said(NamedTuple):
    """A docstring, taken apart."""

    sentence: str
    rule: bool
    sections: dict[str, str]

    def entries(self, section):
        """What is said of each name in it; several names may share an entry."""
        found = {}
        for entry in re.split(r"\n(?=\S)", dedent(self.sections.get(section, "")).strip()):
            names, _, text = re.sub(r"\s+", " ", entry).partition(": ")
            found |= dict.fromkeys(names.split(", "), text)
        return found


def said(it):
    return taken_apart(inspect.getdoc(it) or "")


def taken_apart(doc):
    head, *rest = re.split(r"^([A-Z]\w+):(?:\n|\Z)", doc, flags=re.M)
    sections = dict(zip(rest[::2], rest[1::2], strict=True))
    return Said(doc.split("\n\n")[0], "\nThe rule" in head, sections)


def arguments(it, needed=False):
    them = [x for x in inspect.signature(it).parameters.values() if x.name != "self"]
    return [x.name for x in them if not needed or x.default is x.empty]


def spare(doc):
    """Sections that need not be there, and say too little."""
    references = doc.sections.get("References", "https://")
    names = re.findall(r"``(\w+)[^`]*``", references)
    return [
        *["Returns: nothing"] * (not doc.sections.get("Returns", "something").strip()),
        *["References: no link"] * ("https://" not in references),
        *[f"References: {name} is ours" for name in names if name in OURS],
    ]


def lacks(it, short=False):
    """What a docstring of that form would have."""
    doc = said(it)
    fields = is_named_tuple(it)
    where, names = ("Attributes", it._fields) if fields else ("Args", arguments(it))
    told = doc.entries(where)
    missing = [f"{where}: {name}" for name in names if not told.get(name)]
    missing += [f"{where}: {name} is none" for name in told if name and name not in names]
    if not re.fullmatch(r"\S[^\n]*\.", doc.sentence):
        missing.append("a sentence")
    if not short:
        missing += ["Example"] * (">>> " not in doc.sections.get("Example", ""))
    return missing + spare(doc)


# Tests ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PUBLIC)
def test_a_public_name_has_the_form(path):
    assert not lacks(PUBLIC[path])


@pytest.mark.parametrize("path", METHODS)
def test_a_public_method_has_the_short_form(path):
    assert not lacks(METHODS[path], short=True)


@pytest.mark.parametrize("path", [path for path in FUNCTIONS if "strategies" not in path])
def test_a_function_says_its_rule(path):
    assert said(FUNCTIONS[path]).rule


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_a_module_lists_all_that_it_exports(module):
    """All that is imported as itself; what is made in the file itself may serve other files."""
    source = inspect.getsource(module)
    exported = re.findall(r"^ *from .* import (\w+) as \1$", source, flags=re.M)
    lines = re.findall(r"^from \..* import ([^(]*?|\([^)]*\))$", source, flags=re.M)
    named = {name for line in lines for name in re.findall(r"\w+", line) if " as " not in line}
    made = re.findall(r"^(?:def|class) (\w+)", source, flags=re.M)
    assert {*exported} <= {*module.__all__} <= {*exported, *named, *made}


def test_the_page_that_help_begins_with_groups_all_names():
    page = re.findall(r"\w+", pa.__doc__)
    assert {*pa.__all__} <= {*page}
    assert len(pa.__doc__.splitlines()) <= 30


def test_all_that_makes_functions_is_known():
    returned = {path: get_type_hints(it).get("return") for path, it in FUNCTIONS.items()}
    public = set(PUBLIC.values())
    assert {p for p, it in returned.items() if is_named_tuple(it) and it not in public} == {*MAKERS}


GONE = dict.fromkeys(("pa.lbfgs", "pa.sam"), pytest.mark.given_up("lbfgs and sam"))


@pytest.mark.parametrize("path", [pytest.param(it, marks=GONE.get(it, ())) for it in MAKERS])
def test_functions_that_are_returned_are_said(path):
    made = MAKERS[path]()
    told = said(type(made)).entries("Attributes")
    assert list(told) == list(made._fields)
    for name, it in made._asdict().items():
        if not callable(it) or it is loss:
            continue
        call = re.match(rf"``{name}\((.*?)\)``", told[name])
        assert call, name
        shown = [x.lstrip("*") for x in call[1].split(", ") if x and "=" not in x]
        assert shown == arguments(it, needed=True), name
        if name != "form":  # of a step that does not compile, always the same
            assert said(getattr(it, "func", it)).sentence.endswith("."), name


@pytest.mark.parametrize("option", [*OPTIONS, "engine"])
def test_an_option_is_said_in_the_same_words(option):
    clauses = {}
    for it in FUNCTIONS.values():
        parameter = inspect.signature(it).parameters.get(option)
        text = said(it).entries("Args").get(option, "")
        if parameter and not text.startswith("As for "):
            clauses.setdefault(parameter.default, set()).add(re.split(r"[;:.] |\.$", text)[0])
    assert all(len(words) == 1 for words in clauses.values()), clauses


def test_links_are_links():
    for it in (*PUBLIC.values(), *METHODS.values()):
        doc = inspect.getdoc(it) or ""
        links = re.findall(r"<([^<>]*)>`_", doc)
        assert len(links) == doc.count("://"), doc
        assert all(LINK.fullmatch(link) for link in links), links


@pytest.mark.slow
def test_no_section_is_spare():
    """Of what is private, too."""
    found = 0
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                doc = taken_apart(ast.get_docstring(node) or "")
                assert not spare(doc), (file, node.body[0].lineno)
                found += "References" in doc.sections
    assert found > 50  # otherwise none was looked at


@given(
    st.lists(st.sampled_from(sorted(OURS)), min_size=1),
    st.lists(st.sampled_from(["`x <https://x.org>`_", "``torch.sum``", "Adam, 2014"])),
)
def test_references_are_to_others(ours, others):
    def doc(entries):
        return taken_apart("One.\n\nReferences:\n    " + ";\n    ".join(entries))

    assert spare(taken_apart("One.\n\nReferences:")) == ["References: no link"]
    unlinked = ["References: no link"] * (not any("https:" in other for other in others))
    quoted = [f"``{name}(...)``, which makes it" for name in ours]
    assert spare(doc(others)) == unlinked
    assert spare(doc([*others, *quoted])) == unlinked + [f"References: {it} is ours" for it in ours]


def test_the_reader_sees_what_it_looks_for():
    def good(a, b, *c):
        """One.

        The rule: a.

        Args:
            a, b: Two
                of them.
            c: More.

        Returns:
            A number.

        Example:
            >>> good(1, 2)
            1

        References:
            ``sum``: `Python <https://docs.python.org>`_
        """
        return a

    doc = inspect.getdoc(good) or ""
    assert said(good).entries("Args") == {"a": "Two of them.", "b": "Two of them.", "c": "More."}
    assert (lacks(good), said(good).rule) == ([], True)
    for old, new, missing in (
        ("One.", "One", "a sentence"),
        ("One.", "One\nand two.", "a sentence"),
        ("a, b:", "a:", "Args: b"),
        ("c: More.", "c: More.\n    d: Less.", "Args: d is none"),
        ("    A number.\n", "", "Returns: nothing"),
        (">>> ", "", "Example"),
        (" <https://docs.python.org>`_", "`", "References: no link"),
        ("``sum``", "``pa.grad``", "References: pa is ours"),
        ("``sum``", "``grad(...)``", "References: grad is ours"),
    ):
        assert old in doc
        good.__doc__ = doc.replace(old, new)
        assert lacks(good) == [missing]
    for title in ("Returns", "References"):
        good.__doc__ = re.sub(rf"{title}:\n    .*", "", doc)
        assert title not in said(good).sections
        assert not lacks(good)
    good.__doc__ = doc.replace("The rule", "A rule")
    assert not said(good).rule
