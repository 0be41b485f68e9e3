"""What torch's compiler, vmap, vjp and allocators refuse, said of the user's code, and the way out.

A table for each has words of torch and what they mean. torch's own message always follows, for
anyone who knows it.
"""

import inspect
import linecache
import os
import re
from collections.abc import Callable
from pathlib import Path
from traceback import walk_stack, walk_tb
from typing import Any

import optree
import torch
from torch import nn

from . import random_state, states, trees
from .torch_internals import compiler, modes


# The compiler --------------------------------------------------------------------------------


NUMBER = "a number that is known only when the step runs"
NOTHING_ELSE = "a graph only computes on tensors"
MEANINGS = {  # words of the compiler about a line, and what they mean for it: the first that fits
    "branching": f"it branches on {NUMBER}. Use torch.where, which computes both sides",
    "assertion": f"it branches on {NUMBER}. Check the result of the step instead",
    "logging.logger": f"{NOTHING_ELSE}. Return values to log as aux (has_aux=True)",
    "operator `print`": f"{NOTHING_ELSE}. Return values to print as aux (has_aux=True)",
    "item()": f"it reads {NUMBER} from a tensor. Keep the value a tensor",
    "tolist": f"it reads {NUMBER} from a tensor. Keep the value a tensor",
    "on data-dependent": f"it needs {NUMBER}. Keep the value a tensor",
    "dynamic shape operator": f"the size of its result is {NUMBER}. Use a mask, which keeps "
    "the size (torch.where, or Weighted)",
    "higher order operator": "it changes an object outside the graph of the loop, such as a "
    "list. Return the value as aux (has_aux=True)",
    "builtin operator": NOTHING_ELSE,
}
RAISED = re.compile(r"""raised exception \w+\((["'])(.*?)\1\)""")
OURS = Path(__file__).parents[1]
STANDARD = os.path.dirname(os.__file__)
LIBRARIES = (
    *(str(Path(library.__file__ or "").parent) for library in (torch, optree)),
    str(OURS),
)


class CompileError(RuntimeError):
    """The error of a step that runs, and does not compile."""


def attempt(
    program: Callable[..., Any],
    args: tuple[Any, ...],
    eagerly: Callable[[], object],
    spoils: bool = False,
) -> Any:
    """Call a graph; an error that has nothing to do with the compiler is raised as it is.

    Args:
        program: The graph, which the first call makes.
        args: Its arguments, of which it writes to the first if it ``spoils`` that.
        eagerly: Does the same without the compiler.
        spoils: Whether the first argument is of no more use if the graph fails while it runs.
    """
    try:
        with torch.no_grad():
            return program(*args)
    except BaseException as error:
        sentence = compiler_refusal(error)
        if sentence is None:
            if spoils:
                states.mark(trees.tree_leaves(args[0]), states.Spoiled)
            raise
        device = trees.tree_leaves(args[0])[0].device
        with random_state.put_back(device):
            eagerly()
        raise CompileError(sentence) from error


def compiler_refusal(error: BaseException) -> str | None:
    """A message for an error of the compiler, or None for any other error."""
    if not compiler.is_compiler_error(error):
        return None
    text = str(error)
    if is_limit(error):
        return (
            "the compiler stopped because this step was recompiled too often. Besides the number "
            "of samples, something changes from call to call, and torch's warning names it. A "
            "number that the loss reads from outside is a constant of a graph. Make it a tensor: "
            "torch.tensor(t, dtype=torch.float64), or torch.int64 for an int. Pad inputs of many "
            f"lengths. Keep the order of a dict's keys. The compiler says:\n\n{text}"
        )
    stack = compiler.compiler_stack(error)
    ours = stack and OURS in Path(stack[-1].filename).parents and RAISED.search(text)
    if ours:
        return f"{ours[2]} The compiler says:\n\n{text}"
    theirs = [frame for frame in stack if not _of_a_library(frame.filename)]
    if not theirs:
        return (
            "torch's compiler failed on this step, which runs without compile=True. The compiler "
            f"says:\n\n{text}"
        )
    at, head = theirs[-1], text[:600].lower()
    found = (why for word, why in MEANINGS.items() if word in head)
    why = next(found, text.strip().splitlines()[0].rstrip("."))
    return (
        f'cannot compile `{at.line}` (File "{at.filename}", line {at.lineno}, in {at.name}): '
        f"{why}. Without compile=True, the step runs unchanged. The compiler says:\n\n{text}"
    )


