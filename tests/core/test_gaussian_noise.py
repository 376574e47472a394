"""Noise for tensors: of the right size and type; in secure mode on a grid that tells nothing."""

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

import opacus_shuffle.core.opacus_compat  # noqa: F401  (lets Opacus's optimizers draw from our stream)
from opacus_shuffle.core.gaussian_noise import draw_noise
from opacus_shuffle.core.randomness import SecretGenerator

SECURE = SecretGenerator(secure=True)


@pytest.mark.parametrize("generator", [SecretGenerator(), SECURE], ids=["default", "secure"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_noise_is_normal_independent_and_of_the_type_and_shape_it_is_for(dtype, generator):
    data = torch.zeros(100, 200, dtype=dtype)
    released = data + draw_noise(3.0, data, generator)
    assert (released.dtype, released.shape) == (dtype, (100, 200))
    values = released.double().flatten()
    assert float(values.std()) == pytest.approx(3.0, rel=0.04)
    if dtype != torch.bfloat16:  # whose numbers are too far apart for the test
        assert stats.kstest(values.numpy() / 3.0, "norm").pvalue > 1e-6
        assert abs(float(torch.corrcoef(values.view(2, -1))[0, 1])) < 6 / math.sqrt(10_000)
    assert torch.equal(data + draw_noise(0.0, data, generator), data)


@pytest.mark.parametrize("std", [1e-6, 0.7, 1.0, 5e4])
@pytest.mark.parametrize("size", [0.0, 0.1, 1.7, 123.4])
def test_sums_lie_on_one_grid_whatever_the_data_are(std, size):
    data = torch.full((4000,), size * std)
    units = (data + draw_noise(std, data, SECURE)).double() / 2.0 ** (math.frexp(std)[1] - 20)
    assert torch.equal(units, units.round())
    # A larger single-precision number has no odd multiples left.
    small = units[units.abs() < 2**20]
    assert len(small) < 20 or bool((small.remainder(2) == 1).any())


ADAPTIVE = {
    **{"clipbound_learning_rate": 0.2, "max_clipbound": 1.0, "min_clipbound": 0.5},
    **{"target_unclipped_quantile": 0.5, "unclipped_num_std": 1e6},
}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (DPOptimizer, {}),
        (DPPerLayerOptimizer, {"max_grad_norm": [1.0]}),
        (AdaClipDPOptimizer, ADAPTIVE),
        (DPOptimizerFastGradientClipping, {}),
    ],
)
def test_every_optimizer_of_opacus_draws_it_and_others_stay_as_they_are(kind, options, monkeypatch):
    weight = torch.nn.Parameter(torch.zeros(5000))
    more = {"noise_multiplier": 2.0, "max_grad_norm": 1.0, "expected_batch_size": 1, **options}

    def gradient(generator, secure):
        sgd = torch.optim.SGD([weight], lr=1.0)
        optimizer = kind(sgd, generator=generator, secure_mode=secure, **more)
        weight.summed_grad = torch.zeros(5000)
        optimizer.unclipped_num = torch.tensor(1.0)
        optimizer.add_noise()
        return weight.grad.clone()

    monkeypatch.delattr(torch, "normal")
    plain, secure = gradient(SecretGenerator(), False), gradient(SECURE, True)
    assert 1.8 < float(plain.std()) < 2.2
    assert 1.8 < float(secure.std()) < 2.2
    step = 2.0 ** (2 - 20)
    assert torch.equal(secure, (secure / step).round() * step)
    monkeypatch.undo()
    own = torch.normal(0, 2.0, (5000,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(gradient(torch.Generator().manual_seed(0), False), own)
