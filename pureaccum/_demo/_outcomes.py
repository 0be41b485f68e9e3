"""How the runs ended, and how far each is from the full batch."""

from typing import NamedTuple

import pureaccum as pa

from ._distances import Distance, worst
from ._race import Progress, Tensors, loss_of, network, ragged


class Outcome(NamedTuple):
    """Of one run.

    Args:
        name: What it was.
        half: Whether it computed in float16.
        at_last: Where it ended.
        accuracy: On the rows that it never saw.
        distance: Of its gradient from the full batch's, on the same parameters; of the full batch
            none.
        apart: Of its last parameters from those of the full batch in the same dtype, relative to
            them.
    """

    name: str
    half: bool
    at_last: Progress
    accuracy: float
    distance: Distance | None
    apart: float


def outcomes(at_last: dict[str, Progress], batch: Tensors, test: Tensors) -> list[Outcome]:
    """Of all runs.

    Args:
        at_last: Where each stopped, by name.
        batch: What they trained on.
        test: What they did not.
    """
    net = network()
    fn, loss = pa.functional(net), loss_of(net)
    found: list[Outcome] = []
    for name, progress in at_last.items():
        half = name.endswith("fp16")
        full = at_last["full batch, fp16" if half else "full batch"]
        right = fn.apply(progress.params, (), test["x"])[0].argmax(1) == test["y"]
        difference = {key: x - full.params[key] for key, x in progress.params.items()}
        found.append(
            Outcome(
                name,
                half,
                progress,
                float(right.float().mean()),
                None
                if name.startswith("full")
                else worst(
                    loss,
                    [fn.params, full.params],
                    batch,
                    ragged(batch)(0),
                    half=half,
                    usual=name == "usual loop",
                ),
                float(pa.global_norm(difference) / pa.global_norm(full.params)),
            )
        )
    return found
