"""The site (make site): its pages, links and order, and how it looks in a real browser."""

import html
import json
import os
import re
import subprocess
import sys
import threading
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from conftest import ROOT
from test_explorer import browser  # noqa: F401

SIZES = {"desk": (1280, 800), "phone": (390, 844)}
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


class Page(HTMLParser):
    """What a page has: ids, links, words linked to the glossary, and the page that follows it."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.words, self.next = {""}, [], [], None
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


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder that the site is built into. A warning fails the build."""
    pytest.importorskip("myst_nb", reason="needs the extra site")
    return build(tmp_path_factory.mktemp("site") / "_site", "somebody/labs")


def build(folder, repository):
    command = ["-m", "sphinx", "-q", "-W", "--keep-going", "-c", ROOT / "site", ROOT, folder]
    env = os.environ | {"GITHUB_REPOSITORY": repository}
    built = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=env)
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
    handler = partial(SimpleHTTPRequestHandler, directory=site)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


def as_page(file):
    """The page of a file of the project."""
    return str(Path(file).with_suffix(".html"))


# ---- What needs no browser -----------------------------------------------------------------------


@pytest.mark.slow
def test_where_it_is_published(site, tmp_path):
    """Links to the source and clone lines name the workflow's repository, or are left out."""
    there = {"search.html"} | {file.name for file in site.glob("_static/**/*.html")}
    for file in site.rglob("*.html"):
        assert "github.com/somebody/labs" in file.read_text() or file.name in there, file
    book = json.loads((site / "notebooks" / "1_collectives.ipynb").read_text())["cells"]
    committed = json.loads(NOTEBOOKS[0].read_text())["cells"]
    assert "git clone -q https://github.com/somebody/labs labs" in book.pop(1)["source"]
    assert book == committed
    front = (site / "index.html").read_text()
    assert "git clone https://github.com/somebody/labs" in front
    assert '<a class="explorer" href="https://github.com/somebody/labs">Code</a>' in front
    built = [*build(tmp_path / "_site", "").rglob("*.*")]
    texts = [file.read_text() for file in built if file.suffix == ".html"]
    assert not [text for text in texts if "/somebody/" in text or "git clone" in text]
    assert ".ipynb" not in {file.suffix for file in built}


@pytest.mark.ci
def test_what_is_read_is_there_in_order(pages):
    """From the front page, "next" leads through README's table, and everywhere else."""
    at, chain = "README.html", []
    while at:
        chain.append(at)
        following = pages[at].next
        at = following and os.path.normpath(Path(at).parent / following)
    assert len(chain) == len(set(chain))
    readme = (ROOT / "README.md").read_text()
    table = re.search(r"^\|.* read \|.* build \|.*\n(?:\|.*\n)*", readme, re.M)
    files = dict.fromkeys(re.findall(r"\]\(([\w/.]+)\)", table[0]))  # each once, in order
    named = [as_page(file) for file in files]
    assert len(named) > 20
    assert [page for page in chain if page in named] == named
    outside = {"index.html", "search.html", "notebooks/explorer.html"}
    assert set(chain) == set(pages) - outside
    notes = {as_page(file.relative_to(ROOT)) for file in ROOT.glob("labs/*/*.md")}
    assert notes <= set(chain)


@pytest.mark.ci
def test_no_link_is_broken(site, pages):
    """A view of the explorer is no anchor."""
    text = (site / "notebooks" / "explorer.html").read_text()
    pages["notebooks/explorer.html"].links += re.findall(r'"(\.\./labs/[^"]+)"', text)
    broken = []
    for name, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https"):
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


SOURCES = {f"{name}.html": f"cat {name}.py" for name in ("tp", "sp_megatron", "sp_ulysses", "pp")}
SOURCES |= {"site/diff.html": "diff tp.py sp_megatron.py"}


@pytest.mark.ci
@pytest.mark.parametrize("page", SOURCES)
def test_sources_are_shown_whole(site, pages, page):
    """Each line; of a script beside its number, and an anchor for each section."""
    shown = html.unescape(re.sub("<[^>]+>", "", (site / page).read_text()))
    text = subprocess.run(SOURCES[page].split(), cwd=ROOT, capture_output=True, text=True).stdout
    numbered = [f"{number}{line}\n" for number, line in enumerate(text.splitlines(), 1) if line]
    lines = re.findall(r"^[<>] (.*\S)", text, re.M) if "diff" in page else numbered
    assert len(lines) > 100 and [line for line in lines if line not in shown] == []
    assert "diff" in page or "loss-and-training" in pages[page].ids


