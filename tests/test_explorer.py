"""notebooks/explorer.html: its data made anew, its questions and its views in a real browser."""

import dataclasses
import importlib
import json
import random
import re
import shutil
import sys
from contextlib import contextmanager
from itertools import product

import pytest
from conftest import python
from forks import ROOT
from pytest import approx

import oom_search
import pp
from labs import schedules

PAGE = ROOT / "notebooks" / "explorer.html"
VIEWS = ["layouts", "memory", "pipelines", "collectives", "time"]
SIZES = {"laptop": (1280, 800), "phone": (390, 844), "tablet": (800, 1000)}
SIZES |= {"projector": (1920, 1080), "low": (844, 390)}
ROUGH = 0.08  # how far memory is off where six lengths are predicted, or microbatches added
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"]
QUIET += ["--disable-component-update", "--disable-sync", "--no-first-run"]


@pytest.fixture(scope="module")
def maker():
    """notebooks/make_explorer.py as a module."""
    sys.path.insert(0, str(PAGE.parent))
    return importlib.import_module("make_explorer")


def test_page_is_made_of_its_parts(maker):
    assert PAGE.stat().st_size < 1.5e6
    parts = [*maker.PARTS.glob("*.*"), PAGE.parent / "make_explorer.py"]
    links = [link for p in parts for link in re.findall(r'"(\.\./[^"]+)"', p.read_text())]
    assert [link for link in links if not (PAGE.parent / link).exists()] == []


def test_questions_are_made_of_the_data(maker):
    """Each in the view that answers it; whoever is wrong is told why."""
    data = maker.embedded(PAGE)
    questions = data.pop("questions")
    assert len(questions) >= 24 and {question["view"] for question in questions} == {*VIEWS, "walk"}
    for question in questions:
        reasons = [why for _, why in question["options"] if why is not None]
        assert all(len(why.split()) > 4 for why in [question["because"], *reasons])
    [m2] = [question for question in questions if question["id"] == "m2"]
    assert f"{8_030_261_248 * 16 / 2**30:.0f} GiB" in m2["because"]  # 16 bytes for each of 8B
    for parts in data["layouts"]["runs"].values():
        parts[3]["kept"][0] = 5
    with pytest.raises(ValueError):  # if all kept as much, the question would have no answer
        maker.questions(data)


@pytest.mark.ci
@pytest.mark.parametrize("view", ["layouts", "pipelines", "collectives", "time"])
def test_data_is_the_scripts(maker, view):
    anew = json.loads(json.dumps(maker.VIEWS[view]()))
    assert maker.embedded(PAGE)[view] == anew, "run make_explorer.py"


def test_page_is_made_by_its_command(maker, monkeypatch, tmp_path):
    monkeypatch.setattr(maker, "PAGE", tmp_path / PAGE.name)
    monkeypatch.setattr(sys, "argv", ["make_explorer.py", "--only", "collectives"])
    maker.PAGE.write_text(PAGE.read_text().replace("<h1>", "<h1>older "))
    maker.main()
    assert maker.PAGE.read_text() == PAGE.read_text(), "run make_explorer.py"


# ---- In the browser ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra browser")
    chromium = shutil.which("chromium")
    if not chromium:
        pytest.skip("needs Debian's package chromium")
    with playwright.sync_playwright() as running:
        process = running.chromium.launch(executable_path=chromium, args=QUIET)
        yield process
        process.close()


@contextmanager
def opened(browser, fragment, size="laptop", page=PAGE, **options):
    """The page at a fragment. At the end: nothing on the console, no request to the network."""
    width, height = SIZES[size]
    tab = browser.new_page(viewport={"width": width, "height": height}, **options)
    complaints = []
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("request", lambda request: complaints.append(request.url))
    tab.goto(f"{page.as_uri()}#{fragment}")
    yield tab
    tab.close()
    assert [c for c in complaints if not c.startswith(("file:", "data:"))] == []


def figures(tab):
    """{what it is: number} of the figures that a view shows."""
    pairs = [f.inner_text().split("\n", 1) for f in tab.locator(".figure").all()]
    return {words.strip(): number for number, words in pairs}


UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "s": 1, "ms": 1e-3, "µs": 1e-6}


def shows(text, number):
    """Whether the page shows this number: of 3 digits the last may be off by one."""
    value, unit = text.replace(",", "").split()
    return float(value) * UNITS[unit] == approx(number, rel=0.006)


def wait(tab, condition):
    tab.wait_for_function(f"() => {condition}")


def show(tab, view, **state):
    """Go to a view in this state, and wait until it is shown."""
    words = "".join(f"&{key}={value}" for key, value in state.items())
    tab.evaluate("to => { location.hash = to }", f"#{view}{words}")
    wait(tab, " && ".join(f"String(state.{key}) === '{state[key]}'" for key in state))


# Pixels of the smallest text outside of a pipeline's cells, of the lowest slider
SMALLEST = """() => {
    const scale = (svg) => svg.getBoundingClientRect().width / svg.viewBox.baseVal.width
    const size = (text) => parseFloat(getComputedStyle(text).fontSize) * scale(text.closest("svg"))
    const texts = [...document.querySelectorAll("svg.picture text:not(.cell text)")].map(size)
    const sliders = [...document.querySelectorAll("input")].map((input) => input.offsetHeight)
    return [Math.min(...texts), Math.min(...sliders)]
}"""


@pytest.mark.ci
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("view", VIEWS)
def test_view_fits(browser, view, size):
    """A picture and what moves it are seen together, on a phone on its side too."""
    dark = size in ("phone", "projector")
    with opened(browser, f"{view}&", size, color_scheme="dark" if dark else "light") as tab:
        assert tab.locator("nav a").count() == 6
        assert tab.locator("nav a[aria-current]").get_attribute("href").startswith(f"#{view}")
        assert tab.locator("p:has-text('In the course') a").count() > 0
        wide, shown = tab.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert wide <= shown
        text, slider = tab.evaluate(SMALLEST)
        assert text > 11.9 and (slider >= 40 or size in ("laptop", "projector"))
        box, high = tab.locator("svg.picture").first.bounding_box(), SIZES[size][1]
        assert box["width"] > (300 if size != "projector" else 1000)
        if size in ("laptop", "projector"):
            assert box["y"] + box["height"] <= high
        if tab.locator(".player").count():
            player = tab.locator(".player").bounding_box()
            seen = min(high, player["y"] if player["y"] > box["y"] else high) - box["y"]
            assert player["y"] + player["height"] <= high and seen > min(150, box["height"] / 2)
            if size == "phone":  # what is behind it can be scrolled to
                tab.evaluate("scrollTo(0, 1e6)")
                page = tab.locator("main").bounding_box()
                assert player["height"] < 110 and page["y"] + page["height"] <= player["y"]
        assert tab.locator("svg.picture[tabindex='0']").first.get_attribute("aria-label")


STATES = ["layouts&sp&step=2", "memory&", "pipelines&", "pipelines&interleaved&V=4&step=20"]
STATES += ["walk&sp_megatron&go=attention-exit", "walk&pp&at=60", "walk&tp&bug=1&at=3"]
STATES += ["collectives&op=all_reduce&step=2", "time&", "time&model=llama-3.1-70b&P=8"]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", ["laptop", "phone"])
def test_axe_finds_nothing(browser, scheme, size):
    axe = pytest.importorskip("axe_playwright_python.base", reason="needs the extra browser")
    for state in [*STATES, *VIEWS, "score"]:
        with opened(browser, state, size, color_scheme=scheme, reduced_motion="reduce") as tab:
            tab.evaluate(axe.AXE_SCRIPT)
            found = tab.evaluate("axe.run()")["violations"]
            assert [v for v in found if v["impact"] in ("serious", "critical")] == [], state


