"""notebooks/explorer.html: its data made anew, and its views in a real browser."""

import dataclasses
import importlib
import json
import random
import re
import shutil
import sys
from contextlib import contextmanager

import pytest
from conftest import python
from forks import ROOT

import oom_search
import pp
import sp_layout_sim

PAGE = ROOT / "notebooks" / "explorer.html"
VIEWS = ["layouts", "memory", "pipelines", "collectives", "time"]
SIZES = {"laptop": (1280, 800), "phone": (390, 844), "tablet": (800, 1000)}
SIZES["projector"] = 1920, 1080
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"]
QUIET += ["--disable-component-update", "--disable-sync", "--no-first-run"]


@pytest.fixture(scope="module")
def maker():
    """notebooks/make_explorer.py as a module."""
    sys.path.insert(0, str(PAGE.parent))
    return importlib.import_module("make_explorer")


def test_page_is_made_of_its_parts(maker):
    assert PAGE.read_text() == maker.assemble(maker.embedded(PAGE)), "run make_explorer.py"
    assert PAGE.stat().st_size < 3e6
    assert len((PAGE.parent / "make_explorer.py").read_text().splitlines()) <= 400
    found = {p.name: re.findall(r'"(\.\./[^"]+)"', p.read_text()) for p in maker.PARTS.glob("*.js")}
    links = found.pop("shell.js")
    assert not any(found.values()), "all links stand in LINKS, for the site's build"
    assert [link for link in links if not (PAGE.parent / link).exists()] == []


@pytest.mark.slow
@pytest.mark.parametrize("view", ["layouts", "pipelines", "collectives", "time"])
def test_data_is_the_scripts(maker, view):
    anew = json.loads(json.dumps(maker.VIEWS[view]()))
    assert maker.embedded(PAGE)[view] == anew, "run make_explorer.py"


def test_page_is_made_by_its_command(maker, monkeypatch, tmp_path):
    monkeypatch.setattr(maker, "PAGE", tmp_path / PAGE.name)
    monkeypatch.setattr(sys, "argv", ["make_explorer.py", "--only", "collectives"])
    maker.PAGE.write_text(PAGE.read_text().replace("<h1>", "<h1>older "))
    maker.main()
    assert maker.PAGE.read_text() == PAGE.read_text()


# In the browser
# --------------------------------------------------------------------------------------------------


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
    assert [c for c in complaints if not c.startswith((page.as_uri(), "data:"))] == []


def figures(tab):
    """{what it is: number} of the figures that a view shows."""
    pairs = [f.inner_text().split("\n", 1) for f in tab.locator(".figure").all()]
    return {words.strip(): number for number, words in pairs}


UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "s": 1, "ms": 1e-3, "µs": 1e-6}


def shows(text, number):
    """Whether the page shows this number: of 3 digits the last may be off by one."""
    value, unit = text.replace(",", "").split()
    return float(value) * UNITS[unit] == pytest.approx(number, rel=0.006)


def wait(tab, condition):
    tab.wait_for_function(f"() => {condition}", timeout=9000)


# Pixels of the smallest text outside of a pipeline's cells, of the lowest slider
SMALLEST = """() => {
    const scale = (svg) => svg.getBoundingClientRect().width / svg.viewBox.baseVal.width
    const size = (text) => parseFloat(getComputedStyle(text).fontSize) * scale(text.closest("svg"))
    const texts = [...document.querySelectorAll("svg.picture text:not(.cell text)")].map(size)
    const sliders = [...document.querySelectorAll("input")].map((input) => input.offsetHeight)
    return [Math.min(...texts), Math.min(...sliders)]
}"""


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("view", VIEWS)
def test_view_fits(browser, view, size):
    dark = size in ("phone", "projector")
    with opened(browser, view, size, color_scheme="dark" if dark else "light") as tab:
        assert tab.locator("nav a").count() == 5
        assert tab.locator("nav a[aria-current]").get_attribute("href").startswith(f"#{view}")
        assert tab.locator("p:has-text('In the course') a").count() > 0
        wide, shown = tab.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert wide <= shown
        text, slider = tab.evaluate(SMALLEST)
        assert text > 11.9 and (slider >= 40 or size in ("laptop", "projector"))
        box = tab.locator("svg.picture").first.bounding_box()
        assert box["width"] > (300 if size != "projector" else 1000)
        if size in ("laptop", "projector"):
            assert box["y"] + box["height"] <= SIZES[size][1]
        assert tab.locator("svg.picture[tabindex='0']").first.get_attribute("aria-label")


