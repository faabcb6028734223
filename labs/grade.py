"""Exercises of the labs: hands them out, and grades what comes back.

A lab is one finished file. Between `# exercise: NAME` and `# end exercise` stands what you could
have written yourself; the docstring above it says what to build:

    python labs/grade.py list                # the labs and their exercises
    python labs/grade.py start lab1          # to my_labs/lab1_collectives.py, exercises emptied
    python labs/grade.py lab1                # grade what you wrote there
    python labs/grade.py lab1 --only all_to_all
    python labs/grade.py lab1 --seed 7       # the same inputs again; else they are new each time
    python labs/grade.py lab1 --file submissions --json grades.json    # a class: one row per file

Each exercise is graded by itself. check.py in the lab's folder runs your answer in a file where
all other exercises are finished, on as many ranks of this machine as it asks for. So no wrong
or endless answer hides another one. Exit status: 0 all pass, 1 not yet, 2 unusable arguments.
"""

import ast
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from labs.kit import cli  # noqa: E402
from labs.kit.harness import LABS, Wrong, check, companion, lab_name  # noqa: E402

MY_LABS = LABS.parent / "my_labs"
RESTORE = "restore the markers, or start anew"


def regions(text):
    """[(exercise, indentation, first line, end)] of a lab's text: lines [first, end), from 0.

    Raises Wrong where a start or end marker stands alone.
    """
    found, name = [], None
    for i, line in enumerate(text.split("\n")):
        start = re.fullmatch(r"(\s*)# exercise: (\w+)\s*", line)
        end = line.strip() == "# end exercise"
        if (start and name) or (end and not name):
            raise Wrong(f"line {i + 1}: {line.strip()!r} without its other half", RESTORE)
        if start:
            (indent, name), first = start.groups(), i + 1
        elif end:
            found.append((name, indent, first, i))
            name = None
    if name:
        raise Wrong(f"'# exercise: {name}' has no '# end exercise'", RESTORE)
    return found


def replace(text, change):
    """The text with change(region, number, lines) for the lines of each region.

    number: which of its exercise's regions it is.
    """
    lines, count, done, out = text.split("\n"), Counter(), 0, []
    for region in regions(text):
        name, _, first, end = region
        out += [*lines[done:first], *change(region, count[name], lines[first:end])]
        count[name] += 1
        done = end
    return "\n".join([*out, *lines[done:]])


def task(text, line):
    """What the docstring around a line asks for: its first sentence."""
    nodes = ast.walk(ast.parse(text))
    inside = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    inside = [node for node in inside if node.lineno <= line <= node.end_lineno]
    inside = [node for node in inside if ast.get_docstring(node)]
    text = " ".join(ast.get_docstring(inside[-1]).split()) if inside else "see above"
    return textwrap.shorten(re.split(r"(?<=\.)\s", text)[0], 58, placeholder=" ...")


def emptied(text):
    """The lab as a learner gets it: each region raises its task, and says how long it will be."""

    def change(region, number, lines):
        _, indent, first, _ = region
        count = sum(bool(line.strip()) and line.strip()[0] != "#" for line in lines)
        about = f"{indent}# about {count} line{'s' if count > 1 else ''}"
        return [about, f"{indent}raise NotImplementedError({task(text, first)!r})"]

    return replace(text, change)


def spliced(finished, answers, exercise):
    """The answers' text, every region but those of one exercise replaced by the finished lab's."""
    right = {}
    lines = finished.split("\n")
    for name, _, first, end in regions(finished):
        right.setdefault(name, []).append(textwrap.dedent("\n".join(lines[first:end])))
    count = [name for name, *_ in regions(answers)].count(exercise)
    if count != len(right[exercise]):
        should = f"there should be {len(right[exercise])}"
        raise Wrong(f"{count} places '# exercise: {exercise}', and {should}", RESTORE)

    def change(region, number, lines):
        name, indent, *_ = region  # the learner's: perhaps tabs
        known = name != exercise and number < len(right.get(name, []))
        return textwrap.indent(right[name][number], indent).split("\n") if known else lines

    return replace(answers, change)


