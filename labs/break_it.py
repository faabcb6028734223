"""What people really get wrong in parallel training: 34 bugs to plant and watch being caught.

    python labs/break_it.py --list        # each script's bugs, and which nets of lab 15 see them
    torchrun --nproc_per_node=2 labs/break_it.py sp_megatron.py unsummed_norm_gradient
    torchrun --nproc_per_node=2 labs/break_it.py pp.py mean_of_means --schedule zb --dtype float64
    torchrun --nproc_per_node=2 labs/break_it.py sp_megatron.py unsummed_norm_gradient --where
    python labs/break_it.py --where my_tp.py        # for a copy of tp.py with a mistake of yours

A bug is a function that replaces something right in the script's module with something wrong. Then
the script runs with its own options, and exits with 1 if it notices the bug. Correctness mode, the
default, must notice every bug and name first what is wrong, above torchrun's report; benchmark mode
looks at times and bytes alone. A bug that changes nothing with these options is refused (exit 2),
and so is one that correctness does not notice: in bfloat16 rounding hides some.

--where adds, after FAIL, the first line at which the ranks part from one device (walk/where.py).
"""

import importlib.util
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch.nn.functional as F
import transformers
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

BUGS = {"tp": {}, "sp_megatron": {}, "sp_ulysses": {}, "pp": {}}  # {script: {name: bug}}
NETS = Path(__file__).parent / "lab15_types/nets.json"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for labs.walk, which --where runs
QWEN3 = "unsummed_qk_norm_gradient", "local_layer_types"  # bugs of what no LLaMA has


def bug_of(*scripts):
    """Enter a bug under each of the scripts that can have it."""

    def enter(bug):
        for script in scripts:
            BUGS[script][bug.__name__] = bug
        return bug

    return enter


def instead_of(owner):
    """Put a function in the place of its namesake in owner, which it gets first: `right`."""

    def put(wrong):
        right = getattr(owner, wrong.__name__)
        setattr(owner, wrong.__name__, lambda *args, **kwargs: wrong(right, *args, **kwargs))

    return put


# ---- tp.py, sp_megatron.py: matrices are cut, and what leaves a block is a partial sum -----------


@bug_of("tp")
def missing_backward_all_reduce(script):
    """f's backward returns the rank's own dx, so gradients below lack the other ranks' parts."""

    @instead_of(script.CopyToTPRegion)
    def backward(right, ctx, grad):
        return grad, None


@bug_of("sp_megatron")
def missing_backward_reduction(script):
    """g's backward only cuts dx by tokens, so gradients below lack the other ranks' parts."""

    @instead_of(script.GatherFromSPRegion)
    def backward(right, ctx, grad):  # (b, s, h) -> (b, s/P, h)
        return grad.chunk(ctx.group.size(), 1)[ctx.group.rank()], None


@bug_of("tp", "sp_megatron")
def missing_forward_reduction(script):
    """What leaves a block is not summed, so each rank goes on with its own partial sum."""
    tp = script.STRATEGY == "tp"

    @instead_of(script.ReduceFromTPRegion if tp else script.ReduceScatterToSPRegion)
    def forward(right, ctx, x, group):
        ctx.group = group
        return x if tp else x.chunk(group.size(), 1)[group.rank()]


@bug_of("tp")
def all_reduce_both_ways(script):
    """g all-reduces in the backward, too, so each block sends P times its gradient back."""

    @instead_of(script.ReduceFromTPRegion)
    def forward(right, ctx, x, group):
        ctx.group = group
        return right(ctx, x, group)

    script.ReduceFromTPRegion.backward = script.CopyToTPRegion.backward


@bug_of("tp", "sp_megatron")
def wrong_shard(script):
    """One matrix is cut in the wrong place: layer 0's o_proj has the columns of the next rank."""

    @instead_of(script)
    def parallelize(right, model, group, args):
        full = model.model.layers[0].self_attn.o_proj.weight.detach().clone()
        right(model, group, args)
        weight = model.model.layers[0].self_attn.o_proj.weight
        (_, start, _), size = weight.shard, weight.shape[1]
        weight.data = full.roll(-size, 1)[:, start : start + size].clone()
        return model


