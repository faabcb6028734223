"""pp.py's stages in PyTorch's engine, torch.distributed.pipelining: the same proof and benchmark.

    torchrun --nproc_per_node=2 labs/torch_pipeline.py --mode benchmark --schedule 1f1b
    torchrun --nproc_per_node=2 pp.py --mode benchmark --schedule 1f1b     # ours, to compare

Options are pp.py's; --schedule afab or 1f1b, with microbatches of one size.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import pp  # noqa: E402

pp_finalize_args = pp.finalize_args


class TorchPipeline:
    """In the place of pp.Pipeline."""

    def __init__(self, model, group, args):
        self.rank, self.P, self.group, self.args = group.rank(), group.size(), group, args
        self.stage, self.dtype = pp.Stage(model, self.rank, self.P), model.dtype
        self.current = SimpleNamespace(loss_fn=None)  # of a run; not self: no reference cycle
        self.schedules = {}  # {(length, backward): PyTorch's schedule}
        zeros = torch.zeros(args.batch, args.length, dtype=torch.int64, device=args.device)
        for backward in (True, False):  # the first step opens connections: not to be measured
            self.run(zeros, zeros, lambda hidden, labels: hidden.sum(), backward)
        model.zero_grad()

    def make_schedule(self, length, backward):
        """PyTorch's schedule for ids (b, length)."""
        args, current = self.args, self.current
        shape = args.batch // args.microbatches, length
        with torch.device("meta"):  # what crosses a boundary: else the ranks would ask each other
            hidden = torch.empty(*shape, args.config.hidden_size, dtype=self.dtype)
            hidden = hidden.requires_grad_(backward)
            first = torch.empty(shape, dtype=torch.int64) if self.rank == 0 else hidden
        stage = PipelineStage(
            self.stage, self.rank, self.P, args.device, first, hidden, group=self.group
        )
        engine = {"afab": ScheduleGPipe, "1f1b": Schedule1F1B}[args.schedule]
        how = {"loss_fn": lambda hidden, labels: current.loss_fn(hidden, labels)}
        return engine(stage, args.microbatches, **how, scale_grads=False)

    def run(self, ids, labels, loss_fn, backward=True):
        """As Pipeline.run()."""
        key, losses = (ids.shape[1], backward), []
        if key not in self.schedules:
            self.schedules[key] = self.make_schedule(*key)
        step = self.schedules[key].step if backward else self.schedules[key].eval
        inputs = [ids] if self.rank == 0 else []
        targets = {"target": labels, "losses": losses} if self.rank == self.P - 1 else {}
        self.current.loss_fn = loss_fn
        step(*inputs, **targets)
        self.current.loss_fn = None
        return [loss.detach() for loss in losses]


def finalize_args(args, world):
    """pp.finalize_args(); UsageError for what PyTorch's engine does not run."""
    pp_finalize_args(args, world)
    if args.backend == "fake":
        raise pp.UsageError("PyTorch's engine waits for other ranks: use --backend gloo")
    if args.schedule not in ("afab", "1f1b") or args.batch % args.microbatches:
        how = "use --schedule afab or 1f1b, microbatches of one size"
        raise pp.UsageError(f"for PyTorch's engine {how}")
    if args.schedule == "1f1b" and world > args.microbatches:
        instead = f"--microbatches {world} --batch {-(-args.batch // world) * world}"
        raise pp.UsageError(f"PyTorch's 1f1b takes a microbatch a rank: use {instead}")


pp.Pipeline, pp.finalize_args = TorchPipeline, finalize_args
if __name__ == "__main__":
    sys.exit(record(pp.main)())