def lab_files():
    """The labs' lessons by their numbers: lab2, lab3, lab3b, lab10."""

    def number(path):
        digits, letter = re.match(r"lab(\d+)([a-z]?)_", lab_name(path)).groups()
        return int(digits), letter

    return sorted(LABS.glob("lab*_*/lesson.py"), key=number)


def find_lab(name):
    """The lesson of a lab: lab1, or lab1_collectives."""
    labs = {lab_name(path): path for path in lab_files()}
    for known, path in labs.items():
        if name == known or known.startswith(f"{name}_"):
            return path
    raise cli.UsageError(f"no lab {name}: use one of {', '.join(labs)}")


def show_labs():
    """List the labs and their exercises."""
    for path in lab_files():
        names = dict.fromkeys(name for name, *_ in regions(cli.read_code(path)[0]))
        print(f"{lab_name(path)}: {', '.join(names)}")


def start(lab_file, force):
    """Write the lab with its places empty to my_labs/."""
    target = MY_LABS / f"{lab_name(lab_file)}.py"
    if target.exists() and not force:
        lost = "use --force to write it anew and lose what you wrote"
        raise cli.UsageError(f"{target} is there already: {lost}")
    try:
        MY_LABS.mkdir(exist_ok=True)
    except OSError as problem:
        raise cli.UsageError(f"cannot write {target}: {problem.strerror}") from None
    text = emptied(cli.read_code(lab_file)[0])
    cli.atomic_write(target, lambda path: Path(path).write_text(text, encoding="utf-8"))
    again = f"python labs/grade.py {lab_name(lab_file).split('_')[0]}"
    print(f"{target}: look for NotImplementedError; then {again}")


def grade_one(lab_file, answers, name, seed, timeout):
    """(whether one exercise passes, what was seen, a hint), of the answers' (text, encoding)."""
    try:
        text = spliced(cli.read_code(lab_file)[0], answers[0], name)
        compile(text, lab_name(lab_file), "exec")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"{lab_name(lab_file)}.py"
            file.write_text(text, encoding=answers[1])
            return check(file, name, seed, timeout=timeout)
    except SyntaxError as problem:
        return False, f"{type(problem).__name__}: {problem.msg}: {(problem.text or '').strip()}", ""
    except Wrong as wrong:
        return False, wrong.found, wrong.hint


def exercises_of(lab_file, only):
    """The exercises to grade: all of the lab, or the one that is named."""
    checks = companion("check", lab_file).CHECKS
    if only not in (None, *checks):
        known = ", ".join(checks)
        raise cli.UsageError(f"{lab_name(lab_file)} has no exercise {only}: use one of {known}")
    return [only] if only else list(checks)


def grade(args, lab_file):
    """Grade the learner's answers, a line an exercise; returns whether all pass."""
    answers_file = Path(args.file[0]) if args.file else MY_LABS / f"{lab_name(lab_file)}.py"
    if not answers_file.is_file():
        how = f"use python labs/grade.py start {args.what[0]} to write one"
        raise cli.UsageError(f"no {answers_file}: {how}")
    answers, results, lab = cli.read_code(answers_file), {}, lab_name(lab_file)
    names = exercises_of(lab_file, args.only)
    width = max(map(len, names))
    for name in names:
        passed, seen, hint = grade_one(lab_file, answers, name, args.seed, args.timeout)
        results[name] = {"passed": passed, "report": seen, "hint": hint}
        print(f"  {name:{width}}   {'PASS' if passed else 'FAIL'}   {seen}", flush=True)
        if hint:
            print(f"  {'':{width}}          hint: {hint}", flush=True)
    count = sum(result["passed"] for result in results.values())
    again = "" if count == len(names) else f" (the same inputs again: --seed {args.seed})"
    verdict = "PASS" if count == len(names) else "FAIL"
    print(f"\n{verdict} {lab}: {count} of {len(names)} exercises pass{again}")
    if args.json:
        whole = {"lab": lab, "seed": args.seed, "passed": count == len(names)}
        cli.write_json(args.json, {**whole, "exercises": results})
    return count == len(names)