@bug_of("tp")
def unmasked_embedding(script):
    """A token whose row is on another rank is not masked, so this rank adds a row of its own."""

    @instead_of(script.VocabParallelEmbedding)
    def forward(right, self, ids):
        rows = (ids - self.start).clamp(0, len(self.weight) - 1)
        return script.reduce_from_tp_region(F.embedding(rows, self.weight), self.group)


@bug_of("tp", "sp_megatron")
def local_softmax(script):
    """The loss's softmax is over each rank's shard of the vocabulary, not over all of it."""

    @instead_of(script.VocabParallelCrossEntropy)
    def forward(right, ctx, logits, target, start, group):
        return right(ctx, logits, target, start, SimpleNamespace(size=lambda: 1))


def leave_unsummed(script, *words):
    """Parameters with one of the words in their names keep their own rank's gradient."""

    @instead_of(script)
    def parallelize(right, model, group, args):
        right(model, group, args)
        for name, parameter in model.named_parameters():
            if any(word in name for word in words):
                parameter.sum_over = None
        return model


@bug_of("tp")
def unsummed_qk_norm_gradient(script):
    """Each rank keeps the gradient that its own heads give Qwen3's q_norm and k_norm."""
    leave_unsummed(script, "q_norm", "k_norm")


# ---- sp_megatron.py, sp_ulysses.py: each rank has tokens of its own ------------------------------


@bug_of("sp_megatron")
def unsummed_norm_gradient(script):
    """Each rank keeps the gradient that its own tokens give a norm: the replicas drift apart."""
    leave_unsummed(script, "norm")


@bug_of("sp_ulysses")
def missing_gradient_sum(script):
    """Each rank keeps the gradients that its own tokens give: the replicas drift apart."""
    script.sum_gradients = lambda model: None


@bug_of("sp_megatron", "sp_ulysses")
def local_position_ids(script):
    """Each rank counts its own tokens' positions from 0, so their rotary embedding is wrong."""

    @instead_of(script)
    def parallelize(right, model, group, args):
        model = right(model, group, args)

        @instead_of(model.model.rotary_emb)
        def forward(right, hidden, positions):  # hidden: (b, s/P, h)
            return right(hidden, positions % hidden.shape[1])

        return model


@bug_of("sp_megatron", "sp_ulysses")
def shift_after_split(script):
    """Labels are shifted after they are split, so each rank's last token has no target."""

    @instead_of(script)
    def mean_loss(right, model, hidden, labels, group, args):
        labels, size = labels.clone(), hidden.shape[1]  # s/P tokens a rank
        labels[:, size::size] = script.IGNORE  # a rank's first label: the rank before needs it
        return right(model, hidden, labels, group, args)


@bug_of("sp_ulysses")
def no_op_ulysses(script):
    """The model keeps its stock attention, so a token attends only to tokens of its own rank."""

    @instead_of(script)
    def parallelize(right, model, group, args):
        model = right(model, group, args)
        model.model.set_attn_implementation(args.attn_implementation)
        return model


@bug_of("sp_ulysses")
def wrong_head_order(script):
    """The all-to-all of attention's output returns each head in the place of the next."""

    @instead_of(script)
    def heads_to_tokens(right, x, counts, group):  # -> (b, s/P, heads, d)
        return right(x, counts, group).roll(1, 2)


# ---- pp.py: stages, microbatches, and gradients that accumulate ----------------------------------


@bug_of("pp")
def unscaled_loss(script):
    """Each microbatch's loss is its own mean, and these are summed: about M times too large."""

    @instead_of(script)
    def microbatch_loss(right, model, hidden, targets, count, args):
        return right(model, hidden, targets, (targets != script.IGNORE).sum(), args)


