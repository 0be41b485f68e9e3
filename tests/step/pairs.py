"""Every two features of a step together: a program that has both, and what it has to come to.

    program(features)     the step with these features, trained for two steps
    by_hand(features)     the same in plain torch: the full batch, no step, no microbatch

A pair either comes to the same, or is refused in words that ``REFUSED`` has, with one of three
reasons: it has no meaning, it would have to wait for the device, or torch cannot.
"""

import itertools
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.func import functional_call

import pureaccum as pa
from pureaccum._base.trees import tree_leaves, tree_map


FEATURES = {  # and what it is, as the page says it
    "inside": "`pa.microbatch` in the loss",
    "scan": "`pa.scan` in the loss",
    "batch norm": "exact BatchNorm: `functional(microbatch_size=)`",
    "compile": "`compile=`",
    "donate": "`donate=True`",
    "auto": '`microbatch_size="auto"`',
    "noise": "`noise=True`",
    "skip": '`nonfinite="skip"`',
    "raise": '`nonfinite="raise"`',
    "keys": "`keys=True`",
    "buffers": '`buffers="pooled"`',
    "policy": "`policy=`",
    "scale": "`loss_scale=`",
    "group": "`group=`",
    "stream": "`begin`, `update`, `apply`",
    "aux": "`has_aux=True`",
    "weighted": "`Weighted`",
    "terms": "a sum of `Weighted`",
    "from_torch": "`from_torch`",
    "dtensors": "DTensor parameters",
    "vmap": "`vmap` over the step",
    "grad": "`grad` through the step",
}
RANKS = {"group", "dtensors"}  # the features of several ranks


class Refused(NamedTuple):
    """Why two features do not go together, and the words that say so."""

    reason: str
    why: str
    words: str


NO_MEANING, WAITS, TORCH = "no meaning", "it would wait", "torch cannot"
_AUTO = Refused(
    NO_MEANING,
    "the size is chosen for a whole call, and inside a transform the memory that the outer "
    "transform will need is not known yet",
    "a smaller size does not free their memory",
)
_FROM_TORCH = Refused(
    TORCH,
    "torch's optimizer classes write in place and read numbers on the host",
    "the class changes parameters in place",
)
_DTENSORS = Refused(
    TORCH, "torch.func has no rules for DTensors", "transforms do not see through them"
)
_BATCH_NORM = Refused(
    TORCH,
    "DTensors have no rule for batch norm; use plain tensors and `group=`",
    "batch.norm",
)
REFUSED = {
    ("inside", "batch norm"): Refused(
        NO_MEANING,
        "the inner function splits the batch already; if it is split outside too, BatchNorm sees "
        "only a part of it",
        "splits the batch too",
    ),
    ("inside", "buffers"): Refused(
        NO_MEANING,
        "a step pools the buffers of its own microbatches; those of a function inside are outputs "
        "of that function, reduced by its `reduce=`",
        "that are not in new_buffers",
    ),
    ("batch norm", "stream"): Refused(
        NO_MEANING,
        "one microbatch of a stream does not have the statistics of the whole batch",
        "does not add up",
    ),
    ("noise", "terms"): Refused(
        NO_MEANING,
        "gradient noise is defined for one mean, not for a sum of means",
        "is that of one mean",
    ),
    ("skip", "raise"): Refused(NO_MEANING, "both are values of one option", "cannot be"),
    ("group", "dtensors"): Refused(
        NO_MEANING,
        "`group` adds up tensors that every rank holds whole; DTensors add up over their mesh",
        "Omit group",
    ),
    ("compile", "raise"): Refused(
        WAITS, "a compiled graph does not stop to read a number", "which a graph cannot"
    ),
    **{("auto", b): _AUTO for b in ("vmap", "grad")},
    **{("from_torch", b): _FROM_TORCH for b in ("vmap", "grad")},
    **{("dtensors", b): _DTENSORS for b in ("vmap", "grad")},
    **{(a, "dtensors"): _BATCH_NORM for a in ("batch norm", "buffers")},
}

ROWS, SIZE, RATE, MOMENTUM, SEED = 64, 16, 0.25, 0.5, 3
BAD = 20  # the sample with a NaN in it, where one is to be skipped


