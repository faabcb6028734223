"""Lab 5's referee: wrong plans planted in right ones are found, and what is no plan is one line."""

import json

import pytest
from learner import LABS, run_lab

from labs.lab5_tp_plans.models import tiny_model

PLANS = """
from torch.distributed.tensor import Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from labs.lab5_tp_plans import lesson as finished
def right(model, sp):
    return finished.choose_plan(model, sp)[0]
def without(end):
    return lambda model, sp: {k: v for k, v in right(model, sp).items() if not k.endswith(end)}
no_q_norm, no_o_proj, no_embedding = map(without, ("q_norm", "o_proj", "embed_tokens"))
attention = "model.layers.*.self_attn."
unsummed = {f"{attention}{x}_proj": ColwiseParallel() for x in "qkv"}
unsummed |= {f"{attention}o_proj": RowwiseParallel(output_layouts=Partial())}
strings, number = {f"{attention}q_proj": "colwise"}, 7
def no_arguments(): return {}
"""


@pytest.fixture
def judged(tmp_path, monkeypatch, capsys):
    """judged(model, plan, *options) -> (exit status, the verdict's row or what stderr says)."""
    (tmp_path / "planted.py").write_text(PLANS)
    monkeypatch.syspath_prepend(tmp_path)

    def judged(model, plan, *options):
        file = tmp_path / "verdict.json"
        file.unlink(missing_ok=True)
        options = "--referee", "--model", model, "--plan", f"planted.{plan}", *options
        status = run_lab(LABS["lab5"], [*options, "--json", str(file)])
        said = capsys.readouterr().err
        return status, json.loads(file.read_text())["referee"][0] if file.exists() else said

    return judged


def test_an_unsummed_q_norm_is_found(judged):
    status, row = judged("qwen3", "no_q_norm")
    names = [f"model.layers.{i}.self_attn.q_norm.weight" for i in (0, 1)]
    assert status == 1 and row["verdict"] == "WRONG" and [*row["wrong"]] == names
    assert row["logits"] <= 1e-10, "no logit shows it"


@pytest.mark.parametrize("plan,said", [("strings", "--hf-plan"), ("number", "of type int")])
def test_what_is_no_plan_is_one_line(judged, plan, said):
    status, err = judged("qwen3", plan)
    assert status == 2 and err.startswith("error: argument --plan: ") and err.count("\n") == 1
    assert said in err


@pytest.mark.slow
def test_other_planted_plans(judged, tmp_path):
    assert judged("qwen3", "right", "--sp")[1]["verdict"] == "right"
    tiny_model("mistral").config.save_pretrained(tmp_path)
    assert judged(str(tmp_path), "right")[1]["verdict"] == "right", "a folder without weights"
    for model, plan, verdict in (
        ("llama", "unsummed", "WRONG"),
        ("llama", "no_o_proj", "fails"),
        ("llama", "no_embedding", "fails"),  # not tied
        ("smollm3", "no_embedding", "fails"),  # tied
    ):
        status, row = judged(model, plan)
        assert (status, row["verdict"]) == (1, verdict), (model, plan)
    status, err = judged("llama", "no_arguments")
    assert status == 2 and err.startswith("error: planted.no_arguments is no plan: TypeError")
