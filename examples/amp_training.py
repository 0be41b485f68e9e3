"""Train in fp16 with a loss scale, where the last window of microbatches in an epoch is short.

Eleven microbatches in windows of four leave a window of three. The usual loop still divides every
loss by four, so the last update of each epoch has three quarters of its size. pureaccum divides the
sum once, by the number of samples, so a short window is right too. An overflow makes the loss scale
back off. You choose whether it costs the whole window or only its microbatch.

    Run:   python examples/amp_training.py
    Needs: no extra
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
    """The parameters after every step, with GradScaler and autocast as most people use them."""
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
    """The parameters and the info after every step, with a pure step."""
    fn = pa.functional(make_net())

    def loss(params: Params, batch: list[Tensor]) -> Tensor:
        x, y = batch
        return cross_entropy(fn.apply(params, (), x)[0], y)

    step = pa.make_step(
        loss,
        pa.sgd(LR),
        policy=pa.Policy(autocast=torch.float16),  # parameters stay float32
        loss_scale=pa.dynamic_loss_scale(),  # starts and moves like GradScaler
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
    columns = "update of short window", f"error after {3 * epochs} steps"
    print(f"{'compared with float32':30}{columns[0]:>24}{columns[1]:>24}")
    for name, history in runs.items():
        # in the first epoch, all ways reach the short window with the same parameters;
        # the error is relative to the distance that the parameters have moved
        size = apart(history[2], history[1]) / apart(exact[2], exact[1])
        off = apart(history[-1], exact[-1]) / apart(exact[-1], start)
        said[name] = [float(size), float(off)]
        print(f"{name:30}{f'{size:.3f} of its size':>24}{f'{100 * off:.2f} %':>24}")

    x[5 * rows] = 3e4  # finite in fp16, but its gradients are not
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
