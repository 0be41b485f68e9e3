"""Fifteen models of transformers, padded or not: ``.loss`` is refused where tokens are ignored.

They come from configurations and have random weights; nothing is downloaded.
"""

import os
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

import pureaccum as pa
from pureaccum import CoupledLossError
from tests.problems import nobody_was_asked, once


os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="needs transformers")
pytestmark = [
    pytest.mark.parity,
    pytest.mark.hf,
    pytest.mark.promise("refused"),
    pytest.mark.promise("programs"),
    pytest.mark.usefixtures(nobody_was_asked.__name__),
]
ROWS, LENGTH, SIZE, WORDS = 8, 10, 4, 31
LENGTHS = torch.tensor([10, 3, 7, 2, 5, 9, 4, 6])
BOUND = 2.0**-12  # the root of float32's unit


class Model(NamedTuple):
    """A model, and of which kind its batch is."""

    name: str  # of its configuration and its class, with a head
    head: str
    config: dict[str, Any]
    kind: str


def sizes(*names, **others):
    """Those of a small model: its width, layers and heads, as its configuration calls them."""
    return dict(zip(names, (16, 2, 2), strict=True)) | {"vocab_size": WORDS} | others


WIDE = sizes("hidden_size", "num_hidden_layers", "num_attention_heads", intermediate_size=24)
LLAMA = WIDE | {"num_key_value_heads": 1, "attention_dropout": 0.1}
BERT = WIDE | {"max_position_embeddings": 20}
OPT = BERT | {"ffn_dim": 24, "word_embed_proj_dim": 16}
DISTIL = sizes("dim", "n_layers", "n_heads", hidden_dim=24)
T5 = sizes("d_model", "num_layers", "num_heads", d_kv=8, d_ff=24)
BART = sizes("d_model", "encoder_layers", "encoder_attention_heads", encoder_ffn_dim=24)
DECODER = {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 24}
IMAGES = {"image_size": 8, "patch_size": 4, "num_channels": 2, "num_labels": 3}
MODELS = [
    Model("GPT2", "LMHeadModel", sizes("n_embd", "n_layer", "n_head"), "next"),
    Model("Llama", "ForCausalLM", LLAMA, "next"),
    Model("Mistral", "ForCausalLM", LLAMA, "next"),
    Model("Qwen2", "ForCausalLM", LLAMA, "next"),
    Model("Gemma", "ForCausalLM", LLAMA | {"head_dim": 8}, "next"),
    Model("Mixtral", "ForCausalLM", LLAMA | {"num_local_experts": 4}, "next"),
    Model("GPTNeoX", "ForCausalLM", BERT | {"hidden_dropout": 0.1}, "next"),
    Model("OPT", "ForCausalLM", OPT, "next"),
    Model("Bloom", "ForCausalLM", sizes("hidden_size", "n_layer", "n_head"), "next"),
    Model("Bert", "ForMaskedLM", BERT, "masked"),
    Model("Roberta", "ForMaskedLM", BERT, "masked"),
    Model("DistilBert", "ForMaskedLM", DISTIL, "masked"),
    Model("T5", "ForConditionalGeneration", T5, "to another"),
    Model("Bart", "ForConditionalGeneration", BART | DECODER, "to another"),
    Model("ViT", "ForImageClassification", BERT | IMAGES, "image"),
]
QUICK = ("GPT2", "Bert", "ViT")


def model_of(it, dtype, dropout):
    torch.manual_seed(0)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
    special |= {"decoder_start_token_id": 1} if it.kind == "to another" else {}
    config = getattr(transformers, f"{it.name}Config")(**it.config, **special)
    config.attn_implementation = "sdpa"
    model = getattr(transformers, f"{it.name}{it.head}")(config)
    return model.to(dtype).train(dropout)


def batch_of(it, dtype, padded):
    random = torch.Generator().manual_seed(0)
    if it.kind == "image":
        images = torch.randn(ROWS, 2, 8, 8, generator=random).to(dtype)
        return {"pixel_values": images, "labels": torch.arange(ROWS) % 3}
    ids = torch.randint(3, WORDS, (ROWS, LENGTH), generator=random)
    if not padded:
        return {"input_ids": ids, "labels": ids.clone()}
    own = torch.arange(LENGTH) < LENGTHS[:, None]
    ids, labels = ids.where(own, 0), ids.where(own, -100)
    return {"input_ids": ids, "attention_mask": own.long(), "labels": labels}


def parameters(model):
    return {name: p.detach() for name, p in model.named_parameters()}  # tied ones once


def called(model, params, batch):
    return torch.func.functional_call(model, params, kwargs=dict(batch))


def loss_of(model):
    return lambda params, batch: called(model, params, batch).loss