def pairs():
    return itertools.combinations(FEATURES, 2)


class Net(nn.Module):
    """Two layers, perhaps with BatchNorm between them, or before them where nothing comes of it."""

    def __init__(self, features):
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 2)
        kept = "buffers" in features
        norm = nn.BatchNorm1d(8, track_running_stats=kept)
        self.norm = norm if "batch norm" in features else nn.Identity()
        self.seen = nn.BatchNorm1d(3, affine=False) if "buffers" in features else None
        self.double()
        if "policy" in features:  # buffers are not cast
            for part in (self.norm, self.seen):
                for name, x in [*part.named_buffers()] if part is not None else []:
                    setattr(part, name, x.float() if x.is_floating_point() else x)

    def forward(self, x):
        if self.seen is not None:
            x = x + 0.0 * self.seen(x)
        return self.last(self.norm(self.first(x)).tanh())


class Problem(NamedTuple):
    """A network and its batch, the same on all ranks."""

    net: Net
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    batch: dict[str, Tensor]


def problem(features):
    torch.manual_seed(0)
    net = Net(features)
    batch = {
        "x": torch.randn(ROWS, 3).double(),
        "y": torch.randn(ROWS, 2).double(),
        "mask": torch.randint(0, 4, (ROWS,)).double(),
    }
    if "skip" in features:
        batch["y"][BAD] = torch.nan
    params = {name: x.detach().clone() for name, x in net.named_parameters()}
    return Problem(net, params, dict(net.named_buffers()), batch)


def takes_whole(features):
    """Whether the loss itself takes the batch piece by piece."""
    return bool(features & {"inside", "batch norm"})


# The program --------------------------------------------------------------------------------


ZERO, ONE, YES = torch.tensor(0.0), torch.tensor(1.0), torch.tensor(True)


class Came(NamedTuple):
    """What training came to."""

    params: dict[str, Tensor]
    applied: Tensor = YES
    microbatches: int = 0
    buffers: Any = ()
    loss: Tensor = ZERO
    aux: Any = ()
    scale: Tensor = ONE
    noise: Tensor = ZERO


def added_up(_, before, x):
    """A running sum over features."""
    sums = before.unsqueeze(1) + x.cumsum(1)
    return sums[:, -1], sums


def loss_of(features, net):
    options = {}
    if "batch norm" in features:
        options = {"microbatch_size": SIZE}
        if "group" in features:
            options["group"] = dist.group.WORLD
    fn = pa.functional(net, **options)

    def forward(params, x, buffers, keys):
        if keys is not None:
            x = pa.dropout(x, 0.25, keys)
        if "scan" in features:
            _, x = pa.scan(added_up, chunk_size=2, dim=1)((), torch.zeros_like(x[:, 0]), x)
        return fn.apply(params, buffers, x)

    def out_of(params, x, buffers, keys):
        out, new = forward(params, x, buffers, keys)
        return (out, new) if buffers else (out, ())

    inside = pa.microbatch(
        out_of, microbatch_size=SIZE, batch_argnums=(1, 3), reduce=("concat", "last")
    )

    def loss(params, batch, buffers=None, keys=None):
        own = dict(net.named_buffers()) if buffers is None else buffers
        if "inside" in features:
            out, new = inside(params, batch["x"], own, keys)
        else:
            out, new = forward(params, batch["x"], own, keys)
        errors = ((out - batch["y"]) ** 2).mean(1)
        value = errors.mean()
        if "weighted" in features:
            value = pa.Weighted((errors * batch["mask"]).sum(), batch["mask"].sum())
        if "terms" in features:
            masked = pa.Weighted((errors * batch["mask"]).sum(), batch["mask"].sum())
            value = pa.Weighted(errors.sum(), len(errors)) - 0.5 * masked
        rest = [new] if buffers is not None else []
        rest += [{"errors": errors}] if "aux" in features else []
        if not rest:
            return value
        return value, rest[0] if len(rest) == 1 else tuple(rest)

    return loss


