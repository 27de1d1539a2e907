"""Common part of the tests that walk over calls with odd tensors.

That is views of every kind, tensors that no call can take, and calls that are wrong on one rank alone. A call
with a view of `VIEWS` is to give what it gives with the plain tensor. A call with something of `WRONG` on one
rank is to raise a typed error on every rank at once, and the next call is to be right: `wrong_on_one_rank`
makes both and returns what was not so.
"""

import time

import torch

import symmpool

#: Seconds within which a refusal reaches every rank: far less than any timeout of the tests.
AT_ONCE = 8.0


def strided(x):
    """Returns the same values in every second place of a larger memory."""
    twice = x.new_zeros((*x.shape, 2))
    view = twice[..., 0]
    view.copy_(x)
    return view


def transposed(x):
    """Returns the same values with the dimensions in the opposite order in memory."""
    turned = tuple(reversed(range(x.dim())))
    return x.permute(turned).contiguous().permute(turned)


def shifted(x):
    """Returns the same values in the middle of a larger memory: contiguous, and not where the storage
    begins."""
    larger = x.new_zeros(x.numel() + 3)
    view = larger[3:].view(x.shape)
    view.copy_(x)
    return view


def negative(x):
    """Returns the same values in memory of the other sign, with torch's negative bit."""
    return (
        torch._neg_view(-x) if x.dtype.is_complex or x.dtype.is_floating_point else torch._neg_view(x.neg())
    )


def conjugated(x):
    """Returns the same values in memory of the conjugate, with torch's conjugate bit. For complex tensors
    alone."""
    return x.conj().resolve_conj().conj()


def imaginary(x):
    """Returns the same values as the imaginary part of a conjugated tensor: strided, with the negative
    bit."""
    return torch.complex(x.new_zeros(x.shape), -x).conj().imag


def with_gradient(x):
    """Returns the same values in a leaf that requires a gradient."""
    return x.clone().requires_grad_()


def inferred(x):
    """Returns the same values in a tensor of inference mode."""
    with torch.inference_mode():
        return x.clone()


#: What makes a tensor show the same values in another way, by name.
VIEWS = {
    "strided": strided,
    "transposed": transposed,
    "shifted": shifted,
    "negative": negative,
    "conjugated": conjugated,
    "imaginary": imaginary,
    "requires grad": with_gradient,
    "inference": inferred,
}


def views_of(x):
    """The views that there are of a tensor's values, by name."""
    real = x.dtype in (torch.float32, torch.float64)
    signed = x.dtype.is_floating_point or x.dtype.is_complex or x.dtype.is_signed
    fits = {
        "negative": signed and x.dtype != torch.bool,
        "conjugated": x.dtype.is_complex,
        "imaginary": real,
        "requires grad": x.dtype.is_floating_point or x.dtype.is_complex,
    }
    return {name: make(x) for name, make in VIEWS.items() if fits.get(name, True)}


def expanded(x):
    """A tensor of this shape whose elements all share one place. It can be read, and not be written."""
    return x.new_ones(()).expand(x.shape)


def overlapping(x):
    """A tensor of one dimension or more whose neighbours share memory without a stride of 0."""
    return x.new_ones(x.numel() + 1).as_strided(x.shape, [1] * x.dim())


def freed(x):
    """A tensor whose storage has given up its memory, as FSDP's parameters do."""
    found = x.clone()
    found.untyped_storage().resize_(0)
    return found


def fake(x):
    """A tensor of torch's fake mode, outside of that mode."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        return mode.from_tensor(x)


def of_another_type(x):
    """A tensor of the same shape and of another type, which has elements of the same size."""
    same_size = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    other = same_size[x.dtype.itemsize]
    return torch.zeros(x.shape, dtype=other if x.dtype != other else torch.float32, device=x.device)


#: What no call takes in a tensor's place, by name.
WRONG = {
    "freed": freed,
    "fake": fake,
    "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "a number": lambda x: 5,
    "None": lambda x: None,
    "a list": lambda x: [1],
    "text": lambda x: "tensor",
}


def observed(call):
    """Returns the error of a call, or None, and how many seconds it takes."""
    begun = time.monotonic()
    try:
        call()
    except Exception as error:
        return error, time.monotonic() - begun
    return None, time.monotonic() - begun


def wrong_on_one_rank(me, culprit, right, wrong, following):
    """Makes a call that is `wrong` on one rank and `right` on the others, then one that is right on all:
    `following` makes that and returns whether its result is right. Returns what is not as it should be, or
    None.

    The culprit is to raise an error of the package or a TypeError, the others a DivergedError."""
    raised, seconds = observed(wrong if me == culprit else right)
    failures = []
    if raised is None:
        failures.append("was accepted")
    elif me == culprit:
        if not isinstance(raised, (symmpool.Error, TypeError)):
            failures.append(f"raised {type(raised).__name__}: {raised}")
    elif not isinstance(raised, symmpool.DivergedError):
        failures.append(f"got {type(raised).__name__}: {raised}")
    if seconds > AT_ONCE:
        failures.append(f"took {seconds:.1f} s")
    try:
        if not following():
            failures.append("the next call is wrong")
    except Exception as error:
        failures.append(f"the next call raised {type(error).__name__}: {error}")
    return "; ".join(failures) or None
