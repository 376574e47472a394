"""Two and three processes train what one would: the same sums, the noise of every record's own report, and the same ε."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed
from helpers.processes import found_on_ranks
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.utils.batch_memory_manager import BatchMemoryManager
from scipy import stats
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from opacus_shuffle import PrivacyEngine
from opacus_shuffle.engine.ranks import Ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")

USERS, FEATURES, STEPS = 24, 3000, 4
LITTLE = 1e-3  # the least noise that is taken, next to sums of gradients of norm 1
ACCOUNTANTS = (
    "shuffle_gauss",
    "subsampled_shuffle",
    "shuffled_checkin",
    "shuffled_fw",
    "shuffled_sums",
)
WRAPPERS = {
    "Opacus's": DifferentiallyPrivateDistributedDataParallel,
    "PyTorch's": DistributedDataParallel,
}


def data(users: int = USERS, features: int = 6) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(users, features, generator=generator), torch.arange(users) % 3)


def network(features: int = 6) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(features, 5), nn.Tanh(), nn.Linear(5, 3))


def private(
    accountant: str,
    module: nn.Module,
    records: TensorDataset,
    *,
    batch: int,
    engine: Any = None,
    **options: Any,
):
    """What ``make_private`` returns, and its engine."""
    engine = engine or PrivacyEngine(accountant=accountant)
    sampler = options.pop("sampler", None)
    made = engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
        data_loader=DataLoader(records, batch_size=batch, sampler=sampler),
        **{"max_grad_norm": 1.0, **options},
    )
    return engine, made


def noise_of_one_step(accountant: str, **options: Any) -> dict[str, Any]:
    """Steps on gradients of zero: the sums that are released, and how many records each rank had."""
    model = DifferentiallyPrivateDistributedDataParallel(nn.Linear(FEATURES, 1, bias=False))
    records = TensorDataset(torch.zeros(USERS, FEATURES))
    engine, (private_model, optimizer, loader) = private(
        accountant, model, records, batch=USERS // 4, loss_reduction="sum", **options
    )
    sums, here = [], []
    for _ in range(STEPS):
        for (x,) in loader:
            private_model(x).sum().backward()
            optimizer.step()
            sums.append(optimizer.params[0].grad.clone())
            here.append(len(x))
            optimizer.zero_grad()
    return {
        "sums": torch.stack(sums).flatten(1),
        "here": here,
        "epsilon": engine.get_epsilon(1e-5),
        "rounds": engine.accountant.rounds,
    }


def whole_batches(
    wrapper: Any, mode: str, clipping: str, accountant: str = "shuffled_checkin", **options: Any
) -> torch.Tensor:
    """The weights after two steps on all the records, next to no noise."""
    model = network() if wrapper is None else wrapper(network())
    norm = [0.3 + 0.1 * i for i in range(4)] if clipping == "per_layer" else 0.7
    _, made = private(
        accountant,
        model,
        data(),
        batch=USERS,
        clipping=clipping,
        grad_sample_mode=mode,
        max_grad_norm=norm,
        **options,
    )
    private_model, optimizer, loader = made[0], made[1], made[-1]
    criterion = made[2] if mode == "ghost" else nn.CrossEntropyLoss()
    for _ in range(2):
        for x, y in loader:
            criterion(private_model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([each.detach().flatten() for each in model.parameters()])


MODES = [
    ("hooks", "flat"),
    ("hooks", "per_layer"),
    ("functorch", "flat"),
    ("ew", "flat"),
    ("ghost", "flat"),
]


def drawn_records(accountant: str, **options: Any) -> list[list[int]]:
    """Which records this rank has in each batch."""
    records = TensorDataset(torch.zeros(USERS, 6), torch.arange(USERS))
    model = DifferentiallyPrivateDistributedDataParallel(network())
    engine = options.pop("engine", None)
    _, (*_, loader) = private(
        accountant,
        model,
        records,
        engine=engine,
        **{"batch": 6, "noise_multiplier": 1.0, **options},
    )
    return [y.tolist() for _ in range(STEPS) for _, y in loader]


def refused(accountant: str = "shuffled_checkin", engine: Any = None, **options: Any) -> str:
    """What the engine says to these keywords."""
    model = DifferentiallyPrivateDistributedDataParallel(options.pop("module", None) or network())
    try:
        private(
            accountant,
            model,
            data(),
            batch=options.pop("batch", 6),
            engine=engine,
            **{"noise_multiplier": 1.0, **options},
        )
    except ValueError as error:
        return str(error)
    return "nothing"


def resumed(folder: str) -> dict[str, Any]:
    """Two epochs in a row, and the second one again from a checkpoint."""
    found = []
    path = f"{folder}/checkpoint of {torch.distributed.get_rank()}.pt"
    for number in range(2):
        model = DifferentiallyPrivateDistributedDataParallel(network())
        engine, (private_model, optimizer, loader) = private(
            "shuffled_checkin",
            model,
            data(),
            batch=6,
            local_noise=True,
            noise_multiplier=1.0,
            shuffle_weights=True,
        )
        if number:
            engine.load_checkpoint(path=path, module=private_model, optimizer=optimizer)
        for x, y in loader:
            nn.functional.cross_entropy(private_model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        if not number:
            engine.save_checkpoint(path=path, module=private_model, optimizer=optimizer)
        weights = torch.cat([each.detach().flatten() for each in model.parameters()])
        found.append({"rounds": engine.accountant.rounds, "weights": weights})
    return {"first": found[0], "second": found[1]}


def worker(folder: str) -> dict[str, Any]:
    """What one of the processes does and finds."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    found: dict[str, Any] = {"noise": {}, "weights": {}, "drawn": {}, "refused": {}}
    for accountant in ACCOUNTANTS:
        local = accountant not in ("shuffled_fw", "shuffled_sums")
        more = {"shuffle_weights": False} if accountant == "shuffled_fw" else {}
        found["noise"][accountant] = noise_of_one_step(
            accountant, noise_multiplier=2.0, local_noise=local, **more
        )
        found["drawn"][accountant] = drawn_records(accountant)
    found["noise"]["emulated"] = noise_of_one_step("shuffled_checkin", noise_multiplier=2.0)
    found["shares"] = drawn_records(
        "subsampled_shuffle", batch=6 // size, sampler=DistributedSampler(data())
    )
    found["drawn"]["fixed sums"] = drawn_records("shuffled_sums", poisson_sampling=False)
    seeded = [
        drawn_records(name, engine=PrivacyEngine(accountant=name, seed=5))
        for name in ACCOUNTANTS[1:3]
        for _ in range(2)
    ]
    found["seeded"] = seeded
    for name, wrapper in WRAPPERS.items():
        for mode, clipping in MODES:
            found["weights"][name, mode, clipping] = whole_batches(
                wrapper, mode, clipping, local_noise=True, noise_multiplier=LITTLE
            )
        found["weights"][name, "sums"] = whole_batches(
            wrapper, "hooks", "flat", "shuffled_sums", noise_multiplier=0.1
        )
        for mode in ("hooks", "ghost"):
            found["weights"][name, "batch clip", mode] = whole_batches(
                wrapper, mode, "flat", "shuffled_fw", noise_multiplier=LITTLE, shuffle_weights=True
            )
    module = DifferentiallyPrivateDistributedDataParallel(network())
    engine, (model, optimizer, loader) = private(
        "shuffled_checkin",
        module,
        data(),
        batch=4,
        local_noise=True,
        noise_multiplier=1.0,
        sampler=DistributedSampler(data()),
    )
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=3, optimizer=optimizer
    ) as physical:
        for x, y in physical:
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    found["physical"] = (
        torch.cat([each.detach().flatten() for each in module.parameters()]),
        engine.accountant.rounds,
    )
    found["resumed"] = resumed(folder)
    module = DistributedDataParallel(network())
    _, (model, optimizer, loader) = private(
        "shuffle_gauss", module, data(), batch=12, local_noise=True, noise_multiplier=1.0
    )
    try:
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
        ) as physical:
            x, y = next(iter(physical))
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    except ValueError as error:
        found["split"] = str(error)
    generator = torch.Generator().manual_seed(0)
    found["refused"] = {
        "noise_multiplier differs": refused(local_noise=True, noise_multiplier=1.0 + rank),
        "noise_generator": refused(noise_generator=generator),
        "rand_on_empty": refused(rand_on_empty=True),
        "float32": refused(module=network().bfloat16()),
        "one record": refused("shuffle_gauss", poisson_sampling=False),
        "drawn by all ranks alike": refused(
            "subsampled_shuffle", PrivacyEngine(accountant="subsampled_shuffle", secure_mode=True)
        ),
        "one record for each": refused("subsampled_shuffle", batch=1),
        "nothing": refused(local_noise=True),
    }
    return found


