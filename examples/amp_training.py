"""Train in fp16 with a loss scale, over windows of microbatches of which the last one is short.

Eleven microbatches in windows of four leave a window of three. The usual loop divides every loss
by four all the same, and so the last update of every epoch is three quarters of what it should be.
Sums that are divided once, by the number of samples, are right in a short window too. An overflow
makes the scale back off; you choose whether it costs the window or only its microbatch.

    python examples/amp_training.py
"""

import optree
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import pureaccum as pa


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LR, K = 0.5, 4
Params = dict[str, Tensor]


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5)).to(DEVICE)


def usual_loop(
    loader: DataLoader, k: int, epochs: int, dtype: torch.dtype = torch.float16
) -> list[Params]:
    """The parameters after every step, by GradScaler and autocast as they are mostly used."""
    net, history = make_net(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    scaler = torch.amp.GradScaler(DEVICE, enabled=dtype == torch.float16)
    for _ in range(epochs):
        for i, (x, y) in enumerate(loader):
            with torch.autocast(DEVICE, dtype, enabled=dtype == torch.float16):
                loss = cross_entropy(net(x.to(DEVICE)), y.to(DEVICE))
            scaler.scale(loss / k).backward()
            if (i + 1) % k == 0 or i + 1 == len(loader):
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                history.append({name: p.detach().clone() for name, p in net.named_parameters()})
    return history


def ours(
    loader: DataLoader, k: int, epochs: int, nonfinite: str = "propagate"
) -> tuple[list[Params], list[pa.StepInfo]]:
    """The parameters and the info after every step, by a pure step."""
    fn = pa.functional(make_net())

    def loss(params: Params, batch: list[Tensor]) -> Tensor:
        x, y = batch
        return cross_entropy(fn.apply(params, (), x)[0], y)

    step = pa.make_step(
        loss,
        pa.sgd(LR),
        policy=pa.Policy(autocast=torch.float16),  # float32 masters; opened in each microbatch
        loss_scale=pa.dynamic_loss_scale(),  # begins and moves as GradScaler does
        nonfinite=nonfinite,
    )
    state = step.init(fn.params)
    history, infos = [], []
    for _ in range(epochs):
        for window in pa.windows(loader, k):
            acc = step.begin(state)
            for x, y in window:
                acc = step.update(state, acc, [x.to(DEVICE), y.to(DEVICE)])
            state, info = step.apply(state, acc)
            history.append(state.params)
            infos.append(info)
    return history, infos


def apart(a: Params, b: Params) -> Tensor:
    return pa.global_norm(optree.tree_map(torch.sub, a, b))


def main(rows: int = 16, epochs: int = 5) -> dict[str, list[float]]:
    torch.manual_seed(1)
    x = torch.randn(11 * rows, 20)
    data = TensorDataset(x, (x @ torch.randn(20, 5)).argmax(1))
    whole, cut = DataLoader(data, batch_size=K * rows), DataLoader(data, batch_size=rows)
    start = pa.functional(make_net()).params
    exact = usual_loop(whole, 1, epochs, torch.float32)
    runs = {
        "GradScaler, whole batches": usual_loop(whole, 1, epochs),
        "GradScaler, loss / 4": usual_loop(cut, K, epochs),
        "pureaccum, whole batches": ours(whole, 1, epochs)[0],
        "pureaccum, windows of 4": ours(cut, K, epochs)[0],
    }
    said = {}
    columns = "update of short window", f"off after {3 * epochs} steps"
    print(f"{'beside float32, whole batches':30}{columns[0]:>24}{columns[1]:>20}")
    for name, history in runs.items():
        # in the first epoch, all ways reach the short window with the same parameters
        size = apart(history[2], history[1]) / apart(exact[2], exact[1])
        off = apart(history[-1], exact[-1]) / apart(exact[-1], start)
        said[name] = [float(size), float(off)]
        print(f"{name:30}{f'{size:.3f} of its size':>24}{f'{100 * off:.2f} % of the way':>20}")

    x[5 * rows] = 3e4  # finite in fp16, but the gradients that it gives are not
    for nonfinite in ("propagate", "skip"):
        print(f"a sample of 3e4 in the second window, nonfinite={nonfinite!r}:")
        _, infos = ours(cut, K, 1, nonfinite)
        for i, info in enumerate(infos, 1):
            print(
                f"  window {i}: {info.skipped} of {info.microbatches} microbatches skipped, "
                f"{int(info.weight)} samples, {'applied' if info.applied else 'not applied'}, "
                f"scale {int(info.scale)}, loss {info.loss:.2f}"
            )
        said[nonfinite] = [float(x) for i in infos for x in (i.weight, i.applied, i.scale)]
    return said


if __name__ == "__main__":
    main()
