"""The site's settings, and below them what Sphinx lacks. `make site` builds it into _site/.

Sphinx reads the project's Markdown, notebooks and scripts where they lie: no text is here twice.
"""

import re
import shutil
from difflib import HtmlDiff
from pathlib import Path

from docutils import nodes
from sphinx import addnodes

project = html_title = "Parallel LLaMA labs"
root_doc = "README"
extensions = ["myst_nb"]
source_suffix = dict.fromkeys([".md", ".ipynb", ".py", ".html"], "myst-nb")
include_patterns = ["*.md", "*.py", "labs/*.md", "labs/*.py", "labs/notes/*.md", "site/*.md"]
include_patterns += ["results/*.md", "results/*.py", "notebooks/*.ipynb", "notebooks/explorer.html"]
exclude_patterns = [".*", "_site", "my_labs", "AGENTS.md"]
nb_execution_mode = "off"  # the outputs are those that are committed
myst_enable_extensions = []  # a dollar sign is a shell's prompt, not mathematics
myst_heading_anchors = 4  # GitHub's names for headings, so that links work on both
highlight_language = "text"  # of what names no language: commands, and what they print
html_theme = "sphinx_book_theme"
html_favicon = "icon.svg"
html_theme_options = {"use_download_button": False, "footer_content_items": []}
html_context = {"default_mode": "auto"}  # dark or light, as the reader's system is
html_sidebars = {"**": ["navbar-logo", "search-button-field", "explorer.html", "sbt-sidebar-nav"]}
templates_path = ["."]
html_static_path = html_css_files = ["site.css"]
html_copy_source = html_show_copyright = html_use_index = False

EXPLORER, GLOSSARY, DIFF = "notebooks/explorer", "labs/notes/glossary", "site/diff"
BANNER = re.compile(r"^# -{4} (.+?) -+$|^(?:# -{50,}\n)?# (\S.*)\n# -{50,}$", re.M)
NOT_PROSE = nodes.reference, nodes.literal, nodes.literal_block, nodes.title, nodes.raw


def as_markdown(app, docname, source):
    """Before a page is read: scripts become Markdown; the diff and the navigation are added."""
    path = app.env.doc2path(docname)
    if path.suffix == ".py":
        source[0] = script(path.name, source[0])
    elif docname == EXPLORER:  # finish() writes the explorer over this page
        source[0] = "---\norphan: true\n---\n# The explorer\n"
    elif docname == DIFF:
        source[0] += side_by_side(app.srcdir / "tp.py", app.srcdir / "sp_megatron.py")
    elif docname == root_doc:
        source[0] += navigation(app.env, source[0])


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


def side_by_side(left, right):
    """Two scripts side by side: what differs, and four unchanged lines around it."""
    texts = [file.read_text().splitlines() for file in (left, right)]
    table = HtmlDiff().make_table(*texts, left.name, right.name, context=True, numlines=4)
    table = re.sub(r'<t([hd]) class="diff_next".*?</t\1>|<colgroup></colgroup>', "", table)
    table = table.replace("&nbsp;", " ")  # so that long lines can wrap
    return f'\n```{{raw}} html\n<div class="side-by-side">{table}</div>\n```\n'


def navigation(env, readme):
    """README's table of what to read, row by row, and what is left, as tables of contents."""
    parts, left = {}, sorted(env.found_docs - {root_doc, EXPLORER})
    table = re.search(r"^\|.* read \|.* build \|.*\n\|.*\n((?:\|.*\n)*)", readme, re.M)[1]
    for row in table.splitlines():
        pages = []
        for file in re.findall(r"\]\((?!http)([^)#]+)", row):
            name = file.rpartition(".")[0]
            lab = re.match("labs/(lab[^_]+)_", name)
            pages += [f"labs/notes/{lab[1]}"] if lab else []
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


def link_words(app, doctree, docname):
    """The first use of each of the glossary's words on a page becomes a link to its entry."""
    if GLOSSARY not in app.env.found_docs or docname == GLOSSARY:
        return
    entries, linked = {}, []
    for entry in app.env.get_doctree(GLOSSARY).findall(nodes.section):
        words = [] if entry.next_node(nodes.section) else entry[0].astext().split(", ")
        for word in words:
            entries[word.lower() if word[1:].islower() else word] = entry["ids"][0]
    longest_first = "|".join(map(re.escape, sorted(entries, key=len, reverse=True)))
    pattern = re.compile(rf"(?<![\w-])({longest_first})s?(?![\w-])", re.I)
    page = app.builder.get_relative_uri(docname, GLOSSARY)
    kept = [node for kind in NOT_PROSE for node in doctree.findall(kind)]
    kept = {id(text) for node in kept for text in node.findall(nodes.Text)}
    for text in list(doctree.findall(nodes.Text)):
        pieces, end = [], 0
        for match in [] if id(text) in kept else pattern.finditer(text):
            word = match[1].lower() if len(match[1]) > 2 else match[1]  # F is not f
            entry = entries.get(match[1], entries.get(word))
            if entry and entry not in linked:
                linked.append(entry)
                pieces.append(nodes.Text(text[end : match.start()]))
                uri = f"{page}#{entry}"
                pieces.append(nodes.reference("", match[0], refuri=uri, classes=["word"]))
                end = match.end()
        text.parent.replace(text, [*pieces, nodes.Text(text[end:])])


def finish(app, error):
    """The explorer, its links to Markdown led to pages; and index.html, which servers look for."""
    if not error:
        page = Path(app.srcdir, f"{EXPLORER}.html").read_text()
        page = re.sub(r"(\.\./[\w/]+)\.md\b", r"\1.html", page)
        Path(app.outdir, f"{EXPLORER}.html").write_text(page)
        shutil.copy(Path(app.outdir, "README.html"), Path(app.outdir, "index.html"))


def setup(app):
    """Adds all of it to Sphinx."""
    app.connect("source-read", as_markdown)
    app.connect("doctree-read", mend_links)
    app.connect("doctree-resolved", link_words)
    app.connect("build-finished", finish)
