"""Lab 13's checks of the optimizer's state and of Hugging Face's files."""

import itertools
import json
import tempfile
from pathlib import Path

import torch
from checks.memory import Alive
from checks.shards import finished, layouts_of, numbers_of, part_of, same, save_with
from harness import expect
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging


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
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(model, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            model.loss(seed + step).backward()
            optimizer.step()

    starts = seed, seed, seed + 9
    (right, right_adam), (model, adam), (later, later_adam) = map(built, starts)
    train(right, right_adam, range(6))
    train(model, adam, range(3))
    state, fresh = lab.training_state(model, adam), lab.training_state(later, later_adam)
    names = list(dict(model.named_parameters()))
    wanted = {f"{n}{key}" for n in names for key in ("", "/step", "/exp_avg", "/exp_avg_sq")}
    for found, what in (state, "after 3 steps"), (fresh, "before the first step"):
        expect(isinstance(found, dict), f"{what}: {type(found).__name__}, not a dict")
        odd = sorted(wanted ^ set(found))
        hint = "named_parameters() has a tied one once; of each: itself and three of AdamW's"
        expect(not odd, f"{what}: {', '.join(odd[:4])} too many, or missing", hint)
    for n, key in itertools.product(names, finished.STATE):
        theirs = adam.state[model.get_parameter(n)][key]
        hint = "the tensors of optimizer.state[parameter], by their own names, no copies"
        shared = state[f"{n}/{key}"].data_ptr() == theirs.data_ptr()
        expect(shared, f"{n}/{key} is not AdamW's {key} itself", hint)
        expect(fresh[f"{n}/{key}"].count_nonzero() == 0, f"a new {key} is not zero")
    for name, x in fresh.items():
        shape = x.shape == state[name].shape and x.dtype == state[name].dtype
        expect(shape, f"{name}: a new one is {x.dtype} {tuple(x.shape)}", "as AdamW makes it")
        x.copy_(state[name])
    train(later, later_adam, range(3, 6))
    hint = "what is read into the dict's tensors has to reach model and optimizer, step count too"
    off = [n for n, p in later.named_parameters() if not torch.equal(p, right.get_parameter(n))]
    expect(not off, f"3 steps, a copy, 3 steps: {', '.join(off)} not as after 6", hint)
    return f"{len(state)} tensors, tied ones once; 3 + 3 steps are 6 steps, to the bit"


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
        shapes = {name: tuple(x.shape) for name, x in full.items()}
        what = f"embeddings {'tied' if tied else 'not tied'}, {dtype}"
        with tempfile.TemporaryDirectory() as folder:
            there, hf = Path(folder, "hf"), Path(folder, "model.safetensors")
            state = full | {f"{name}/exp_avg": x + 1 for name, x in full.items()}
            save_with(finished, folder, state, "zero3", 3)
            config.save_pretrained(folder)
            with Alive() as alive:
                lab.export(folder, hf)
            expect(hf.exists(), f"{what}: no file {hf.name}", "os.replace the draft")
            names = set(json.loads(hf.read_bytes()[8:].partition(b"}}")[0] + b"}}")) - {
                "__metadata__"
            }
            expect(names == set(full), f"{what}: {len(names)} tensors", "parameters alone: no /")
            expect(not Path(f"{hf}.draft").exists(), f"{what}: the draft is left")
            most = 2 * max(x.nbytes for x in full.values()) + 64
            hint = "get(name) makes one full tensor, when write_tensors asks for it"
            expect(alive.peak <= most, f"{what}: {alive.peak} bytes alive, {most} do", hint)
            theirs = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
            expect(same(dict(theirs.named_parameters()), full), f"{what}: HF reads other weights")
            model.save_pretrained(there, max_shard_size="2KB")
            index = lab.import_index(there)
            expect(len(index["tensors"]) == len(full), f"{what}: {len(index['tensors'])} tensors")
            for layout in layouts_of("zero3", shapes, 3):
                mine = {n: torch.zeros(len(numbers_of(s)), dtype=dtype) for n, s in layout.items()}
                finished.fill(there, index, mine, layout)
                right = {name: part_of(full[name], shard) for name, shard in layout.items()}
                hint = "numbers begin at 8 + the header's length + data_offsets[0]; one run, whole"
                expect(same(mine, right), f"{what}: other numbers come from HF's files", hint)
    return "HF reads what is exported, to the bit; HF's files load into 3 shards"