@pytest.mark.ci
def test_words_lead_to_the_glossary_once_a_page(pages):
    entries = pages["labs/notes/glossary.html"].ids
    for page in pages.values():
        assert len(page.words) == len(set(page.words))
        assert all(word.partition("#")[2] in entries for word in page.words)
    assert len(pages["README.html"].words) > 5
    for lab, word in (("9", "stage"), ("3b", "block"), ("7", "block"), ("13", "overlap")):
        [page] = [p for name, p in pages.items() if re.match(rf"labs/lab{lab}_.*/README", name)]
        assert not any(f"#{word}" in link for link in page.words)


@pytest.mark.ci
def test_ways_there_and_back(pages):
    """Labs, their code, notebooks and explorer link each other; course and GPUs lead the menu."""
    links = {name: " ".join(page.links) for name, page in pages.items()}
    lessons = [name for name in links if name.endswith("/lesson.html")]
    assert len(lessons) >= 18
    for lesson in lessons:
        page = lesson.replace("lesson", "README")
        assert "README.html" in pages[lesson].links and "lesson.html" in pages[page].links
        assert "notebooks/explorer.html#" in links[page], page
    for book in (as_page(book.relative_to(ROOT)) for book in NOTEBOOKS):
        assert re.search(r"\.\./labs/lab\w+/README\.html", links[book]), book
        assert f"../{book}" in pages["labs/README.html"].links, book
    for name in set(pages) - {"notebooks/explorer.html"}:
        menu = pages[name].links[:12]
        assert any(link.endswith(("course.html", "#")) for link in menu), name
        assert any(link.endswith(("gpus.html", "#")) for link in menu), name
    front = (ROOT / "README.md").read_text().partition("\n## ")[0]
    assert "](results/gpus.md)" in front and "](labs/course.md)" in front


# ---- In the browser ------------------------------------------------------------------------------


WRONG = """() => {  // with a page at some width
    const all = (selector) => [...document.querySelectorAll(selector)]
    const seen = (one) => one.getClientRects().length > 0
    const wide = (one) => seen(one) && one.getBoundingClientRect().right > innerWidth
    const small = (i) => i.naturalWidth > 2 * i.width && i.width && i.closest("a")?.href !== i.src
    const pointed = (one) => seen(one) && getComputedStyle(one).cursor === "pointer"
    const reached = "a[href], button, input, select, summary, label, [tabindex]"
    return Object.entries({
        "wide": document.documentElement.scrollWidth > innerWidth ? [document.body] : [],
        "no picture": all("img").filter((i) => !i.complete || !i.naturalWidth),
        "no alt": all("img").filter((i) => i.alt.split(" ").length < 4),
        "not in full size": all(".bd-article img").filter(small),
        "a column is hidden": all(".bd-article tr > :last-child").filter(wide),
        "not for the keyboard": all("*").filter((one) => pointed(one) && !one.closest(reached)),
    }).flatMap(([what, ones]) => ones.map((one) => `${what}: ${one.outerHTML.slice(0, 150)}`))
}"""
# Blocks of code that hide something at their right: lines on paper are not wrapped, for this test.
# A phone may hide it, if the block has the shadow that says so.
CUT = """() => [...document.querySelectorAll(".bd-article pre")]
    .filter((one) => one.scrollWidth > one.clientWidth)
    .filter((one) => innerWidth > 600 || !getComputedStyle(one).backgroundAttachment.match("local"))
    .map((one) => `cut at ${innerWidth}: ${one.innerText.slice(0, 150)}`)"""
DESKS, PAPER = (1280, 1440, 1920), 680  # A4 without its margins, in px
UNWRAPPED = ".highlight pre { white-space: pre !important }"
# What a page loads beside its pictures; a frame is a page of its own. Names, not sizes, because
# a file that the browser has already, and only asks about (304), has no bytes there.
LOADED = """() => performance.getEntries()
    .filter((e) => !["img", "iframe"].includes(e.initiatorType)).map((e) => e.name)"""


