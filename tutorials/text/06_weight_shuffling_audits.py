# %% [markdown]
# # WS Table VI: audits, and what matching undoes
#
# **An attack shows more than the published $\varepsilon$ at the paper's own setting. An adversary who sees the weights before and after an
# update can undo the permutation between them.**
#
# An audit runs a mechanism many times, with one record and without it, and an attacker guesses whether the record was there. The rate of
# correct guesses bounds $\varepsilon$ from *below*, with a stated confidence (95 % for each number here) and independently of any proof. Yang, Ji
# and Xiang's *Weights Shuffling for Improving DPSGD in Transformer-based Models* (WS) audits its mechanism in Table VI and reports 0.4771 and
# 0.7005 for claims of 0.5 and 1. One trusted server adds the noise; neighbours are zero-out. The notebook takes half a minute on two CPU cores;
# `FULL` uses five seeds and takes two minutes.
#
# The attacks are in `reproduction/`: `permuted_audits.py`, `released_weights.py` and `realignment.py`.

# %%
import sys
import warnings

import matplotlib.pyplot as plt
import torch
from torch import nn

import opacus_shuffle
from opacus_shuffle.core.picture_styles import BOUND_STYLES
from opacus_shuffle.core.rounding import round_down, round_up

sys.path.append("../reproduction")
from permuted_audits import audit_published_setting
from realignment import align
from released_weights import audit_small_training

plt.style.use("figures.mplstyle")
warnings.filterwarnings("ignore", message="Secure RNG|Full backward hook|This run is not private")
warnings.filterwarnings(
    "ignore", category=opacus_shuffle.PrivacyAssumptionWarning
)  # the published formula is what is audited
FULL = False
SEEDS = range(5 if FULL else 1)

# %% [markdown]
# ## The setting of Table VI
#
# A ViT with 85.8 million parameters, 10,000 steps of 1,000 out of 50,000 records, $\delta = 5\cdot 10^{-6}$, the noise by the paper's Theorem 6 for
# $\varepsilon = 0.5$ and for $\varepsilon = 1$. The audit does not train the ViT: it releases what the theorem is about, every step's permuted,
# noised gradient by itself, for a record whose gradient lies in one coordinate (a pair that meets the theorem's conditions), and for one
# at 46° to a gradient with equal coordinates.

# %%
PRINTED = {0.5: 0.4771, 1.0: 0.7005}  # Table VI: what the paper's own audit found
found = {}
for target in PRINTED:
    for pair, runs in (
        ("one_coordinate", {}),
        ("oblique", {"trials": 2_000}),
    ):  # the second needs few runs
        found[target, pair] = [
            audit_published_setting(
                steps=10_000, target_epsilon=target, pair=pair, seed=seed, **runs
            )
            for seed in SEEDS
        ]
print(found[0.5, "one_coordinate"][0])

# %%
print("claim  printed audit  certified  pair of gradients  found at least")
for (target, pair), results in found.items():
    claims = {claim.bound: claim.epsilon for claim in results[0].claims}
    lower = [result.largest.lower.epsilon for result in results]
    print(
        f"{target:5}  {PRINTED[target]:13}  {round_up(claims['certified']):>9}  {pair:17}  {round_down(min(lower), digits=3):>14}"
    )
    assert all(value > claims["published"] > PRINTED[target] for value in lower)
    assert all(value < claims["certified"] for value in lower)

# %% [markdown]
# All of them are above the published value, so this value is not a bound. None is above the certified value, which is DP-SGD's own
# $\varepsilon$.

# %% [markdown]
# ## One step of real training, with and without re-alignment
#
# A small network with 25,450 parameters, 2,000 steps with or without a canary, noise by the same formula. Three attackers: one sees the gradient
# as it was; one sees the permuted gradient alone; one sees the weights before and after the update and matches their rows first.

# %%
steps = [audit_small_training(seed=seed) for seed in SEEDS]
print(steps[0])

# %%
names = [finding.name for finding in steps[0].findings]
values = [[result.findings[place].lower.epsilon for result in steps] for place in range(len(names))]
published = next(claim.epsilon for claim in steps[0].claims if claim.bound == "published")
figure, axes = plt.subplots(figsize=(8, 3.2))
least = [min(epsilons) for epsilons in values]
bars = axes.barh(names, least, height=0.6, color="#666666", label="found by an attack")
axes.bar_label(bars, [round_down(epsilon, digits=3) for epsilon in least], padding=4)
axes.axvline(
    published,
    color=BOUND_STYLES["published"]["color"],
    linestyle="--",
    label=f"published: at most {round_up(published, digits=3)}",
)
axes.set(
    xlim=(0, 1.15 * max(least)),
    xlabel="ε is at least this, with 95 % confidence for each bar (all three together: at least 85 %)",
    title="one step of training: what the formula allows, and what three attackers found",
)
axes.grid(visible=False)
axes.invert_yaxis()
_ = figure.legend(loc="outside lower center", ncols=2)

# %%
by_name = dict(zip(names, values, strict=True))
recovered = [result.findings[-1].recovered for result in steps]
print(
    "share of the permuted rows that matching found:",
    ", ".join(f"{share:.1%}" for share in recovered),
)
assert all(share == 1 for share in recovered)
assert all(value > published for value in by_name[names[-1]])

# %% [markdown]
# Matching recovers every row, and the last attacker is as good as the first. Permuting hides nothing from an adversary who sees two releases.

# %% [markdown]
# ## How matching works, by hand
#
# A network, an update of a size that training makes, and a secret permutation of its hidden units. `align` compares the two releases, row by
# row, and finds the permutation again.

# %%
torch.manual_seed(0)
network = nn.Sequential(
    nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
)
spec = opacus_shuffle.find_permutations(network, torch.zeros(2, 20))
before = {name: value.clone() for name, value in network.state_dict().items()}
for size in (0.01, 0.1, 0.3):
    after = {
        name: value + size * value.std() * torch.randn(value.shape)
        for name, value in before.items()
    }
    network.load_state_dict(after)
    secret = spec.sample()
    spec.apply_(network, secret)
    share = align(spec, before, network.state_dict()).recovered(secret)
    print(f"an update of {size:.0%} of the weights: {share:.1%} of the permuted units are put back")
    assert share == 1

# %% [markdown]
# ## What differs from the print, and why
#
# * Table VI prints 0.4771 and 0.7005, both below their claims; the audits above find more than the claims. Table VI audits training itself
#   (200 epochs, with a canary among real records). A likely reason why it stays below: with real data and large batches one record's share of
#   the clipped sum is too small to see, as `benchmarks/RESULTS.rst` shows for a smaller network. An audit that stays below a claim does not
#   prove it. The attackers here use what the theorem allows: other records whose gradients add up to nothing.
# * "Permuted gradient by itself" is what the theorem is about. Weights before and after are what training shows, and there the permutation can
#   be undone.
# * Every number is of one seed unless `FULL`; `benchmarks/RESULTS.rst` has the ranges over twenty.
