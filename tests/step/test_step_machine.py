"""``make_step`` beside the loop that everybody writes: backward, GradScaler, clip, optimizer.

On the torch side a window is a module whose ``.grad`` sums up ``backward()`` of each microbatch,
then ``unscale_``, ``clip_grad_norm_``, ``step`` and ``update`` of a scaler, and a ``LambdaLR``
that is stepped only where the optimizer was.

Two ways to weigh a microbatch are in use. ``"totals"`` sums up what the samples sum up to and
divides by the weight at the end: the same kernels on the same numbers but for powers of two, so all
is equal in bits, in float32, over the whole run. ``"shares"`` multiplies each mean by ``rows / N``
first, which rounds: that is compared in float64, to a bound, one step at a time.
"""

import copy
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor, nn

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import seeds
from tests.draws import examples, generator
from tests.exactly import copied
from tests.problems import in_a_window
from tests.step.problems import ROOT_U64


pytestmark = [pytest.mark.laws, pytest.mark.promise("applied")]
EPS = 1e-3
SCHEDULE = pa.join_schedules([pa.linear_warmup(0.1, 3, 0.01), pa.cosine_decay(0.1, 7, 0.01)], [3])


class Kind(NamedTuple):
    """An optimizer on both sides, and by how much its step moves for a move of the gradient.

    A step of Adam is ``m / (sqrt(v) + eps)``: its derivative is at most that by ``m``,
    ``1 / eps``, and that by ``v``, ``|m| / sqrt(v) / eps``, where the betas keep the first factor
    below 7.3 (Cauchy and Schwarz).
    """

    ours: Any
    torchs: type[torch.optim.Optimizer]
    options: dict[str, Any]
    trees: dict[str, str]  # ours to torch's
    moves: float


KINDS = {
    "sgd": Kind(
        pa.sgd,
        torch.optim.SGD,
        {"momentum": 0.5, "weight_decay": 0.01, "nesterov": True},
        {"momentum": "momentum_buffer"},
        1.5,
    ),
    "plain sgd": Kind(pa.sgd, torch.optim.SGD, {}, {}, 1.0),
    "adam": Kind(
        pa.adam,
        torch.optim.Adam,
        {"eps": EPS, "amsgrad": True},
        {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "max_exp_avg_sq": "max_exp_avg_sq"},
        8.3 / EPS,
    ),
    "adamw": Kind(
        pa.adamw,
        torch.optim.AdamW,
        {"eps": EPS, "weight_decay": 0.1},
        {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
        8.3 / EPS,
    ),
}


def make_module(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))


def row_losses(out, batch):
    return ((out - batch["y"]) ** 2).sum(-1)


class Loop:
    """The loop; every choice that it makes is torch's."""

    def __init__(self, module, kind, scaler, reduction, clips):
        self.module, self.reduction, self.clips = module, reduction, clips
        self.optimizer = kind.torchs(module.parameters(), lr=1.0, **kind.options)
        self.rates = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda count: SCHEDULE(torch.tensor(count)).item()
        )
        self.scaler = torch.amp.GradScaler("cpu", *(scaler or (1.0,)), enabled=scaler is not None)
        self.applied = 0
        self.terms: dict[str, Tensor] = {}

    @property
    def params(self):
        return dict(sorted(self.module.named_parameters()))

    def weight(self, batch):
        return float(batch["mask"].sum()) if self.reduction == "weighted" else len(batch["y"])

    def window(self, parts, form):
        """One window; a microbatch of weight zero is not looked at."""
        parts = [part for part in parts if self.weight(part)]
        whole = sum(map(self.weight, parts))
        if not parts:
            return False
        buffers = copied(dict(self.module.named_buffers()))
        self.optimizer.zero_grad(set_to_none=True)
        self.terms = {name: torch.zeros((), dtype=torch.float64) for name in self.params}
        for part in parts:
            rows = row_losses(self.module(part["x"]), part)
            by = 1.0  # what is summed up is divided by, at the end
            if self.reduction == "weighted":
                loss, by = (part["mask"] * rows).sum(), whole
                if form == "shares":
                    loss, by = loss / self.weight(part) * (self.weight(part) / whole), 1.0
            elif self.reduction == "sum":
                loss = rows.sum()
            elif form == "shares" or form == "one":
                loss = rows.mean() * (len(rows) / whole)
            else:
                loss, by = rows.mean() * len(rows), whole
            before = {n: 0 if p.grad is None else p.grad.clone() for n, p in self.params.items()}
            self.scaler.scale(loss).backward()
            for name, param in self.params.items():
                self.terms[name] += (param.grad - before[name]).norm() / by
        scale = self.scaler.get_scale()
        self.terms = {name: norm / scale for name, norm in self.terms.items()}
        self.scaler.unscale_(self.optimizer)
        for param in self.params.values():
            param.grad /= by
        found = any(not param.grad.isfinite().all() for param in self.params.values())
        if self.clips:
            nn.utils.clip_grad_norm_(list(self.params.values()), self.clips)
        if not (found and not self.scaler.is_enabled()):
            self.scaler.step(self.optimizer)
        self.scaler.update()
        if found:  # torch leaves the running statistics of such a window in place
            for name, buffer in self.module.named_buffers():
                buffer.copy_(buffers[name])
        else:
            self.rates.step()
            self.applied += 1
        return not found