def is_limit(error: BaseException | None) -> bool:
    """Whether the compiler has refused to make one more graph of the same code."""
    return compiler.is_compiler_error(error) and "recompile" in type(error).__name__.lower()


def _of_a_library(file: str) -> bool:
    standard = file.startswith(STANDARD) and "site-packages" not in file
    return standard or file.startswith(LIBRARIES)


# Memory --------------------------------------------------------------------------------------

# Texts of RuntimeErrors that are no torch.OutOfMemoryError. CUDNN_STATUS_NOT_SUPPORTED is not here:
# cuDNN says it of sizes that it does not take, too.
NO_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",  # on Windows
    "CUDA error: out of memory",  # outside torch's allocator
    "HIP error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUSPARSE_STATUS_ALLOC_FAILED",
    "CUFFT_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",  # cuDNN 8; the next two are cuDNN 9
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there was not enough memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in NO_MEMORY)


# vmap, and torch.func's vjp ------------------------------------------------------------------


ONE_BY_ONE = "use engine='autograd', which takes samples one at a time"
STATISTICS = "Batch norm got a batched tensor", "more than 1 value per channel when training"
RULES = (  # words of torch about vmap, and what they mean: the first that fits
    (
        "randomness error mode",
        "draws random numbers, and vmap has to know whether samples share them. Pass "
        "randomness='different' or 'same'. Or use a key for each sample of the batch "
        "(pa.dropout), so that the numbers do not depend on the chunks either.",
    ),
    (
        ".item()",
        "reads a number from a tensor, of which vmap has one per sample. Keep the value a tensor, "
        f"or {ONE_BY_ONE}.",
    ),
    (
        "data-dependent control flow",
        "branches on a number, which differs between samples. Use torch.where, which computes "
        f"both sides, or {ONE_BY_ONE}.",
    ),
    (
        "doesn't have storage",
        "reads numbers from a tensor, of which vmap has one per sample. Keep the value a tensor, "
        f"or {ONE_BY_ONE}.",
    ),
    (
        "dynamic shape",
        "makes a tensor whose size depends on its numbers. Use a mask, which keeps the size "
        f"(torch.where, or Weighted), or {ONE_BY_ONE}.",
    ),
    (
        "mutate a captured tensor",
        "writes to a tensor that is not an argument of the loss, such as a running statistic or a "
        "cache. Pass it as an argument (pureaccum.functional), or leave it unchanged: net.eval().",
    ),
    ("batching rule", f"calls an operation without a rule for vmap. Instead, {ONE_BY_ONE}."),
    ("vmap support", f"calls an operation without a rule for vmap. Instead, {ONE_BY_ONE}."),
    ("setup_context", f"has a custom Function or a checkpoint. Instead of vmap, {ONE_BY_ONE}."),
    (
        "saved tensor hooks",
        f"has a custom Function or a checkpoint. Instead of vmap, {ONE_BY_ONE}.",
    ),
)

BY_AUTOGRAD = "Use engine='autograd', outside of any transform"
ADVICE = (  # words of torch about vjp, what they mean, and the way out
    (
        "saved tensor hooks",
        "has a checkpoint, or moves tensors that it saves for its backward pass (save_on_cpu)",
        f"{BY_AUTOGRAD}. A checkpoint also needs use_reentrant=False. Or use pa.remat, which runs "
        "in both engines.",
    ),
    (
        "setup_context",
        "has a custom Function without setup_context (a reentrant checkpoint, a module's backward "
        "hook), or redistributes DTensors (from_local, to_local, the hooks of parallelize_module)",
        f"{BY_AUTOGRAD}. A checkpoint also needs use_reentrant=False.",
    ),
    (
        "Tensor.requires_grad_()",
        "makes a tensor require grad (a gradient penalty, torch.autograd.functional, "
        "transformers' gradient_checkpointing_enable)",
        f"{BY_AUTOGRAD}. A checkpoint also needs {{'use_reentrant': False}}. For derivatives "
        "inside the loss, torch.func.grad, jvp and others run in both engines.",
    ),
    (
        "Tensor.retain_grad()",
        "keeps the gradient of a tensor of its own (retain_grad)",
        f"{BY_AUTOGRAD}.",
    ),
    (
        "backward() called",
        "calls .backward()",
        "Remove .backward(): pureaccum differentiates the value that the loss returns. Train "
        "another network with its own step.",
    ),
    (
        "doesn't have storage",
        "needs the memory of a tensor: packed sequences in a recurrent network, .numpy(), "
        "data_ptr(), torch.jit.trace",
        f"{BY_AUTOGRAD}. .item() and .tolist() run in both engines.",
    ),
    (
        "Cannot access storage",
        "needs the memory of a tensor: deepcopy, pickle, nested tensors",
        f"{BY_AUTOGRAD}.",
    ),
    ("`.data`", "assigns to the .data of a tensor", f"{BY_AUTOGRAD}."),
    (
        "NestedTensorImpl",
        "computes with nested tensors",
        f"{BY_AUTOGRAD}. Padding runs in both engines.",
    ),
    ("do not have strides", "computes with compressed sparse tensors", f"{BY_AUTOGRAD}."),
    (
        "values backward",
        "computes with nested tensors",
        f"{BY_AUTOGRAD}. Padding runs in both engines.",
    ),
    (
        "mutate a captured Tensor",
        "writes to a tensor that it got as an argument or captures",
        "Write to a copy (x = x.clone()), and return values to keep as aux. Pass the buffers of a "
        "module through functional(module).apply, or call net.eval(), which leaves them unchanged.",
    ),
)


