"""Lab 13's checks of the optimizer's state and of Hugging Face's files."""

import itertools
import json
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from labs.kit.alive import Alive
from labs.kit.compare import tried
from labs.kit.harness import expect
from labs.lab13_checkpoints.disk import Disk
from labs.lab13_checkpoints.shards import finished, same, save_with

NEW = "no state yet: zeros of AdamW's first, put into optimizer.state[parameter]"


class Tied(nn.Module):
    """Two matrices and a bias; the head's is the embedding's."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(6, 4, dtype=torch.float64)
        self.middle = nn.Linear(4, 4, dtype=torch.float64)
        self.head = nn.Linear(4, 6, bias=False, dtype=torch.float64)
        self.head.weight = self.embedding.weight

    def loss(self, seed):
        ids = torch.randint(6, (8,), generator=torch.Generator().manual_seed(seed))
        return self.head(self.middle(self.embedding(ids)).tanh()).logsumexp(-1).mean()


def check_optimizer(lab, group, seed):
    def built(start):
        model = Tied(start)
        order = [*model.parameters()][::-1]  # a trainer's groups: not in the order of the names
        return model, torch.optim.AdamW([{"params": order[:1]}, {"params": order[1:]}], lr=0.1)

    def train(model, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            model.loss(seed + step).backward()
            optimizer.step()

    starts = seed, seed, seed + 9
    (right, right_adam), (model, adam), (later, later_adam) = map(built, starts)
    train(right, right_adam, range(6))
    train(model, adam, range(3))
    fresh = tried("before the first step", NEW, lab.training_state, later, later_adam)
    state = lab.training_state(model, adam)
    expect_state(model, adam, state, "after 3 steps", "of each: itself and three of AdamW's")
    expect_state(later, later_adam, fresh, "before the first step", NEW)
    for name, x in fresh.items():
        zeros = "/" not in name or not x.count_nonzero()
        expect(zeros, f"before the first step: {name} is not zero", "AdamW starts from zeros")
        shape = x.shape == state[name].shape and x.dtype == state[name].dtype
        expect(shape, f"{name}: a new one is {x.dtype} {tuple(x.shape)}", "as AdamW makes it")
        x.copy_(state[name])
    train(later, later_adam, range(3, 6))
    hint = "what is read into the dict's tensors has to reach model and optimizer, step count too"
    off = [n for n, p in later.named_parameters() if not torch.equal(p, right.get_parameter(n))]
    expect(not off, f"3 steps, a copy, 3 steps: {', '.join(off)} not as after 6", hint)
    return f"{len(state)} tensors, tied ones once; 3 + 3 steps are 6 steps, to the bit"


def expect_state(model, adam, found, what, hint):
    """Raise Wrong unless what was found are the parameters' and AdamW's own tensors."""
    expect(isinstance(found, dict), f"{what}: {type(found).__name__}, not a dict")
    names = list(dict(model.named_parameters()))
    wanted = [f"{n}{key}" for n in names for key in ("", "/step", "/exp_avg", "/exp_avg_sq")]
    missing = [name for name in wanted if name not in found]
    expect(not missing, f"{what}: {', '.join(missing[:4])} missing", hint)
    odd = [name for name in found if name not in wanted]
    once = "named_parameters() has a tied one once"
    expect(not odd, f"{what}: {', '.join(odd[:4])} too many", once)
    for name, x in found.items():
        memory = isinstance(x, torch.Tensor) and not x.requires_grad
        data = "a tensor that can be read into: of a parameter its .data"
        expect(memory, f"{what}: {name} is {type(x).__name__}", data)
    alone = len({x.data_ptr() for x in found.values()}) == len(found)
    expect(alone, f"{what}: some tensors share their memory", "to each zeros of its own")
    for n, key in itertools.product(names, finished.STATE):
        theirs = adam.state[model.get_parameter(n)].get(key)
        expect(theirs is not None, f"{what}: AdamW has no {key} of {n}", hint)
        own = "the tensors of optimizer.state[parameter], by their own names, no copies"
        shared = found[f"{n}/{key}"].data_ptr() == theirs.data_ptr()
        expect(shared, f"{what}: {n}/{key} is not AdamW's {key} itself", own)


def check_export(lab, group, seed):
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "vocab_size": 19}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    for tied, dtype in (True, torch.float64), (False, torch.bfloat16):
        torch.manual_seed(seed)
        config = LlamaConfig(**sizes, tie_word_embeddings=tied)
        model = LlamaForCausalLM(config).to(dtype)
        full = {name: p.data for name, p in model.named_parameters()}
        what = f"embeddings {'tied' if tied else 'not tied'}, {dtype}"
        with tempfile.TemporaryDirectory() as folder:
            there, hf = Path(folder, "hf"), Path(folder, "model.safetensors")
            parts = itertools.product(full.items(), finished.STATE)
            state = full | {f"{name}/{key}": x + 1 for (name, x), key in parts}
            save_with(finished, folder, state, "zero3", 3)
            config.save_pretrained(folder)
            disk = Disk()
            with Alive() as alive, disk.inside():
                lab.export(folder, hf)
            hint = "write a draft beside path, then os.replace it: a kill leaves no half of a file"
            expect(f"{hf.name} is opened" not in disk.log, f"{what}: written in place", hint)
            moved = hf.exists() and not Path(f"{hf}.draft").exists()
            expect(moved, f"{what}: the draft is left, or no {hf.name}", "os.replace the draft")
            wrong = "of each tensor the dtype and shape of the index, and all its numbers"
            names = set(tried(what, wrong, safe_open, hf, "pt").keys())
            odd = ", ".join(sorted(names ^ set(full))[:3])
            expect(not odd, f"{what}: {odd} too many, or missing", "all parameters alone: no /")
            most = 2 * max(x.nbytes for x in full.values()) + 64
            hint = "get(name) makes one full tensor, when write_tensors asks for it"
            expect(alive.peak <= most, f"{what}: {alive.peak} bytes alive, {most} do", hint)
            theirs = tried(what, wrong, LlamaForCausalLM.from_pretrained, folder, dtype=dtype)
            weights = dict(theirs.named_parameters())
            expect(same(weights, full), f"{what}: HF reads other weights", wrong)
            model.save_pretrained(there, max_shard_size="2KB")
            check_import(lab, there, what)
    return "HF reads what is exported, to the bit; each tensor of HF's files is in the index"


def check_import(lab, folder, what):
    """The index of HF's files is the finished lab's, of which a test reads the numbers."""
    index, right = lab.import_index(folder), finished.import_index(folder)["tensors"]
    found = json.loads(json.dumps(index["tensors"]))  # lists or tuples
    hint = "each tensor of every file"
    expect(found.keys() == right.keys(), f"{what}: {len(found)} tensors, not {len(right)}", hint)
    for name, entry in right.items():
        hint = "at: 8 + the header's length + data_offsets[0]; runs: those of whole(), in numbers"
        expect(found[name] == entry, f"{what}: {name} is {found[name]}, not {entry}", hint)