@pytest.mark.slow
def test_tips_by_mouse_and_by_touch(browser):
    """Beside what they explain, never over it; a tap shows one, a tap elsewhere hides it."""
    with opened(browser, "layouts") as tab:
        tip, target = tab.locator("#tip"), tab.locator("svg.picture [data-tip]").nth(1)
        target.hover()
        assert tip.inner_text().startswith("rank 1: norm 1")
        place, box = target.bounding_box(), tip.bounding_box()
        assert box["x"] >= place["x"] + place["width"] or box["x"] + box["width"] <= place["x"]
        tab.keyboard.press("Escape")
        assert tip.is_hidden()
    with opened(browser, "layouts", "phone", has_touch=True) as tab:
        tip, target = tab.locator("#tip"), tab.locator("svg.picture [data-tip]").nth(1)
        target.tap()
        assert tip.inner_text().startswith("rank 1: norm 1")
        place, box = target.bounding_box(), tip.bounding_box()
        assert box["y"] >= place["y"] + place["height"] or box["y"] + box["height"] <= place["y"]
        tab.locator(".words").tap()
        assert tip.is_hidden()


@pytest.mark.slow
@pytest.mark.parametrize("view", ["layouts", "collectives", "pipelines"])
def test_keys_buttons_and_play(browser, view):
    with opened(browser, f"{view}&P=8&step=1") as tab:
        at = lambda: int(tab.locator(".player input").input_value())  # noqa: E731
        first, words = at(), tab.locator("main").inner_text()
        tab.keyboard.press("ArrowRight")
        assert at() == first + 1
        assert tab.locator("main").inner_text() != words
        tab.keyboard.press("ArrowLeft")
        assert at() == first
        tab.get_by_role("button", name="A step on").click()
        assert at() == first + 1
        tab.locator("body").click(position={"x": 2, "y": 2})
        tab.keyboard.press(" ")
        assert tab.get_by_role("button", name="Pause").count() == 1
        wait(tab, f"document.querySelector('.player input').value > {at()}")
        tab.keyboard.press(" ")
        assert tab.get_by_role("button", name="Play").count() == 1


@pytest.mark.slow
def test_state_stands_in_the_fragment(browser):
    with opened(browser, "layouts&ulysses&P=3&step=7") as tab:
        ranks = tab.locator("[data-control=P]")
        assert ranks.get_attribute("aria-valuetext") == "3"
        ranks.focus()
        tab.keyboard.press("ArrowRight")
        wait(tab, "location.hash === '#layouts&ulysses&step=7'")  # 4 is the default
        tab.locator("[data-control=layout]").select_option("cp")
        wait(tab, "location.hash === '#layouts&cp&step=7'")
        tab.evaluate("location.hash = '#collectives&op=all_gather&P=5&step=2'")
        assert tab.locator("[data-control=op]").input_value() == "all_gather"
        assert tab.locator(".player output").inner_text() == "step 2 of 4"
        tab.locator("nav a").first.click()  # a view is as it was left
        assert tab.locator("[data-control=layout]").input_value() == "cp"


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["nothing", "layouts&P=99&layout=&x&=&step=-1", "layouts&P=%&"])
def test_broken_fragments(browser, wrong):
    with opened(browser, wrong) as tab, opened(browser, "layouts") as right:
        assert tab.locator("main").inner_text() == right.locator("main").inner_text()
    with opened(browser, "layouts&P=2&step=999") as tab:  # more steps than there are: the last
        assert len(set(tab.locator(".player output").inner_text().split()[1::2])) == 1