def options_of(features):
    options = {
        "compile": {"compile": {"backend": "eager"}},
        "donate": {"donate": True},
        "noise": {"noise": True},
        "skip": {"nonfinite": "skip"},
        "raise": {"nonfinite": "raise"},
        "keys": {"keys": True},
        "buffers": {"buffers": "pooled"},
        "policy": {"policy": pa.Policy(param=torch.float64, compute=torch.float32)},
        "scale": {"loss_scale": pa.dynamic_loss_scale(2.0**10, growth_interval=1)},
        "aux": {"has_aux": True},
        "group": {"group": dist.group.WORLD} if "group" in features else {},
    }
    made = {}
    for name in features:
        for option, value in options.get(name, {}).items():
            if option in made:
                raise ValueError(f"{option} cannot be {made[option]!r} and {value!r}")
            made[option] = value
    if "auto" in features:
        made["microbatch_size"] = "auto"
    elif not takes_whole(features) and "stream" not in features:
        made["microbatch_size"] = SIZE
    return made


def optimizer_of(features):
    if "from_torch" in features:
        return pa.from_torch(torch.optim.SGD, lr=RATE, momentum=MOMENTUM)
    return pa.sgd(RATE, momentum=MOMENTUM)


def trained(features, step, state, batch):
    """The state and what the last of two steps told, and the aux of its samples."""
    info = None
    aux = ()
    for _ in range(2):
        if "stream" not in features:
            state, info = step(state, batch)
            aux = info.aux
            continue
        window, told, at = step.begin(state), [], 0
        rows = len(batch["x"])
        whole = takes_whole(features) or "auto" in features
        before = 40 if "group" in features and dist.get_rank() else 0
        for part in [batch] if whole else pa.microbatches(batch, SIZE):
            beside = {"offset": before + at} if features >= {"group", "keys"} else {}
            if "terms" in features:
                beside["weights"] = [ROWS, problem(features).batch["mask"].sum()]
            window = step.update(state, window, part, **beside)
            at += len(part["x"])
            if "aux" in features:
                window, its = window
                told.append(its)
        assert at == rows
        state, info = step.apply(state, window)
        if told:
            aux = {"errors": torch.cat([its["errors"] for its in told])}
    return state, info, aux


