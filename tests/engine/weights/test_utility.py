"""Shuffling the weights changes nothing about how well a run of WS Algorithm 1 ends."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.shuffled_runs import BATCH, build, in_record, records
from helpers.toy import run_epoch
from scipy.stats import ks_2samp
from torch import nn
from torch.utils.data import DataLoader

from opacus_shuffle import PrivacyEngine
from opacus_shuffle.permutation import find_permutations

pytestmark = pytest.mark.filterwarnings("ignore::opacus_shuffle.PrivacyAssumptionWarning")


def final_losses(seeds, *, spec, sigma=1.0, **options):
    """The loss after training, for noise, batches and permutations of many seeds."""
    found = []
    for seed in seeds:
        network, data = build("mlp").float(), records("mlp", dtype=torch.float32)
        _, optimizer, loader = (engine := PrivacyEngine(accountant="shuffled_fw")).make_private(
            module=network,
            optimizer=torch.optim.SGD(network.parameters(), lr=0.5),
            data_loader=DataLoader(data, batch_size=BATCH, generator=torch.Generator().manual_seed(3 * seed)),
            noise_multiplier=sigma,
            max_grad_norm=1.0,
            noise_generator=torch.Generator().manual_seed(3 * seed + 1),
            wrap_model=False,
            **in_record(
                shuffle_weights=spec,
                shuffle_generator=torch.Generator().manual_seed(3 * seed + 2),
                batch_clip=2.0,
                **options,
            ),
        )
        assert engine.shuffler is not None
        for _ in range(2):
            run_epoch(network, optimizer, loader)
        with torch.no_grad():
            found.append(float(nn.functional.cross_entropy(network(data.tensors[0]), data.tensors[1])))
    return np.array(found)


@pytest.mark.zoo
def test_shuffling_does_not_change_how_well_a_run_ends():
    # Equal seeds put the noise on other units after the first permutation, so runs differ; their distribution does not. The
    # level of each Kolmogorov-Smirnov test is 1e-3.
    spec = find_permutations(build("mlp"))
    shuffled = final_losses(range(40), spec=spec)
    still = final_losses(range(40, 80), spec=spec, shuffle_mode="on_release")
    assert ks_2samp(shuffled, still).pvalue > 1e-3
    same_seeds = final_losses(range(5), spec=spec, shuffle_mode="on_release")
    assert np.abs(same_seeds - shuffled[:5]).min() > 1e-6
    noisier = final_losses(range(80, 120), spec=spec, sigma=3.0)  # which the same test does see
    assert ks_2samp(shuffled, noisier).pvalue < 1e-3
