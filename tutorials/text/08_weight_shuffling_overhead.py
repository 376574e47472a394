# %% [markdown]
# # WS Tables VII and VIII: the cost of shuffling the weights
#
# **Permuting by index gives exactly the same result as multiplying by permutation matrices, takes less time, and adds a few per cent to a
# step of private training.**
#
# Yang, Ji and Xiang's *Weights Shuffling for Improving DPSGD in Transformer-based Models* (WS) times three ways to permute a matrix (Table
# VII) and epochs with and without shuffling (Table VIII), on an RTX 3090. This notebook measures the same on the machine that it runs on. It
# asserts that the three methods agree. It asserts nothing about times, because they depend on the machine and its load. It computes no
# $\varepsilon$. The notebook takes under a minute on two CPU cores; with `FULL` it uses the paper's matrix of 10,000 × 10,000, and needs two
# minutes and 3 GB.

# %%
import argparse
import sys
import warnings

import torch

sys.path.append("../benchmarks")
import weight_shuffling as benchmark

warnings.filterwarnings(
    "ignore", message="Secure RNG|Full backward hook|Sparse CSR tensor support|IProgress not found"
)
FULL = False
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
print(
    "a GPU:",
    torch.cuda.get_device_name() if DEVICE == "cuda" else "none, so these are times of a CPU",
)

# %% [markdown]
# ## Table VII: three ways to permute a matrix

# %%
size = 10_000 if FULL or DEVICE == "cuda" else 3_000
matrix = torch.randn(size, size, device=DEVICE)
rows, columns = torch.randperm(size, device=DEVICE), torch.randperm(size, device=DEVICE)
left, right = torch.eye(size, device=DEVICE)[rows], torch.eye(size, device=DEVICE)[:, columns]
sparse_left, sparse_right = left.to_sparse_csr(), right.t().contiguous().to_sparse_csr()
ways = {
    "index": lambda: matrix[rows][:, columns],
    "matrix multiplication": lambda: left @ matrix @ right,
    "sparse matrix multiplication": lambda: torch.sparse.mm(
        sparse_right, torch.sparse.mm(sparse_left, matrix).t()
    ).t(),
}


def wait():
    """Waits for the GPU to finish, if there is one."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


printed = {"index": 0.9799, "matrix multiplication": 1316.6, "sparse matrix multiplication": 322.62}
milliseconds = {name: 1e3 * benchmark.seconds(way, 3, wait) for name, way in ways.items()}
print(f"{size:,} x {size:,}:")
for name, time in milliseconds.items():
    ours, theirs = time / milliseconds["index"], printed[name] / printed["index"]
    print(
        f"    {name:28} {time:9.1f} ms, {ours:6.1f} times the index's (printed: {printed[name]} ms, {theirs:.0f} times)"
    )
for name, way in ways.items():
    assert torch.equal(way(), matrix[rows][:, columns]), name

# %% [markdown]
# ## Table VIII: a step of private training
#
# This cell trains a small ViT and a small BERT with batches of 16 and AdamW. "More" is the time of the shuffler divided by the time of the
# rest of the step, in the same run.

# %%
options = argparse.Namespace(device=DEVICE, batch=16, steps=5)
for name, (build, make) in benchmark.networks().items():
    benchmark.measure(name, build, benchmark.Records(make, 4 * options.batch), options)

# %%
printed_epochs = {  # Table VIII, in seconds: unshuffled, shuffled
    "ViT, CIFAR": (2 * 60 + 25, 2 * 60 + 42),
    "BERT, QNLI": (28 * 60 + 28, 28 * 60 + 53),
    "RoBERTa, QNLI": (29 * 60 + 45, 30 * 60 + 11),
    "GPT-2, E2E": (30 * 60 + 1, 30 * 60 + 13),
    "GPT-2-large, E2E": (43 * 60 + 25, 44 * 60 + 29),
}
shares = {name: (shuffled - usual) / usual for name, (usual, shuffled) in printed_epochs.items()}
for name, share in shares.items():
    print(f"printed, {name:17} {share:6.1%} more")
assert f"{shares['ViT, CIFAR']:.1%}" == "11.7%"

# %% [markdown]
# Shuffling moves every weight and both of Adam's moments once in every step, regardless of the batch size. Its share of the time therefore
# falls as batches grow, and an epoch of few, large batches has little overhead.

# %% [markdown]
# ## Differences from the paper
#
# * **The machine.** GPUs and CPUs differ in how fast they multiply relative to how fast they move memory, and so do these ratios.
#   `benchmarks/RESULTS.rst` lists measured times and the machines; it does not include a GPU yet.
# * **The sizes**: small networks with random weights replace the paper's networks, whose weights would have to be downloaded.
# * The paper says that shuffling takes "only 2.3 %" of the training time. According to its own table, shuffling adds between 0.7 % and 11.7 %
#   (for the ViT).
# * The paper's times cover only the permutations of its own theorems; the default here also permutes heads and the residual stream.