@pytest.mark.slow
def test_links_from_the_notes_name_moments(browser):
    """Each word of a link is one that the page understands, and its step is there."""
    files = *ROOT.glob("labs/**/*.md"), *PAGE.parent.glob("*.ipynb")
    texts = [file.read_text() for file in files]
    links = re.findall(r"explorer\.html#([^)\s]+)\)", " ".join(texts))
    assert len(links) > 15
    with opened(browser, "layouts") as tab:
        for link in sorted(set(links)):
            view, *words = link.split("&")
            tab.evaluate("to => { location.hash = to }", f"#{link}")
            wait(tab, f"current.id === '{view}' && document.querySelector('main svg.picture')")
            bare = tab.evaluate("current.bare")
            for word in words:
                key, value = word.split("=") if "=" in word else (bare, word)
                assert str(tab.evaluate(f"state.{key}")) == value, link
            if "step=" in link:
                told = tab.locator(".player output").inner_text()
                assert f"step {link.split('step=')[1]} of" in told, link


@pytest.mark.slow
def test_pieces_travel_unless_motion_is_unwelcome(browser):
    moving = "document.getAnimations().filter(a => a.animationName === 'travel').length"
    for view in ("layouts&sp&step=2", "collectives&step=2"):
        with opened(browser, view) as tab:
            assert tab.evaluate(moving) == tab.locator(".piece").count() > 0
        with opened(browser, view, reduced_motion="reduce") as tab:
            assert tab.evaluate(moving) == 0
            assert tab.locator(".way").count() == tab.locator(".piece").count() > 0


# Of every step of the layout on P ranks: the sentence, marks in the small block, names, collective
TOLD = """P => {
    set({ P })
    const { moments, tensors } = DATA.layouts.runs[state.layout][P - 1]
    return moments.map(([, before, after, collective], i) => {
        set({ step: i + 1 })
        const here = document.querySelectorAll(".station.now").length
        const names = `${tensors[before][0]} ${tensors[after][0]}`
        return [document.querySelector(".words").innerText, here, names, collective]
    })
}"""


@pytest.mark.slow
@pytest.mark.parametrize("layout", sp_layout_sim.LAYOUTS)
def test_every_step_is_explained(browser, layout):
    """What happens and why, not only which names change; 5 to 8 highlights lead to steps."""
    with opened(browser, f"layouts&{layout}") as tab:
        for P in (1, 2, 7):
            for words, here, names, collective in tab.evaluate(TOLD, P):
                title, why = words.split(": ", 1)
                assert (collective.replace("_", "-") or "no message") in title
                assert re.search(r"\b(since|so|needs?|only|same|at a time)\b", why), words
                assert len(set(why.split()) - set(names.split())) > 9, words
                assert here == 1 and not re.search("undefined|[{}]", words), words
        chips = tab.locator(".chips button").all()
        assert 5 <= len(chips) <= 8
        for chip in chips:
            chip.click()
            assert chip.get_attribute("aria-pressed") == "true"


@pytest.mark.slow
def test_colours_of_replicas_and_of_one_ranks_messages(browser):
    colours = "all => all.map((x) => x.getAttribute('fill') || x.getAttribute('stroke'))"
    with opened(browser, "layouts&sp&P=3&step=2") as tab:
        held = lambda name: tab.locator(f"[data-tip^='{name}'] .held").evaluate_all(colours)  # noqa: E731
        for rank in range(3):
            assert held(f"rank {rank}: norm 1") == [f"var(--rank{rank})"]
            assert held(f"rank {rank}: enter attention") == [f"var(--rank{r})" for r in range(3)]
        tab.evaluate("set({ P: 8 })")  # 56 messages: one rank's are drawn
        for rank in (0, 5):
            tab.locator(f"[data-tip^='rank {rank}: norm 1']").hover()
            assert tab.locator(".way").evaluate_all(colours) == [f"var(--rank{rank})"] * 7


SETTINGS = [(layout, P) for layout in sp_layout_sim.LAYOUTS for P in range(1, 9)]


