"""Two processes train one network: the same permutations on both, and the run without shuffling in another order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from helpers.shuffled_runs import EXACT, contents, distance, prepare, unshuffle, weights
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")

KINDS = {
    "Opacus's, hooks": (DifferentiallyPrivateDistributedDataParallel, "hooks", {}),
    "Opacus's, layer by layer": (
        DifferentiallyPrivateDistributedDataParallel,
        "hooks",
        {"clipping": "per_layer", "max_grad_norm": [0.2 + 0.1 * i for i in range(6)]},
    ),
    "PyTorch's, hooks": (DistributedDataParallel, "hooks", {}),
    "PyTorch's, ghost": (DistributedDataParallel, "ghost", {}),
}
RANKS = 2


def distributed_run(kind: str, **options: Any):
    """One process's part of a run; the wrapped network has the weights of rank 0."""
    from helpers.shuffled_runs import build

    wrapper, mode, more = KINDS[kind]
    network = build("mlp")
    if torch.distributed.get_rank():
        with torch.no_grad():
            network[0].weight += 1  # wrapping takes rank 0's
    run = prepare("mlp", network=wrapper(network), mode=mode, optimizer="Adam", **more, **options)
    run.network = network
    return run


def worker(rank: int, folder: str) -> None:
    """What one of the processes does; what it finds goes into a file."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS
    )
    found: dict[str, Any] = {}
    for kind in KINDS:
        plain = distributed_run(kind).train(1)
        shuffled = distributed_run(kind, shuffle=True).train(1)
        here = {
            "plain": contents(plain),
            "shuffled": contents(shuffled),
            "steps": shuffled.shuffler.shuffles,
        }
        unshuffle(shuffled)
        found[kind] = here | {"unshuffled": contents(shuffled)}
    # two runs with secrets of their own, the same but for them
    first, second = (
        distributed_run("Opacus's, hooks", shuffle=True, own_generator=False).train(1)
        for _ in range(2)
    )
    found["secret"] = [weights(each.network) for each in (first, second)]
    found["keys"] = [each.shuffler.state_dict()["key"] for each in (first, second)]
    # ranks that would draw differently if each used its own generator
    different = distributed_run("Opacus's, hooks", shuffle=True)
    own = torch.Generator().manual_seed(rank)
    again = distributed_run(
        "Opacus's, hooks", shuffle=True, own_generator=False, shuffle_generator=own
    ).train(1)
    found["generators"] = weights(again.network)
    # first records of other lengths: rank 0's specification for all
    spec = different.shuffler.spec
    found["specification"] = spec.to_dict()
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    """What each rank found."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    start = (
        "spawn" if torch.cuda.is_available() else "fork"
    )  # which imports nothing anew, and which CUDA forbids
    torch.multiprocessing.start_processes(worker, (str(folder),), nprocs=RANKS, start_method=start)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


@pytest.mark.parametrize("kind", KINDS)
def test_both_ranks_have_the_same_weights_and_state(ranks, kind):
    one, two = (found[kind] for found in ranks)
    assert one["steps"] == two["steps"] == 4
    for name in one["shuffled"]:
        if "gradient" not in name:
            assert torch.equal(one["shuffled"][name], two["shuffled"][name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_unshuffled_afterwards_the_run_is_the_run_without_shuffling(ranks, kind):
    for found in (each[kind] for each in ranks):
        assert distance(found["plain"], found["shuffled"]) > 1e-3
        assert distance(found["plain"], found["unshuffled"]) <= EXACT


def test_two_runs_share_no_permutation_and_two_ranks_share_all(ranks):
    for one, two in zip(ranks[0]["secret"], ranks[1]["secret"], strict=True):
        assert distance(one, two) == 0
    assert distance(*ranks[0]["secret"]) > 1e-3
    assert ranks[0]["keys"] == ranks[1]["keys"]
    assert len(set(ranks[0]["keys"])) == 2


def test_of_different_generators_rank_0s_counts(ranks):
    assert distance(ranks[0]["generators"], ranks[1]["generators"]) == 0
    assert ranks[0]["specification"] == ranks[1]["specification"]
