"""Fit y = 2 x with one step of SGD, with and without accumulation, and end at the same weight.

This is the example with which Hugging Face Accelerate shows its accumulation: eight samples, four
microbatches of two, a weight that begins at 0, and 2.04000 both ways. Dividing each loss by the
number of microbatches gives that as well, as long as all have the same number of samples; cut into
3, 3 and 2 it does not, since a sample of the last one then counts for more than any other.

    python examples/accelerate_toy.py
"""

import torch
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import pureaccum as pa


X = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
Y = 2 * X
WEIGHT = torch.zeros(1, 1)
LR = 0.02


def loss(weight: Tensor, batch: list[Tensor]) -> Tensor:
    inputs, labels = batch
    return mse_loss(inputs.view(-1, 1) @ weight, labels.view(-1, 1))


def accumulated(rows: int) -> Tensor:
    """The weight after one step over all that the loader yields."""
    loader = DataLoader(TensorDataset(X, Y), batch_size=rows)
    step = pa.make_step(loss, pa.sgd(LR))
    state = step.init(WEIGHT)
    for window in pa.windows(loader, len(loader)):
        acc = step.begin(state)
        for microbatch in window:
            acc = step.update(state, acc, microbatch)
        state, _ = step.apply(state, acc)
    return state.params


def at_once() -> Tensor:
    """The weight after one step over the whole batch, by torch alone."""
    weight = WEIGHT.clone().requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=LR)
    loss(weight, [X, Y]).backward()
    optimizer.step()
    return weight.detach()


def usual_loop(rows: int) -> Tensor:
    """The weight after one step of accumulation as it is mostly written."""
    loader = DataLoader(TensorDataset(X, Y), batch_size=rows)
    weight = WEIGHT.clone().requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=LR)
    for microbatch in loader:
        (loss(weight, microbatch) / len(loader)).backward()
    optimizer.step()
    return weight.detach()


def main() -> dict[str, Tensor]:
    weights = {"without": at_once()}
    for rows in (3, 2):
        weights |= {f"usual, by {rows}": usual_loop(rows), f"by {rows}": accumulated(rows)}
        cut = ", ".join(str(len(part)) for part in X.split(rows))
        print(f"samples cut {cut}:")
        print(f"  loss / k, the final model weight is {weights[f'usual, by {rows}'].item():.5f}")
        print(f"  pureaccum, the final model weight is {weights[f'by {rows}'].item():.5f}")
    print(f"w/ accumulation, the final model weight is {weights['by 2'].item():.5f}")
    print(f"w/o accumulation, the final model weight is {weights['without'].item():.5f}")
    return weights


if __name__ == "__main__":
    main()