def program(features):
    """What the step with these features comes to."""
    net, params, buffers, batch = problem(features)
    step = pa.make_step(loss_of(features, net), optimizer_of(features), **options_of(features))
    if "group" in features and "dtensors" not in features:
        start, end = ((0, 40), (40, ROWS))[dist.get_rank()]
        batch = {name: x[start:end] for name, x in batch.items()}
    if "dtensors" in features:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        placed = {name: Replicate() if "last" in name else Shard(0) for name in params}
        params = {name: distribute_tensor(x, mesh, [placed[name]]) for name, x in params.items()}
        batch = {name: distribute_tensor(x, mesh, [Shard(0)]) for name, x in batch.items()}
    given = buffers if "buffers" in features else None

    def train(params):
        return trained(features, step, step.init(params, given, SEED), batch)

    if "raise" in features:
        check_raised(features, step, params, given, batch)
    if "grad" in features:

        def moved(params):
            return sum(x.square().sum() for x in train(params)[0].params.values())

        grad = torch.func.grad(moved)
        if "vmap" in features:
            grads = torch.func.vmap(grad)({k: torch.stack([x, 1.5 * x]) for k, x in params.items()})
        else:
            grads = full(grad(params))
        return Came(grads, microbatches=ROWS // SIZE)
    if "vmap" in features:
        members = [{k: s * x for k, x in params.items()} for s in (1.0, 1.5)]
        stacked = pa.stack([step.init(each, given, SEED) for each in members])

        def of_one(state):
            return trained(features, step, state, batch)

        state, info, aux = torch.func.vmap(of_one)(stacked)
        count = int(info.microbatches[0])
    else:
        state, info, aux = train(params)
        count = int(info.microbatches)
    return Came(
        params=full(state.params),
        buffers=full(state.buffers) if given else (),
        loss=info.loss,
        applied=info.applied,
        aux=full(aux),
        scale=state.loss_scale.scale if "scale" in features else ONE,
        noise=info.noise.noise[..., 0] if "noise" in features else ZERO,
        microbatches=count,
    )


def check_raised(features, step, params, given, batch):
    """A NaN in the batch is raised, under transforms too, and for one of several members."""
    bad = {**batch, "y": batch["y"] * torch.nan}

    def loss(params):
        state = step.init(params, given, SEED)
        return trained(features, step, state, bad)[1].loss

    if "grad" in features:
        loss = torch.func.grad(loss)
    if "vmap" in features:
        loss = torch.func.vmap(loss)
        params = {k: torch.stack([x, x]) for k, x in params.items()}
    try:
        loss(params)
    except FloatingPointError:
        return
    raise AssertionError("a NaN went through nonfinite='raise'")


def full(tree):
    return tree_map(lambda x: x.full_tensor() if isinstance(x, DTensor) else x, tree)


# By hand ------------------------------------------------------------------------------------


def rows_of_microbatches(features, count):
    """Which samples each microbatch of a step has, of which there are so many."""
    rows = [*range(ROWS)]
    shares = [rows]
    if "group" in features:
        shares = [rows[:40], rows[40:]]
    if "dtensors" in features:
        half, each = ROWS // 2, ROWS // count // 2
        return [
            [*range(i, i + each), *range(half + i, half + i + each)] for i in range(0, half, each)
        ]
    if count <= len(shares):
        return shares
    size = SIZE if "group" in features and "auto" not in features else ROWS // count
    return [share[i : i + size] for share in shares for i in range(0, len(share), size)]


def by_hand(features, count, times=1.0):
    """What two steps come to in plain torch, with ``times`` the parameters to begin with."""
    net, params, buffers, batch = problem(features)
    params = {k: times * x for k, x in params.items()}
    at = rows_of_microbatches(features, count)
    if "skip" in features:
        if "batch norm" in features:
            at = []
        at = [rows for rows in at if BAD not in rows]
    kept = [i for rows in at for i in rows]

    def copied(buffers):
        return {k: x.clone() for k, x in buffers.items()}

    def errors(params, buffers, rows, attempt):
        part = {k: x[torch.tensor(rows, dtype=torch.int64)] for k, x in batch.items()}
        if "policy" in features:
            params = {k: x.float() for k, x in params.items()}
            part = {k: x.float() for k, x in part.items()}
        x = part["x"]
        if "keys" in features:
            index = ROWS * attempt + torch.tensor(rows, dtype=torch.int64)
            x = pa.dropout(x, 0.25, pa.fold_in(pa.fold_in(pa.key(SEED), attempt), index))
        x = x.cumsum(1) if "scan" in features else x
        out = functional_call(net, (params, buffers), (x,))
        return ((out - part["y"]) ** 2).mean(1)

    weights = batch["mask"] if "weighted" in features else torch.ones(ROWS).double()
    if "terms" in features:  # of one sample in the sum of means, times all that are kept
        weights = 1 - 0.5 * batch["mask"] * len(kept) / batch["mask"][kept].sum()

    def sums(params, buffers, rows, attempt):
        its = errors(params, copied(buffers), rows, attempt)
        return (its * weights[rows].to(its.dtype)).sum().double()

    def steps(params):
        velocity = None
        before = params
        held = {k: x.clone() for k, x in buffers.items()}
        loss = noise = torch.tensor(torch.nan).double()
        for attempt in range(2):
            if not kept:
                continue
            weight = len(kept) if "terms" in features else weights[kept].sum()

            def mean(params, attempt=attempt, weight=weight):
                return sums(params, held, kept, attempt) / weight

            grads, loss = torch.func.grad_and_value(mean)(params)
            if "noise" in features:
                noise = _noise(lambda p, rows, a=attempt: sums(p, held, rows, a), params)
            if "buffers" in features:
                errors(params, held, kept, attempt)
            velocity = {
                k: g if velocity is None else MOMENTUM * velocity[k] + g for k, g in grads.items()
            }
            before, params = params, {k: x - RATE * velocity[k] for k, x in params.items()}
        return params, before, held, loss, noise

    def _noise(of, params):
        def flat(grads):
            return torch.cat([x.reshape(-1) for x in grads.values()])

        each = [flat(torch.func.grad(lambda p, rows=rows: of(p, rows))(params)) for rows in at]
        w = [weights[rows].sum() for rows in at]
        scatter = sum(g.square().sum() / n for g, n in zip(each, w, strict=True))
        total = sum(each).square().sum() / sum(w)
        return (scatter - total) / (len(at) - 1) if len(at) > 1 else torch.tensor(torch.nan)

    applied = torch.tensor(bool(kept))
    if "grad" in features:
        moved = lambda p: sum(x.square().sum() for x in steps(p)[0].values())  # noqa: E731
        return Came(torch.func.grad(moved)(params), applied)
    new, before, held, loss, noise = steps(params)
    aux = ()
    if "aux" in features:
        mine = [*range(ROWS)]
        if "group" in features:
            mine = mine[:40] if dist.get_rank() == 0 else mine[40:]
        aux = {"errors": errors(before, copied(held), mine, 1).double()}
    scale = ONE
    if "scale" in features:
        scale = torch.tensor(2.0**8 if "skip" in features else 2.0**12)
    return Came(
        params=new,
        buffers=held if "buffers" in features else (),
        loss=loss,
        applied=applied,
        aux=aux,
        scale=scale,
        noise=noise if "noise" in features else ZERO,
        microbatches=count,
    )


def apart(came, want, features):
    """Where what came is further off than rounding can be, in the dtype that was computed in."""
    bound = 2.0**-12 if "policy" in features else 2.0**-26
    for name, x, y in zip(came._fields, came, want, strict=True):
        if name == "microbatches":
            continue
        xs, ys = tree_leaves(x), tree_leaves(y)
        if len(xs) != len(ys):
            return f"{name} has {len(xs)} leaves, not {len(ys)}"
        for a, b in zip(xs, ys, strict=True):
            a, b = a.double(), b.double()
            lost = not torch.equal(a.isfinite(), b.isfinite())
            error = (a - b)[b.isfinite()].norm() if not lost else torch.inf
            if error > bound * max(1.0, float(b[b.isfinite()].norm())):
                return (
                    f"{name} is off by {float(error):.1e}: {a.flatten()[:4]} for {b.flatten()[:4]}"
                )
    return ""


def wrong_with(features):
    """What two features do that they should not: nothing, "", if they come to the same."""
    came = program(features)
    if "vmap" not in features:
        return apart(came, by_hand(features, came.microbatches), features)
    for i, times in enumerate((1.0, 1.5)):
        member = Came(*tree_map(partial(_member, i), [*came]))
        if told := apart(member, by_hand(features, came.microbatches, times), features):
            return f"member {i}: {told}"
    return ""


def _member(i, x):
    return x[i] if isinstance(x, Tensor) and x.dim() else x


def check(pair):
    """A pair works and is right, or is refused in the words of the table."""
    refused = REFUSED.get(pair) or REFUSED.get(pair[::-1])
    if refused is None:
        told = wrong_with({*pair})
        assert not told, f"{' and '.join(pair)}: {told}"
        return
    with pytest.raises(Exception, match=refused.words):
        wrong_with({*pair})


# The page -----------------------------------------------------------------------------------


def page():
    """The table, as a reader sees it."""
    names = [*FEATURES]
    reasons = list(dict.fromkeys(REFUSED.values()))
    lines = ["| | " + " | ".join(str(i + 1) for i in range(len(names))) + " |"]
    lines.append("|---" * (len(names) + 1) + "|")
    for i, a in enumerate(names):
        cells = []
        for j, b in enumerate(names):
            refused = REFUSED.get((a, b)) or REFUSED.get((b, a))
            mark = "abcdefghijklmnop"[reasons.index(refused)] if refused else "✓"
            cells.append("" if j > i else "·" if j == i else mark)
        lines.append(f"| {i + 1} {FEATURES[a]} | " + " | ".join(cells) + " |")
    notes = [
        f"- **{'abcdefghijklmnop'[n]}**, {it.reason}: {it.why}." for n, it in enumerate(reasons)
    ]
    return "\n".join([*lines, "", *notes])


if __name__ == "__main__":
    print(page())
