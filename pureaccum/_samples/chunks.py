"""The gradient of each sample, a chunk of samples at a time.

    for chunk in microbatches(batch, chunk_size):
        yield vmap(gradient of one sample)(chunk)

A sample's gradient is its term in the sum over the batch: the gradient of its loss, or of its total
if the loss is ``Weighted``. If the loss returns several numbers, it is their Jacobian. Results have
samples along dim 0, then the dims of the loss, then those of the parameter.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import optree
import torch
from torch import Tensor

from .._base import checks, dtensors, refusals, trees
from .._base.torch_internals import functorch, modes
from .._core import batches, engines, losses, watch, windows, writes
from .._core.seams import Portion, Recorded, Seams
from . import outer_products, scaling


Randomness = Literal["error", "different", "same"]
SampleEngine = Literal["vmap", "autograd"]
Metrics = Callable[[trees.Tree, Tensor], trees.Tree] | Literal["norm"] | None


class Mapped(NamedTuple):
    """How a loss is mapped over samples."""

    keep_batch_dim: bool
    randomness: Randomness


class Sampling(NamedTuple):
    """How the gradients of samples are taken, the same for all of them."""

    chunk_size: int | None
    mapped: Mapped
    engine: SampleEngine
    has_aux: bool = False
    transform: scaling.Transform | scaling.Clip = None
    metrics: Metrics = None
    several: bool = False  # whether the loss may be several numbers
    carries_graph: bool = False  # as torch.func's own results do
    # Another way to a chunk at top level: ``shortcut(task, part)`` is None where it does not lead.
    shortcut: "Callable[[Task, trees.Tree], Chunk | None] | None" = None


class Chunk(NamedTuple):
    """What the samples of a chunk came to."""

    grads: list[Tensor | outer_products.Outer]  # transformed, but for the multiplication by
    factor: Tensor | tuple[()]  # one number per sample, or one for each of its leaves
    keep: Tensor | tuple[()]  # which samples add anything, where not all do
    spec: optree.PyTreeSpec  # of one sample's gradient
    value: Tensor  # losses, each of one number or several, or the totals of ``Weighted``
    weight: Tensor | tuple[()]  # of ``Weighted``
    aux: trees.Tree
    metrics: trees.Tree


SampleLoss = Callable[[Sequence[Tensor], trees.Tree], Any]  # of the params' leaves and a sample


class Task(NamedTuple):
    """What a call asks of each chunk of its samples."""

    call: SampleLoss
    leaves: list[Tensor]
    spec: optree.PyTreeSpec  # of params
    parts: list[list[int]]  # the leaves of each part that has a norm of its own
    how: Sampling


def check_sampling(how: Sampling) -> Sampling:
    """The sampling itself, whose options are what they may be."""
    if how.chunk_size is not None:
        how = how._replace(chunk_size=batches.check_size(how.chunk_size, "chunk_size"))
    checks.check_choice(how.mapped.randomness, ("error", "different", "same"), "randomness")
    checks.check_choice(how.engine, ("vmap", "autograd"), "engine")
    transform: Any = how.transform
    if isinstance(transform, scaling.Clip):
        return how
    if isinstance(transform, str):
        checks.check_choice(transform, ("normalize", "sign"), "transform")
    elif transform is not None and not callable(getattr(transform, "factor", transform)):
        raise TypeError(
            f"transform is {transform!r}; expected a function of one sample's gradient, "
            "clip_by_global_norm(...), 'normalize' or 'sign'."
        )
    if not (how.metrics is None or how.metrics == "norm" or callable(how.metrics)):
        raise TypeError(
            f"metrics is {how.metrics!r}; expected a function of one sample's gradient and value, "
            "or 'norm'."
        )
    return how


def of_arguments(
    func: Callable[..., Any], at: tuple[int, ...], alone: bool, args: tuple[Any, ...], kwargs: Any
) -> tuple[trees.Tree, Callable[..., Any]]:
    """What is differentiated of some arguments, and the function of that and of all of them."""

    def call(params: trees.Tree, *rest: Any) -> Any:
        given = dict(zip(at, (params,) if alone else params, strict=True))
        try:
            return func(*(given.get(i, x) for i, x in enumerate(rest)), **kwargs)
        except Exception as error:
            losses.advise_on_arguments(error, (), {})
            error.add_note(
                "pureaccum: raised by the loss of one sample, without its batch dimension; if it "
                "expects a batch, pass keep_batch_dim=True. A BatchNorm in training mode has no "
                "gradient of one sample: use net.eval()."
            )
            raise

    return args[at[0]] if alone else tuple(args[i] for i in at), call


def sampled(
    func: Callable[..., Any],
    params: trees.Tree,
    args: tuple[Any, ...],
    at: tuple[int, ...],
    cut: tuple[int, ...],
    how: Sampling,
    known: writes.Known,
) -> tuple[Iterator[Chunk], list[trees.Tree]]:
    """The chunks of a call, and a list that gets the aux and metrics of each as it comes.

    What is ``known`` is of the user's function: ``func`` is another one at each call.
    """
    leaves, spec = checks.read_params(params)
    dtensors.refuse_sharded(
        leaves, "params", "Use per_sample_grad with reduce=..., which takes them."
    )
    parts = scaling.parts_of(how.transform, params)
    cut_at = checks.positions(cut, len(args), "batch_argnums")
    checks.check_disjoint(at, cut_at)
    batch = batches.read_batch({i: args[i] for i in cut_at}, "args")
    if batches.rows_to_cut(batch, "args", one_by_one=True) == 0 and (
        how.has_aux or callable(how.metrics)
    ):
        raise ValueError(
            "the batch has no samples, so the loss is never called and there are no aux or "
            "metrics; expected at least one sample."
        )
    if how.chunk_size is not None:
        checks.refuse_autocast_cache(leaves)
    beside: list[trees.Tree] = []
    if batch.rows == 0 and how.metrics == "norm":
        none = trees.global_norm(leaves).new_zeros(0)
        beside.append(((), scaling.norms_as_tree(how.transform, [none] * len(parts))))

    def call(leaves: Sequence[Tensor], sample: trees.Tree) -> Any:
        return func(trees.unflatten(spec, leaves), *(sample.get(i, x) for i, x in enumerate(args)))

    def noted(call: SampleLoss) -> Iterator[Chunk]:
        task = Task(call=call, leaves=leaves, spec=spec, parts=parts, how=how)
        for chunk in _chunks(task, batch, known):
            beside.append((chunk.aux, chunk.metrics))
            yield chunk

    def watched() -> Iterator[Chunk]:
        given = writes.Given("params", leaves, spec), writes.Given("args", batch.leaves, batch.spec)
        with writes.guarding(known, *given) as guarded:
            yield from noted(guarded(call))

    return noted(call) if torch.compiler.is_dynamo_compiling() else watched(), beside


def with_beside(result: Any, beside: list[trees.Tree], how: Sampling) -> Any:
    """A result, and aux and metrics if there are any."""
    if not how.has_aux and how.metrics is None:
        return result
    aux, metrics = trees.tree_map(lambda *parts: torch.cat(parts), *beside)
    return result, aux if how.metrics is None else (aux, metrics) if how.has_aux else metrics


def _chunks(task: Task, batch: batches.Batch, known: writes.Known) -> Iterator[Chunk]:
    """The samples of a batch, a chunk at a time."""
    shortcut, run = _shortcut(task), _runner(task, known)
    for part in batches.cut_batch(batch, task.how.chunk_size or max(batch.rows or 0, 1)):
        chunk = None
        if shortcut is not None and not known.unseen:
            chunk = shortcut(task, part)
        if chunk is None:
            chunk = run(partial(_chunk, task, part))
            known.unseen |= shortcut is not None  # and so it is not tried in vain again
        yield chunk


def _shortcut(task: Task) -> "Callable[[Task, trees.Tree], Chunk | None] | None":
    """The shortcut, if this call may take it."""
    recorded = carries_graph(task.how) and any(x.requires_grad for x in task.leaves)
    # Where others look at operations, layers would not be seen, or what a mode makes of them.
    alone = modes.at_top_level() and modes.may_write() and not watch.captures_are_sought()
    return task.how.shortcut if task.how.engine == "vmap" and alone and not recorded else None


def carries_graph(how: Sampling) -> bool:
    """Whether autograd records what is done with results."""
    return how.carries_graph and torch.is_grad_enabled()


def _runner(task: Task, known: writes.Known) -> Callable[[Callable[[engines.Way], Chunk]], Chunk]:
    """What runs a function of a way; nothing is detached where results carry an outer graph."""
    how, leaves = task.how, task.leaves
    if how.engine == "autograd":
        return partial(windows.run_window, leaves=leaves, engine="autograd", known=known)
    if how.carries_graph or modes.transform_active() or functorch.forward_ad_active():
        return lambda of_way: of_way(windows.as_they_are(leaves))
    return partial(windows.run_window, leaves=leaves, engine="func", known=known)


def _chunk(task: Task, part: trees.Tree, way: engines.Way) -> Chunk:
    call, spec, parts, how = task.call, task.spec, task.parts, task.how
    tensors, sample_of = samples_of(part, how)
    specs: dict[str, optree.PyTreeSpec] = {}
    reading = partial(losses.read, has_aux=how.has_aux, several=how.several)
    seams = Seams(loss=lambda leaves, sample, *_: call(leaves, sample), read=reading, term=_no_term)

    def one(*tensors: Tensor) -> Any:
        own, around = engines.remembering_modules(seams, way) if way.remembers else (seams, way)
        recorded = way.forward(
            own, Portion(tree=sample_of(tensors), rows=1, carried=(), counts=None), around
        )
        seen, shape = recorded.seen, recorded.shape
        each = _pulled(recorded, around, how)
        grads = trees.unflatten(spec, each)
        norms = (
            [trees.global_norm([each[i] for i in its]) for its in parts] if needs_norms(how) else []
        )
        norm = scaling.norms_as_tree(how.transform, norms) if norms else None
        metrics = how.metrics(grads, seen.total) if callable(how.metrics) else norm
        noted, specs["metrics"] = checks.read_tensors(metrics, "metrics", OF_EACH)
        if callable(how.transform):
            grads = how.transform(grads)
        elif how.transform == "sign":
            grads = trees.tree_map(torch.sgn, grads)
        kept, specs["grads"] = checks.read_tensors(grads, TRANSFORMED, OF_EACH)
        aux, specs["aux"] = checks.read_tensors(losses.join_aux(seen.aux, shape), "aux", OF_EACH)
        return kept, norms, seen.total, seen.weight, aux, noted

    with batches.cutting(checks.LARGEST_INT):  # a sample is no batch
        kept, norms, value, weight, aux, metrics = _over_samples(one, tensors, how)
    factor, keep = scaling.scaled_and_kept(norms, value, weight, how.transform, parts)
    return Chunk(
        grads=kept,
        factor=factor,
        keep=keep,
        spec=specs["grads"],
        value=value,
        weight=weight,
        aux=trees.unflatten(specs["aux"], aux),
        metrics=trees.unflatten(specs["metrics"], metrics),
    )


def _no_term(*_: Any) -> Any:
    raise AssertionError  # samples enter no sums


def _over_samples(one: Callable[..., Any], tensors: list[Tensor], how: Sampling) -> Any:
    if how.engine == "autograd":
        outs = [one(*row) for row in zip(*tensors, strict=True)]
        return trees.tree_map(lambda *xs: torch.stack(xs), *outs)
    try:
        return torch.func.vmap(one, randomness=how.mapped.randomness)(*tensors)
    except (RuntimeError, ValueError) as error:
        if (why := refusals.vmap_refusal(error)) is None:
            raise
        raise RuntimeError(why) from error


def _pulled(recorded: Recorded, way: engines.Way, how: Sampling) -> list[Tensor]:
    """The gradient of a loss; of several numbers their gradients, in one vmapped backward pass."""
    total = recorded.seen.total

    def of(cotangent: Tensor) -> list[Tensor]:
        grads = engines.pulled(recorded, cotangent, way)
        return [_gradient_of(x, g) for x, g in zip(way.leaves, grads, strict=True)]

    if total.dim() == 0:
        return of(torch.ones_like(total))
    shape, many = total.shape, total.numel()
    basis = torch.eye(many, dtype=total.dtype, device=total.device).view(many, *shape)
    if how.engine == "vmap":
        rows = torch.func.vmap(of, randomness="same")(basis)  # what is run again draws the same
    elif many:
        rows = [torch.stack(xs) for xs in zip(*map(of, basis), strict=True)]
    else:
        rows = [x.new_zeros(0, *x.shape) for x in way.leaves]
    return [x.view(*shape, *x.shape[1:]) for x in rows]


def _gradient_of(leaf: Tensor, grad: Tensor | None) -> Tensor:
    if grad is None:
        return torch.zeros_like(leaf)
    return grad.to_dense() if grad.is_sparse else grad


TRANSFORMED, OF_EACH = "the result of transform", "Return one tensor for each sample."


def like_transformed(transform: scaling.Transform | scaling.Clip, params: trees.Tree) -> trees.Tree:
    """A tree like what a transform makes of one gradient."""
    if not callable(transform):
        return params
    like = transform(trees.tree_map(torch.zeros_like, params))
    need_leaves(checks.read_tensors(like, TRANSFORMED, OF_EACH)[0])
    return like


def need_leaves(transformed: list[Any]) -> list[Any]:
    """The leaves of what a transform returned, or an error that says that there are none."""
    if not transformed:
        raise ValueError(f"{TRANSFORMED} has no leaves, so there is nothing to reduce.")
    return transformed


def samples_of(part: trees.Tree, how: Sampling) -> tuple[list[Tensor], Callable[..., trees.Tree]]:
    """The tensors of a chunk, and a function from one row of each to a sample."""
    given, spec = trees.flatten(part)

    def sample_of(tensors: Sequence[Tensor]) -> trees.Tree:
        rows = iter([x.unsqueeze(0) for x in tensors] if how.mapped.keep_batch_dim else tensors)
        return trees.unflatten(spec, [next(rows) if isinstance(x, Tensor) else x for x in given])

    return [x for x in given if isinstance(x, Tensor)], sample_of


def needs_norms(how: Sampling) -> bool:
    """Whether the norms of gradients are asked for."""
    return how.metrics == "norm" or bool(scaling.scalings_of(how.transform))
