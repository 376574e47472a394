# %% [markdown]
# # Quick start: an Opacus script in the shuffle model
#
# **With an import and an accountant, an Opacus script trains for users who trust nobody but a shuffler, at a proved $\varepsilon$ and a
# trusted server's accuracy.**
#
# In the **shuffle model** nobody sees a raw gradient. Every record's owner sends noised messages, a shuffler mixes those of all users, and the
# server sees them in random order. This notebook *simulates* that in one process, which does see the data: every $\varepsilon$ below
# describes the protocol simulated. It trains on 4,000 real MNIST digits and takes about a minute on two CPU cores.

# %%
import warnings

import torch
from image_datasets import load_image_dataset
from small_cnn import SmallCNN, accuracy
from torch import nn
from torch.utils.data import DataLoader

warnings.filterwarnings("ignore", message="Secure RNG turned off|Full backward hook is firing")
torch.manual_seed(0)  # the network's first weights; our noise is seeded by the operating system

train, test = load_image_dataset("mnist-5k")
EPOCHS, DELTA = 15, 1e-5
NOISE = {"noise_multiplier": 1.5, "max_grad_norm": 1.0}


def fit(model, optimizer, loader):
    """The training loop that you have."""
    for _ in range(EPOCHS):
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    return accuracy(model, test, torch.device("cpu"))


# %% [markdown]
# ## Before: Opacus
#
# A trusted server sees every gradient and adds noise to their sum. (Opacus's $\varepsilon$ is about a record more or less in the data; all
# others here are about a record that reports zero.)

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
# `shuffled_sums`: every user sends labelled bits, some of them random, and only the sum of all bits says anything. The noise multiplier is the
# sum's, as in Opacus, and each user's data take part in a round by a secret coin of its own.

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
# No $\varepsilon$ without its meaning: each row says who is trusted, which data sets it covers, and whether it is proved. `certified` covers
# **every** data set, and is what `get_epsilon` answers. `statement()` is the sentence to quote.

# %%
engine.privacy_report(DELTA)

# %%
print(engine.privacy_report(DELTA).statement())

# %% [markdown]
# ## Gaussian reports, the other protocol
#
# Here every user clips its gradient, adds its *own* Gaussian noise and sends one vector: `accountant="shuffled_checkin"` and
# `local_noise=True` in a script. A sum of $k$ reports then carries $\sqrt{k}\,\sigma C$ of noise, so it takes many users. From plain
# numbers, no model needed:

# %%
import opacus_shuffle

run = opacus_shuffle.ShuffledCheckIn(noise_multiplier=3.0, num_users=60_000, sample_rate=0.1)
report = opacus_shuffle.privacy_report(run, steps=1000, delta=DELTA)
report

# %% [markdown]
# `published` is what the published theorem prints, and `pair` the exact value for the same **one pair** of data sets; that is no guarantee, and
# asking for it comes with a warning. Over the rounds, the shaded region is what is not known: the truth for the worst data set
# lies between `pair` and `certified`.

# %%
_ = report.plot()

# %% [markdown]
# ## The noise for a budget
#
# In a script `make_private_with_epsilon(..., target_epsilon=, target_delta=, epochs=)`; from plain numbers:

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
# ## What differs from the print, and why
#
# This notebook reproduces no figure. Those that do have numbers; the next step is `10_choosing_a_trust_model`.
