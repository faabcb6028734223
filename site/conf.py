"""The site's settings, and what Sphinx lacks. It reads all sources where they lie."""

import json
import os
import re
import shutil
import sys
from difflib import unified_diff
from pathlib import Path

from docutils import nodes
from sphinx import addnodes

project = html_title = "Parallel LLaMA labs"
root_doc = "README"
sys.path.append(str(Path(__file__).parent))
extensions = ["myst_nb", "words"]
source_suffix = dict.fromkeys([".md", ".ipynb", ".py", ".html"], "myst-nb")
include_patterns = ["*.md", "*.py", "labs/*.md", "labs/*.py", "labs/*/*.md", "site/*.md"]
include_patterns += ["labs/*/lesson.py", "labs/kit/*.py", "results/*.md", "results/*.py"]
include_patterns += ["notebooks/*.ipynb", "notebooks/explorer.html"]
exclude_patterns = [".*", "_site", "my_labs", "AGENTS.md"]
nb_execution_mode = "off"  # the outputs are those that are committed
nb_merge_streams = True
myst_heading_anchors = 4  # GitHub's names for headings, so that links work on both
highlight_language = "text"  # of what names no language: commands, and what they print
html_theme = "sphinx_book_theme"
html_favicon = "icon.svg"
html_theme_options = {"use_download_button": False, "footer_content_items": [], "show_toc_level": 2}
html_sidebars = {"**": ["navbar-logo", "search-button-field", "explorer.html", "sbt-sidebar-nav"]}
templates_path = ["."]
html_static_path = ["site.css", "site.js", "../notebooks/explorer.png"]
html_css_files, html_js_files = ["site.css"], ["site.js"]
html_copy_source = html_show_copyright = html_use_index = False

PUBLISHED = os.environ.get("GITHUB_REPOSITORY")  # owner/name, where GitHub's workflow builds
CODE = f"https://github.com/{PUBLISHED}" if PUBLISHED else ""  # without it no page links there
html_baseurl = "https://{}.github.io/{}/".format(*PUBLISHED.split("/")) if CODE else ""
html_context = {"published": PUBLISHED, "code": CODE, "base": html_baseurl, "default_mode": "auto"}

EXPLORER, DIFF, FILES = "notebooks/explorer", "site/diff", ("tp.py", "sp_megatron.py")
BANNER = re.compile(r"^# -{4} (.+?) -+$|^(?:# -{50,}\n)?# (\S.*)\n# -{50,}$", re.M)
PICTURE = re.compile(r'(<a [^>]*>)?(<img [^>]*src="([^"]*_images/[^"]+)"[^>]*>)')
COLAB = "%cd /content\n!git clone -q {} labs\n%pip install -q ./labs\n%cd labs/notebooks"


def as_markdown(app, docname, source):
    """Before a page is read: scripts become Markdown; the diff and the navigation are added."""
    path = app.env.doc2path(docname)
    if path.suffix == ".py":
        source[0] = script(f"{docname.removeprefix('labs/')}.py", source[0])
    elif docname == EXPLORER:  # finish() writes the explorer over this page
        source[0] = "---\norphan: true\n---\n# The explorer\n"
    elif docname == DIFF:
        texts = [(app.srcdir / file).read_text().splitlines() for file in FILES]
        lines = unified_diff(*texts, *FILES, n=4, lineterm="")
        source[0] += "\n``````{code-block} diff\n\n" + "\n".join(lines) + "\n``````\n"
    elif docname == root_doc:
        source[0] = front(app.srcdir, source[0]) + navigation(app.env, source[0])


def front(root, readme):
    """The front page: where GitHub shows a picture, a question to try; how much there is."""
    labs = [file.read_text() for file in root.glob("labs/*/lesson.py")]
    exercises = sum(len(set(re.findall(r"# exercise: (\w+)", lab))) for lab in labs)
    checks = [*root.glob("labs/*/check.py"), root / "labs/bugs.py"]
    text = "\n".join(file.read_text() for file in checks).replace("(*BUGS)", "(1, 2, 3, 4)")
    bugs = re.findall(r"^(?:BUGS = \[|@bug_of\()(.*)[])]$", text, re.M)
    listed = "\n".join(file.read_text() for file in root.glob("labs/*/mistakes.txt"))
    bugs = sum(len(names.split(",")) for names in bugs) + len(re.findall("^bug ", listed, re.M))
    question = (root / "site/question.html").read_text()
    scale = f"{len(labs)} labs, {exercises} exercises, {bugs} bugs to plant and watch being caught"
    readme = readme.replace("A laptop is enough:", f"\n{scale}. A laptop is enough:", 1)
    block = f"```{{raw}} html\n{question}```"
    readme = re.sub("<!-- on GitHub -->.*?<!-- end -->", lambda _: block, readme, flags=re.S)
    clone = f"git clone {CODE}\ncd {CODE.split('/')[-1]}\n" if CODE else ""
    return readme.replace("```\nmake demo\n", f"```\n{clone}make demo\n", 1)


