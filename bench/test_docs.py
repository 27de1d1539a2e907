"""Tests of the script that builds the documentation's site: `make docs` runs it."""

import importlib.util
import re
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "docs/site/build.py"
spec = importlib.util.spec_from_file_location("build", SCRIPT)
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)


def test_links_that_lead_nowhere_are_named(tmp_path):
    def write(name, text):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    write("rust/index.html", '<a href="gone.html">rustdoc has checked its own</a><p id="there">')
    write("style.css", "")
    write("other/page.html", '<h2 id="here">x</h2><a href="../index.html#top">up</a><a href="#gone">!</a>')
    write(
        "index.html",
        '<link href="style.css"><a name="top"></a><a href="https://example.org/gone">x</a>'
        '<a href="other/page.html#here">x</a><a href="rust/">x</a><a href="rust/index.html#there">x</a>'
        '<a href="/other/page.html">x</a><a href="mailto:a@example.org">x</a><a href="#top">x</a>'
        '<a href="other/page.html#lost">1</a><img src="gone.svg"><a href="rust/index.html#lost">3</a>',
    )
    assert build.broken_links(tmp_path) == [
        ("index.html", "gone.svg"),
        ("index.html", "other/page.html#lost"),
        ("index.html", "rust/index.html#lost"),
        ("other/page.html", "#gone"),
    ]


def test_the_site_has_every_document_and_module():
    navigation = SCRIPT.with_name("mkdocs.yml").read_text().partition("nav:")[2].partition("\n\n")[0]
    documents = [path for pattern in build.DOCUMENTS for path in build.ROOT.glob(pattern)]
    names = [str(path.relative_to(build.ROOT)) for path in documents if path.suffix == ".md"]
    # The index has a row for each decision, as a test of the tidy suite sees to.
    is_decision = re.compile(r"docs/decisions/(?!README\.md)").match
    names = [name for name in names if not is_decision(name)]
    names += [f"reference/{module}.md" for module in build.MODULES]
    assert len(names) > 10
    for name in names:
        assert f": {name}\n" in f"{navigation}\n", name


def test_every_module_of_the_package_has_a_page_or_is_an_inner_one():
    package = build.ROOT / "python/symmpool"
    names = [path.name.removesuffix(".py") for path in package.iterdir() if path.suffix in ("", ".py")]
    public = {name for name in names if not name.startswith("_")}
    shown = {module.split(".")[1] for module in build.MODULES if "." in module}
    assert public == shown | set(build.INNER) and not shown & set(build.INNER)
    engines = {path.stem for path in (package / "engines").glob("*.py") if path.stem != "__init__"}
    inner = {"core", "custom_allreduce_v2", "types"}
    assert {f"symmpool.engines.{name}" for name in engines - inner} <= set(build.MODULES)
