"""What a script's report says with each bug of labs/break_it.py, which this runs on 2 ranks."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tqdm import tqdm

from labs.break_it import BUGS

ROOT = Path(__file__).resolve().parents[2]
LABELS = {"logits": "logits", "loss": "loss", "norms": "gradients of norms"}
LABELS |= {"qkv": "gradients of q, k, v", "o": "gradients of o"}
LABELS |= {"mlp": "gradients of gate, up, down", "embedding": "gradient of the embedding"}
LABELS |= {"head": "gradient of lm_head"}
LABELS |= {"norm": "norm of all gradients", "later": "loss of the second step"}
# Which of LABELS a gradient belongs to, by what its name contains; the first that fits
GRADIENTS = {"norms": "norm", "qkv": r"[qkv]_proj", "o": "o_proj"}
GRADIENTS |= {"mlp": r"(gate|up|down)_proj", "embedding": "embed_tokens", "head": "lm_head"}


def group(entry):
    """The row of LABELS that an entry of --json belongs to; None: to none that is shown."""
    if entry["step"] > 1 or entry["kind"] == "weight":
        return "later" if (entry["step"], entry["kind"]) == (2, "loss") else None
    if entry["kind"] == "grad_norm":
        return "norm"
    if entry["kind"] == "grad":
        return next(name for name, own in GRADIENTS.items() if re.search(own, entry["name"]))
    return entry["kind"]


def summary(correctness):
    """{rows: [[label, largest error, how many are wrong, of how many]], wrong, of, coverage}."""
    tensors, rows = correctness["tensors"], {}
    for entry in tensors:
        if (name := group(entry)) is not None:
            row = rows.setdefault(name, [name, 0.0, 0, 0])
            row[1] = max(row[1], float(f"{entry['relative_error']:.2g}"))
            row[2] += entry["relative_error"] > correctness["tolerance"]
            row[3] += 1
    coverage = max((entry["coverage"] for entry in tensors), key=lambda x: abs(x - 1))
    wrong = sum(not entry["passed"] for entry in tensors)
    rows = [rows[name] for name in LABELS if name in rows]
    return {"rows": rows, "wrong": wrong, "of": len(tensors), "coverage": round(coverage, 2)}


def run(script, bug):
    """A script's --json, with the bug; without one where bug is "none"."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "report.json")
        call = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
        call += [f"{script}.py"] if bug == "none" else ["labs/break_it.py", f"{script}.py", bug]
        done = subprocess.run([*call, "--json", file], cwd=ROOT, capture_output=True, text=True)
        if done.returncode != (bug != "none") or not file.exists():
            raise RuntimeError(f"{script}.py with {bug}: {done.stdout[-500:]}{done.stderr[-500:]}")
        return json.loads(file.read_text())["correctness"]


def bugs():
    """{scripts: {script: {bug: summary(), and what it says}}}; "none" is without a bug."""
    found = {}
    for script, own in BUGS.items():
        found[script] = {"none": ""} | {name: bug.__doc__ for name, bug in own.items()}
    todo = [(script, bug) for script, own in found.items() for bug in own]
    for script, bug in tqdm(todo, desc="bugs"):
        found[script][bug] = summary(run(script, bug)) | {"says": found[script][bug]}
    return {"scripts": found, "labels": LABELS}