def grade_submission(args, file):
    """What --json has of a submission, graded by a process of its own; or {"passed", "error"}."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        words = [sys.executable, __file__, *args.what, "--file", file, "--seed", str(args.seed)]
        words += ["--timeout", str(args.timeout), "--json", results]
        words += ["--only", args.only] if args.only else []
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        process = subprocess.Popen(words, start_new_session=True, **streams)
        try:
            said = process.communicate(timeout=args.limit)[1].decode(errors="replace")
            problems = re.findall(r"^error: (.*)", said, re.M)
            problems = problems or [f"its grader ended, exit code {process.returncode}"]
        except subprocess.TimeoutExpired:
            problems = [f"not done after {args.limit} s"]
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and whatever it has started
            process.wait()
        if results.exists():
            return json.loads(results.read_bytes())
        return {"passed": False, "error": problems[-1]}


def grade_class(args, lab_file, files):
    """Grade the submissions one after the other, a row each; returns whether all pass."""
    count, rows = len(exercises_of(lab_file, args.only)), {}
    width = max(map(len, files))
    print(f"  {'submission':{width}}   passed     not yet")
    for file in files:
        row = rows[file] = grade_submission(args, file)
        wrong = [name for name, one in row.get("exercises", {}).items() if not one["passed"]]
        done = "error" if "error" in row else f"{count - len(wrong)} of {count}"
        print(f"  {file:{width}}   {done:8}   {row.get('error') or ', '.join(wrong)}", flush=True)
    passed = sum(row["passed"] for row in rows.values())
    verdict = "PASS" if passed == len(rows) else "FAIL"
    seed = f"the same inputs again: --seed {args.seed}"
    print(f"\n{verdict} {lab_name(lab_file)}: {passed} of {len(rows)} submissions pass ({seed})")
    if args.json:
        whole = {"lab": lab_name(lab_file), "seed": args.seed, "passed": verdict == "PASS"}
        cli.write_json(args.json, {**whole, "submissions": rows})
    return passed == len(rows)


def submissions(names):
    """The files that --file names, and those of a folder; None if it is one learner's file."""
    paths = [Path(name) for name in names or ()]
    if len(paths) < 2 and not any(path.is_dir() for path in paths):
        return None
    files = [sorted(path.glob("*.py")) if path.is_dir() else [path] for path in paths]
    if [] in files:
        raise cli.UsageError(f"no .py file in {paths[files.index([])]}")
    return [str(file) for some in files for file in some]


def main(argv=None):
    """Returns the exit status: 0 all pass, 1 not yet, 2 unusable arguments."""
    parser = cli.documented(__doc__)
    add = parser.add_argument
    add("what", nargs="+", metavar="LAB", help="list, start LAB, or LAB alone, to grade it")
    add("--force", action="store_true", help="start: write over what is there")
    add("--file", nargs="+", help="the answers (my_labs/LAB.py); a class's: files or a folder")
    add("--only", metavar="NAME", help="grade one exercise")
    add("--seed", type=int, help="of the inputs (a new one each time)")
    add("--timeout", type=cli.positive, default=60, help="seconds for an exercise (60)")
    add("--limit", type=cli.positive, default=600, help="seconds for a file of a class (600)")
    add("--json", metavar="FILE", help="write the results")
    try:
        cli.check_platform()
        args = parser.parse_args(argv)
        if args.what == ["list"]:
            show_labs()
            return 0
        cli.check_writable(args.json)
        if args.what[0] == "start" and len(args.what) == 2:
            start(find_lab(args.what[1]), args.force)
            return 0
        if len(args.what) > 1:
            raise cli.UsageError(f"{' '.join(args.what)}: use list, start LAB, or LAB")
        cli.shorten_tempdir()
        args.seed = secrets.randbelow(1 << 31) if args.seed is None else args.seed
        lab_file, files = find_lab(args.what[0]), submissions(args.file)
        passed = grade_class(args, lab_file, files) if files else grade(args, lab_file)
        return 0 if passed else 1
    except cli.UsageError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    cli.please_any_reader()
    sys.exit(main())