@pytest.mark.slow
def test_pages_in_a_browser(browser, address, site, pages):  # noqa: F811
    """No error, no request to another host, nothing of WRONG on a desk and on a phone, and no block
    of code that is cut: at no width of a desk and not on paper."""
    tab, wrong = browser.new_page(), []
    tab.on("console", lambda told: wrong.append(told.text) if told.type == "error" else None)
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    ours = (address, "data:")
    tab.on("request", lambda r: None if r.url.startswith(ours) else wrong.append(r.url))
    for page in pages:
        tab.emulate_media(media="screen")
        for size, (width, height) in SIZES.items():
            tab.set_viewport_size({"width": width, "height": height})
            tab.goto(address + page)
            wrong += [f"{page}, {size}: {what}" for what in tab.evaluate(WRONG)]
        loaded = {urlsplit(name).path for name in tab.evaluate(LOADED) if name.startswith(address)}
        weight = sum((site / path[1:]).stat().st_size for path in loaded)
        assert f"/{page}" in loaded
        limit = 1.5e6 if "explorer.html" in page else 1e6  # it has Step through's recordings
        wrong += [f"{page}: {weight} bytes"] if weight > limit else []
        for width in (*DESKS, SIZES["phone"][0]):
            tab.set_viewport_size({"width": width, "height": 800})
            wrong += [f"{page}, {what}" for what in tab.evaluate(CUT)]
        tab.set_viewport_size({"width": PAPER, "height": 1000})
        tab.emulate_media(media="print")
        tab.add_style_tag(content=UNWRAPPED)
        wrong += [f"{page}, on paper: {what}" for what in tab.evaluate(CUT)]
    assert wrong == []
    tab.goto(address + "tp.html")  # a long line is seen
    tab.set_viewport_size({"width": DESKS[-1], "height": 800})
    tab.emulate_media(media="screen")
    tab.evaluate("document.querySelector('.bd-article pre').append('x'.repeat(300))")
    assert len(tab.evaluate(CUT)) == 1
    tab.close()


@pytest.mark.ci
def test_paper_has_the_answers(browser, address):  # noqa: F811
    """Printed: each question of a lab closed, then all once more, open; no frame, no menu."""
    tab = browser.new_page(viewport={"width": PAPER, "height": 1000})
    tab.goto(address + "labs/lab4_overlap/README.html")
    tab.emulate_media(media="print")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    count = tab.locator("#questions details").count()
    shown = tab.locator(".answers details > :last-child:visible").count()
    assert count == shown == 6 and tab.locator("#questions details[open]").count() == 0
    assert not tab.locator(".bd-sidebar-primary:visible, .source:visible").count()
    tab.evaluate("dispatchEvent(new Event('afterprint'))")
    assert tab.locator(".answers").count() == 0
    tab.close()


@pytest.mark.ci
@pytest.mark.parametrize("size", SIZES)
def test_front_page_and_menu(browser, address, size):  # noqa: F811
    """What to run is seen, and a question whole; the menu opens by click and by key."""
    tab = browser.new_page(viewport=dict(zip(("width", "height"), SIZES[size])))
    tab.goto(address)
    assert tab.locator(".bd-article code:has-text('make demo')").first.bounding_box()["y"] < 600
    frame = tab.locator("iframe.question")
    frame.scroll_into_view_if_needed()
    last = frame.content_frame.locator(".after .whole").bounding_box()
    assert last["y"] + last["height"] < frame.bounding_box()["y"] + frame.bounding_box()["height"]
    button, page = tab.locator("button.primary-toggle"), tab.get_by_role("link", name="4. Ulysses")
    for act in (button.click, partial(button.press, "Enter")) * 2:
        there = page.is_visible()
        act()
        page.wait_for(state="hidden" if there else "visible")
        if size == "phone":  # the menu lies over the button
            tab.keyboard.press("Escape")
            page.wait_for(state="hidden")
    tab.close()


WAYS = [("light", "phone"), ("light", "desk"), ("dark", "desk"), ("dark", "phone")]


@pytest.mark.slow
@pytest.mark.parametrize("way", range(4))
def test_accessible(browser, address, pages, way):  # noqa: F811
    """axe finds nothing serious on any page (each in one of four ways, because it takes seconds);
    all have the shade of the reader's system."""
    axe = pytest.importorskip("axe_playwright_python.base", reason="needs the extra browser")
    scheme, size = WAYS[way]
    viewport = dict(zip(("width", "height"), SIZES[size]))
    tab, serious = browser.new_page(viewport=viewport, color_scheme=scheme), []
    for page in [*sorted(pages)[way::4], "tp.html?highlight=gradient"]:
        tab.goto(address + page)
        shade = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (int(re.search(r"\d+", shade)[0]) > 128) == (scheme == "light"), page
        tab.evaluate(axe.AXE_SCRIPT)
        for rule in tab.evaluate("axe.run({runOnly: ['wcag2a', 'wcag2aa']})")["violations"]:
            if rule["impact"] in ("serious", "critical"):
                serious += [(page, rule["id"], node["html"][:200]) for node in rule["nodes"]]
    tab.close()
    assert serious == []


@pytest.mark.ci
@pytest.mark.parametrize("word,page", [("reduce-scatter", "sp_megatron"), ("deadlock", "lab3b")])
def test_search_finds(browser, address, word, page):  # noqa: F811
    tab = browser.new_page()
    tab.goto(f"{address}search.html?q={word}")
    tab.locator(f"#search-results a[href*={page}]").first.wait_for()
    tab.close()