@pytest.fixture(
    scope="module", params=[pytest.param(2, marks=pytest.mark.zoo), 3], ids="{} ranks".format
)
def ranks(request, tmp_path_factory) -> list[dict[str, Any]]:
    """What each rank found."""
    return found_on_ranks(worker, size=request.param, folder=tmp_path_factory.mktemp("ranks"))


def is_noise_of(sums: torch.Tensor, deviation: torch.Tensor) -> bool:
    """Whether these are draws of centred Gaussians of these deviations, one per row: refused by chance once in 10⁹."""
    squares = float(((sums.double() / deviation[:, None]) ** 2).sum())
    return bool(stats.chi2(sums.numel()).ppf(5e-10) < squares < stats.chi2(sums.numel()).isf(5e-10))


@pytest.mark.parametrize("accountant", ["shuffle_gauss", "subsampled_shuffle", "shuffled_checkin"])
def test_the_sum_carries_the_noise_of_all_ranks_records(ranks, accountant):
    found = [each["noise"][accountant] for each in ranks]
    records = torch.tensor([each["here"] for each in found]).sum(0)
    assert len(records) == 4 * STEPS
    with_records = records > 0
    assert is_noise_of(found[0]["sums"][with_records], 2.0 * records[with_records].double().sqrt())
    assert not found[0]["sums"][~with_records].any()
    if accountant != "shuffled_checkin":
        assert set(records.tolist()) == {USERS // 4}
    for other in found[1:]:
        assert torch.equal(other["sums"], found[0]["sums"])


@pytest.mark.parametrize("accountant", ["emulated", "shuffled_fw"])
def test_noise_of_the_sum_is_added_once(ranks, accountant):
    found = [each["noise"][accountant] for each in ranks]
    assert is_noise_of(found[0]["sums"], torch.full((4 * STEPS,), 2.0, dtype=torch.float64))
    assert all(torch.equal(each["sums"], found[0]["sums"]) for each in found)


def test_a_shuffled_sum_is_that_of_all_users_of_all_ranks(ranks):
    """Every coordinate of the answer is on the protocol's lattice, and as noisy as the protocol says."""
    found = [each["noise"]["shuffled_sums"] for each in ranks]
    mechanism = found[0]["rounds"][0][0]
    sums = found[0]["sums"].double()
    steps = sums * mechanism.granularity / 2 + mechanism.noise_trials * mechanism.bit_probability
    assert float((steps - steps.round()).abs().max()) < 1e-3
    assert is_noise_of(sums, torch.full((4 * STEPS,), mechanism.noise_std, dtype=torch.float64))
    assert all(torch.equal(each["sums"], found[0]["sums"]) for each in found)


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_every_rank_accounts_for_the_rounds_that_one_process_would(ranks, accountant):
    local = accountant not in ("shuffled_fw", "shuffled_sums")
    engine, _ = private(
        accountant,
        nn.Linear(FEATURES, 1, bias=False),
        TensorDataset(torch.zeros(USERS, FEATURES)),
        batch=USERS // 4,
        noise_multiplier=2.0,
        local_noise=local,
    )
    planned = engine.accountant.planned
    for found in (each["noise"][accountant] for each in ranks):
        assert found["rounds"] == [(planned, 4 * STEPS)]
        assert found["epsilon"] == ranks[0]["noise"][accountant]["epsilon"] > 0


@pytest.mark.parametrize("accountant", [*ACCOUNTANTS, "fixed sums"])
def test_a_record_is_in_no_batch_twice(ranks, accountant):
    for pieces in zip(*(each["drawn"][accountant] for each in ranks), strict=True):
        together = [record for piece in pieces for record in piece]
        assert len(set(together)) == len(together)
        if accountant in ("shuffle_gauss", "subsampled_shuffle", "fixed sums"):
            assert len(together) == 6
            assert max(map(len, pieces)) - min(map(len, pieces)) <= 1


def test_with_a_distributed_sampler_a_loader_s_batch_is_one_rank_s_share(ranks):
    for pieces in zip(*(each["shares"] for each in ranks), strict=True):
        assert [len(set(piece)) for piece in pieces] == [6 // len(ranks)] * len(ranks)
        assert len({record for piece in pieces for record in piece}) == 6


def test_coins_are_fair_on_every_rank(ranks):
    """24 coins of rate 1/4, 16 times, by three accountants: refused by chance once in 10⁹."""
    poisson = ("shuffled_checkin", "shuffled_fw", "shuffled_sums")
    heads = sum(len(piece) for each in ranks for name in poisson for piece in each["drawn"][name])
    tosses = stats.binom(len(poisson) * 4 * STEPS * USERS, 0.25)
    assert tosses.ppf(5e-10) <= heads <= tosses.isf(5e-10)


def test_a_seed_repeats_every_rank_and_no_rank_repeats_another(ranks):
    for each in ranks:
        assert each["seeded"][0] == each["seeded"][1]
        assert each["seeded"][2] == each["seeded"][3]
    size = len(ranks)
    positions = [
        [[record // size for record in batch] for batch in each["seeded"][2]] for each in ranks
    ]
    assert positions[0] != positions[1]
    for pieces in zip(*(each["seeded"][0] for each in ranks), strict=True):
        assert len({record for piece in pieces for record in piece}) == 6


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(("mode", "clipping"), MODES)
def test_ranks_take_the_steps_of_one_process(ranks, wrapper, mode, clipping):
    """Noise is LITTLE·C per record: of some 50 weights, two steps of 24 reports, a mean's deviation is below 1e-3/√12."""
    one = whole_batches(None, mode, clipping, local_noise=True, noise_multiplier=LITTLE)
    for found in (each["weights"][wrapper, mode, clipping] for each in ranks):
        assert torch.equal(found, ranks[0]["weights"][wrapper, mode, clipping])
        assert float((found - one).abs().max()) < 7 * LITTLE * math.sqrt(2 * 2 / USERS)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_sums_of_ranks_are_sums_of_one_process(ranks, wrapper):
    one = whole_batches(None, "hooks", "flat", "shuffled_sums", noise_multiplier=0.1)
    for found in (each["weights"][wrapper, "sums"] for each in ranks):
        assert torch.equal(found, ranks[0]["weights"][wrapper, "sums"])
        assert float((found - one).abs().max()) < 7 * 2 * 0.1 * 0.7 * 2 / USERS


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_the_sum_of_all_ranks_is_clipped(ranks, wrapper, mode):
    """Units may be in another order, so what is compared is the sorted weights; the steps are as long as one record's clip."""
    one = whole_batches(
        None, mode, "flat", "shuffled_fw", noise_multiplier=LITTLE, shuffle_weights=True
    )
    for found in (each["weights"][wrapper, "batch clip", mode] for each in ranks):
        assert torch.equal(found, ranks[0]["weights"][wrapper, "batch clip", mode])
        assert (
            float((found.sort().values - one.sort().values).abs().max())
            < 7 * 2 * 2 * LITTLE * 0.7 / USERS
        )


def test_physical_batches_differ_in_number_and_ranks_stay_in_step(ranks):
    for weights, rounds in (each["physical"] for each in ranks):
        assert torch.equal(weights, ranks[0]["physical"][0])
        assert [count for _, count in rounds] == [USERS // (4 * len(ranks))]


def test_pytorch_s_wrapper_takes_no_split_batches(ranks):
    """It adds up gradients in every backward pass, of which ranks would have different numbers and wait for ever."""
    for each in ranks:
        assert "DifferentiallyPrivateDistributedDataParallel" in each["split"]


def test_a_resumed_run_goes_on_alike_on_all_ranks(ranks):
    for each in (each["resumed"] for each in ranks):
        assert [count for _, count in each["first"]["rounds"]] == [4]
        assert [count for _, count in each["second"]["rounds"]] == [8]
        assert torch.equal(each["second"]["weights"], ranks[0]["resumed"]["second"]["weights"])
        assert not torch.equal(each["second"]["weights"], each["first"]["weights"])


def test_what_ranks_cannot_do_together_is_refused_on_all_of_them(ranks):
    for each in ranks:
        for words, said in each["refused"].items():
            assert words in said, (words, said)


def test_a_network_that_waits_for_a_process_group_is_told_so():
    class Parallel(DifferentiallyPrivateDistributedDataParallel):
        def __init__(self, module):
            nn.Module.__init__(self)
            self.module = module

    with pytest.raises(ValueError, match="init_process_group"):
        Ranks.of(Parallel(copy.deepcopy(network())))
