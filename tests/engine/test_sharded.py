"""Sharded networks (FSDP2) train with Opacus's accountants as Opacus trains them, bit by bit; ours refuse them by name."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import opacus
import pytest
import torch
import torch.distributed
from helpers.processes import found_on_ranks
from opacus.utils import fsdp_utils
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from opacus_shuffle import PrivacyEngine

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo"),
    pytest.mark.filterwarnings("ignore"),
]

USERS, FAR = 24, 100.0
ACCOUNTANTS = (
    "shuffle_gauss",
    "subsampled_shuffle",
    "shuffled_checkin",
    "shuffled_fw",
    "shuffled_sums",
)
WAYS = ("layer by layer", "as a whole", "in part", "by FSDP1")


def sharded(network: nn.Sequential, way: str = "layer by layer") -> nn.Module:
    """The network, sharded on the CPU, also where there is an accelerator."""
    shard = functools.partial(
        fully_shard, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    )
    if way == "layer by layer":
        with mock.patch.object(fsdp_utils, "fully_shard", shard):
            return fsdp_utils.FSDP2Wrapper(network)
    if way == "by FSDP1":
        return FullyShardedDataParallel(
            network, use_orig_params=True, device_id=torch.device("cpu")
        )
    shard(network[0] if way == "in part" else network)
    return network


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(USERS, 6, generator=generator), torch.arange(USERS) % 3)


def private(
    engine: Any, module: nn.Module, records: TensorDataset, *, batch: int = 8, **options: Any
) -> tuple[Any, ...]:
    """What ``make_private`` returns, or ``make_private_with_epsilon`` for a budget."""
    make = engine.make_private_with_epsilon if "target_epsilon" in options else engine.make_private
    sampler, kind = options.pop("sampler", None), options.pop("optimizer", torch.optim.SGD)
    options = {
        "criterion": nn.CrossEntropyLoss(reduction=options.get("loss_reduction", "mean")),
        **options,
    }
    return make(  # type: ignore[no-any-return]
        module=module,
        optimizer=kind(module.parameters(), lr=1.0),
        data_loader=DataLoader(records, batch_size=batch, sampler=sampler),
        **{"max_grad_norm": 0.7, "grad_sample_mode": "ghost_fsdp", **options},
    )


def train(made: tuple[Any, ...], model: nn.Module | None = None) -> list[list[int]]:
    """Trains for an epoch; returns the last column of each batch."""
    wrapped, optimizer, criterion, loader = made
    seen = []
    for x, y in loader:
        optimizer.zero_grad()
        criterion((model or wrapped)(x), y).backward()
        optimizer.step()
        seen.append(y.tolist())
    return seen


def weights(module: nn.Module) -> torch.Tensor:
    return torch.cat([each.full_tensor().detach().flatten() for each in module.parameters()])


RUNS: dict[str, dict[str, Any]] = {
    **{name: {"accountant": name} for name in ("rdp", "prv", "gdp")},
    "as a whole": {"way": "as a whole"},
    "a sum": {"loss_reduction": "sum"},
    "Adam": {"optimizer": torch.optim.Adam},
    "no wrapper": {"wrap_model": False},
    "a budget": {"target_epsilon": 2.0, "target_delta": 1e-5, "epochs": 3},
    "own batches": {"poisson_sampling": False, "batch": 4},
    "physical batches": {"poisson_sampling": False, "batch": 4, "physical": 2},
    "a checkpoint": {"checkpoint": True},
}


def run(
    engine_class: Any,
    folder: str,
    *,
    accountant: str = "gdp",  # the fastest to ask
    way: str = "layer by layer",
    physical: int | None = None,
    checkpoint: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """All that one rank sees of an epoch, or of two with a checkpoint between them."""
    module, engine = sharded(network(), way), engine_class(accountant=accountant)
    if options.get("poisson_sampling") is False:
        options["sampler"] = DistributedSampler(data(), seed=3)
    if "target_epsilon" not in options:
        options.setdefault("noise_multiplier", 1.1)
    torch.manual_seed(7 + torch.distributed.get_rank())
    made = private(engine, module, data(), **options)
    trained = made[0] if options.get("wrap_model", True) else module
    if physical is None:
        batches = train(made, trained)
    else:
        with BatchMemoryManager(
            data_loader=made[-1], max_physical_batch_size=physical, optimizer=made[1]
        ) as split:
            batches = train((*made[:-1], split), trained)
    if checkpoint:
        path = f"{folder}/{engine_class.__module__} on {torch.distributed.get_rank()}.pt"
        engine.save_checkpoint(path=path, module=made[0], optimizer=made[1])
        engine.load_checkpoint(path=path, module=made[0], optimizer=made[1])
        batches += train(made, trained)
    return {
        "weights": weights(module),
        "random state": torch.get_rng_state(),
        "told": (
            batches,
            made[1].noise_multiplier,
            engine.accountant.history,
            float(engine.get_epsilon(1e-5)),
        ),
    }


def moved_after_a_batch_was_left() -> dict[str, Any]:
    """Leaves the loop in the middle of a batch, then takes one step; every record moves a weight of its own."""
    torch.manual_seed(5 + torch.distributed.get_rank())
    module = sharded(
        nn.Sequential(nn.Embedding(USERS, 1, _weight=torch.zeros(USERS, 1)), nn.Flatten(0))
    )
    made = private(
        PrivacyEngine(accountant="rdp"),
        module,
        TensorDataset(torch.arange(USERS), FAR + torch.arange(USERS)),
        batch=USERS // 2,
        criterion=nn.L1Loss(reduction="sum"),
        loss_reduction="sum",
        noise_multiplier=0.0,
        max_grad_norm=1.0,
    )
    with BatchMemoryManager(
        data_loader=made[-1], max_physical_batch_size=1, optimizer=made[1]
    ) as split:
        left = train((*made[:-1], [next(iter(split))]))[0]
    before = weights(module)
    batch = train((*made[:-1], [next(iter(made[-1]))]))[0]
    return {"left": left, "before": before, "batch": batch, "after": weights(module)}


def worker(folder: str) -> dict[str, Any]:
    """What one of the processes finds."""
    engines = {"stock": opacus.PrivacyEngine, "ours": PrivacyEngine}
    found: dict[str, Any] = {
        name: {which: run(each, folder, **options) for which, each in engines.items()}
        for name, options in RUNS.items()
    }
    found["a few records"] = run(PrivacyEngine, folder, batch=2)
    found["left"] = moved_after_a_batch_was_left()
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    return found_on_ranks(worker, size=2, folder=tmp_path_factory.mktemp("ranks"))


@pytest.mark.zoo
@pytest.mark.parametrize("name", RUNS)
def test_sharded_networks_train_as_in_opacus_bit_by_bit(ranks, name):
    for found in (each[name] for each in ranks):
        ours, stock = found["ours"], found["stock"]
        assert ours["told"] == stock["told"]
        assert torch.equal(ours["weights"], stock["weights"])
        assert torch.equal(ours["random state"], stock["random state"])
        assert torch.equal(ours["weights"], ranks[0][name]["ours"]["weights"])
        assert len(ours["told"][0]) > 2
        assert not torch.equal(
            ours["weights"], torch.cat([each.detach().flatten() for each in network().parameters()])
        )


@pytest.mark.zoo
def test_a_rank_without_a_record_steps_along(ranks):
    """Opacus leaves such a batch out on the rank that has it, and the ranks then add up sums of different batches."""
    found = [each["a few records"] for each in ranks]
    for each in found:
        batches, _, history, epsilon = each["told"]
        assert len(batches) == USERS // 2
        assert [] in batches
        assert history == [(1.1, 2 / USERS, USERS // 2)]
        assert epsilon == found[0]["told"][3]
        assert torch.equal(each["weights"], found[0]["weights"])


@pytest.mark.zoo
def test_a_batch_that_was_left_does_not_join_the_next(ranks):
    found = [each["left"] for each in ranks]
    batch, left = (
        {int(record - FAR) for each in found for record in each[which]}
        for which in ("batch", "left")
    )
    assert len(left) == 2
    for each in found:
        assert not each["before"].any()
        assert set(each["after"].nonzero().flatten().tolist()) == batch
        assert len(each["after"].unique()) == 2  # nobody is in it twice


@pytest.fixture
def one_process(tmp_path):
    """A process group of this process alone."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("way", WAYS)
