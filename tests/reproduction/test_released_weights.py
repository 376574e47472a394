"""The audit of released weights: an adversary who re-aligns them sees the gradients."""

from __future__ import annotations

import pytest
import torch
from helpers.canary_runs import DELTA, private
from released_weights import audit_released_weights
from torch.nn.functional import cross_entropy

from opacus_shuffle.analysis import fenton_wilkinson

PER_LAYER = {"clipping": "per_layer", "max_grad_norm": [0.5] * 4}


def audit(run, steps=100):
    generator = torch.Generator().manual_seed(9)
    return audit_released_weights(**run, steps=steps, delta=DELTA, generator=generator)


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("hooks", {}),
        *(pytest.param(mode, {}, marks=pytest.mark.zoo) for mode in ("functorch", "ghost")),
        pytest.param("hooks", PER_LAYER, marks=pytest.mark.zoo),
    ],
)
def test_an_adversary_who_sees_released_weights_sees_the_gradients(mode, options):
    result = audit(private(shuffle_weights=True, sigma=0.3, mode=mode, **options))
    gradient, _, realigned = result.findings
    assert realigned.recovered == 1.0
    # In double precision the scores agree except for rounding, so the counts are the same.
    assert realigned.lower == gradient.lower
    assert gradient.lower.epsilon > 0


@pytest.mark.zoo
def test_theorem_6_is_below_what_the_shuffled_gradients_show():
    """All other gradients are zero, which meets the conditions of the theorem.

    The orbit of the canary's entry has 8 entries, however, and not 8032.
    """
    sizes = {"sizes": (1000, 8, 3), "sigma": 0.4, "dtype": torch.float32}
    run = private("shuffled_fw", **sizes, shuffle_weights=True, batch_clip=1.0)
    result = audit({**run, "loss": lambda model, batch: 0.0 * model(batch[0]).sum()}, steps=300)
    published, certified = result.claims
    d = run["engine"].accountant.planned.dimension
    formula = fenton_wilkinson.compute_epsilon(noise_std=0.4, delta=DELTA, dimension=d)
    assert published.epsilon == formula
    gradient, shuffled, realigned = (finding.lower.epsilon for finding in result.findings)
    assert published.epsilon < shuffled < gradient <= certified.epsilon
    assert abs(realigned - gradient) < 0.5  # Single precision.
    assert result.contradicted == (published,)


def test_the_shuffler_is_restored_when_the_loss_fails():
    run = private(shuffle_weights=True)
    shuffler = run["engine"].shuffler

    def failing(model, batch):
        if shuffler.steps == 3:
            raise RuntimeError("no more")
        return cross_entropy(model(batch[0]), batch[1])

    with pytest.raises(RuntimeError, match="no more"):
        audit({**run, "loss": failing})
    assert "draw" not in vars(shuffler)


@pytest.mark.parametrize(
    ("sgd", "message"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "plain torch.optim.SGD.*momentum"),
        (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1), "weight_decay"),
        (torch.optim.Adam, "plain torch.optim.SGD.*got Adam"),
        (lambda p: torch.optim.SGD(p, lr=0.0), "positive lr"),
        (None, "engine must shuffle weights"),
    ],
)
def test_runs_whose_releases_do_not_determine_the_gradient_are_refused(sgd, message):
    run = private(sgd=sgd, shuffle_weights=sgd is not None)
    with pytest.raises(ValueError, match=message):
        audit(run)
