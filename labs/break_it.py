"""Runs a script with one of the bugs of bugs.py, which it must notice; with --where, says where.

    python labs/break_it.py --list        # each script's bugs
    torchrun --nproc_per_node=2 labs/break_it.py sp_megatron.py unsummed_norm_gradient
    torchrun --nproc_per_node=2 labs/break_it.py pp.py mean_of_means --schedule zb --dtype float64
    torchrun --nproc_per_node=2 labs/break_it.py sp_megatron.py unsummed_norm_gradient --where
    python labs/break_it.py --where my_tp.py        # for a copy of tp.py with a mistake of yours

The script runs with its own options, and exits with 1 if it notices the bug. Correctness mode,
the default, must notice every bug and name first what is wrong, above torchrun's report;
benchmark mode looks at times and bytes alone. A bug that changes nothing with these options is
refused (exit 2), and so is one that correctness does not notice: in bfloat16 rounding hides some.

--where adds, after FAIL, the first line at which the ranks part from one device (walk/where.py).
"""

import signal
import sys
from pathlib import Path

import transformers
from torch.distributed.elastic.multiprocessing.errors import record

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from labs.bugs import BUGS, instead_of, load  # noqa: E402
from labs.walk import where  # noqa: E402

QWEN3 = "unsummed_qk_norm_gradient", "local_layer_types"  # bugs of what no LLaMA has
OF_DTENSOR = "local_softmax", "unsummed_qk_norm_gradient", "loss_by_local_count"
OF_DTENSOR += ("no_op_parallelize",)  # bugs of code that --dtensor runs, too


def pointless(name, script, args, world):
    """Why a bug would change nothing with these options, and which to use; or None."""
    options = vars(args)
    M = options.get("microbatches")
    if world == 1:
        return "needs 2 ranks: start it with torchrun --nproc_per_node=2"
    if options.get("shard_weights") and name == "missing_gradient_sum":
        return "is no bug with --shard-weights: PyTorch's fully_shard sums the gradients"
    if options.get("dtensor") and name not in OF_DTENSOR:
        return "is a bug of our own code, which --dtensor does not run"
    if name in ("unscaled_loss", "mean_of_means", "overwritten_gradients") and M == 1:
        return "needs 2 microbatches, because with one it is right"
    if name in QWEN3 and args.config.model_type != "qwen3":
        return f"is no bug in a {args.config.model_type}: use --model tiny, which becomes a Qwen3"
    if name == "swapped_labels" and args.batch == 1:
        return "needs 2 sequences: use --batch 2"
    if name == "untied_gradient" and not args.config.tie_word_embeddings:
        return f"is no bug where embeddings are not tied, as in {args.model}: use --model tiny"


def plant(name, script):
    """Have a script change its module once its arguments are final, or refuse the bug."""
    bug = BUGS[script.STRATEGY][name]

    def must_notice(args, group, check=script.MODES["correctness"]):
        summary, result = check(args, group)
        if result["passed"]:
            instead = "leave out --dtype, --batch, --microbatches and --model"
            raise script.UsageError(f"{name} changes too little to be seen: {instead}")
        return summary, result

    @instead_of(script)
    def finalize_args(right, args, world):
        if name in QWEN3 and args.model == "tiny":
            script.print0("the model is a Qwen3 of tiny's size; half of its layers have a window")
            sizes = {key: getattr(args.config, key) for key in (*script.SIZES, "initializer_range")}
            windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4}
            args.config = transformers.AutoConfig.for_model("qwen3", head_dim=8, **sizes, **windows)
        right(args, world)
        reason = pointless(name, script, args, world)
        if reason:
            raise script.UsageError(f"{name} {reason}")
        args.bug = name  # --json holds it
        script.print0(f"\nwith the bug {name}:\n  {bug.__doc__}")
        bug(script)

    script.MODES["correctness"] = must_notice


def main():
    """Returns the script's exit status; 2 where there is no such script or bug."""
    words = [word for word in sys.argv[1:] if word != "--where"]
    if sys.argv[1:2] == ["--where"]:
        return where.main(words)
    script, bug = (words + ["", ""])[:2]
    path, bugs = Path(script), BUGS.get(Path(script).stem, {})
    if script == "--list" or (bugs and bug == "--list"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the list without a traceback
        for name in BUGS if script == "--list" else [path.stem]:
            print(f"{name}.py")
            for bug, does in BUGS[name].items():
                print(f"  {bug}\n      {does.__doc__}")
        return 0
    if path.is_file() and bug in bugs:
        sys.argv, asks_where = [script, *words[2:]], "--where" in sys.argv
        module = load(path)
        plant(bug, module)
        if asks_where:
            where.after_failure(path, bug, module)
        return module.main()
    scripts = ", ".join(f"{name}.py" for name in BUGS)
    problem = f"no script {script or 'given'}: give a path to {scripts}; --list names the bugs"
    if path.is_file() and bugs:
        problem = f"no bug {bug or 'given'} of {path.name}: use one of {', '.join(bugs)}"
    print(f"error: {problem}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(record(main)())
