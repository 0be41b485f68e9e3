"""Whatever a loss draws, its samples are told apart from its mask: draws excuse nothing."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Beta, Categorical, Dirichlet, Gamma

import pureaccum as pa
from pureaccum import CoupledLossError
from tests.problems import forget_losses


pytestmark = [pytest.mark.laws, pytest.mark.promise("refused")]
ROWS, SIZE = 12, 4
OWN = torch.Generator().manual_seed(0)
NUMPY = np.random.default_rng(0)
LSTM = nn.LSTM(3, 3, 2, batch_first=True, dropout=0.5)


def images(n):
    return torch.ones(n, 2, 5, 5)


Draw = Callable[[int], Tensor]  # numbers for so many samples
OF_TORCH = {
    "rand": lambda n: torch.rand(n),
    "randn": lambda n: torch.randn(n, 2),
    "randn_like": lambda n: torch.randn_like(torch.ones(n)),
    "randint": lambda n: torch.randint(5, (n,)),
    "randint_like": lambda n: torch.randint_like(torch.ones(n), 2, 5),
    "randperm": lambda n: torch.rand(n, 4)[:, torch.randperm(4)],
    "normal": lambda n: torch.normal(torch.zeros(n), torch.ones(n)),
    "normal of a mean": lambda n: torch.normal(torch.zeros(n), 1.0),
    "normal of a size": lambda n: torch.normal(0.0, 1.0, (n,)),
    "normal_": lambda n: torch.empty(n).normal_(1.0, 2.0),
    "uniform_": lambda n: torch.empty(n).uniform_(1.0, 3.0),
    "exponential_": lambda n: torch.empty(n).exponential_(),
    "cauchy_": lambda n: torch.empty(n).cauchy_(),
    "log_normal_": lambda n: torch.empty(n).log_normal_(),
    "geometric_": lambda n: torch.empty(n).geometric_(0.5),
    "random_": lambda n: torch.empty(n).random_(1, 5),
    "bernoulli": lambda n: torch.bernoulli(torch.full((n,), 0.3)),
    "bernoulli_": lambda n: torch.empty(n).bernoulli_(torch.full((n,), 0.3)),
    "multinomial": lambda n: torch.multinomial(torch.rand(n, 4).add(1), 2),
    "poisson": lambda n: torch.poisson(torch.ones(n)),
    "binomial": lambda n: torch.binomial(torch.full((n,), 3.0), torch.full((n,), 0.5)),
    "Gamma": lambda n: Gamma(torch.ones(n), 1.0).sample(),
    "Beta": lambda n: Beta(torch.ones(n), torch.ones(n)).sample(),
    "Dirichlet": lambda n: Dirichlet(torch.ones(n, 3)).sample(),
    "Categorical": lambda n: Categorical(torch.ones(n, 3)).sample(),
    "dropout": lambda n: F.dropout(torch.ones(n)),
    "dropout of channels": lambda n: F.dropout2d(images(n)),
    "alpha dropout": lambda n: F.alpha_dropout(torch.ones(n), training=True),
    "rrelu": lambda n: F.rrelu(-torch.ones(n), training=True),
    "gumbel": lambda n: F.gumbel_softmax(torch.ones(n, 3)),
    "hard gumbel": lambda n: F.gumbel_softmax(torch.ones(n, 3), hard=True),
    "attention": lambda n: F.scaled_dot_product_attention(*[images(n)] * 3, dropout_p=0.5),
    "LSTM": lambda n: LSTM(torch.ones(n, 2, 3))[0].detach(),
    "fractional pooling": lambda n: F.fractional_max_pool2d(images(n), 2, output_size=2),
    "truncated normal": lambda n: nn.init.trunc_normal_(torch.empty(n)),
}
OF_ITS_OWN = {
    "normal_": lambda n: torch.empty(n).normal_(generator=OWN),
    "bernoulli": lambda n: torch.bernoulli(torch.full((n,), 0.3), generator=OWN),
    "normal": lambda n: torch.normal(torch.zeros(n), 1.0, generator=OWN),
    "multinomial": lambda n: torch.multinomial(torch.ones(n, 3), 1, generator=OWN),
    "rand": lambda n: torch.rand(n, generator=OWN),
    "randn": lambda n: torch.randn(n, generator=OWN),
    "randint": lambda n: torch.randint(0, 5, (n,), generator=OWN),
    "randperm": lambda n: torch.rand(n, 4)[:, torch.randperm(4, generator=OWN)],
}
NOT_OF_TORCH = {
    "numpy": lambda n: torch.from_numpy(np.random.randn(n)).float(),
    "Python, for each row": lambda n: torch.tensor([random.random() for _ in range(n)]),
    "Python, at each call": lambda n: torch.full((n,), random.random()),
    "a numpy generator": lambda n: torch.from_numpy(NUMPY.normal(size=n)),
}


def ask(draw, masked, calls=8):
    forget_losses()  # these are one loss
    params = {"w": torch.tensor([0.5, -1.0, 0.25])}
    mask = torch.tensor([1.0, 2.0, 4.0]).repeat(ROWS // 3)
    batch = {"x": torch.randn(ROWS, 3), "mask": mask}

    def loss(params, batch):
        x, weight = batch["x"], batch["mask"]
        each = (x @ params["w"] + draw(len(x)).float().reshape(len(x), -1).sum(1)) ** 2
        return (each * weight).sum() / weight.sum() if masked else each.mean()

    grad = pa.grad(loss, microbatch_size=SIZE, engine="auto")
    for _ in range(calls):
        grad(params, batch)


TABLES = {"torch": OF_TORCH, "its own": OF_ITS_OWN, "others": NOT_OF_TORCH}
ALL = {f"{name}, {of}": draw for of, table in TABLES.items() for name, draw in table.items()}


@pytest.mark.parametrize("name", ALL)
def test_a_loss_that_draws_for_each_row_is_not_refused(name):
    ask(ALL[name], masked=False)


@pytest.mark.parametrize("name", [name for name in ALL if not name.endswith("others")])
def test_what_is_drawn_of_a_generator_of_torch_s_excuses_nothing(name):
    with pytest.raises(CoupledLossError):
        ask(ALL[name], masked=True, calls=1)


def test_a_layer_that_is_dropped_now_and_then_is_not_refused():
    """By Python's generator: what is drawn once a call is the same for the whole and its parts."""
    w, x = torch.randn(3, 2), torch.randn(8, 3)
    for seed in range(60):
        random.seed(seed)

        def loss(w, x):
            out = x @ w
            return (out if random.random() < 0.3 else out.tanh()).square().mean()

        forget_losses()  # each is a first call
        pa.grad(loss, microbatch_size=4)(w, x)


def test_a_chaotic_loss_is_not_refused():
    """Its parts are computed by other kernels, whose last bits grow until nothing else is left."""

    def loss(w, x):
        out = x.sin().square() @ w.softmax(1).T
        for _ in range(60):
            out = 3.99 * out * (1 - out)
        return out.mean()

    for seed in range(20):
        torch.manual_seed(seed)
        w, x = torch.randn(4, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)
        forget_losses()  # each is a first call
        pa.grad(loss, microbatch_size=4)(w, x)