@bug_of("pp")
def mean_of_means(script):
    """The loss is the mean of the microbatches' means, though they differ in number of targets."""

    @instead_of(script)
    def microbatch_loss(right, model, hidden, targets, count, args):
        own = (targets != script.IGNORE).sum()
        return right(model, hidden, targets, own * args.microbatches, args)


@bug_of("pp")
def overwritten_gradients(script):
    """A microbatch's gradients replace those of the one before instead of adding to them."""

    @instead_of(script.Pipeline)
    def backward(right, self, action, received):
        for name, parameter in self.stages[action.stage].named_parameters():
            if "embed_tokens" not in name:  # tied to the head, it is in other stages, too
                parameter.grad = None
        return right(self, action, received)


@bug_of("pp")
def untied_gradient(script):
    """First and last stage each keep their own summand of the tied embedding's gradient."""
    script.sum_gradients = lambda model: None


@bug_of("pp")
def dropped_boundary_gradient(script):
    """The gradient that the second stage sends to the first is lost, so zeros arrive."""

    @instead_of(script.Pipeline)
    def backward(right, self, action, received):
        return right(self, action, received * 0 if action.stage == 0 else received)


@bug_of("pp")
def wrong_layers(script):
    """First and last layer are swapped before the layers are dealt out to the stages."""

    @instead_of(script)
    def parallelize(right, model, group, args):
        first, *others, last = model.model.layers
        model.model.layers = nn.ModuleList([last, *others, first])
        return right(model, group, args)


@bug_of("pp")
def swapped_labels(script):
    """The last stage holds each sequence against the labels of the one before it."""

    @instead_of(script.Pipeline)
    def run(right, self, ids, targets, loss_fn, backward=True):
        return right(self, ids, targets.roll(1, 0), loss_fn, backward)


@bug_of("pp")
def local_layer_types(script):
    """Each stage gives its layers the types, full or sliding, of the model's first layers."""

    @instead_of(script.Stage)
    def __init__(right, self, model, stage, stage_count):
        right(self, model, stage, stage_count)
        self.decoder.config = model.config


# ---- Everywhere ----------------------------------------------------------------------------------


