"""Fit y = 2x with one step of SGD, with and without accumulation, and get the same weight.

Hugging Face Accelerate shows its accumulation with this example: eight samples, four microbatches
of two, a weight that starts at 0, and 2.04000 both ways. Dividing each loss by the number of
microbatches gives that too, as long as all microbatches have the same size. With microbatches of 3,
3 and 2 it does not, since each sample of the last one counts for more.

    Run:   python examples/accelerate_toy.py
    Needs: no extra
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
    """The weight after one step over everything that the loader yields."""
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
    """The weight after one step over the whole batch, with torch alone."""
    weight = WEIGHT.clone().requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=LR)
    loss(weight, [X, Y]).backward()
    optimizer.step()
    return weight.detach()


def usual_loop(rows: int) -> Tensor:
    """The weight after one step of the accumulation loop that most people write."""
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
        print(f"microbatches of {cut} samples:")
        print(f"  loss / k, the final model weight is {weights[f'usual, by {rows}'].item():.5f}")
        print(f"  pureaccum, the final model weight is {weights[f'by {rows}'].item():.5f}")
    print(f"w/ accumulation, the final model weight is {weights['by 2'].item():.5f}")
    print(f"w/o accumulation, the final model weight is {weights['without'].item():.5f}")
    return weights


if __name__ == "__main__":
    main()
