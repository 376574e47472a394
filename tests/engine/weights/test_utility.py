"""Shuffling the weights changes nothing about how well a run ends."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.shuffled_runs import BATCH, build, records
from helpers.toy import run_epoch
from scipy.stats import ks_2samp
from torch import nn
from torch.utils.data import DataLoader

from opacus_shuffle import PrivacyEngine, WeightShuffling
from opacus_shuffle.permutation import find_permutations

pytestmark = pytest.mark.filterwarnings("ignore::opacus_shuffle.PrivacyAssumptionWarning")


def final_losses(seeds, *, shuffle, sigma=1.0):
    """The loss after training, for noise, batches and permutations of many seeds."""
    losses = []
    for seed in seeds:
        network, data = build("mlp").float(), records("mlp", dtype=torch.float32)
        generators = [torch.Generator().manual_seed(3 * seed + use) for use in range(3)]
        _, optimizer, loader = PrivacyEngine(accountant="rdp").make_private(
            module=network,
            optimizer=torch.optim.SGD(network.parameters(), lr=0.5),
            data_loader=DataLoader(data, batch_size=BATCH, generator=generators[0]),
            noise_multiplier=sigma,
            max_grad_norm=1.0,
            noise_generator=generators[1],
            wrap_model=False,
            shuffle_weights=WeightShuffling(groups=shuffle, generator=generators[2])
            if shuffle
            else False,
        )
        for _ in range(2):
            run_epoch(network, optimizer, loader)
        with torch.no_grad():
            losses.append(
                float(nn.functional.cross_entropy(network(data.tensors[0]), data.tensors[1]))
            )
    return np.array(losses)


@pytest.mark.zoo
def test_shuffling_does_not_change_how_well_a_run_ends():
    # Equal seeds put the noise on other units after the first permutation, so runs differ; their
    # distribution does not. The level of each Kolmogorov-Smirnov test is 1e-3.
    spec = find_permutations(build("mlp"))
    shuffled = final_losses(range(40), shuffle=spec)
    still = final_losses(range(40, 80), shuffle=False)
    assert ks_2samp(shuffled, still).pvalue > 1e-3
    same_seeds = final_losses(range(5), shuffle=False)
    assert np.abs(same_seeds - shuffled[:5]).min() > 1e-6
    noisier = final_losses(range(80, 120), shuffle=spec, sigma=3.0)  # which the same test does see
    assert ks_2samp(shuffled, noisier).pvalue < 1e-3
