# %% [markdown]
# # Quick start: an Opacus script in the shuffle model
#
# In the **shuffle model** nobody sees a raw gradient. Every record's owner clips its gradient, adds its *own* Gaussian noise, and
# hands the report to a shuffler; the server sees the reports of a round in random order and adds them up. No trusted server is
# needed, so every report carries noise of its own, and the sum of $k$ reports carries $\sqrt{k}\,\sigma C$. This notebook
# *simulates* that in one process, which does see the data: every $\varepsilon$ below describes the protocol simulated.
#
# Here: an ordinary Opacus script, the import, the flag, the table of $\varepsilon$, and one figure. It trains on 4,000 real MNIST
# digits and takes about a minute on one CPU core.

# %%
import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader

from opacus_shuffle import PrivacyAssumptionWarning
from opacus_shuffle.commands.image_datasets import load_image_dataset
from opacus_shuffle.commands.training import SmallCNN, accuracy

warnings.filterwarnings("ignore", message="Secure RNG turned off|Full backward hook is firing")
torch.manual_seed(0)  # the network's first weights; our noise is seeded by the operating system

train, test = load_image_dataset("mnist-5k")
EPOCHS, DELTA = 15, 1e-5

# %% [markdown]
# ## Before: Opacus
#
# A trusted server adds the noise once, to the sum of the batch.

# %%
from opacus import PrivacyEngine

model = SmallCNN(channels=1, size=28)
engine = PrivacyEngine(accountant="prv")
model, optimizer, loader = engine.make_private(
    module=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    data_loader=DataLoader(train, batch_size=400),
    noise_multiplier=10.0,
    max_grad_norm=1.0,
)

# %% [markdown]
# ## After: the import and the flag
#
# `accountant="shuffled_checkin"` says what runs: in every round each user takes part by its own coin. `local_noise=True` says that
# `noise_multiplier` is each report's own $\sigma$.

# %%
from opacus_shuffle import PrivacyEngine

model = SmallCNN(channels=1, size=28)
engine = PrivacyEngine(accountant="shuffled_checkin")
model, optimizer, loader = engine.make_private(
    module=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.3),
    data_loader=DataLoader(train, batch_size=400),
    noise_multiplier=0.5,
    max_grad_norm=1.0,
    local_noise=True,
)

# %% [markdown]
# The training loop is the one you have.

# %%
for _ in range(EPOCHS):
    for images, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

print(f"test accuracy after {EPOCHS} epochs: {accuracy(model, test, torch.device('cpu')):.1%}")

# %% [markdown]
# ## The table of $\varepsilon$
#
# No $\varepsilon$ without its meaning: each row says who is trusted, which data sets it covers, and whether it is proved. `certified`
# covers **every** data set. `published` is what the published theorem prints and `pair` the exact value for the same **one pair** of
# data sets; that is no guarantee.

# %%
engine.privacy_report(DELTA)

# %% [markdown]
# Asking for a single number gives the certified one. Another bound is there for the asking, with a sentence that says what it
# assumes.

# %%
print(engine.get_epsilon(DELTA))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", PrivacyAssumptionWarning)
    print(engine.get_epsilon(DELTA, bound="published"))
print(caught[-1].message)

# %% [markdown]
# ## What more noise and more users prove
#
# At this little noise per report ($\sigma = 0.5$, 4,000 users) no gain from shuffling can be proved for every data set. With a
# larger population, more noise in each report averages out all the same, and the proof sets in. From plain numbers, no model needed:

# %%
import opacus_shuffle

run = opacus_shuffle.ShuffledCheckIn(noise_multiplier=3.0, num_users=60_000, sample_rate=0.1)
report = opacus_shuffle.privacy_report(run, steps=1000, delta=DELTA)
report

# %% [markdown]
# ## How $\varepsilon$ grows with the rounds
#
# In the shaded region lies what is not known: the truth for the worst data set is somewhere between `pair` and what is certified.

# %%
report.plot()
# %% [markdown]
# The noise for a budget: `make_private_with_epsilon(...)` in a script, or

# %%
budget = {"target_epsilon": 1.0, "target_delta": DELTA, "num_users": 60_000, "sample_rate": 0.1, "steps": 1000}
sigma = opacus_shuffle.compute_noise_multiplier("shuffled_checkin", **budget)
print(f"each report's own noise multiplier must be at least {sigma:.4f}")