@pytest.mark.slow
def test_layouts_on_the_page_are_the_simulators(browser, maker):
    """At the end all that is sent; on the way what each rank holds: shapes, slices."""
    with opened(browser, "layouts") as tab:
        for layout, P in random.Random(0).sample(SETTINGS, 12):
            args = sp_layout_sim.parse([*maker.BLOCK, "--tp", str(P)])
            run = sp_layout_sim.run(args)["layouts"][layout]
            tab.evaluate("to => { location.hash = to }", f"#layouts&{layout}&P={P}&step=999")
            wait(tab, f"state.P === {P} && state.layout === '{layout}'")
            found, sent = figures(tab), sum(row["sent_bytes"] for row in run["traffic"])
            assert shows(found["wire bytes so far, a rank"], sent / P)
            assert found["collectives so far"] == str(sum(t["count"] for t in run["traffic"]))
            assert shows(found["weights on rank 0"], run["weight_bytes"][0])
            assert shows(found["kept by rank 0 for the backward"], run["kept_bytes"][0])
            for step in range(1, 9):
                tab.evaluate("step => set({ step })", step)
                for tip in tab.locator("svg.picture [data-tip]").all():
                    head, holds, shape = tip.get_attribute("data-tip").split("\n")
                    rank, name = head.removeprefix("rank ").split(": ")
                    if name in run["steps"]:
                        known = run["steps"][name]
                        assert shape.startswith(str(tuple(known["shapes"][int(rank)])))
                        start, end = (known["slices"][int(rank)] + ":").split(":")[:2]
                        cut = f"{known['holds']} {start} to {int(end or 0) - 1}"
                        assert holds == (known["holds"] if start == "all" else cut)


@pytest.mark.slow
def test_collectives_on_the_page_are_lab_1s(browser, maker):
    """Bytes as lab 1 counts them, seconds as it predicts them."""
    from experiments.lab1 import COSTS

    settings = [(op, P) for op in maker.OPERATIONS for P in range(2, 9)]
    with opened(browser, "collectives") as tab:
        for op, P in random.Random(1).sample(settings, 12):
            n, us, gb = 2**22, 50, 10
            words = f"#collectives&{op}&P={P}&step=99&n={n}&latency={us}&bandwidth={gb}"
            tab.evaluate("to => { location.hash = to }", words)
            wait(tab, f"state.P === {P} && state.op === '{op}'")
            steps, sent = COSTS[op.replace("_", " " if op.startswith("gather") else "-")](P, n)
            seconds = steps * us * 1e-6 + sent / (gb * 1e9)
            found = figures(tab)
            assert shows(found["wire bytes so far, a rank"], sent)
            assert tab.locator(".player output").inner_text() == f"step {steps} of {steps}"
            assert shows(found["in all"], seconds)
            a, b = us * 1e-6, 1 / gb / 1e9
            ring, both = (P - 1) * (a + b * n / P), op in ("all_reduce", "gather_and_add")
            priced = {"ring": 2 * ring, "gather and add": (P - 1) * (a + b * n)}
            for name, price in (priced if both else {op.replace("_", "-"): ring}).items():
                assert shows(found[name], price)


# Memory, pipelines and time
# --------------------------------------------------------------------------------------------------


def memory_settings(memory, seed, count):
    """(key, recomputation, loss, optimizer, length), what the data have of them; MiB there."""
    choose = random.Random(seed)
    while count:
        *key, recompute, loss = choose.choice(sorted(memory["curves"])).split(" ")
        optimizer = choose.choice(["none", "adamw", "adamw-host"])
        length = round(2 ** choose.uniform(11, 20) / 512) * 512
        setting = " ".join(key), recompute, loss, optimizer, length
        if (mib := interpolated(memory, *setting)) < 139 * 1024:  # what some GPU has
            count -= 1
            yield setting, mib


