"""The equations of a Mersenne Twister hold for PyTorch's noise.

They hold for ours no more often than a coin falls.
"""

from __future__ import annotations

import math

import pytest
import torch
from generator_attack import contradictions

from opacus_shuffle.core.randomness import SecretGenerator

SIZE = 25_600  # as many equations; their rank is 19,937, the bits of the Twister's state


@pytest.mark.slow
def test_pytorchs_noise_gives_its_generator_away():
    noise = torch.normal(0.0, 1.0, (SIZE,), generator=torch.Generator().manual_seed(7))
    assert contradictions(noise) == (19_937, 0, SIZE - 19_937)


@pytest.mark.slow
def test_no_twister_has_drawn_the_default_noise():
    rank, failing, holding = contradictions(SecretGenerator().normals(SIZE))
    assert rank == 19_937
    # Each equation that is left fails with probability one half; seven standard deviations: 3e-12.
    assert failing > (failing + holding) / 2 - 3.5 * math.sqrt(failing + holding)