@pytest.mark.slow
def test_the_way_home_the_shade_and_what_comes_first(browser, tmp_path):
    """A link to a view leads home, and to the code where that is published."""
    shade = "getComputedStyle(document.body).backgroundColor"
    code, address = '<meta name="code" content="', "https://github.com/somebody/labs"
    early = "<script>dispatchEvent(new Event('resize'))</script></body>"
    (there := tmp_path / "explorer.html").write_text(
        PAGE.read_text().replace(code, code + address).replace("</body>", early)
    )
    with opened(browser, "memory&") as tab, opened(browser, "memory&", page=there) as published:
        assert [a.inner_text() for a in tab.locator("#out a").all()] == ["Home"]
        assert published.locator("#out a").last.get_attribute("href") == address
        light = tab.evaluate(shade)
        tab.evaluate("localStorage.setItem('mode', 'dark')")  # as the site's button does
        tab.reload()
        assert tab.evaluate(shade) != light
    with opened(browser, "", java_script_enabled=False) as tab:
        words = tab.locator("noscript").inner_text()
        assert "needs JavaScript" in words and all(view in words for view in ("Memory", "Time"))
    (frame := tmp_path / "front.html").write_text(f'<iframe src="{there.as_uri()}#ask=m1">')
    with opened(browser, "", page=frame) as tab:
        tab.frames[1].locator("input").first.press("ArrowRight")
        tab.frames[1].get_by_role("button", name="That is my guess").press("Enter")
        assert tab.frames[1].locator(".verdict").is_visible()
        assert tab.frames[1].locator("nav").is_hidden()


# ---- Questions -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("view", [*VIEWS, "walk"])
def test_predict_then_reveal(browser, maker, view):
    """The view is covered until there is a guess; by keyboard alone. A wrong guess is told why.

    First guesses count: of a view's questions the last one is answered right.
    """
    questions = [q for q in maker.embedded(PAGE)["questions"] if q["view"] == view]
    with opened(browser, view, "phone") as tab:
        for question in questions:  # "Next question" leads to each; the focus goes along
            wait(tab, f"question?.id === '{question['id']}'")
            assert question is questions[0] or tab.evaluate("document.activeElement.id") == "ask"
            assert tab.locator(".stage, .verdict, .because").count() == 0
            assert not tab.locator("svg.picture text", has_text=re.compile(r"\d of \d")).count()
            right = question is questions[-1]
            reasons = [why for _, why in question["options"]]
            chosen = [why is None for why in reasons].index(right)
            tab.locator(".option input").nth(chosen).focus()
            tab.keyboard.press(" ")
            tab.locator("button.main").press("Enter")
            told = tab.locator(".verdict").inner_text()
            assert told.startswith("Right." if right else f"Not quite. {reasons[chosen]}"), told
            tab.evaluate("localStorage.clear()")  # as Chromium does by itself now and then
            tab.reload()
            assert tab.locator(".verdict").inner_text() == told
            assert tab.locator(".because").inner_text() == question["because"]
            tab.locator(".stage :is(svg.picture, .cells)").first.wait_for()
            asked = re.sub("&(step|go)=", "&&", question["see"])
            for key, value in re.findall(r"&(\w+)=([\w.-]+)", asked):
                assert str(tab.evaluate(f"state.{key}")) == value, question["id"]
            tab.get_by_role("button", name="Next question").press("Enter")
        wait(tab, "document.querySelector('main').innerText.includes('Score: 1 of')")
        tab.locator(".kicker a").press("Enter")
        wait(tab, "document.querySelector('h2').innerText.includes('then revealed: 1 of')")
        assert tab.locator(".dots .wrong").count() == len(questions) - 1
        tab.get_by_role("button", name="To the next question").press("Enter")
        wait(tab, f"question?.view === '{'layouts' if view == 'walk' else 'walk'}'")


@pytest.mark.slow
def test_the_focus_goes_where_a_press_leads(browser):
    steps = {"Go to the view": ".again button", "Guess first": "#ask", "Show the": ".because"}
    with opened(browser, "memory", "phone") as tab:
        on = lambda there: wait(tab, f"document.activeElement.matches('{there}')")  # noqa: E731
        tab.on("dialog", lambda dialog: dialog.accept())
        for name, there in (steps | {"Close the question": ".again button"}).items():
            tab.get_by_role("button", name=name).press("Enter")
            on(there)
        for link, there in {"nav a >> nth=3": "nav [aria-current]", ".kicker a": "#ask"}.items():
            tab.locator(link).press("Enter")
            on(there)
        tab.get_by_role("button", name="Forget my answers").press("Enter")
        wait(tab, "!document.querySelector('.dots .wrong') && document.activeElement.id === 'ask'")


