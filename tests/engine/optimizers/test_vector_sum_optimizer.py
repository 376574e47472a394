"""The optimizer that sums by a shuffle protocol: the distribution of its gradient, and batches in pieces."""

from __future__ import annotations

import math

import pytest
import torch
from opacus.optimizers import DPOptimizer
from torch import nn

from opacus_shuffle.engine.private_optimizer import PrivateOptimizer
from opacus_shuffle.engine.shuffled_sum import ShuffledSum
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum


def protocol_for(records, dimension):
    return ShuffleVectorSum(records, dimension, 1.0, epsilon=1.0, delta=1e-5)


def optimizer_for(parameters, protocol, *, seed=0, reduction="sum", everyone_reports=False):
    sigma = protocol.noise_multiplier
    sums = ShuffledSum(protocol, noise_multiplier=sigma, everyone_reports=everyone_reports)
    return PrivateOptimizer(
        torch.optim.SGD(parameters, lr=1.0),
        clipping=sums,
        noise=sums,
        noise_multiplier=sigma,
        max_grad_norm=protocol.max_norm,
        expected_batch_size=protocol.num_users,
        loss_reduction=reduction,
        generator=torch.Generator().manual_seed(seed),
    )


def give(parameters, samples):
    """Per-record gradients as a backward pass leaves them."""
    for parameter, sample in zip(parameters, samples, strict=True):
        parameter.grad_sample = sample.clone()


class Noiseless(ShuffleVectorSum):
    """Neither noise nor rounding to speak of: a grid of 2^40 steps, and the noise's mean in place of the noise."""

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self.granularity = 2**40

    def draw_noise(self, num_reports, generator=None):
        return torch.full(
            (self.dimension,),
            round(num_reports * self.noise_bits * self.bit_probability),
            dtype=torch.int64,
        )


# --- the distribution of the gradient
# ----------------------------------------------------------------------------------------


def test_the_gradient_is_unbiased_and_has_the_protocol_s_variance():
    """3000 coordinates with equal gradients are 3000 draws."""
    records, dimension = 8, 3000
    protocol = protocol_for(records, dimension)
    shapes = [(40, 50), (1000,)]
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    value = 0.7 / math.sqrt(dimension)  # within the norm: nothing is clipped
    give(parameters, [torch.full((records, *shape), value) for shape in shapes])
    optimizer = optimizer_for(parameters, protocol)
    assert optimizer.pre_step()
    assert [parameter.grad.shape for parameter in parameters] == [
        torch.Size(shape) for shape in shapes
    ]
    errors = (
        torch.cat([parameter.grad.reshape(-1).double() for parameter in parameters])
        - records * value
    )
    # Rounding has variance frac·(1 − frac) of a grid step squared, not the worst 1/4.
    step = 2 / protocol.granularity
    place = (value + 1) / step
    rounding = records * (place - math.floor(place)) * (1 - place + math.floor(place))
    variance = step**2 * (records * protocol.noise_bits * protocol.bit_probability**2 + rounding)
    assert variance <= protocol.variance
    five = 5 / math.sqrt(
        dimension
    )  # standard deviations of a mean; of a variance it is √2 times that, relatively
    assert abs(errors.mean()) < five * math.sqrt(variance)
    assert errors.var() == pytest.approx(variance, rel=five * math.sqrt(2))


def test_without_noise_it_is_opacus_s_clipped_gradient():
    torch.manual_seed(0)
    shapes = [(7, 3), (5,), (2, 2, 2)]
    samples = [
        torch.randn(6, *shape) * scale
        for shape, scale in zip(shapes, (0.01, 1.0, 0.2), strict=True)
    ]
    dimension = sum(math.prod(shape) for shape in shapes)
    ours, stock = ([nn.Parameter(torch.zeros(shape)) for shape in shapes] for _ in range(2))
    optimizer = optimizer_for(
        ours, Noiseless(6, dimension, 1.0, 1.0, 1e-5, "tight"), reduction="mean"
    )
    plain = DPOptimizer(
        torch.optim.SGD(stock, lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        expected_batch_size=6,
    )
    for parameters, each in ((ours, optimizer), (stock, plain)):
        give(parameters, samples)
        assert each.pre_step()
    for mine, theirs in zip(ours, stock, strict=True):
        assert mine.grad.dtype == theirs.grad.dtype
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)


def test_every_record_is_clipped_to_the_norm_whatever_the_precision():
    seen = []

    class Watching(ShuffleVectorSum):
        def encode_scaled(self, pieces, factors, generator=None):
            seen.append(torch.cat([each.double() for each in pieces], dim=1) * factors[:, None])
            return super().encode_scaled(pieces, factors, generator)

    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        parameter = nn.Parameter(torch.zeros(300, dtype=dtype))
        optimizer = optimizer_for([parameter], Watching(4, 300, 0.5, 1.0, 1e-5, "tight"))
        give([parameter], [1e3 * torch.randn(4, 300).to(dtype)])
        optimizer.pre_step()
        assert parameter.grad.dtype == dtype
    norms = torch.cat([points.norm(dim=1) for points in seen])
    assert norms.max() <= 0.5
    assert norms.min() > 0.4999


# --- batches in pieces
# ------------------------------------------------------------------------------------------------


def test_pieces_of_a_batch_add_up_to_the_batch():
    """On a grid without rounding, the counts and the noise are the same to the bit."""
    samples = torch.randn(12, 50)

    def release(pieces):
        parameter = nn.Parameter(torch.zeros(50))
        optimizer = optimizer_for([parameter], Noiseless(12, 50, 1.0, 1.0, 1e-5, "tight"))
        for number, piece in enumerate(pieces):
            optimizer.signal_skip_step(do_skip=number < len(pieces) - 1)
            give([parameter], [piece])
            optimizer.pre_step()
            if number < len(pieces) - 1:
                optimizer.zero_grad()
        return parameter.grad

    torch.testing.assert_close(release([samples]), release(samples.split(5)), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(release([samples]), release(samples.split(1)), rtol=1e-6, atol=1e-7)


def test_a_batch_is_released_once():
    parameter = nn.Parameter(torch.zeros(10))
    optimizer = optimizer_for([parameter], protocol_for(2, 10))
    give([parameter], [torch.zeros(2, 10)])
    optimizer.pre_step()
    with pytest.raises(ValueError, match="zero_grad"):
        optimizer.add_noise()
    with pytest.raises(ValueError, match="zero_grad"):
        optimizer.pre_step()
    optimizer.zero_grad()
    with pytest.raises(ValueError, match=r"backward"):
        optimizer.add_noise()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_empty_batch_is_a_sum_of_zeros(dtype):
    protocol = ShuffleVectorSum.with_noise_multiplier(
        40, 17, 1.0, 1.0, delta=1e-5, zero_on_grid=True, rate=0.1
    )
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((3, 5), (1,), ())]
    optimizer = optimizer_for(parameters, protocol, everyone_reports=True)
    give(parameters, [torch.zeros(0, *each.shape, dtype=dtype) for each in parameters])
    assert optimizer.pre_step()
    assert [each.grad.shape for each in parameters] == [each.shape for each in parameters]
    assert max(float(each.grad.abs().max()) for each in parameters) < 8 * protocol.variance**0.5
