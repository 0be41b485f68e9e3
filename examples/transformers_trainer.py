"""Use the Trainer of transformers with the whole batch's gradient, computed in microbatches.

Its own accumulation is right where a model divides its loss by `num_items_in_batch`, as decoders
do. Elsewhere it is silently wrong: it adds up the losses of a head that classifies, weighs means of
your own `compute_loss` equally for any number of words, and adds up a router's balance loss. Here a
batch is a step, split as memory demands. The Trainer divides what `compute_loss` returns, so the
class overrides `training_step`. Clipping, optimizer, schedule and logs use the `p.grad` it sets.

    Run:   python examples/transformers_trainer.py
    Needs: pip install transformers accelerate
"""

import tempfile
from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import pureaccum as pa


SIZE, K = 4, 8  # samples per microbatch, microbatches per step
Tensors = dict[str, Tensor]


class MicrobatchTrainer(hf.Trainer):
    """Makes one step per batch, on the gradient of the pure loss that ``loss_of(fn)`` returns."""

    def __init__(self, *args: Any, loss_of: Any, microbatch_size: int | None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.loss_of, self.size, self.fn = loss_of, microbatch_size, None
        if self.args.gradient_accumulation_steps > 1 or self.args.fp16:
            raise ValueError("a batch is a step: expected gradient_accumulation_steps=1; no fp16")

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        if self.fn is None:  # now it is on its device; DDP and FSDP raise
            self.fn = pa.functional(model)
            loss = self.loss_of(self.fn)
            self.gradient = pa.grad_and_value(loss, microbatch_size=self.size, engine="auto")
        grads, value = self.gradient(self.fn.params, self._prepare_inputs(inputs))
        for name, p in model.named_parameters():
            p.grad = grads.get(name)
        return value


def of_words(fn: Any) -> Any:
    def loss(params: Tensors, batch: Tensors) -> pa.Weighted:
        out, _ = fn.apply(params, fn.buffers, **batch, num_items_in_batch=1)  # a sum
        return pa.Weighted(out.loss, (batch["labels"][:, 1:] != -100).sum())

    return loss


def of_samples(fn: Any) -> Any:
    return lambda params, batch: fn.apply(params, fn.buffers, **batch)[0].loss


def of_router(fn: Any) -> Any:
    def parts(params: Tensors, batch: Tensors) -> list[Any]:
        out, _ = fn.apply(params, fn.buffers, batch["input_ids"], batch["attention_mask"])
        logits, labels = out.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
        gates = [x.unflatten(0, (len(batch["labels"]), -1)) for x in out.router_logits]
        return [cross_entropy(logits, labels, reduction="sum"), (labels != -100).sum(), gates]

    cut = pa.microbatch(parts, microbatch_size=SIZE, reduce=["sum", "sum", "concat"])

    def loss(params: Tensors, batch: Tensors) -> Tensor:
        nll, words, gates = cut(params, batch)
        gates = tuple(x.flatten(0, 1) for x in gates)  # over all words: it multiplies means
        balance = load_balancing_loss_func(gates, 8, 2, batch["attention_mask"])
        return nll / words + 0.01 * balance

    return loss


class MeanOfWords(hf.Trainer):
    loss_is_scaled_for_ga = False  # the Trainer wants this for a mean

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).loss


CASES = {  # the model, its usual Trainer, our loss, and the size, or None if the loss splits
    "a decoder": (hf.LlamaForCausalLM, hf.Trainer, of_words, SIZE),
    "a head that classifies": (hf.LlamaForSequenceClassification, hf.Trainer, of_samples, SIZE),
    "a mean in compute_loss": (hf.LlamaForCausalLM, MeanOfWords, of_words, SIZE),
    "a router": (hf.MixtralForCausalLM, hf.Trainer, of_router, None),
}
MODEL = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
MODEL |= {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0}
MODEL |= {"output_router_logits": True, "router_aux_loss_coef": 0.01, "num_labels": 3}
ARGS = {"logging_steps": 1, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
ARGS |= {"use_cpu": True, "dataloader_pin_memory": False}
GRADIENT = {"max_steps": 1, "optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0}
STEPS = {"max_steps": 10, "learning_rate": 1e-2, "lr_scheduler_type": "cosine"}  # AdamW, clipped


def samples(classify: bool) -> list[Tensors]:
    """58 texts of 4 to 16 words that end in an answer: one word, some or all of them."""
    ids, at, ends = torch.randint(1, 64, (58, 16)), torch.arange(16), torch.randint(4, 17, (58, 1))
    mask, answer = at < ends, (at < ends) & (at >= ends * torch.rand(58, 1) - 1)
    labels = ids[:, 0] % 3 if classify else ids.masked_fill(~answer, -100)
    columns = {"input_ids": ids * mask, "attention_mask": mask.long(), "labels": labels}
    return [{name: x[i] for name, x in columns.items()} for i in range(58)]


def train(model: Any, settings: Any, trainer: Any, rows: int, k: int = 1) -> tuple[Tensors, Any]:
    """How far each parameter moves, and what the Trainer logs."""
    torch.manual_seed(0)
    net = model(model.config_class(**MODEL, experts_implementation="eager")).double()
    data = samples(model is hf.LlamaForSequenceClassification)
    start = {name: p.detach().clone() for name, p in net.named_parameters()}
    sizes = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": k}
    with tempfile.TemporaryDirectory() as folder:
        args = hf.TrainingArguments(folder, **ARGS, **sizes, **settings)
        it = trainer(model=net, args=args, train_dataset=data)
        it.remove_callback(hf.PrinterCallback)
        it.train()
    return {n: p.detach() - start[n] for n, p in net.named_parameters()}, it.state.log_history


def off(moved: Tensors, exact: Tensors) -> list[float]:
    apart = {name: moved[name] - x for name, x in exact.items()}
    each = [float(apart[name].norm() / x.norm()) for name, x in exact.items()]
    return [float(pa.global_norm(apart) / pa.global_norm(exact)), max(each)]


def main() -> dict[tuple[str, str], list[float]]:
    found = {}
    print(f"{'error':36}{'gradient':>12}{'worst leaf':>12}{'ten steps':>12}")
    for name, (model, usual, loss_of, size) in CASES.items():
        ours = partial(MicrobatchTrainer, loss_of=loss_of, microbatch_size=size)
        whole = [train(model, settings, usual, SIZE * K)[0] for settings in (GRADIENT, STEPS)]
        for way, how in {"the Trainer": (usual, SIZE, K), "pureaccum": (ours, SIZE * K)}.items():
            grads, moved = (train(model, settings, *how)[0] for settings in (GRADIENT, STEPS))
            found[name, way] = [*off(grads, whole[0]), off(moved, whole[1])[0]]
            numbers = (f"{x:.1%}" if x > 2**-12 else f"{x:.0e}" for x in found[name, way])
            print(f"{f'{name}, {way}':36}" + "".join(f"{x:>12}" for x in numbers))
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)  # the tensors are small
    main()
