"""Guards code that stands in several scripts: each copy must be word for word its original.

The scripts and labs import nothing of each other, so that one file is all there is to read. What
they have in common carries the line `# Copied from tp.py` above it: here the text below that line
is compared with the statement of the same name in the file named. Above the banner of a section the
line stands for all of the file from there on. The original itself carries no such line.

    python tests/copies.py          # list what drifted; exit 1 if anything did
    python tests/copies.py --fix    # write the original over its copies
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARK = re.compile(r"# Copied from ([\w/]+\.py)$")
TAIL = re.compile(r"^# Copied from ([\w/]+\.py)\n# -+ \d\. ", re.M)


def statements(text):
    """{name: (first line, last line, file it was copied from or None)} of a module, from 0.

    Those of a tail that is copied as a whole are not listed one by one, except in the original.
    """
    lines, found = text.splitlines(), {}
    for node in ast.parse(text).body:
        decorators = (d.lineno for d in getattr(node, "decorator_list", []))
        first = min([node.lineno, *decorators]) - 1
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Assign):
            name = ast.unparse(node.targets[0])
        else:
            continue
        mark = MARK.match(lines[first - 1]) if first else None
        found[name] = first, node.end_lineno, mark and mark[1]
    return found


def split_tail(text):
    """(the text before a tail that is copied as a whole, the tail, the file it is copied from)."""
    mark = TAIL.search(text)
    if not mark:
        return text, "", None
    banner = mark.end() - len(mark[0].splitlines()[-1])
    return text[: mark.start()], text[banner:], mark[1]


def tail_of(text, like):
    """Of an original, all from the banner of the section with which the copied tail begins."""
    number = re.match(r"# -+ (\d)\. ", like)[1]
    return text[re.search(rf"^# -+ {number}\. ", text, re.M).start() :]


def drift(folder=ROOT, fix=False):
    """One line for each copy that is not its original, and for each copy that nothing marks.

    With fix, the original's text is written over the copies that differ.
    """
    files = [path for where in ("*", "labs/*", "labs/*/*") for path in folder.glob(f"{where}.py")]
    texts = {path.relative_to(folder).as_posix(): path.read_text() for path in sorted(files)}
    problems = []

    def write(script, text):
        (folder / script).write_text(text)
        texts[script] = text
        problems[-1] += " (written anew)"

    for script in texts:
        head, tail, original = split_tail(texts[script])
        if original and tail_of(texts[original], tail) != tail:
            problems.append(f"{script}: its last sections differ from those of {original}")
            if fix:
                write(script, f"{head}# Copied from {original}\n{tail_of(texts[original], tail)}")
    tables = {name: statements(text) for name, text in texts.items()}
    own = {name: statements(split_tail(text)[0]) for name, text in texts.items()}

    def source(script, name):
        first, last, _ = tables[script][name]
        return "\n".join(texts[script].splitlines()[first:last])

    for script in texts:
        for name, (first, last, original) in reversed(own[script].items()):  # lines stay put
            if original and name not in tables.get(original, {}):
                problems.append(f"{script}: {name} is said to be of {original}, which has none")
            elif original == script:
                problems.append(f"{script}: {name} is said to be a copy of itself")
            elif original and source(script, name) != source(original, name):
                problems.append(f"{script}: {name} differs from its original in {original}")
                if fix:
                    lines = texts[script].splitlines()
                    lines[first:last] = source(original, name).splitlines()
                    write(script, "\n".join(lines) + "\n")
                    tables[script] = statements(texts[script])  # others copy from here
            elif not original and last - first > 2:
                for other in texts:
                    known = other == script or name not in own[other]
                    known = known or own[other][name][2] == script
                    if not known and source(other, name) == source(script, name):
                        problems.append(f"{script}: {name} is the same in {other}, and unmarked")
    return problems


if __name__ == "__main__":
    found = drift(fix="--fix" in sys.argv)
    print(*found or ["no copy has drifted"], sep="\n")
    sys.exit(1 if found and "--fix" not in sys.argv else 0)
