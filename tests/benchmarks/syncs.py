"""Whether a step waits for the device.

Rule: torch itself says so. After a warm-up, one step runs where every call that waits is an error.
"""

import torch

from .apart import why
from .contenders import CONTENDERS
from .models import Model, build


def syncs(model: Model, name: str, device: str) -> dict:
    """``{"syncs": 0}``, or ``{"failure": why}``."""
    try:
        problem = build(model, device)
        training = CONTENDERS[name](problem)
        for _ in range(3):
            training(problem.batch)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            training(problem.batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    except Exception as error:
        return {"failure": why(error)}
    return {"syncs": 0}
