# %% [markdown]
# # Train on every record once an epoch
#
# **With `accountant="random_allocation"` every record is used exactly once per epoch, and $\varepsilon$ is below that of Opacus's Poisson
# batches.**
#
# Opacus draws Poisson batches: each record is included in each batch independently, so in one epoch some records are used twice and a third
# of them not at all. With random allocation, each record is assigned to *one* of the epoch's batches by a secret draw, which is repeated for
# every epoch. Both methods trust one server with the data. [The how-to](../docs/how_to/train_once_an_epoch.rst) describes the requirements;
# [proof 11](../docs/proofs/11_random_allocation.md) derives the bound. If Debian's Fashion-MNIST is installed, the notebook trains on 12,000
# of its images in about two minutes on two CPU cores. Otherwise it trains on 4,000 real MNIST digits in less than one minute.

# %%
import warnings

import matplotlib.pyplot as plt
import numpy as np
import torch
from image_datasets import DEBIAN_FASHION_MNIST, load_image_dataset
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opacus_shuffle
from opacus_shuffle.commands.scattering import scattering_features
from opacus_shuffle.core.picture_styles import BOUND_STYLES

plt.style.use("figures.mplstyle")
# The last warning is about the RDP that Opacus's PRV accountant uses only to choose its grid.
warnings.filterwarnings(
    "ignore",
    message="Secure RNG turned off|Full backward hook is firing|Optimal order is the largest",
)

BATCH, DELTA = 100, 1e-5
dataset = "fashion-mnist" if DEBIAN_FASHION_MNIST.is_dir() else "mnist-5k"
train, test = (
    TensorDataset(
        torch.cat([scattering_features(block) for block in torch.split(images[:most], 500)]),
        labels[:most],
    )
    for most, (images, labels) in zip(
        (12_000, 2_000), (data.tensors for data in load_image_dataset(dataset)), strict=True
    )
)
records, entries = train.tensors[0].shape
batches = records // BATCH


def private(accountant, **noise):
    """Returns an engine and a private linear model on fixed features, its optimizer and its loader."""
    model = nn.Linear(entries, 10, bias=False)
    nn.init.zeros_(model.weight)
    engine = opacus_shuffle.PrivacyEngine(accountant=accountant)
    make = engine.make_private_with_epsilon if "target_epsilon" in noise else engine.make_private
    made = make(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(train, batch_size=BATCH),
        max_grad_norm=0.5,
        **noise,
    )
    return engine, *made


# %% [markdown]
# ## How often each record is drawn
#
# The cell draws one epoch from each loader, and counts how often each record was drawn and how many records each batch has. The batch sizes
# vary as much as those of Poisson batches, and must be kept secret in the same way: $\varepsilon$ is far larger against an adversary who sees
# them. (This notebook may inspect them, because it has access to the data anyway.)

# %%
ways = {"Poisson": "prv", "allocation": "random_allocation"}
colours = [BOUND_STYLES[bound]["color"] for bound in ("poisson", "certified")]
shares, lengths = [], []
for accountant in ways.values():
    *_, loader = private(accountant, noise_multiplier=1.0)
    drawn = list(loader.batch_sampler)
    counts = np.bincount(
        np.concatenate([np.asarray(batch, dtype=int) for batch in drawn]), minlength=records
    )
    shares.append(np.bincount(counts, minlength=5)[:5] / records)
    lengths.append([len(batch) for batch in drawn])
    if accountant == "random_allocation":
        assert set(counts) == {1}
figure, (often, sizes) = plt.subplots(1, 2, figsize=(9, 3.6))
for place, (name, share, colour) in enumerate(zip(ways, shares, colours, strict=True)):
    often.bar(np.arange(5) + 0.4 * place - 0.2, share, width=0.4, color=colour, label=name)
sizes.hist(lengths, bins=range(60, 145, 5), color=colours)
often.set(xlabel="how often in one epoch", ylabel="share of the records", title="a record")
sizes.set(xlabel="records in it", ylabel="batches", title="a batch")
_ = often.legend()

# %% [markdown]
# ## ε at the same noise
#
# The $\varepsilon$ of random allocation is known to within half a percent. `poisson` uses the same noise with Poisson batches.
# `shuffled_batches` is the best proved value for `DataLoader(shuffle=True)`, whose batches have a fixed size: the random order of the records
# does not reduce it, although some papers quote the $\varepsilon$ of Poisson batches for such loaders.

# %%
epochs = 20
noises = np.geomspace(0.6, 4, 7)
rows = {"certified": [], "poisson": [], "shuffled_batches": []}
for sigma in noises:
    report = opacus_shuffle.privacy_report(
        "random_allocation",
        noise_multiplier=sigma,
        num_batches=batches,
        steps=epochs * batches,
        delta=DELTA,
    )
    for bound in report.bounds:
        rows[bound.bound].append(bound.epsilon)
figure, axes = plt.subplots()
for name, epsilons in rows.items():
    axes.plot(noises, epsilons, label=name, **BOUND_STYLES[name])
axes.set(
    xlim=(0.55, 4.4),
    xscale="log",
    yscale="log",
    xlabel="noise multiplier",
    ylabel="ε",
    title=f"{epochs} epochs of {batches} batches, δ = {DELTA:g}",
)
axes.set_xticks([0.6, 1, 2, 3, 4], ["0.6", "1", "2", "3", "4"])
axes.minorticks_off()
axes.legend()
assert np.all(np.array(rows["certified"]) < rows["poisson"])

# %% [markdown]
# ## Accuracy at the same ε
#
# The cell trains the same linear model on these images with the noise required for $\varepsilon = 1$.


# %%
def accuracy(model):
    """Returns the fraction of the test images that are classified correctly."""
    with torch.no_grad():
        return (model(test.tensors[0]).argmax(1) == test.tensors[1]).float().mean().item()


reached = {}
for accountant in ("prv", "random_allocation"):
    engine, model, optimizer, loader = private(
        accountant, target_epsilon=1.0, target_delta=DELTA, epochs=epochs
    )
    for _ in range(epochs):
        for features, labels in loader:
            nn.functional.cross_entropy(model(features), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    reached[accountant] = accuracy(model)
    print(
        f"{accountant}: noise multiplier {optimizer.noise_multiplier:.3f}, "
        f"epsilon {engine.get_epsilon(DELTA):.3f}, {reached[accountant]:.1%} of the test images"
    )
assert min(reached.values()) > 0.7

# %% [markdown]
# The engine accounts for a whole epoch when the epoch begins, because the decision to stop early may depend on what the epoch has shown. Stop
# training only at the end of an epoch.

# %%
print(engine.privacy_report(DELTA).statement())