def interpolated(memory, key, recompute, loss, optimizer, length):
    """MiB at the peak, from the page's data."""
    peaks = []
    for curve, step in zip(memory["curves"][f"{key} {recompute} {loss}"], memory["steps"][key]):
        after = sum(at < length for at, *_ in curve)
        (a, *below), (b, *above) = curve[max(0, min(after, len(curve) - 1) - 1) :][:2]
        total = sum(below) + (sum(above) - sum(below)) * (length - a) / (b - a)
        state = step[memory["parts"].index("optimizer state")]
        peaks.append(max(total + state, sum(step)) if optimizer == "adamw" else total)
    return max(peaks)


@pytest.mark.slow
@pytest.mark.parametrize("case", range(40))
def test_memory_is_predicted(maker, tmp_path, case):
    """40 random settings, interpolated from the page's data: as oom_search.py predicts them."""
    memory = maker.embedded(PAGE)["memory"]
    setting, mib = list(memory_settings(memory, 2, 40))[case]
    key, recompute, loss, optimizer, length = setting
    model, strategy, *shard, world = key.split(" ")
    command = ["oom_search.py", "--how", "predicted", "--at", length, "--strategy", strategy]
    command += ["--nproc", world, *shard, "--model", model, "--recompute", recompute]
    command += ["--loss", loss, "--optimizer", optimizer, "--json", tmp_path / "direct.json"]
    done = python(*command, "--journal", tmp_path / "journal")
    assert done.returncode == 0, done.stderr
    [row] = json.loads((tmp_path / "direct.json").read_text())["results"]
    direct = max(row["at"][0]["peak_memory_bytes"]) / 2**20
    assert mib == pytest.approx(direct, rel=0.02), setting


@pytest.mark.slow
def test_memory_on_the_page(browser, maker):
    """Peak, limit and longest length, of 20 settings, as from the page's data in Python."""
    memory = maker.embedded(PAGE)["memory"]
    with opened(browser, "memory") as tab:
        for i, (setting, mib) in enumerate(memory_settings(memory, 3, 20)):
            key, recompute, loss, optimizer, length = setting
            model, strategy, *shard, world = key.split(" ")
            gpu = list(memory["gpus"])[i % len(memory["gpus"])]
            kind = "all-to-all" if strategy == "sp_ulysses" else "several"
            room = memory["gpus"][gpu] - memory["outside"]["one rank" if world == "1" else kind]
            words = f"memory&{strategy}&model={model}&gpu={gpu}&P={world}&length={length}"
            words += f"&recompute={recompute}&loss={loss}&optimizer={optimizer}"
            words += f"&shard={'yes' if shard else 'no'}"
            tab.evaluate("to => { location.hash = to }", words)
            told = f"{length:,} tokens take"
            tab.wait_for_function("t => document.body.innerText.includes(t)", arg=told)
            shown = tab.locator(".words").inner_text()
            peak, limit = (float(x) for x in re.findall(r"([\d.]+) GiB", shown)[:2])
            assert peak == pytest.approx(mib / 1024, rel=0.006)
            assert limit == pytest.approx(room, rel=0.006)
            assert ("fits" in shown) == (mib <= room * 1024)
            longest = tab.locator("h2").first.inner_text().split(":")[1].replace(",", "")
            longest = int(re.search(r"\d+", longest)[0])
            peaks = [interpolated(memory, *setting[:-1], n) for n in (longest, longest + 512)]
            fits = [peak <= 1024 * room for peak in peaks]
            assert fits == [True, False] or longest == 2048 and fits == [False, False]
            halves = tab.locator("svg.picture").first.get_attribute("aria-label")
            steps = re.findall(r"optimizer's step ([\d.]+) GiB", halves)
            assert [float(x) for x in steps] == [
                pytest.approx(max(map(sum, memory["steps"][key])) / 1024, rel=0.006)
            ] * (optimizer == "adamw")
            asked = oom_search.parse(tab.locator("code").inner_text().split()[2:])
            assert asked.at == [length] and asked.nproc == [int(world)] and asked.model == model
            assert [asked.recompute, asked.loss, asked.optimizer] == [recompute, loss, optimizer]
            assert asked.strategies == [strategy] and asked.shard_weights == bool(shard)


