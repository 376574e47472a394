"""Noise for tensors: of the right size and type by default, and in secure mode on a grid that tells nothing of the data."""

from __future__ import annotations

import math

import pytest
import torch
from opacus.optimizers import (
    AdaClipDPOptimizer,
    DPOptimizer,
    DPOptimizerFastGradientClipping,
    DPPerLayerOptimizer,
)
from scipy import stats

from opacus_shuffle.core.gaussian_noise import draw_noise
from opacus_shuffle.core.opacus_compat import gaussian_noise
from opacus_shuffle.core.randomness import SecretGenerator


def secure_noise(std, reference):
    return draw_noise(std, reference, SecretGenerator(secure=True))


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_noise_is_normal_independent_and_of_the_type_and_shape_it_is_for(dtype, secure):
    released = torch.zeros(100, 200, dtype=dtype) + draw_noise(
        3.0, torch.zeros(100, 200, dtype=dtype), SecretGenerator(secure=secure)
    )
    assert (released.dtype, released.shape) == (dtype, (100, 200))
    if dtype != torch.bfloat16:  # whose numbers are too far apart for the test
        values = released.double().flatten()
        assert stats.kstest(values.numpy() / 3.0, "norm").pvalue > 1e-6
        assert abs(float(torch.corrcoef(values.view(2, -1))[0, 1])) < 6 / math.sqrt(10_000)


@pytest.mark.parametrize("std", [1e-6, 0.7, 1.0, 5e4])
def test_sums_lie_on_one_grid_whatever_the_data_are(std):
    for size in (0.0, 0.1 * std, 1.7 * std, 123.4 * std):
        data = torch.full((4000,), size)
        released = (data + secure_noise(std, data)).double()
        step = 2.0 ** (math.frexp(std)[1] - 20)
        assert step < std * 2.1e-6
        units = released / step
        assert torch.equal(units, units.round())
        small = units[
            units.abs() < 2**20
        ]  # a larger single-precision number has no odd multiples left
        assert len(small) < 20 or bool((small.remainder(2) == 1).any())


def test_secure_noise_is_added_in_place_and_to_plain_numbers_as_opacus_does():
    data = torch.ones(3, 2, dtype=torch.bfloat16)
    data += secure_noise(1.0, data)
    assert data.dtype == torch.bfloat16
    assert (2.0 + secure_noise(1.0, torch.tensor(0.0))).shape == ()


@pytest.mark.parametrize(
    "kind", [DPOptimizer, DPPerLayerOptimizer, AdaClipDPOptimizer, DPOptimizerFastGradientClipping]
)
def test_every_optimizer_of_opacus_draws_it_and_others_stay_as_they_are(kind, monkeypatch):
    weight = torch.nn.Parameter(torch.zeros(5000))
    norm = [1.0] if kind is DPPerLayerOptimizer else 1.0
    more = {"target_unclipped_quantile": 0.5, "clipbound_learning_rate": 0.2, "max_clipbound": 1.0, "min_clipbound": 0.5,
            "unclipped_num_std": 1e6} if kind is AdaClipDPOptimizer else {}  # fmt: skip

    monkeypatch.delattr(torch, "normal")

    def gradient(generator, secure):
        optimizer = kind(
            torch.optim.SGD([weight], lr=1.0), noise_multiplier=2.0, max_grad_norm=norm, expected_batch_size=1,
            generator=generator, secure_mode=secure, **more,
        )  # fmt: skip
        weight.summed_grad = torch.zeros(5000)
        optimizer.unclipped_num = torch.tensor(1.0)
        optimizer.add_noise()
        return weight.grad.clone()

    assert 1.8 < float(gradient(SecretGenerator(), False).std()) < 2.2
    secure = gradient(SecretGenerator(secure=True), True)
    assert 1.8 < float(secure.std()) < 2.2
    step = 2.0 ** (2 - 20)
    assert torch.equal(secure, (secure / step).round() * step)
    monkeypatch.undo()
    plain = gradient(torch.Generator().manual_seed(0), False)
    assert torch.equal(
        plain, torch.normal(0, 2.0, (5000,), generator=torch.Generator().manual_seed(0))
    )


def test_no_noise_is_none():
    assert torch.equal(
        gaussian_noise(0.0, torch.ones(2), SecretGenerator(secure=True), True), torch.zeros(2)
    )
