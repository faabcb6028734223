"""Makes explorer.html: one file with the page (explorer/) and the data that it shows.

    python notebooks/make_explorer.py                         # all four views
    python notebooks/make_explorer.py --only layouts          # these; the others' data stay

The page computes no layout, memory or schedule: all of that comes from the scripts that it is
about, which run here.
"""

import argparse
import json
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

PAGE, PARTS = HERE / "explorer.html", HERE / "explorer"
DATA = re.compile(r'(?<=<script type="application/json" id="data">).*?(?=</script>)', re.DOTALL)
SCRIPTS = ["shell.js", "layouts.js", "memory.js", "pipelines.js", "collectives.js"]


def layouts():
    return {}


def memory():
    return {}


def pipelines():
    return {}


def collectives():
    return {}


VIEWS = {f.__name__: f for f in (layouts, memory, pipelines, collectives)}


def embedded(page):
    """The data of a page that was made before."""
    return json.loads(DATA.search(page.read_text())[0])


def assemble(data):
    """explorer.html's text. `<` inside of JSON would end the script element, were it `</script>`."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", r"\u003c")
    scripts = [(PARTS / name).read_text() for name in SCRIPTS if (PARTS / name).exists()]
    page = (PARTS / "page.html").read_text()
    page = page.replace("{css}", (PARTS / "page.css").read_text().strip())
    return page.replace("{js}", "\n".join(scripts).strip()).replace("{data}", text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=VIEWS, default=list(VIEWS), metavar="VIEW")
    only = parser.parse_args().only
    data = embedded(PAGE) if PAGE.exists() else {}
    for name, make in VIEWS.items():
        data[name] = make() if name in only else data.get(name, {})
    PAGE.write_text(assemble(data))
    sizes = [f"{name} {len(json.dumps(part)) / 1024:,.0f}" for name, part in data.items()]
    print(f"{PAGE}: {PAGE.stat().st_size / 1024:,.0f} KiB (data: {', '.join(sizes)})")


if __name__ == "__main__":
    main()
