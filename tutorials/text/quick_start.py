# %% [markdown]
# # Quick start: an Opacus script in the shuffle model
#
# **Change one import and choose an accountant, and an Opacus script trains for users who trust only a shuffler. The $\varepsilon$ is proved,
# and the accuracy is that of training with a trusted server.**
#
# In the **shuffle model** raw gradients never leave their owners. Each user sends noised messages, a shuffler mixes the messages of all
# users, and the server sees them in random order. This notebook *simulates* the protocol in one process, which does see the data; every
# $\varepsilon$ below describes the simulated protocol. The notebook trains on 4,000 real MNIST digits and takes about a minute on two CPU
# cores.

# %%
import warnings

import torch
from image_datasets import load_image_dataset
from small_cnn import SmallCNN, accuracy
from torch import nn
from torch.utils.data import DataLoader

warnings.filterwarnings("ignore", message="Secure RNG turned off|Full backward hook is firing")
torch.manual_seed(0)  # for the initial weights; the noise is seeded by the operating system

train, test = load_image_dataset("mnist-5k")
EPOCHS, DELTA = 15, 1e-5
NOISE = {"noise_multiplier": 1.5, "max_grad_norm": 1.0}


def fit(model, optimizer, loader):
    """Runs an ordinary training loop and returns the test accuracy."""
    for _ in range(EPOCHS):
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    return accuracy(model, test, torch.device("cpu"))


# %% [markdown]
# ## Before: Opacus
#
# A trusted server sees every gradient and adds noise to their sum. (Opacus's $\varepsilon$ compares data sets that differ by adding or
# removing one record. All other values here compare data sets in which one record reports zero instead of its gradient.)

# %%
from opacus import PrivacyEngine

model = SmallCNN(channels=1, size=28)
engine = PrivacyEngine(accountant="prv")
before = fit(
    *engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(train, batch_size=400),
        **NOISE,
    )
)
print(
    f"trusting a server: {before:.1%} of the test digits, epsilon = {engine.get_epsilon(DELTA):.3f}"
)

# %% [markdown]
# ## After: the import and the accountant
#
# With `shuffled_sums`, every user sends labelled bits, some of them random, and only the sum of all bits carries information. The noise
# multiplier refers to the sum, as in Opacus. Each user's data are included in a round with a fixed probability, decided independently and in
# secret.

# %%
from opacus_shuffle import PrivacyEngine

model = SmallCNN(channels=1, size=28)
engine = PrivacyEngine(accountant="shuffled_sums")
after = fit(
    *engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(train, batch_size=400),
        **NOISE,
    )
)
print(
    f"trusting a shuffler: {after:.1%} of the test digits, epsilon = {engine.get_epsilon(DELTA):.3f}"
)
assert (
    min(before, after) > 0.1 + 5 * (0.1 * 0.9 / len(test)) ** 0.5
)  # guessing, and five standard errors

# %% [markdown]
# ## The table of ε
#
# Each row of the report states who is trusted, which data sets the $\varepsilon$ covers, and whether it is proved. `certified` covers
# **every** data set; it is the value that `get_epsilon` returns. `statement()` returns a sentence to quote.

# %%
engine.privacy_report(DELTA)

# %%
print(engine.privacy_report(DELTA).statement())

# %% [markdown]
# ## Gaussian reports, the other protocol
#
# In this protocol every user clips its gradient, adds its *own* Gaussian noise and sends one vector. In a script, use
# `accountant="shuffled_checkin"` and `local_noise=True`. A sum of $k$ reports then carries $\sqrt{k}\,\sigma C$ of noise, so the protocol
# needs many users. The report below is computed from plain numbers and needs no model.

# %%
import opacus_shuffle

run = opacus_shuffle.ShuffledCheckIn(noise_multiplier=3.0, num_users=60_000, sample_rate=0.1)
report = opacus_shuffle.privacy_report(run, steps=1000, delta=DELTA)
report

# %% [markdown]
# `published` is the bound of the published theorem, and `pair` is the exact value for the same **one pair** of data sets. Neither is a
# guarantee, and requesting either raises a warning. In the plot over the rounds, the shaded region shows what is not known: the true
# $\varepsilon$ of the worst data set lies between `pair` and `certified`.

# %%
_ = report.plot()

# %% [markdown]
# ## The noise for a budget
#
# In a script, call `make_private_with_epsilon(..., target_epsilon=, target_delta=, epochs=)`. From plain numbers:

# %%
budget = {
    "target_epsilon": 1.0,
    "target_delta": DELTA,
    "num_users": 60_000,
    "sample_rate": 0.1,
    "steps": 1000,
}
sigma = opacus_shuffle.compute_noise_multiplier("shuffled_checkin", **budget)
print(f"each report's own noise multiplier must be at least {sigma:.4f}")

# %% [markdown]
# ## Differences from the papers
#
# This notebook reproduces no figure; the numbered notebooks do. A good next step is `10_choosing_a_trust_model`.
