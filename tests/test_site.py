"""The site (make site): its pages, links and order, and how it looks in a real browser."""

import html
import json
import re
import subprocess
import sys
import threading
import tomllib
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from conftest import ROOT
from test_explorer import browser  # noqa: F401

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPOSITORY = PROJECT["urls"]["Repository"]
SIZES = {"desk": (1280, 800), "phone": (390, 844)}
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


class Page(HTMLParser):
    """What a page has: ids, links, words linked to the glossary, and what it loads."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.words, self.loads, self.next = {""}, [], [], [], None
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids.add(found.get("id"))
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
            if found.get("class") == "word reference external":
                self.words.append(found["href"])
        if tag == "link" and found.get("rel") == "next":
            self.next = found["href"]
        elif tag == "link" and found.get("rel") in ("stylesheet", "icon", "preload"):
            self.loads.append(found["href"])
        elif tag in ("img", "script", "iframe") and "src" in found:
            self.loads.append(found["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder that the site is built into. A warning fails the build."""
    pytest.importorskip("myst_nb", reason="needs the extra site")
    folder = tmp_path_factory.mktemp("site") / "_site"
    command = ["-m", "sphinx", "-q", "-W", "--keep-going", "-c", ROOT / "site", ROOT, folder]
    built = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    """{path in the site: Page}"""
    files = [file for file in site.rglob("*.html") if "_static" not in file.parts]
    return {file.relative_to(site).as_posix(): Page(file) for file in files}


@pytest.fixture(scope="module")
def address(site):
    """Where the site is served: search needs more than files on disk."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *words):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


def as_page(file):
    """The page of a file of the project."""
    return str(Path(file).with_suffix(".html"))


def table_of_reading():
    """Files that README's table of what to read names, in order."""
    text = (ROOT / "README.md").read_text().partition("## What to read, in which order")[2]
    rows = [line for line in text.partition("\n## ")[0].splitlines() if line.startswith("|")]
    files = re.findall(r"\]\(([\w/.]+)\)", "".join(rows))
    return list(dict.fromkeys(files))


# What needs no browser
# --------------------------------------------------------------------------------------------------


def test_repository_is_named_once():
    """What repeats the address in pyproject.toml agrees with it."""
    files = [*NOTEBOOKS, ROOT / "CITATION.cff"]
    found = {
        file.name: set(re.findall(r"https://(?:colab[\w.]*/)?github[\w.]*/[\w/-]+", text))
        for file in files
        for text in [file.read_text()]
    }
    colab = REPOSITORY.replace("github.com", "colab.research.google.com/github") + "/blob/main"
    for name, addresses in found.items():
        assert REPOSITORY in addresses
        notebook = {f"{colab}/notebooks/{Path(name).stem}"} if name.endswith(".ipynb") else set()
        assert addresses == {REPOSITORY} | notebook


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_colab_has_a_cell_that_installs(path):
    """The second and third cells, in all notebooks the same."""
    link, setup = json.loads(path.read_text())["cells"][1:3]
    assert f"notebooks/{path.name})" in "".join(link["source"])
    first = json.loads(NOTEBOOKS[0].read_text())["cells"][2]
    assert setup["source"] == first["source"]
    head = 'import sys\n\nif "google.colab" in sys.modules:\n'
    body = "".join(setup["source"]).removeprefix(head)
    assert all(line.startswith("    ") for line in body.split("\n"))


def test_conf_is_small():
    assert len((ROOT / "site" / "conf.py").read_text().splitlines()) <= 150


@pytest.mark.slow
def test_what_is_read_is_there_in_order(pages):
    """From the front page, "next" leads through README's table, and everywhere else."""
    at, chain = "README.html", []
    while at:
        chain.append(at)
        following = pages[at].next
        at = following and (Path(at).parent / following).as_posix()
        at = at and str(Path("/", at).resolve().relative_to("/"))
    assert len(chain) == len(set(chain))
    named = [as_page(file) for file in table_of_reading()]
    assert len(named) > 20
    assert [page for page in chain if page in named] == named
    outside = {"index.html", "search.html", "notebooks/explorer.html"}
    assert set(chain) == set(pages) - outside
    notes = {as_page(file.relative_to(ROOT)) for file in ROOT.glob("labs/notes/*.md")}
    assert notes <= set(chain)


