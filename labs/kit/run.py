"""A lab's own run: `python labs/lab1_collectives/lesson.py`, or the copy of it in my_labs/.

Runs every exercise's check, on as many ranks as it asks for, and if all hold the experiments.
--predict N answers the question that the run ends with, --plot draws what was measured, --json
writes it, --inject-bug NAME puts one of the lab's bugs in, which a check has to catch.
"""

import math
import os
import sys
from functools import partial

from labs.kit import cli
from labs.kit.harness import Wrong, check, companion, lab_name, load
from labs.kit.pictures import check_picture


def parse(lab, shown, bugs, argv):
    """The command line's arguments: those of every lab, and the lab's own. Raises UsageError."""
    parser = cli.documented(lab.__doc__)
    add = parser.add_argument
    add("--seed", type=int, default=0, help="of the checks' inputs (0)")
    add("--json", metavar="FILE", help="write the results")
    add("--plot", metavar="FILE", help="draw them")
    finite = cli.number(-math.inf, math.inf)
    predict = "answer the question that the run ends with"
    add("--predict", metavar="N", type=finite, help=predict)
    add("--inject-bug", metavar="NAME", help="run with a bug to be caught; list: name them")
    shown.add_options(parser)
    args = parser.parse_args(argv)
    if args.inject_bug not in (None, "list", *bugs):
        raise cli.UsageError(f"no bug {args.inject_bug}: use --inject-bug list, which names them")
    cli.check_writable(args.json)
    cli.check_writable(args.plot)
    check_picture(args.plot)
    return args


def run_checks(file, args):
    """Run every exercise's check, printing each; returns {name: {"passed", "report"}}."""
    checks, results = companion("check", file).CHECKS, {}
    width = max(map(len, ["exercise", *checks]))
    print(f"\n  {'exercise':{width}}   ranks          what was seen", flush=True)
    for name, (_, world) in checks.items():
        passed, report, _ = check(file, name, args.seed, args.inject_bug)
        results[name] = {"passed": passed, "report": report}
        verdict = "PASS" if passed else "FAIL"
        print(f"  {name:{width}}   {world:<5}   {verdict}   {report}", flush=True)
    return results


def compare_prediction(predict, args, results):
    """Print a lab's question and, with --predict, how near the answer is; returns all of it."""
    question, formula, measure = predict
    question, measured = question.format(**vars(args)), measure(results)
    if args.predict is None:
        print(f"\n  Predict, then run: {question} (--predict N)")
    else:
        right = abs(args.predict - measured) <= 0.005 * abs(measured)
        verdict = "right" if right else f"off by {args.predict - measured:+g}"
        print(f"\n  {question}\n  predicted {args.predict:g}, measured {measured:g}: {verdict}")
        print(f"  {formula}")
    return {"question": question, "predicted": args.predict, "measured": measured}


def check_and_show(file, lab, shown, args):
    """The checks and, if all hold, the experiments; returns the results, "passed" among them."""
    results = {"lab": lab_name(file), "exercises": run_checks(file, args)}
    failed = [name for name, seen in results["exercises"].items() if not seen["passed"]]
    if not failed:  # the experiments rely on every exercise
        results |= shown.experiment(lab, args)
        results["prediction"] = compare_prediction(shown.PREDICT, args, results)
        failed = results["failed"]
    results["passed"] = not failed
    count = f"all {len(results['exercises'])} exercises' checks hold"
    verdict = "FAIL" if failed else "PASS"
    print(f"\n{verdict} {results['lab']}: {', '.join(failed) or count}", flush=True)
    return results


def run_lab(file, argv=None):
    """A lab's command line; returns its exit status.

    0: all held, 1: a check failed, 2: unusable arguments.
    """
    try:
        cli.check_platform()
        lab, shown = load(file), companion("show", file)
        bugs = {bug.__name__: bug.__doc__ for bug in companion("check", file).BUGS}
        args = parse(lab, shown, bugs, argv)
        if args.inject_bug == "list":
            print(*(f"  {bug:28} {does}" for bug, does in bugs.items()), sep="\n")
            return 0
        if instead := getattr(args, "referee", None):  # lab 5's, which needs no exercise's check
            results = {"lab": lab_name(file)} | instead(lab, args)
        else:
            results = check_and_show(file, lab, shown, args)
        if args.json:
            cli.write_json(args.json, results)
        if args.plot and "prediction" in results:
            cli.atomic_write(args.plot, partial(shown.draw, results))
        return 0 if results["passed"] else 1
    except cli.UsageError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except Wrong as wrong:  # a rank of an experiment, which has nothing to compare
        print(f"\nFAIL {lab_name(file)}: {wrong.found}")
        return 1


def main(file):
    """What a lab's file calls; returns the exit status.

    Where torchrun has started several ranks, rank 0 alone reads the command line; the others call
    follow(lab) of the lab's show.py, if there is one (lab 8).
    """
    cli.please_any_reader()
    follow = getattr(companion("show", file), "follow", None)
    if follow and "RANK" in os.environ and "MASTER_ADDR" not in os.environ:
        print("error: RANK is set, MASTER_ADDR is not: unset it, or use torchrun", file=sys.stderr)
        return 2
    if follow and os.environ.get("RANK", "0") != "0":
        no_run = {"-h", "--help", "list", "--inject-bug=list"} & set(sys.argv)  # rank 0 answers
        return 0 if no_run else follow(load(file))
    return run_lab(file)
