"""A causal language model whose labels are masked unevenly: the mean over tokens, exactly.

The model comes from a configuration and has random weights; nothing is downloaded.
"""

import os

import pytest
import torch
import torch.nn.functional as F

import pureaccum as pa


os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="needs transformers")
pytestmark = [pytest.mark.parity, pytest.mark.hf]
KEPT = (12, 1, 7, 0, 0, 3, 12)  # tokens that count in each row: rows 3 and 4 are all masked
SIZES = (1, 2, 3, 7)


@pytest.fixture(scope="module", params=["eager", "sdpa"])
def model(request):
    """GPT-2, which is float64 throughout; Llama's norms cast to float32."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=31,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        attn_implementation=request.param,
    )
    return transformers.GPT2LMHeadModel(config).double().train()


@pytest.fixture(scope="module")
def batch():
    tokens = torch.randint(0, 31, (len(KEPT), 13), generator=torch.Generator().manual_seed(0))
    masked = torch.arange(13) > torch.tensor(KEPT)[:, None]
    return {"input_ids": tokens, "labels": tokens.masked_fill(masked, -100)}


def total(model, params, batch):
    """The summed loss of the next tokens."""
    out = torch.func.functional_call(model, params, kwargs={"input_ids": batch["input_ids"]})
    logits, labels = out.logits[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="sum", ignore_index=-100)


def count(batch):
    return (batch["labels"][:, 1:] != -100).sum()


def parameters(model):
    return {name: p.detach() for name, p in model.named_parameters()}  # tied ones once


def full_batch(model, batch):
    """The mean over all tokens that count, by ``.backward()``.

    Not ``model(**batch).loss``, which casts to float32; that is the same mean, to half its digits.
    """
    model.zero_grad()
    out = model(**batch)
    logits, labels = out.logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:]
    loss = F.cross_entropy(logits, labels)  # its ignore_index is -100
    assert abs(loss - out.loss) <= 2**-12 * loss
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("engine", ["func", "autograd"])
@pytest.mark.parametrize("size", SIZES)
def test_weighted_by_tokens_is_the_full_batch(model, batch, size, engine):
    """To sqrt(u) of the sum of the norms of the microbatches' shares, leaf by leaf."""
    loss = lambda params, part: pa.Weighted(total(model, params, part), count(part))  # noqa: E731
    params = parameters(model)
    grads = pa.grad(loss, microbatch_size=size, engine=engine)(params, batch)
    expected = full_batch(model, batch)
    shares = [
        torch.func.grad(lambda p, part=part: total(model, p, part) / sum(KEPT))(params)
        for part in pa.microbatches(batch, size)
    ]
    for name, want in expected.items():
        scale = sum(share[name].norm() for share in shares)
        assert (grads[name] - want).norm() <= 2**-26.5 * scale


def test_a_mean_of_means_is_far_off(model, batch):
    """The control: rows of different lengths averaged alike are far off, without any NaN."""
    rows = [i for i, kept in enumerate(KEPT) if kept]  # an all-masked mean is NaN
    some = {key: column[rows] for key, column in batch.items()}
    mean = lambda params, part: total(model, params, part) / count(part)  # noqa: E731
    with pytest.raises(pa.CoupledLossError):
        pa.grad(mean, microbatch_size=1)(parameters(model), some)
    means = pa.grad(mean, microbatch_size=1, check=False)(parameters(model), some)
    expected = full_batch(model, batch)
    error = pa.global_norm({name: means[name] - want for name, want in expected.items()})
    assert error > 0.1 * pa.global_norm(expected)
