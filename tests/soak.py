"""200 correct runs, none of which may FAIL: any seed, length, batch, dtype, model, number of ranks.

    python tests/soak.py            # 200 runs, about 10 minutes
    python tests/soak.py 20 7       # 20 runs, the seventh series

A verdict must not depend on a device's rounding. Prints how near to their limits the runs came;
exit status 1 if one failed.
"""

import json
import random
import re
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out
from conftest import changed, live  # noqa: E402
from forks import MODELS, STRATEGIES, prepare, run_script  # noqa: E402

CHOICES = ["tiny", "own_kv", "bias", "shared_kv", "even", "head_dim", "deep"]
WORKS = {"own_kv": [1, 2, 3], "shared_kv": [1, 2, 3, 4, 5]}  # of the others 1 to 4


def command(dice, script, folder):
    """A script's arguments, and a number of ranks that can share the model."""
    model = dice.choice(CHOICES)
    ranks = dice.choice(WORKS.get(model, [1, 2, 3, 4]))
    if script == "pp.py" and model not in ("tiny", "deep"):  # two layers
        ranks = min(ranks, 2)
    length = dice.choice([2, 3, dice.randint(4, 40), dice.randint(41, 333)])
    options = ["--seed", dice.randrange(10), "--length", length, "--batch", dice.randint(1, 3)]
    options += ["--dtype", dice.choice(["float64", "float32", "bfloat16"])]
    options += ["--mode", dice.choice(["correctness", "learning"])]
    options += ["--attn", dice.choice(["sdpa", "eager"])]
    model = f"{folder}/{model}" if model in MODELS else model
    return ranks, [str(word) for word in ["--model", model, *options]]


def main(runs=200, series=0):
    dice, failed, nearest = random.Random(series), 0, defaultdict(float)
    with tempfile.TemporaryDirectory() as folder:
        prepare(folder)
        for i in range(runs):
            script = STRATEGIES[i % len(STRATEGIES)]
            ranks, argv = command(dice, script, folder)
            file = Path(folder, "results.json")
            source = changed(script)
            codes, output = live(
                ranks, folder, run_script, (script, source, [*argv, "--json", str(file)])
            )
            results = json.loads(file.read_text()) if file.exists() else {}
            file.unlink(missing_ok=True)
            for row in results.get("correctness", {}).get("tensors", []):
                key = results["dtype"], row["kind"]
                nearest[key] = max(nearest[key], row["relative_error"] / row["limit"])
            for apart in re.findall(r"losses within (\S+) of", output):
                key = results["dtype"], "learning"
                nearest[key] = max(nearest[key], float(apart))
            if set(codes) != {0}:
                failed += 1
                print(f"FAIL {ranks} ranks: {script} {' '.join(argv)}\n{output[-2000:]}")
    for (dtype, what), ratio in sorted(nearest.items()):
        print(f"{dtype:10}{what:14}{ratio:.2g}")
    print(f"{runs - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