@pytest.mark.slow
def test_pipelines_on_the_page_are_pps(browser, maker):
    """The timeline that the page draws, its bubble and formula, of 20 settings: pp.py's."""
    data = maker.embedded(PAGE)["pipelines"]
    with opened(browser, "pipelines") as tab:
        for setting in random.Random(4).sample(sorted(data["schedules"]), 20):
            schedule, P, M, V = (int(x) if x.isdigit() else x for x in setting.split(" "))
            costs = random.Random(setting).choice(list(data["costs"]))
            words = f"pipelines&{schedule}&P={P}&M={M}&V={V}&costs={costs}"
            tab.evaluate("to => { location.hash = to }", words)
            told = f"{P} ranks, {M} microbatches"
            tab.wait_for_selector(f"svg.picture[aria-label*='{told}']", state="attached")
            F, B, W = (int(x) / V for x in costs.split(":"))
            cost = {"F": F, "B": B, "W": W} if schedule == "zb" else {"F": F, "B": B + W}
            ranks = [list(pp.SCHEDULES[schedule](rank, P, M, V)) for rank in range(P)]
            rows = pp.simulate(ranks, P * V, lambda action, cost=cost: cost[action.kind])
            cells = "cells => cells.map(cell => cell.dataset.tip)"
            drawn = tab.locator(".cell").evaluate_all(cells)
            names = {"F": "forward", "B": "backward", "W": "gradients of weights"}
            for row, words in zip(rows, drawn, strict=True):
                rank, (kind, stage, m), begin, end = row
                assert words.startswith(f"rank {rank}: {names[kind]} of microbatch {m}")
                assert V == 1 or f"stage {stage} of {P * V}" in words
                times = re.search(r"from ([\d.]+) to ([\d.]+) forwards", words).groups()
                assert [float(x) * F * V for x in times] == pytest.approx([begin, end], abs=0.02)
            formula = pp.bubble_formula(P, M, V, *cost.values())
            found = [f.inner_text().split("\n")[0] for f in tab.locator(".figure").all()]
            assert found[0] == f"{100 * pp.bubble(rows, P):.1f}%"
            assert found[1] == ("none" if formula is None else f"{100 * formula:.1f}%")
            assert found[3].startswith(str(max(map(pp.most_in_flight, ranks))))


@pytest.mark.slow
def test_time_on_the_page_is_lab_11s(browser, maker):
    """Seconds, the largest part, MFU, tokens a second, of 20 settings: by lab 11's functions."""
    from experiments import plan

    lab, data = maker.load(maker.LABS / "lab11_time.py"), maker.embedded(PAGE)["time"]
    networks = {"measured": {}, "ideal": {"network": 50e9, "hop": 0.0, "spread": 0.0}}
    choose = random.Random(5)
    with opened(browser, "time") as tab:
        for setting in choose.sample(sorted(data["steps"]), 20):
            name, gpu, nodes, network, strategy = setting.split(" ")
            length, count = choose.choice(data["lengths"]), choose.choice(data["counts"])
            words = f"#time&{strategy}&model={name}&gpu={gpu}&nodes={nodes}&network={network}"
            tab.evaluate("to => { location.hash = to }", f"{words}&length={length}&count={count}")
            wait(tab, f"state.length === {length} && state.count === {count}")
            found, model, gpus = figures(tab), lab.MODELS[name], 8 * int(nodes)
            if plan.why_not(model, strategy, gpus):
                assert set(found.values()) == {"none"}
                continue
            cluster = dataclasses.replace(plan.cluster_of(lab, gpu), **networks[network])
            parts = plan.strategy_parts(lab, model, strategy, gpus, length, count, cluster)
            rate = count * length / sum(parts.values())
            assert shows(found["a step"], sum(parts.values()))
            assert f", is {max(parts, key=parts.get)}, " in tab.locator(".words").inner_text()
            used = lab.mfu(model, length, rate, gpus, lab.H100.peak)
            assert float(found["MFU"].strip("%")) / 100 == pytest.approx(used, abs=6e-4)
            assert shows(found["tokens a second"] + " B", rate)