class Training(RuleBasedStateMachine):
    """Both sides, window by window."""

    @initialize(
        seed=seeds(),
        kind=st.sampled_from(sorted(KINDS)),
        reduction=st.sampled_from(["mean", "sum", "weighted"]),
        form=st.sampled_from(["totals", "totals", "shares"]),
        scaler=st.sampled_from(
            [None, (2.0**16, 2.0, 0.5, 2), (1.0, 4.0, 0.25, 1), (2.0**90, 2.0, 2.0**-80, 3)]
        ),
        clips=st.sampled_from([None, 0.5, 100.0]),  # always, and hardly ever
        engine=st.sampled_from(["func", "autograd"]),
        donate=st.booleans(),
    )
    def begin(self, seed, kind, reduction, form, scaler, clips, engine, donate):
        self.random, self.kind, self.form, self.reduction = generator(seed), kind, form, reduction
        self.dtype = torch.float64 if form == "shares" else torch.float32
        module = make_module(seed).to(self.dtype)
        fn = pa.functional(module)

        def loss(params, batch, buffers):
            out, new_buffers = fn.apply(params, buffers, batch["x"])
            rows = row_losses(out, batch)
            if reduction == "weighted":
                total = pa.Weighted((batch["mask"] * rows).sum(), batch["mask"].sum())
            else:
                total = rows.sum() if reduction == "sum" else rows.mean()
            return total, new_buffers

        def make(size):
            optimizer = KINDS[kind].ours(SCHEDULE, **KINDS[kind].options)
            if clips:
                optimizer = pa.chain(pa.clip_by_global_norm(clips), optimizer)
            return pa.make_step(
                loss,
                optimizer,
                microbatch_size=size,
                reduction="sum" if reduction == "sum" else "mean",
                loss_scale=scaler and pa.dynamic_loss_scale(*scaler, min_scale=2.0**-149),
                buffers="sequential",
                check=False,  # the loop normalises each microbatch by itself, too
                engine=engine,
                donate=donate,
            )

        self.steps = {size: make(size) for size in (None, 2, 3, 4, 20)}
        self.state = self.steps[None].init(fn.params, fn.buffers, seed)
        self.loop = Loop(copy.deepcopy(module), KINDS[kind], scaler, reduction, clips)
        self.clips, self.backoff = clips, scaler[2] if scaler else 1.0
        self.windows = self.samples = 0

    # What comes in ------------------------------------------------------------------------

    def batch(self, rows):
        def normal(*shape):
            return torch.randn(*shape, generator=self.random, dtype=self.dtype)

        mask = torch.randint(0, 3, (rows,), generator=self.random).to(self.dtype)
        mask[:1] = 1
        return {"x": normal(rows, 3), "y": normal(rows, 2), "mask": mask}

    def room(self):
        """Whether the scale may back off: torch's has no floor, and its reciprocal a ceiling."""
        return self.loop.scaler.get_scale() * self.backoff >= 2.0**-20

    def poisoned(self, batch, poison, row):
        """Into a sample that counts."""
        if poison == "large":  # overflows where it is multiplied by 2**90
            if self.clips or "adam" in self.kind:
                batch["y"][row] = 2.0**50
        elif self.room():
            batch["x" if poison == "nan" else "y"][row, 0] = float(poison)
        batch["mask"][row] = 1

    # What is done ---------------------------------------------------------------------------

    poisons = st.sampled_from([None, None, None, None, "inf", "-inf", "nan", "large"])

    @rule(
        rows=st.integers(2, 9),
        size=st.sampled_from([None, 2, 3, 4, 20]),
        poison=poisons,
        at=st.integers(0, 8),
    )
    def whole_batch(self, rows, size, poison, at):
        if size and size < rows and rows % size == 1:
            rows += 1  # BatchNorm refuses a single sample
        batch = self.batch(rows)
        if poison:
            self.poisoned(batch, poison, at % rows)
        parts = [*pa.microbatches(batch, size or rows)]
        one = len(parts) == 1 and self.form == "totals"
        before = copied(self.state)
        new, info = self.steps[size](self.state, batch)
        self.judge(before, new, info, parts, "one" if one else self.form)

    @rule(
        sizes=st.lists(st.integers(2, 5), max_size=4),
        poison=poisons,
        at=st.integers(0, 20),
        masked=st.booleans(),
    )
    def streamed(self, sizes, poison, at, masked):
        """Of an empty window, too: begin, then apply."""
        parts = [self.batch(rows) for rows in sizes]
        if poison and parts:
            part = parts[at % len(parts)]
            self.poisoned(part, poison, at % len(part["y"]))
        if masked and parts:  # one microbatch without weight, and with NaN where that is allowed
            parts[0]["mask"].zero_()
            if self.reduction == "weighted":
                parts[0]["y"].fill_(torch.nan)
        self.stream(parts)

    @rule(sizes=st.lists(st.integers(2, 3), max_size=2))
    @precondition(lambda self: self.reduction == "weighted")
    def nothing_weighs(self, sizes):
        parts = [self.batch(rows) for rows in sizes]
        for part in parts:
            part["mask"].zero_()
        self.stream(parts)

    def stream(self, parts):
        before = copied(self.state)
        new, info = in_a_window(self.steps[None], self.state, parts)
        self.judge(before, new, info, parts, self.form)

    # What it has come to --------------------------------------------------------------------

    def judge(self, before, new, info, parts, form):
        used = self.loop.scaler.get_scale()
        applied = self.loop.window(parts, form)
        self.state = new
        self.windows += 1
        self.samples += sum(len(part["y"]) for part in parts)
        assert bool(info.applied) is applied
        assert info.scale.item() == used
        assert info.microbatches.item() == len(parts)
        assert info.weight == (self.reduction != "sum") * sum(map(self.loop.weight, parts))
        if not applied:
            assert_trees_bitwise_equal(new[:3], before[:3])
        if form == "shares":
            self.close(info, applied)
        else:
            self.equal()

    def trees(self):
        """Each tree of numbers, ours and torch's by name."""
        opt_state = self.state.opt_state[-1] if self.clips else self.state.opt_state
        params = self.loop.params
        pairs = [("params", self.state.params, {n: p.detach() for n, p in params.items()})]
        if self.loop.applied:
            held = self.loop.optimizer.state
            for ours, theirs in KINDS[self.kind].trees.items():
                column = {name: held[p][theirs] for name, p in params.items()}
                pairs.append((ours, getattr(opt_state, ours), column))
        return pairs

    def equal(self):
        for name, ours, theirs in self.trees():
            assert_trees_bitwise_equal({name: ours}, {name: theirs})
        assert_trees_bitwise_equal(self.state.buffers, dict(self.loop.module.named_buffers()))

    def close(self, info, applied):
        """To the bound; then torch's side goes on from our numbers."""
        if applied:
            # clipping moves a gradient by its own error, and by that of the norm
            norm = sum(self.loop.terms.values())  # at least that of the gradient
            error, lr = 2 * ROOT_U64 * norm, 0.1
            for name, ours, theirs in self.trees():
                for leaf in ours:
                    size = theirs[leaf].norm()
                    by = {"params": lr * KINDS[self.kind].moves, "momentum": 1.5, "exp_avg": 1.0}
                    moves = by.get(name, 2 * norm)
                    assert (ours[leaf] - theirs[leaf]).norm() <= moves * error + ROOT_U64 * size
                    theirs[leaf].copy_(ours[leaf])
        for name, buffer in self.loop.module.named_buffers():
            assert torch.equal(self.state.buffers[name], buffer)

    @invariant()
    def both_have_counted_alike(self):
        assert self.state.attempts.item() == self.windows
        assert self.state.applied.item() == self.loop.applied
        assert self.state.samples.item() == self.samples
        last = self.state.opt_state[-1] if self.clips else self.state.opt_state
        assert last.steps.item() == self.loop.applied == self.loop.rates.last_epoch
        if self.loop.scaler.is_enabled():
            assert self.state.loss_scale.scale.item() == self.loop.scaler.get_scale()
            held = self.loop.scaler.state_dict()["_growth_tracker"]
            assert self.state.loss_scale.growth_tracker.item() == held


TestTraining = Training.TestCase
TestTraining.settings = settings(examples(1 / 2), stateful_step_count=12)
