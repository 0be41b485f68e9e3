"""``pytest --moved SEED``: as on another processor, whose kernels round otherwise.

Each number that a test draws is moved to one of its two neighbours in floating point. Which one
depends on the number and on the seed alone, so a microbatch that runs again draws the same ones.
Integers stay. A test that fails then compares rounding: show ``...`` for a printed figure, use data
whose sums are exact for bits, and elsewhere a bound against the sizes that were added.
"""

import torch


DRAWS = ("rand", "randn", "normal", "rand_like", "randn_like")
IN_PLACE = ("uniform_", "normal_", "exponential_", "log_normal_", "cauchy_")
INTEGERS = {torch.float64: torch.int64, torch.float32: torch.int32}


def move_draws(seed):
    """Replace torch's draws by ones that are moved, in this process and for good."""
    for name in DRAWS:
        setattr(torch, name, _moving(getattr(torch, name), seed))
    for name in IN_PLACE:
        setattr(torch.Tensor, name, _moving_in_place(getattr(torch.Tensor, name), seed))


def _moving(draw, seed):
    def drawn(*args, **kwargs):
        numbers = draw(*args, **kwargs)
        return neighbours(numbers, seed) if _may_move(numbers) else numbers

    return drawn


def _moving_in_place(draw, seed):
    def drawn(self, *args, **kwargs):
        draw(self, *args, **kwargs)
        if _may_move(self):
            with torch.no_grad():
                self.copy_(neighbours(self.detach(), seed))
        return self

    return drawn


def _may_move(x):
    plain = type(x) in (torch.Tensor, torch.nn.Parameter) and x.device.type == "cpu"
    mapped = torch._C._functorch.maybe_current_level() is not None
    return plain and x.dtype in INTEGERS and not mapped and not torch.compiler.is_dynamo_compiling()


def neighbours(x, seed):
    """Each number's next one, up or down as a hash of its bits and of the seed says."""
    followed, x = x.requires_grad, x.detach()
    bits = x.contiguous().view(INTEGERS[x.dtype]).to(torch.int64)
    mixed = bits * 0x2545F4914F6CDD1D + seed * 0x1B873593  # as hashes do
    mixed = (mixed ^ (mixed >> 29)) * 0x2545F4914F6CDD1D
    up = ((mixed >> 40) & 1).bool()
    moved = torch.nextafter(x, torch.where(up, torch.inf, -torch.inf).to(x.dtype))
    return torch.where((x == 0) | (moved == 1), x, moved).requires_grad_(followed)