def script(name, text):
    """A Python file: its sections, whose titles are its banners, with line numbers."""
    parts, begin, heading = [], 0, f"# {name}"
    for banner in [*BANNER.finditer(text), None]:
        end = banner.start() if banner else len(text)
        line = text.count("\n", 0, begin) + 1
        fence = f"``````{{code-block}} python\n:lineno-start: {line}\n\n"
        parts.append(f"{heading}\n\n{fence}{text[begin:end].rstrip()}\n``````\n")
        if banner:
            begin, heading = end, f"## {banner[1] or banner[2]}"
    return "\n".join(parts)


def navigation(env, readme):
    """README's table of what to read, row by row, and what is left, as tables of contents."""
    parts, left = {}, sorted(env.found_docs - {root_doc, EXPLORER})
    table = re.search(r"^\|.* read \|.* build \|.*\n\|.*\n((?:\|.*\n)*)", readme, re.M)[1]
    for row in table.splitlines():
        pages = []
        for file in re.findall(r"\]\((?!http)([^)#]+)", row):
            name = file.rpartition(".")[0]
            pages += [name.replace("lesson", "README")] if name.endswith("/lesson") else []
            pages += [name, DIFF] if name == "sp_megatron" else [name]
        title = row.split("|")[1].strip().partition(":")[0]
        parts[title[0].upper() + title[1:]] = [page for page in pages if page in left]
        left = [page for page in left if page not in pages]
    texts = [page for page in left if "/" in page and env.doc2path(page).suffix != ".py"]
    parts |= {"To look up": texts, "For contributors": [p for p in left if p not in texts]}
    toctree = "\n```{{toctree}}\n:hidden:\n:caption: {}\n\n/{}\n```\n"
    return "".join(toctree.format(title, "\n/".join(pages)) for title, pages in parts.items())


def mend_links(app, doctree):
    """Links that work on GitHub only: to the explorer's views, to folders. And one to the diff."""
    up = "../" * app.env.docname.count("/")
    for link in list(doctree.findall(addnodes.pending_xref)):
        if link["reftarget"] == EXPLORER:
            view = f"{up}{EXPLORER}.html#{link['reftargetid'] or ''}"
            link.replace_self(nodes.reference("", "", *link.children, refuri=view))
        elif Path(app.env.relfn2path(link["reftarget"])[1]).is_dir():
            link.replace_self(link.children[0].children)  # text: a folder is no page
    for code in list(doctree.findall(nodes.literal)):
        if code.astext() == "diff tp.py sp_megatron.py":
            code.replace_self(nodes.reference("", "", code.deepcopy(), refuri=f"{up}{DIFF}.html"))


def finish(app, error):
    """The explorer, its links to Markdown led to pages; index.html; what the theme does badly."""
    if error:
        return
    root, out = Path(app.srcdir), Path(app.outdir)
    page = re.sub(r"(\.\./[\w/]+)\.md\b", r"\1.html", (root / f"{EXPLORER}.html").read_text())
    page = page.replace('<meta name="code" content="">', f'<meta name="code" content="{CODE}">')
    (out / f"{EXPLORER}.html").write_text(page)
    for file in out.rglob("*.html"):  # the icons are in a font, too; a picture has its full size
        page = re.sub("<script [^>]*fontawesome.js[^>]*></script>", "", file.read_text())
        page = re.sub('<span class="[npw]">([^<]*)</span>', r"\1", page)  # of plain colour
        page = PICTURE.sub(lambda m: m[0] if m[1] else f'<a href="{m[3]}">{m[2]}</a>', page)
        file.write_text(page)
    shutil.copy(out / "README.html", out / "index.html")
    for file in root.glob("notebooks/*.ipynb") if CODE else []:  # for Colab: .github/workflows
        book = json.loads(file.read_text())
        cell = {"id": "colab", "cell_type": "code", "metadata": {}, "source": COLAB.format(CODE)}
        book["cells"].insert(1, cell | {"outputs": [], "execution_count": None})
        (out / "notebooks" / file.name).write_text(json.dumps(book))


def setup(app):
    """Adds all of it to Sphinx."""
    app.connect("source-read", as_markdown)
    app.connect("doctree-read", mend_links)
    app.connect("build-finished", finish)