@pytest.mark.slow
@pytest.mark.parametrize("view", VIEWS)
def test_tips(browser, view):
    """A tap shows one, beside what it explains and never over it; a tap elsewhere hides it."""
    with opened(browser, f"{view}&", "phone", has_touch=True) as tab:
        tip = tab.locator("#tip")
        target = tab.locator("svg.picture :is([data-tip] rect, rect[data-tip])").first
        target.evaluate("target => target.scrollIntoView({ block: 'center' })")  # it hides tips
        tab.evaluate("() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
        target.tap(force=True)
        words = target.evaluate("target => target.closest('[data-tip]').dataset.tip")
        assert tip.inner_text() == words
        assert view != "layouts" or words.startswith("rank 0: norm 1")
        place, box = target.bounding_box(), tip.bounding_box()
        assert box["y"] >= place["y"] + place["height"] or box["y"] + box["height"] <= place["y"]
        tab.locator(".words").dispatch_event("pointerdown")
        assert tip.is_hidden()


@pytest.mark.slow
def test_what_is_too_wide_for_a_phone_follows_the_step(browser):
    within = "e => e.getBoundingClientRect().left >= 0 && e.getBoundingClientRect().right <= 390"
    with opened(browser, "pipelines&schedule=zb&P=8&M=16&step=9999", "phone") as tab:
        for step in (3, 50):
            tab.evaluate("step => set({ step })", step)
            assert tab.locator("line.now").evaluate(within)
        show(tab, "walk", script="sp_megatron", at=3)
        tab.locator(".chips button").first.wait_for()
        for chip in tab.locator(".chips button").all():
            chip.evaluate("chip => chip.onclick()")
            assert tab.locator(".chips [aria-pressed=true]").evaluate(within)


@pytest.mark.ci
@pytest.mark.parametrize("view", ["layouts", "collectives", "pipelines"])
def test_keys_buttons_and_play(browser, view):
    with opened(browser, f"{view}&P=8&step=1") as tab:
        at = lambda: int(tab.locator(".player input").input_value())  # noqa: E731
        first, words = at(), tab.locator("main").inner_text()
        tab.keyboard.press("ArrowRight")
        assert at() == first + 1 and tab.locator("main").inner_text() != words
        tab.keyboard.press("ArrowLeft")
        assert at() == first
        tab.keyboard.press(" ")
        assert tab.get_by_role("button", name="Pause").count() == 1
        wait(tab, f"document.querySelector('.player input').value > {at()}")
        tab.keyboard.press(" ")
        assert tab.get_by_role("button", name="Play").count() == 1
        tab.evaluate("set({ step: 9999 }), move(-1)")
        tab.get_by_role("button", name="A step on").press("Enter")  # at the end the focus stays
        assert tab.evaluate("document.activeElement.title").startswith("A step on")
        if view == "pipelines":  # what a click on a microbatch does
            tab.locator("[data-control=follow]").select_option("2")
            assert tab.locator(".cell:not(.other)").count() == 2 * 8


@pytest.mark.ci
@pytest.mark.parametrize("wrong", ["nothing", "layouts&P=99&layout=&x&=&step=-1", "layouts&P=%&"])
def test_the_state_stands_in_the_fragment(browser, wrong):
    usual = "layouts&" if "&" in wrong else "walk"
    with opened(browser, wrong) as tab, opened(browser, usual) as right:
        assert tab.locator("main").inner_text() == right.locator("main").inner_text()
        tab.evaluate("location.hash = '#time&P=32'")
        wait(tab, "state.P === 32")
        follow = "location.hash = '#layouts&ulysses&P=3&step=999'"  # there are not so many
        busy = "const end = Date.now() + 300; while (Date.now() < end);"  # and both are due
        tab.evaluate(f"() => {{ setTimeout(() => {follow}, 99); set({{}}); {busy} }}")
        wait(tab, "state.P === 3")
        assert len(set(tab.locator(".player output").inner_text().split()[1::2])) == 1
        tab.locator("[data-control=P]").press("ArrowRight")  # to the default
        wait(tab, "location.hash === '#layouts&ulysses&step=999'")


@pytest.mark.ci
def test_links_from_the_notes_name_moments(browser):
    """Each word of a link is one that the page understands, and its step is there."""
    files = ROOT / "README.md", *ROOT.glob("labs/**/*.md"), *PAGE.parent.glob("*.ipynb")
    links = re.findall(r"explorer\.html#([^)\s]+)\)", " ".join(file.read_text() for file in files))
    assert len(links) > 15
    with opened(browser, "layouts&") as tab:
        for link in set(links):
            tab.evaluate("to => { location.hash = to }", f"#{link}")
            wait(tab, f"current.id === '{link.split('&')[0]}' && document.querySelector('.stage')")
            if "go=" in link:  # a landmark
                wait(tab, "state.go === '' && state.at > 0")
            bare, known = tab.evaluate("[current.bare, state]")
            words = {f"{key}={value}" for key, value in known.items()} | {str(known.get(bare))}
            assert words >= {w for w in link.split("&")[1:] if not w.startswith("go=")}, link
            if "step=" in link:
                told = tab.locator(".player output").inner_text()
                assert f"step {link.split('step=')[1]} of" in told, link


@pytest.mark.ci
@pytest.mark.parametrize("size", ["laptop", "phone"])
def test_step_through(browser, size):
    """A landmark, the steps and messages by keyboard, the callers' variables, what has changed."""
    with opened(browser, "walk&sp_megatron&go=attention-exit", size) as tab:
        tab.locator(".code .now").wait_for()
        text = lambda where: tab.locator(where).first.inner_text()  # noqa: E731
        assert "reduce_scatter_single(out, x, group=group)" in text(".code .now")
        assert {"partial sum", "shard of dim 0"} <= set(tab.locator(".badge").all_inner_texts())
        assert tab.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
        at, line = (lambda: tab.evaluate("state.at")), text(".code .now")
        for key, other in {"m": "M", "ArrowRight": "ArrowLeft"}.items():
            here = at()
            tab.keyboard.press(key)
            assert at() > here
            tab.keyboard.press(other)
            assert at() == here and text(".code .now") == line
        depth = tab.locator(".stack > *").count()
        tab.keyboard.press("u")
        assert tab.locator(".stack > *").count() < depth
        tab.locator(".caller").first.press("Enter")
        assert "The variables of train_step" in text(".ranks .note")
        tab.get_by_role("button", name="Back to the line").press("Enter")
        tab.evaluate("set({ go: 'optimizer-step' })")
        assert "optimizer.step()" in text(".code .now") and tab.locator("i.changed").count() > 0


@pytest.mark.ci
def test_find_the_bug(browser):
    """Too early, too late, and right."""
    with opened(browser, "walk&sp_megatron&bug=1&at=2") as tab:
        for at, said in (2, "Not yet"), (9999, "before this line"):
            tab.evaluate(f"set({{ at: {at} }})")
            tab.get_by_role("button", name="It goes wrong here").press("Enter")
            assert said in tab.locator(".find").inner_text()
        tab.get_by_role("button", name="Show me").press("Enter")
        said = tab.locator(".find").inner_text()
        assert "Right. Rank" in said and "should be “reduce-scatter" in said


@pytest.mark.slow
def test_ranks_of_a_pipeline_wait_for_each_other(browser):
    receives = "walkRun().tracks[1].findIndex((step) => step[5]?.length)"
    with opened(browser, "walk&pp") as tab:
        tab.locator(".station").first.wait_for()
        tab.evaluate(f"set({{ at: walkRun().ends[1][{receives}] - 1 }})")
        assert "waits for rank 0" in tab.locator(".head").nth(1).inner_text()
        tab.locator(".head").nth(1).press("Enter")
        assert tab.locator(".code .waits").count() == 1
        assert tab.locator(".station").count() == 8  # F and B of 2 microbatches on 2 ranks


@pytest.mark.ci
def test_layouts_on_the_page_are_the_simulators(browser, maker):
    """At the end all that is sent; on the way why, and what each rank holds: shapes, slices."""
    reason = re.compile(r": .*\b(since|so|needs?|only|same|at a time)\b[^{}]+$")
    with opened(browser, "layouts&") as tab:
        four = maker.four_layouts
        for layout, P in [(x, P) for P in (3, 8) for x in four.ATTENTION]:
            args = four.parse([*maker.BLOCK, "--tp", str(P)])
            run = four.run(args)["layouts"][layout]
            show(tab, "layouts", layout=layout, P=P, step=999)
            found, sent = figures(tab), sum(row["sent_bytes"] for row in run["traffic"])
            assert shows(found["wire bytes so far, a rank"], sent / P)
            assert found["collectives so far"] == str(sum(t["count"] for t in run["traffic"]))
            assert shows(found["kept by rank 0 for the backward"], run["kept_bytes"][0])
            for step in range(1, int(tab.locator(".player input").get_attribute("max")) + 1):
                tab.evaluate("step => set({ step })", step)
                words = tab.locator(".words").inner_text()
                assert reason.search(words) and "undefined" not in words, words
                assert tab.locator(".station.now").count() == 1
                for tip in tab.locator("svg.picture [data-tip]").all() if step < 9 else []:
                    head, holds, shape = tip.get_attribute("data-tip").split("\n")
                    rank, name = head.removeprefix("rank ").split(": ")
                    if known := run["steps"].get(name):
                        assert shape.startswith(str(tuple(known["shapes"][int(rank)])))
                        start, end = (known["slices"][int(rank)] + ":").split(":")[:2]
                        word = maker.word(known["placement"], known)
                        cut = f"{word} {start} to {int(end or 0) - 1}"
                        assert holds == (word if start == "all" else cut)


@pytest.mark.ci
def test_collectives_on_the_page_are_lab_1s(browser, maker):
    """Bytes as lab 1 counts them, seconds as it predicts them."""
    from labs.lab1_collectives.show import COSTS

    settings, n, us, gb = list(product(maker.OPERATIONS, range(2, 9))), 2**22, 50, 10
    with opened(browser, "collectives&") as tab:
        for op, P in random.Random(1).sample(settings, 12):
            show(tab, "collectives", op=op, P=P, step=99, n=n, latency=us, bandwidth=gb)
            steps, sent = COSTS[op.replace("_", " " if op.startswith("gather") else "-")](P, n)
            found = figures(tab)
            assert shows(found["wire bytes so far, a rank"], sent)
            assert tab.locator(".player output").inner_text() == f"step {steps} of {steps}"
            assert shows(found["in all"], steps * us * 1e-6 + sent / (gb * 1e9))


# ---- Memory, pipelines and time ------------------------------------------------------------------


def memory_settings(memory, seed, count):
    """(key, recomputation, loss, optimizer, length, microbatches); MiB by the data, and so on."""
    from explorer import questions

    choose, presets = random.Random(seed), [key for key in memory["curves"] if "70b" not in key]
    while count:
        *key, recompute, loss = choose.choice(sorted(presets)).split(" ")
        optimizer, M = choose.choice(["none", "adamw", "adamw-host"]), 1
        if key[1] == "pp" and recompute == "full":
            optimizer, M = choose.choice([(optimizer, 1), ("adamw", 4)])
        points = [at for at, *_ in memory["curves"][" ".join([*key, recompute, loss])][0]]
        length = round(2 ** choose.uniform(11, 20) / 512) * 512
        length = choose.choice(points) if len(points) < 7 else length  # between few it is rough
        setting = " ".join(key), recompute, loss, optimizer, length, M
        asked = setting[0], f"{recompute} {loss}", optimizer
        mib, _ = questions.peak(memory, *asked, length, M)
        if mib < 139 * 1024:  # what some GPU has
            count -= 1
            gpu = choose.choice(list(memory["gpus"]))
            yield setting, mib, gpu, questions.longest(memory, *asked, gpu, M)


@pytest.mark.ci(every=40)
@pytest.mark.parametrize("case", range(40))
def test_memory_is_predicted(maker, tmp_path, case):
    """Settings between the lengths of the page's data: as oom_search.py predicts them."""
    memory = maker.embedded(PAGE)["memory"]
    setting, mib, *_ = list(memory_settings(memory, 2, 40))[case]
    key, recompute, loss, optimizer, length, M = setting
    model, strategy, *shard, world = key.split(" ")
    command = ["oom_search.py", "--how", "predicted", "--at", length, "--strategy", strategy]
    command += ["--nproc", world, *shard, "--model", model, "--recompute", recompute]
    command += ["--loss", loss, "--optimizer", optimizer, "--json", tmp_path / "direct.json"]
    command += ["--batch", M, "--microbatches", M] if M > 1 else []
    done = python(*command)
    assert done.returncode == 0, done.stderr
    [row] = json.loads((tmp_path / "direct.json").read_text())["results"]
    direct = max(row["at"][0]["peak_memory_bytes"]) / 2**20
    assert mib == approx(direct, rel=0.02 if M == 1 else ROUGH), setting


@pytest.mark.ci
def test_memory_on_the_page(browser, maker):
    """Peak and longest length, of 20 settings, as from the page's data in Python."""
    memory = maker.embedded(PAGE)["memory"]
    with opened(browser, "memory&") as tab:
        for setting, mib, gpu, longest in memory_settings(memory, 5, 20):
            key, recompute, loss, optimizer, length, M = setting
            model, strategy, *shard, world = key.split(" ")
            words = {"model": model, "gpu": gpu, "P": world, "length": length, "loss": loss}
            words |= {"recompute": recompute, "optimizer": optimizer, "strategy": strategy}
            if strategy == "plain":
                del words["P"], words["loss"]
            shard = "yes" if shard else "no"
            show(tab, "memory", **words, shard=shard, microbatches=M)
            shown = tab.locator(".words").inner_text()
            assert float(re.search(r"([\d.]+) GiB", shown)[1]) == approx(mib / 1024, rel=0.006)
            head = tab.locator(".stage h2").first.inner_text()
            assert f": {longest:,} tokens" in head or not longest and "not even 2,048" in head
            curves = memory["curves"][f"{key} {recompute} {loss}"]
            assert ("extrapolated" in head) == (longest > min(curve[-1][0] for curve in curves))
            asked = oom_search.parse(tab.locator("code").inner_text().split()[2:])
            assert [asked.at, asked.nproc, asked.model] == [[length], [int(world)], model]
            assert [asked.recompute, asked.loss, asked.optimizer] == [recompute, loss, optimizer]
            assert asked.strategies == [strategy] and asked.shard_weights == (shard == "yes")
            assert asked.gpu == gpu
            assert [asked.batch, asked.microbatches or 1] == [M, M]


@pytest.mark.ci
def test_pipelines_on_the_page_are_pps(browser, maker):
    """The timeline that the page draws, its bubble and formula, of 20 settings: pp.py's."""
    data, names = maker.embedded(PAGE)["pipelines"], {"F": "forward", "B": "backward"}
    with opened(browser, "pipelines&") as tab:
        for setting in random.Random(4).sample(sorted(data["schedules"]), 20):
            schedule, P, M, V = (int(x) if x.isdigit() else x for x in setting.split(" "))
            costs = random.Random(setting).choice(list(data["costs"]))
            words = {"schedule": schedule, "P": P, "M": M, "costs": costs}
            show(tab, "pipelines", **words | ({"V": V} if V > 1 else {}))
            F, B, W = (int(x) / V for x in costs.split(":"))
            cost = {"F": F, "B": B, "W": W} if schedule == "zb" else {"F": F, "B": B + W}
            ranks = [list(pp.SCHEDULES[schedule](rank, P, M, V)) for rank in range(P)]
            rows = pp.simulate(ranks, P * V, lambda action, cost=cost: cost[action.kind])
            rows.sort(key=lambda row: row[0])  # the page draws one rank after the other
            drawn = tab.locator(".cell").evaluate_all("all => all.map(cell => cell.dataset.tip)")
            for (rank, (kind, stage, m), begin, end), words in zip(rows, drawn, strict=True):
                what = f"rank {rank}: {names.get(kind, 'gradients of weights')} of microbatch {m}"
                assert words.startswith(what) and (V == 1 or f"stage {stage} of {P * V}" in words)
                times = re.search(r"from ([\d.]+) to ([\d.]+) forwards", words).groups()
                assert [float(x) * F * V for x in times] == approx([begin, end], abs=0.02)
            formula = schedules.bubble_formula(P, M, V, *cost.values())
            found = [f.inner_text().split("\n")[0] for f in tab.locator(".figure").all()]
            assert found[0] == f"{100 * schedules.bubble(rows, P):.1f}%"
            assert found[1] == ("none" if formula is None else f"{100 * formula:.1f}%")
            assert found[3].startswith(str(max(map(schedules.most_in_flight, ranks))))
            options = tab.locator("code").inner_text().split()[2:]
            asked = dict(zip(options[::2], options[1::2]))
            assert [asked["--schedule"], asked["--recompute"]] == [schedule, "none"]
            assert [int(asked[f"--{x}"]) for x in ("ranks", "microbatches")] == [P, M]
            assert int(asked.get("--virtual-stages", 1)) == V


@pytest.mark.ci
def test_time_on_the_page_is_lab_11s(browser, maker):
    """Seconds, the largest part and MFU, of 20 settings; what does not fit comes last."""
    from labs.lab11_time import plan

    lab, data = maker.load(maker.LABS / "lab11_time" / "lesson.py"), maker.embedded(PAGE)["time"]
    networks = {"measured": {}, "ideal": {"network": 50e9, "hop": 0.0, "spread": 0.0}}
    choose = random.Random(5)
    with opened(browser, "time&") as tab:
        for setting in choose.sample(sorted(data["steps"]), 20):
            name, gpus, gpu, network, strategy = setting.split(" ")
            length, count = choose.choice(data["lengths"]), choose.choice(data["counts"])
            words = {"model": name, "gpu": gpu, "P": gpus, "network": network, "length": length}
            show(tab, "time", **words, strategy=strategy, count=count)
            label = tab.locator("svg.picture").first.get_attribute("aria-label")
            kinds = re.findall("fits|not fit|split", label)
            order = ["fits", "not fit", "split"]
            assert len(kinds) == 5 and kinds == sorted(kinds, key=order.index)
            found, model = figures(tab), lab.MODELS[name]
            if plan.why_not(model, strategy, int(gpus)):
                assert set(found.values()) == {"none"}
                continue
            cluster = dataclasses.replace(plan.cluster_of(lab, gpu), **networks[network])
            parts = plan.strategy_parts(lab, model, strategy, int(gpus), length, count, cluster)
            assert shows(found["a step"], sum(parts.values()))
            assert f", is {max(parts, key=parts.get)}, " in tab.locator(".words").inner_text()
            rate = count * length / sum(parts.values())
            used = lab.mfu(model, length, rate, int(gpus), lab.H100.peak)
            assert float(found["MFU"].strip("%")) / 100 == approx(used, abs=6e-4)


FITS = [("llama-3.1-8b", "pp", 16, 32768, 16), ("llama-3.1-70b", "sp", 32, 65536, 4)]
FITS += [("llama-3.1-70b", "tp", 4, 4096, 4), ("llama-3.1-70b", "ulysses_sharded", 16, 32768, 4)]


@pytest.mark.slow
@pytest.mark.parametrize("name,strategy,gpus,length,count", FITS)
def test_what_fits_is_oom_searchs(browser, maker, name, strategy, gpus, length, count):
    """Where Time says how much a strategy needs, and lab 11's plan, it is the same."""
    from labs.lab11_time import plan

    [known] = plan.peak_memory([strategy], name, gpus, length, count, "h100").values()
    state = f"time&{strategy}&model={name}&P={gpus}&length={length}&count={count}"
    with opened(browser, state) as tab:
        shown = tab.locator(".words").inner_text()
    needs = float(re.search(r"needs about ([\d.]+) GiB", shown)[1]) * 2**30
    assert needs == approx(known["peak_bytes"], rel=ROUGH)
    assert ("it fits" in shown) == known["fits"]
