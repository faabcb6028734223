"""The glossary's words become links to it, for the site (conf.py)."""

import re

from docutils import nodes

GLOSSARY = "labs/notes/glossary"
NOT_PROSE = nodes.reference, nodes.literal, nodes.literal_block, nodes.title, nodes.raw


def link_words(app, doctree, docname):
    """The first use of a glossary's word on a page becomes a link; not of one that it qualifies."""
    if GLOSSARY not in app.env.found_docs or docname == GLOSSARY:
        return
    entries, linked = {}, []
    for entry in app.env.get_doctree(GLOSSARY).findall(nodes.section):
        title = entry[0].astext()
        words = [] if entry.next_node(nodes.section) or "(" in title else title.split(", ")
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


def setup(app):
    """Adds it to Sphinx."""
    app.connect("doctree-resolved", link_words)