@pytest.mark.slow
def test_no_link_is_broken(site, pages):
    """Nor loads a page anything of another host. A view of the explorer is no anchor."""
    text = (site / "notebooks" / "explorer.html").read_text()
    pages["notebooks/explorer.html"].links += re.findall(r'"(\.\./labs/[^"]+)"', text)
    broken = []
    for name, page in pages.items():
        for link in page.links + page.loads:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https") and link in page.links or parts.scheme == "data":
                continue
            there = (site / name).parent / unquote(parts.path) if parts.path else site / name
            target = there.resolve()
            if parts.scheme or parts.netloc or not target.is_file():
                broken.append((name, link))
            elif target.suffix == ".html" and target.name != "explorer.html":
                known = pages[target.relative_to(site).as_posix()].ids
                broken += [(name, link)] if unquote(parts.fragment) not in known else []
    assert broken == []
    assert sum(len(page.links) for page in pages.values()) > 1000


@pytest.mark.slow
@pytest.mark.parametrize("script", ["tp.py", "sp_megatron.py", "sp_ulysses.py", "pp.py"])
def test_scripts_are_shown_whole(site, pages, script):
    """Each line beside its number, and an anchor for each section."""
    text = (site / as_page(script)).read_text()
    lines = re.findall(r'<span class="linenos"> *(\d+)</span>(.*)', text)
    source = (ROOT / script).read_text().splitlines()
    shown = {
        int(number): html.unescape(re.sub("<[^>]+>", "", line)).rstrip() for number, line in lines
    }
    assert [line for line in source if line] == [line for line in shown.values() if line]
    assert all(source[number - 1] == line for number, line in shown.items())
    assert {"loss-and-step", "command-line-the-same-in-all-four-scripts"} <= pages[
        as_page(script)
    ].ids


@pytest.mark.slow
def test_diff_shows_every_difference(site):
    text = (site / "site" / "diff.html").read_text()
    shown = html.unescape(re.sub("<[^>]+>", "", text))
    files = ["tp.py", "sp_megatron.py"]
    diff = subprocess.run(["diff", *files], cwd=ROOT, capture_output=True, text=True).stdout
    differing = re.findall(r"^[<>] (.*\S)", diff, re.M)
    assert len(differing) > 100
    assert [line for line in differing if line not in shown] == []


@pytest.mark.slow
def test_words_lead_to_the_glossary_once_a_page(pages):
    entries = pages["labs/notes/glossary.html"].ids
    for page in pages.values():
        assert len(page.words) == len(set(page.words))
        assert all(word.partition("#")[2] in entries for word in page.words)
    assert len(pages["README.html"].words) > 5


# In the browser
# --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_pages_in_a_browser(browser, address, pages):  # noqa: F811
    """No error, no request to another host, all pictures, no page that scrolls sideways."""
    tab, wrong = browser.new_page(), []
    tab.on("console", lambda told: wrong.append(told.text) if told.type == "error" else None)
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    ours = (address, "data:")
    tab.on("request", lambda r: None if r.url.startswith(ours) else wrong.append(r.url))
    for page in pages:
        tab.set_viewport_size({"width": 1280, "height": 800})
        tab.goto(address + page)
        for size, (width, height) in SIZES.items():
            tab.set_viewport_size({"width": width, "height": height})
            wide = tab.evaluate("document.documentElement.scrollWidth")
            wrong += [f"{page}: {wide} pixels on a {size}"] if wide > width else []
        lost = "[...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src)"
        wrong += [f"{page}: no picture {source}" for source in tab.evaluate(lost)]
    tab.close()
    assert wrong == []


@pytest.mark.slow
def test_search_finds(browser, address):  # noqa: F811
    tab = browser.new_page()
    tab.goto(f"{address}search.html?q=reduce-scatter")
    tab.wait_for_selector("text=Search finished", timeout=9000)
    found = [link.get_attribute("href") for link in tab.locator("#search-results li a").all()]
    assert any("sp_megatron.html" in link for link in found)
    tab.close()


@pytest.mark.slow
def test_dark_and_light(browser, address):  # noqa: F811
    """As the reader's system has it."""
    shades = {}
    for scheme in ("light", "dark"):
        tab = browser.new_page(color_scheme=scheme)
        tab.goto(address)
        shade = "getComputedStyle(document.body).backgroundColor"
        shades[scheme] = sum(map(int, re.findall(r"\d+", tab.evaluate(shade))[:3]))
        tab.close()
    assert shades["light"] > 600 and shades["dark"] < 150
