"""What vmap and torch.func's vjp refuse in a loss: why, and the way out."""

from traceback import walk_tb

from torch import nn


ONE_BY_ONE = "engine='autograd' takes the samples one by one"
STATISTICS = "Batch norm got a batched tensor", "more than 1 value per channel when training"
RULES = (  # words of torch about vmap, and what they mean
    (
        "randomness error mode",
        "draws random numbers, and vmap has to be told whether samples share them: "
        "randomness='different' or 'same'. With a key for each row of the batch (pa.dropout) they "
        "do not depend on the chunks either.",
    ),
    (
        ".item()",
        f"takes a number out of a tensor, of which vmap has many: keep it a tensor; {ONE_BY_ONE}.",
    ),
    (
        "data-dependent control flow",
        "decides by a number, which differs from sample to sample: torch.where takes both sides; "
        f"{ONE_BY_ONE}.",
    ),
    (
        "doesn't have storage",
        f"takes numbers out of a tensor, of which vmap has many: keep it a tensor; {ONE_BY_ONE}.",
    ),
    (
        "dynamic shape",
        "makes a tensor whose size depends on its numbers: a mask keeps the size (torch.where, or "
        f"Weighted); {ONE_BY_ONE}.",
    ),
    (
        "mutate a captured tensor",
        "writes to a tensor that is no argument of the loss: a running statistic, a cache. Pass it "
        "as an argument (pureaccum.functional), or have it stay as it is: net.eval().",
    ),
    ("batching rule", f"calls what torch has no rule for under vmap: {ONE_BY_ONE}."),
    ("vmap support", f"calls what torch has no rule for under vmap: {ONE_BY_ONE}."),
    ("setup_context", f"has a custom Function or a checkpoint: {ONE_BY_ONE}."),
    ("saved tensor hooks", f"has a custom Function or a checkpoint: {ONE_BY_ONE}."),
)

BY_AUTOGRAD = "engine='autograd' can (outside of any transform)"
ADVICE = (  # words of torch about vjp, what they mean, and the way out
    (
        "saved tensor hooks",
        "has a checkpoint, or keeps elsewhere what is saved for its backward pass (save_on_cpu)",
        f"{BY_AUTOGRAD}; a checkpoint takes use_reentrant=False, or is a pa.remat, which runs in "
        "both engines.",
    ),
    (
        "setup_context",
        "has a custom Function without setup_context (a reentrant checkpoint, a module's backward "
        "hook), or redistributes DTensors (from_local, to_local, the hooks of parallelize_module)",
        f"{BY_AUTOGRAD}; a checkpoint takes use_reentrant=False.",
    ),
    (
        "Tensor.requires_grad_()",
        "has a tensor require grad (a gradient penalty, torch.autograd.functional, transformers' "
        "gradient_checkpointing_enable)",
        f"{BY_AUTOGRAD}, and a checkpoint takes {{'use_reentrant': False}}; torch.func.grad, jvp "
        "and the like inside of the loss run in both engines.",
    ),
    ("Tensor.retain_grad()", "keeps the gradient of a tensor of its own", f"{BY_AUTOGRAD}."),
    (
        "backward() called",
        "calls .backward()",
        "What it returns is differentiated here: leave .backward() out. Another network beside "
        "params is trained by a step of its own.",
    ),
    (
        "doesn't have storage",
        "asks where a tensor's numbers lie: packed sequences in a recurrent network, .numpy(), "
        "data_ptr(), torch.jit.trace",
        f"{BY_AUTOGRAD}; .item() and .tolist() run in both engines.",
    ),
    (
        "Cannot access storage",
        "asks where a tensor's numbers lie: deepcopy, pickle, nested tensors",
        f"{BY_AUTOGRAD}.",
    ),
    ("`.data`", "assigns to the .data of a tensor", f"{BY_AUTOGRAD}."),
    (
        "NestedTensorImpl",
        "computes with nested tensors",
        f"{BY_AUTOGRAD}; padding runs in both.",
    ),
    ("do not have strides", "computes with compressed sparse tensors", f"{BY_AUTOGRAD}."),
    ("values backward", "computes with nested tensors", f"{BY_AUTOGRAD}; padding runs in both."),
    (
        "mutate a captured Tensor",
        "writes to a tensor that it was given or holds",
        "Write to a copy (x = x.clone()), and return as aux what is to be kept. A module's buffers "
        "go in and out by functional(module).apply, and net.eval() leaves them alone.",
    ),
)


def advise(error: RuntimeError) -> None:
    """Say what to do where torch.func's vjp refuses a loss."""
    for words, why, way_out in ADVICE:
        if words in str(error):
            note = f"pureaccum: torch.func cannot differentiate this loss, which {why}. {way_out}"
            if note not in getattr(error, "__notes__", ()):  # of a transform inside of another
                error.add_note(note)
            return


def explained(error: Exception) -> str | None:
    """A message for what vmap refused; None where the error is the loss's own."""
    text = str(error)
    where, module = _module_of(error)
    said = f"\n\ntorch said: {text}"
    if isinstance(module, nn.RNNBase) and "broadcast shape" in text:
        return (
            f"{where} cannot go through vmap, for which torch has no rule; {ONE_BY_ONE}, and a "
            f"loop over cells (GRUCell, RNNCell) goes through vmap.{said}"
        )
    of_a_batch = "BatchNorm" in type(module).__name__ and "mutate a captured" in text
    if of_a_batch or any(words in text for words in STATISTICS):
        return (
            f"{where} normalises with the statistics of a whole batch, so that no sample has a "
            "gradient of its own. In eval mode (net.eval()) it is a function of one sample; "
            f"GroupNorm and LayerNorm always are.{said}"
        )
    for words, meaning in RULES:
        if words in text.lower():
            return f"{where} {meaning}{said}"
    return None


def _module_of(error: Exception) -> tuple[str, nn.Module | None]:
    """The innermost module that was being called, by its name in the outermost."""
    called = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
    modules = [x for x in called if isinstance(x, nn.Module)]
    if not modules:
        return "the loss", None
    root, at = modules[0], modules[-1]
    name = next((name for name, module in root.named_modules() if module is at), "")
    return f"{type(at).__name__} {name!r}" if name else type(at).__name__, at
