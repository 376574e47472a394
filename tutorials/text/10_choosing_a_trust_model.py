# %% [markdown]
# # Choosing a trust model: from a budget to a sentence for a model card
#
# **With a proved $\varepsilon$ of 1, a model whose users trust only a shuffler is as accurate as one whose users trust a
# server.**
#
# There are 4,000 users, a linear model on fixed wavelet features, and a privacy budget: $\varepsilon = 1$ at
# $\delta = 10^{-5}$, for every data set. Whom do the users have to trust? This notebook first computes the noise for every trust model, then trains with
# each of them, then shows the code for one of them, and ends with a sentence that you can quote.
#
# All values are for *zero-out* neighbours: two runs that differ in one record, which reports zero in one of them. The
# notebook takes about two minutes on two CPU cores.

# %%
import warnings

import matplotlib.pyplot as plt
import torch
from image_datasets import load_image_dataset
from IPython.display import Markdown
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opacus_shuffle
from opacus_shuffle.commands.compare import CompareSettings, compare, draw
from opacus_shuffle.commands.scattering import scattering_features
from opacus_shuffle.core.picture_styles import TRUST_COLOURS

plt.style.use("figures.mplstyle")
# The last is about the RDP by which Opacus's PRV chooses its grid alone: no ε here is from it.
warnings.filterwarnings(
    "ignore",
    message="Secure RNG turned off|Full backward hook is firing|Optimal order is the largest",
)

ROUNDS, RATE, EPSILON, DELTA = 60, 0.5, 1.0, 1e-5
train, test = (
    TensorDataset(
        torch.cat([scattering_features(block) for block in torch.split(images, 500)]), labels
    )
    for images, labels in (data.tensors for data in load_image_dataset("mnist-5k"))
)
USERS, entries = train.tensors[0].shape
PARAMETERS = 10 * entries
print(
    f"{USERS:,} users, {len(test):,} held-out digits, a linear model with {PARAMETERS:,} parameters"
)

# %% [markdown]
# ## 1. What does each trust model cost?
#
# `plan` needs no model. For each trust model it finds the least noise for which $\varepsilon$ is **proved for every data set**, and
# computes the resulting noise on the mean gradient.

# %%
plan = opacus_shuffle.plan(
    num_users=USERS,
    steps=ROUNDS,
    sample_rate=RATE,
    dimension=PARAMETERS,
    target_epsilon=EPSILON,
    target_delta=DELTA,
)
print(plan)

# %% [markdown]
# The most important column is *on mean*: the noise on one coordinate of the mean gradient, in clipping norms. With the same
# value, training is equally accurate in every trust model.

# %%
names = [
    f"{row.trusted},\n{'DP-SGD' if row is plan.rows[-1] else row.mechanism}" for row in plan.rows
]
figure, axes = plt.subplots(figsize=(8, 4.4))
for name, row in zip(names, plan.rows, strict=True):
    axes.plot(
        row.noise_of_mean, name, "o", color=TRUST_COLOURS[row.trusted.split()[-1]], markersize=9
    )
    axes.annotate(
        f"{row.noise_of_mean:.2g}",
        (row.noise_of_mean, name),
        xytext=(8, 0),
        textcoords="offset points",
        verticalalignment="center",
    )
axes.set(
    xscale="log",
    xlabel="noise on one coordinate of the mean gradient, in clipping norms",
    title=f"the same proved ε of {EPSILON:g}, in every trust model",
)
axes.margins(x=0.1)
axes.grid(visible=False)
axes.invert_yaxis()

# %% [markdown]
# Sums of bits (`shuffled_sums`) need hardly more noise than a trusted server. Their cost is communication: every user sends noise
# bits in every round, including rounds that do not use the user's data.

# %%
by_mechanism = {row.mechanism: row for row in plan.rows if row.trusted == "the shuffler"}
sums, server = by_mechanism["shuffled_sums"], plan.rows[-1]
print(f"noise of sums over that of the server: {sums.noise_of_mean / server.noise_of_mean:.3f}")
print(f"each user sends: {sums.sent}")
assert server.noise_of_mean <= sums.noise_of_mean < 1.1 * server.noise_of_mean
assert all(row.bound.epsilon <= EPSILON for row in plan.rows)

# %% [markdown]
# ## 2. What is the effect on accuracy?
#
# `compare` (on the command line: `opacus-shuffle compare`) trains the same linear model on 4,000 real MNIST digits with four trust
# models, each within the same proved $\varepsilon$. The model uses fixed wavelet features, which do not depend on the data. Learning
# rates and rounds were chosen once on training images; $\varepsilon$ does not account for this choice. Here each model is trained once. By
# default there are three runs, each with its own $\varepsilon$, to show the variation between runs.

# %%
comparison = compare(CompareSettings(epsilon=EPSILON, delta=DELTA, runs=1))
Markdown(comparison.markdown())

# %%
draw(comparison)

# %%
accuracy = {
    f"{each.trust_model.trusted}, {each.trust_model.how}": each.accuracy
    for each in comparison.outcomes
}
chance = (
    5 * (0.1 * 0.9 / comparison.test_records) ** 0.5 + 0.1
)  # guessing, and five standard errors
assert all(each.bound.epsilon <= EPSILON for each in comparison.outcomes)
assert min(accuracy["a server, DP-SGD"], accuracy["a shuffler, sums of bits"]) > chance

# %% [markdown]
# ## 3. In your own script
#
# For sums of bits, an Opacus script needs another import and another accountant. `make_private_with_epsilon` builds the protocol
# whose noise meets the budget.

# %%
model = nn.Linear(entries, 10, bias=False)
nn.init.zeros_(model.weight)

engine = opacus_shuffle.PrivacyEngine(accountant="shuffled_sums")
private, optimizer, loader = engine.make_private_with_epsilon(
    module=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=4.0, momentum=0.9),
    data_loader=DataLoader(train, batch_size=int(RATE * USERS)),
    target_epsilon=EPSILON,
    target_delta=DELTA,
    epochs=int(ROUNDS * RATE),
    max_grad_norm=0.5,
)
for _ in range(int(ROUNDS * RATE)):
    for features, labels in loader:
        nn.functional.cross_entropy(private(features), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

# %%
features, labels = test.tensors
with torch.no_grad():
    right = (model(features).argmax(1) == labels).double().mean().item()
print(f"{right:.1%} of {len(labels):,} held-out digits")
assert right > chance

# %% [markdown]
# ## 4. The sentence for the model card
#
# The report lists every bound with its meaning. `statement()` is one complete sentence: $\varepsilon$ and $\delta$, the data sets
# covered, the neighbours, and who is trusted.

# %%
report = engine.privacy_report(DELTA)
report

# %%
print(report.statement())
assert report.best.epsilon <= EPSILON
assert report.best.guarantee is opacus_shuffle.Guarantee.PROVED

# %% [markdown]
# Copy this sentence to the model card, together with the accuracy. `report.to_dict()` has the same content in machine-readable form.

# %%
card = f"""
## Privacy

{report.statement()}

It has {right:.1%} accuracy on {len(labels):,} held-out digits.
Rounds and learning rate were chosen on training images of the same data set. No ε accounts for this choice.
"""
Markdown(card)

# %% [markdown]
# ## What differs from the print, and why
#
# No paper prints this table. SG compares bounds at the same noise. Here the proved budget is the same, and
# the noise follows from it. The page on pitfalls in the documentation lists what such an $\varepsilon$ does *not* cover; the first
# item is that a shuffler run by someone else may not shuffle.