def test_our_accountants_refuse_sharded_networks_by_name(one_process, way):
    for accountant in ACCOUNTANTS:
        module = sharded(network(), way)
        for noise in (
            {"noise_multiplier": 1.0},
            {"target_epsilon": 2.0, "target_delta": 1e-5, "epochs": 3},
        ):
            engine = PrivacyEngine(accountant=accountant)
            with pytest.raises(
                ValueError,
                match=rf"{accountant} does not train sharded networks, got a F(SDP|ullySharded)",
            ):
                private(engine, module, data(), local_noise=accountant in ACCOUNTANTS[:3], **noise)


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
@pytest.mark.parametrize("way", WAYS)
def test_weight_shuffling_refuses_sharded_networks_by_name(one_process, way, accountant):
    with pytest.raises(
        ValueError,
        match=r"shuffle_weights does not go with sharded parameters: .*class F(SDP|ullySharded)",
    ):
        private(
            PrivacyEngine(accountant=accountant),
            sharded(network(), way),
            data(),
            noise_multiplier=1.0,
            shuffle_weights=True,
        )


NOT_IN_OPACUS: dict[str, dict[str, Any]] = {
    **{mode: {"grad_sample_mode": mode} for mode in ("hooks", "functorch", "ghost")},
    "per_layer": {"clipping": "per_layer", "max_grad_norm": [0.7] * 4},
    "in part": {"way": "in part"},
    "by FSDP1": {"way": "by FSDP1"},
}


@pytest.mark.parametrize("name", NOT_IN_OPACUS)
def test_what_opacus_does_not_do_with_sharded_networks_fails_as_there(one_process, name):
    options = dict(NOT_IN_OPACUS[name])
    way, said = options.pop("way", "layer by layer"), []
    for engine_class in (opacus.PrivacyEngine, PrivacyEngine):
        with pytest.raises(Exception) as error:  # noqa: PT011  (of Opacus and PyTorch, whatever they are)
            private(
                engine_class(accountant="rdp"),
                sharded(network(), way),
                data(),
                noise_multiplier=1.0,
                **options,
            )
        said.append((error.type, str(error.value)))
    assert said[0] == said[1]