@bug_of("tp", "sp_megatron", "sp_ulysses")
def loss_by_local_count(script):
    """Each rank divides the loss by the number of its own targets, not of all targets."""

    def own(targets, group, args):  # of its vocabulary; where tokens are split, of its tokens
        if script.STRATEGY == "tp":
            start, end = script.split(args.config.vocab_size, group.rank(), group.size())
            return (targets >= start) & (targets < end)
        size = -(-targets.shape[1] // group.size())
        return targets[:, group.rank() * size :][:, :size] != script.IGNORE

    @instead_of(script)
    def mean_loss(right, model, hidden, labels, group, args):
        loss = right(model, hidden, labels, group, args)
        targets = F.pad(labels[:, 1:], (0, 1), value=script.IGNORE)
        return loss * (targets != script.IGNORE).sum() / own(targets, group, args).sum()


@bug_of(*BUGS)
def no_op_parallelize(script):
    """Nothing is sharded: every rank holds and computes everything. The loss is right."""

    @instead_of(script)
    def parallelize(right, model, group, args):
        for parameter in model.parameters():  # in Ulysses they are replicated, as they should be
            parameter.replicas = group.size() if script.STRATEGY == "sp_ulysses" else 1
            parameter.sum_over = None
        return model

    @instead_of(script)
    def forward_backward(right, model, ids, labels, group, args, backward=True):
        _, loss, _ = script.reference_step(model, ids, labels)
        return loss

    @instead_of(script)
    def local_logits(right, model, ids, group, args):
        logits = model(input_ids=ids, use_cache=False).logits
        logits.replicas = 1
        return logits


# ---- Running a script with a bug -----------------------------------------------------------------


def pointless(name, script, args, world):
    """Why a bug would change nothing with these options, and which to use; or None."""
    options = vars(args)
    M = options.get("microbatches")
    if world == 1:
        return "needs 2 ranks: start it with torchrun --nproc_per_node=2"
    if options.get("shard_weights") and name == "missing_gradient_sum":
        return "is no bug with --shard-weights: PyTorch's fully_shard sums the gradients"
    if options.get("dtensor") and name not in ("loss_by_local_count", "no_op_parallelize"):
        return "is a bug of our own code, which --dtensor does not run"
    if name in ("unscaled_loss", "mean_of_means", "overwritten_gradients") and M == 1:
        return "needs 2 microbatches, because with one it is right"
    if name in QWEN3 and args.config.model_type != "qwen3":
        return f"is no bug in a {args.config.model_type}: use --model tiny, which becomes a Qwen3"
    if name == "swapped_labels" and args.batch == 1:
        return "needs 2 sequences: use --batch 2"
    if name == "untied_gradient" and not args.config.tie_word_embeddings:
        return f"is no bug where embeddings are not tied, as in {args.model}: use --model tiny"


def load(path):
    """The script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    script = sys.modules[path.stem] = importlib.util.module_from_spec(spec)  # pickle looks there
    spec.loader.exec_module(script)
    return script


def plant(name, script):
    """Change the script's module. Once its arguments are final it names the bug, or refuses it."""
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
            print("the model is a Qwen3 of tiny's size; half of its layers have a window")
            sizes = {key: getattr(args.config, key) for key in (*script.SIZES, "initializer_range")}
            windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4}
            args.config = transformers.AutoConfig.for_model("qwen3", head_dim=8, **sizes, **windows)
        right(args, world)
        reason = pointless(name, script, args, world)
        if reason:
            raise script.UsageError(f"{name} {reason}")
        args.bug = name  # --json holds it
        print(f"\nwith the bug {name}:\n  {bug.__doc__}")

    script.OWN_MODES.clear()  # they prove nothing
    script.MODES["correctness"] = must_notice
    bug(script)


def main():
    """Returns the script's exit status; 2 where there is no such script or bug."""
    if sys.platform == "win32":
        print("error: needs Linux or macOS; on Windows use WSL", file=sys.stderr)
        return 2
    is_rank0 = "LOCAL_RANK" not in os.environ or os.environ["RANK"] == "0"
    script, bug = (sys.argv[1:3] + ["", ""])[:2]
    asks_where = "--where" in sys.argv
    path, scripts = Path(script), ", ".join(f"{name}.py" for name in BUGS)
    bugs = BUGS.get(path.stem, {})
    if script == "--list" or (bugs and bug == "--list"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the list without a traceback
        for name in BUGS if script == "--list" else [path.stem]:
            nets = dict.fromkeys(BUGS[name], "?") | json.loads(NETS.read_text())[f"{name}.py"]
            about = (
                (f"  {b}", does.__doc__, f"lab 15: {nets[b]}") for b, does in BUGS[name].items()
            )
            if is_rank0:
                print(f"{name}.py", *map("\n      ".join, about), sep="\n")
        return 0
    if script == "--where":
        from labs.walk import where

        return where.main(sys.argv[2:])
    if path.is_file() and bug in bugs:
        sys.argv = [script, *(option for option in sys.argv[3:] if option != "--where")]
        module = load(path)
        plant(bug, module)
        if asks_where:
            from labs.walk import where

            where.after_failure(path, bug, module)
        return module.main()
    problem = f"no script {script or 'given'}: give a path to {scripts}; --list names the bugs"
    if path.is_file() and bugs:
        problem = f"no bug {bug or 'given'} of {path.name}: use one of {', '.join(bugs)}"
    if is_rank0:
        print(f"error: {problem}", file=sys.stderr)
    else:
        time.sleep(30)  # torchrun ends all ranks when one goes, so rank 0 prints first
    return 2


if __name__ == "__main__":
    sys.exit(record(main)())
