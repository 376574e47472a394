# %% [markdown]
# # WS Tables VII and VIII: what shuffling the weights costs
#
# **Permuting by indices gives exactly what multiplying by permutation matrices gives, in less time, and adds a few per cent to a step of
# private training.**
#
# Yang, Ji and Xiang's *Weights Shuffling for Improving DPSGD in Transformer-based Models* (WS) times three ways to permute a matrix (Table VII) and
# epochs with and without shuffling (Table VIII), on an RTX 3090. This notebook measures the same on the machine that it runs on. What it
# asserts is that the ways agree; times depend on the machine and on what else it does, so nothing about them is asserted. No
# $\varepsilon$ is in here. Under a minute on two CPU cores; `FULL` takes the paper's matrix of 10,000 × 10,000, two minutes and 3 GB.

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
    """Waits for the GPU, where there is one."""
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
# A small ViT and a small BERT, batches of 16, AdamW. "More" is the shuffler's own time over the rest of the step, in the same
# run.

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
# Shuffling moves every weight and both of Adam's moments once a step, whatever the batch. So its share falls with the batch: what counts
# is the time of a step, and an epoch of few, large batches pays little.

# %% [markdown]
# ## What differs from the print, and why
#
# * **The machine.** Whether multiplying or moving memory is what a machine does well differs between GPUs and CPUs, and so do these ratios.
#   `benchmarks/RESULTS.rst` has what was measured, and says where; figures of a GPU are not among them yet.
# * **Sizes**: small networks with random weights stand in for the paper's, whose weights would have to be downloaded.
# * The text says that shuffling takes "only 2.3 %" of training. By its own table it adds between 0.7 % and, for the ViT, 11.7 %.
# * Only what the paper permutes is in its times; the default here also permutes heads and the residual stream.