def refuse_pre_dispatch() -> None:
    """Raise where torch would take gradients for constants."""
    if modes.pre_dispatching():
        raise RuntimeError(
            "make_fx(pre_dispatch=True) and torch.export record above autograd, where gradients "
            "of torch.func become constants. Use make_fx without pre_dispatch, which records all "
            "of them."
        )


def advise_on_vjp(error: RuntimeError) -> None:
    """Add to an error of torch.func's vjp what to do with a loss that it refuses."""
    if error.__cause__ is not None:  # somebody has put it into words
        return
    for words, why, way_out in ADVICE:
        if words in str(error):
            add_once(error, f"torch.func cannot differentiate this loss, which {why}. {way_out}")
            return


def advise_on_curvature(error: RuntimeError) -> None:
    """Add to an error of torch what to do where it has no second derivative."""
    if "derivative" in str(error) and "not implemented" in str(error):
        add_once(
            error,
            "torch has no second derivative of this operation, and curvature needs one. For "
            "scaled_dot_product_attention, enter torch.nn.attention.sdpa_kernel(SDPBackend.MATH) "
            "in the loss or around the call. Replace an EmbeddingBag by an Embedding and a sum.",
        )


def add_once(error: Exception, advice: str) -> None:
    """Add advice to an error that may come through here more than once."""
    note = f"pureaccum: {advice}"
    if note not in getattr(error, "__notes__", ()):  # from a transform inside another one
        error.add_note(note)


def vmap_refusal(error: Exception) -> str | None:
    """A message for what vmap refused, or None where the error is the loss's own."""
    text = str(error)
    where, module = _module_of(error)
    said = f"\n\ntorch says: {text}"
    if isinstance(module, nn.RNNBase) and "broadcast shape" in text:
        return (
            f"{where} cannot run under vmap, because torch has no rule for it. Instead, "
            f"{ONE_BY_ONE}. Or use a loop over cells (GRUCell, RNNCell), which runs under "
            f"vmap.{said}"
        )
    of_a_batch = "BatchNorm" in type(module).__name__ and "mutate a captured" in text
    if of_a_batch or any(words in text for words in STATISTICS):
        return (
            f"{where} normalises with the statistics of the whole batch, so no sample has a "
            "gradient of its own. Call net.eval(), which makes it a function of one sample, or "
            f"use GroupNorm or LayerNorm.{said}"
        )
    for words, meaning in RULES:
        if words in text.lower():
            return f"{where} {meaning}{said}"
    return None


def _module_of(error: Exception) -> tuple[str, nn.Module | None]:
    """The innermost module that was being called, and its name in the outermost one."""
    called = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
    modules = [x for x in called if isinstance(x, nn.Module)]
    if not modules:
        return "the loss", None
    root, at = modules[0], modules[-1]
    name = next((name for name, module in root.named_modules() if module is at), "")
    return f"{type(at).__name__} {name!r}" if name else type(at).__name__, at


def users_line() -> str:
    """The innermost line that is neither torch's nor ours."""
    for frame, line in walk_stack(inspect.currentframe()):  # of None it skips some frames
        file = Path(frame.f_code.co_filename)
        if not str(file).startswith(LIBRARIES):
            text = linecache.getline(str(file), line).strip()
            text = text if len(text) <= 60 else f"{text[:59]}…"
            return f"{file.name}:{line}" + (f" ({text})" if text else "")
    return "an unknown line"