def weighted(it, model):
    def loss(params, batch):
        logits, labels = called(model, params, batch).logits.float(), batch["labels"]
        if it.kind == "next":
            logits, labels = logits[:, :-1], labels[:, 1:]
        total = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")
        return pa.Weighted(total, (labels != -100).sum())

    return loss


# Each model in both dtypes, with dropout in one of them: those that are like each other differ in
# which, so both dtypes come with dropout and without for decoders, for encoders and for both.
DROPS = (*QUICK, "Llama", "Qwen2", "Mixtral", "OPT", "DistilBert", "Bart")  # in float32
settings = [
    pytest.param(
        it,
        dtype,
        dropout,
        id=f"{it.name}-{str(dtype)[6:]}{'-dropout' * dropout}",
        marks=() if it.name in QUICK else pytest.mark.slow,
    )
    for it in MODELS
    for dtype in (torch.float32, torch.bfloat16)
    for dropout in [(dtype == torch.float32) == (it.name in DROPS)]
]
every = pytest.mark.parametrize(("it", "dtype", "dropout"), settings)


def calls(loss, params, batch):
    grad = pa.grad(loss, microbatch_size=SIZE, engine="auto")
    for _ in range(8):
        grad(params, batch)
    pa.value(loss, microbatch_size=SIZE)(params, batch)
    once(pa.make_step(loss, pa.sgd(0.0), microbatch_size=SIZE), params, batch)


@pytest.mark.slow
@every
def test_rows_without_padding_are_never_refused(it, dtype, dropout):
    model = model_of(it, dtype, dropout)
    calls(loss_of(model), parameters(model), batch_of(it, dtype, padded=False))


@pytest.mark.slow
@every
def test_padded_rows_are_not_refused_as_weighted_totals(it, dtype, dropout):
    model = model_of(it, dtype, dropout)
    loss, params, batch = weighted(it, model), parameters(model), batch_of(it, dtype, padded=True)
    calls(loss, params, batch)


@pytest.mark.slow
@pytest.mark.parametrize("it", MODELS, ids=lambda it: it.name)
def test_weighted_totals_of_padded_rows_have_the_gradient_of_the_model(it):
    model = model_of(it, torch.float32, dropout=False)
    loss, params = weighted(it, model), parameters(model)
    batch = batch_of(it, torch.float32, padded=True)
    got = pa.grad(loss, microbatch_size=SIZE, engine="auto")(params, batch)
    model.zero_grad()
    model(**batch).loss.backward()
    count = int(loss(params, batch).weight)
    norms = 0.0
    for part in pa.microbatches(batch, SIZE):
        share = pa.grad(lambda p, part: loss(p, part).total / count, engine="auto")(params, part)
        norms += float(pa.global_norm(share))
    own = {
        k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in model.named_parameters()
    }
    assert pa.global_norm({name: got[name] - own[name] for name in own}) <= BOUND * norms


@pytest.mark.slow
@every
def test_a_mean_over_padded_rows_is_refused_at_once(it, dtype, dropout):
    if it.kind == "image":
        return
    if (it.name, dtype) == ("Mixtral", torch.bfloat16):
        pytest.skip("torch's grouped products have no kernel in float64, and bfloat16 cannot tell")
    model = model_of(it, dtype, dropout)
    loss, params, batch = loss_of(model), parameters(model), batch_of(it, dtype, padded=True)
    with pytest.raises(CoupledLossError) as caught:
        pa.grad(loss, microbatch_size=SIZE, engine="auto")(params, batch)
    assert caught.value.kind == "mean of means"
    assert "pa.Weighted(F.cross_entropy(out, y, reduction='sum'), (y != -100).sum())" in (
        caught.value.way
    )
    for again in (pa.value, partial(pa.grad, engine="auto")):
        with pytest.raises(CoupledLossError):
            again(loss, microbatch_size=SIZE)(params, batch)


# A language model whose labels are masked unevenly: the mean over tokens, exactly --------------


KEPT = (12, 1, 7, 0, 0, 3, 12)  # tokens that count in each row: samples 3 and 4 are all masked
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_mean_of_means_is_far_off(model, batch):
    """The control: samples of different lengths averaged alike are far off, without any NaN."""
    rows = [i for i, kept in enumerate(KEPT) if kept]  # an all-masked mean is NaN
    some = {key: column[rows] for key, column in batch.items()}
    mean = lambda params, part: total(model, params, part) / count(part)  # noqa: E731
    with pytest.raises(pa.CoupledLossError):
        pa.grad(mean, microbatch_size=1)(parameters(model), some)
    means = pa.grad(mean, microbatch_size=1, check=False)(parameters(model), some)
    expected = full_batch(model, batch)
    error = pa.global_norm({name: means[name] - want for name, want in expected.items()})
    assert error > 0.1 * pa.global_norm(expected)
