"""Several processes train what one would: the same sums, noise of the right size, the same ε."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed
from helpers import toy as small_runs
from helpers.private_runs import OURS, Run
from helpers.processes import found_on_ranks
from helpers.shuffled_runs import EXACT, SeededRun, build, distance
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from scipy import stats
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from opacus_shuffle import PrivacyEngine, WeightShuffling

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo"),
    pytest.mark.skipif(
        small_runs.DEVICE.type != "cpu", reason="these ranks train on the CPU, and so does one"
    ),
    pytest.mark.filterwarnings("ignore"),
]
USERS, FEATURES, STEPS = 24, 3000, 4
LITTLE = 1e-3  # the least noise that is taken, next to sums of gradients of norm 1
LOCAL = {"local_noise": True}
WRAPPERS = {
    "Opacus's": DifferentiallyPrivateDistributedDataParallel,
    "PyTorch's": DistributedDataParallel,
}
FLAGS = {name: LOCAL if options == LOCAL else {} for name, options in OURS.items()}


def data(features=6, *, zero=False):
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(USERS, features, generator=draws)
    return TensorDataset(0 * x if zero else x, torch.arange(USERS))


def network(features=6):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(features, 5), nn.Tanh(), nn.Linear(5, 3))


def private(
    name,
    wrapper="Opacus's",
    *,
    module=None,
    batch=6,
    records=None,
    norm=1.0,
    sampler=None,
    **options,
):
    """A run of one rank; without a wrapper that of a single process."""
    module = network() if module is None else module
    module = module if wrapper is None else WRAPPERS[wrapper](module)
    sgd = torch.optim.SGD(module.parameters(), lr=1.0)
    loader = DataLoader(data() if records is None else records, batch_size=batch, sampler=sampler)
    toy = {"module": module, "optimizer": sgd, "data_loader": loader, "max_grad_norm": norm}
    run = Run(name, toy=toy, **{"sigma": 1.0, **options})
    loss = run.criterion
    run.criterion = lambda logits, y: loss(logits, y % 3)
    return run


def flat(run):
    return torch.cat([parameter.detach().flatten() for parameter in run.network.parameters()])


def noise_of(name, module=None, **options):
    """Steps on gradients of zero: the released sums, and how many records this rank had."""
    run = private(
        name,
        module=nn.Linear(FEATURES, 3, bias=False) if module is None else module,
        records=data(FEATURES, zero=True),
        loss_reduction="sum",
        sigma=2.0,
        **options,
    )
    sums, here = [], []
    for _ in range(STEPS):
        for x, y in run.loader:
            run.step((x, y))
            sums.append(run.optimizer.params[-1].grad.flatten().clone())
            here.append(len(x))
    return {
        "sums": torch.stack(sums),
        "here": here,
        "rounds": run.engine.accountant.rounds,
        "epsilon": run.engine.get_epsilon(1e-5),
    }


def drawn(name, **options):
    """Which records this rank has in each batch."""
    loader = private(name, **options).loader
    return [y.tolist() for _ in range(STEPS) for _, y in loader]


MODES = [
    ("hooks", "flat"),
    ("hooks", "per_layer"),
    ("functorch", "flat"),
    ("ghost", "flat"),
]
WHOLE: dict[str, dict[str, Any]] = {
    **{f"{mode}, {clipping}": {"mode": mode, "clipping": clipping} for mode, clipping in MODES},
    "sums": {"name": "shuffled_sums"},
    "sums, ghost": {"name": "shuffled_sums", "mode": "ghost"},
    "sums clipped": {"name": "shuffled_fw", "shuffle_weights": True},
    "sums clipped, ghost": {"name": "shuffled_fw", "shuffle_weights": True, "mode": "ghost"},
}


def whole_batches(wrapper, case):
    """The weights after two steps on all the records, next to no noise."""
    options = {"name": "shuffled_checkin", **WHOLE[case]}
    norm = (
        [0.3 + 0.1 * place for place in range(4)] if options.get("clipping") == "per_layer" else 0.7
    )
    sigma = 0.1 if options["name"] == "shuffled_sums" else LITTLE
    flags = FLAGS[options["name"]]
    run = private(wrapper=wrapper, batch=USERS, norm=norm, sigma=sigma, **{**flags, **options})
    return flat(run.train().train())


def refused(name="shuffled_checkin", wrapper="Opacus's", **options):
    """What the engine says to these keywords."""
    try:
        run = private(name, wrapper, **options)
        with run.split(2) as batches:
            run.train(batches)
    except ValueError as error:
        return str(error)
    return "nothing"


def resumed(folder):
    """An epoch in physical batches, of other numbers on each rank, and one from its checkpoint."""
    path = f"{folder}/checkpoint of {torch.distributed.get_rank()}.pt"
    first, again = (private("shuffled_checkin", shuffle_weights=True, **LOCAL) for _ in range(2))
    with first.split(3) as batches:
        first.train(batches)
    first.engine.save_checkpoint(path=path, module=first.model, optimizer=first.optimizer)
    before = flat(again.load(path))
    again.train()
    return {
        "rounds": (first.accounted, again.accounted),
        "weights": (flat(first), before, flat(again)),
    }


def shuffled(wrapper, **options):
    """A run whose weights on rank 1 begin elsewhere, for wrapping takes rank 0's."""
    inner = build("mlp")
    if torch.distributed.get_rank():
        with torch.no_grad():
            inner[0].weight += 1
    run = SeededRun(network=WRAPPERS[wrapper](inner), optimizer="Adam", **options)
    run.network = inner
    return run.fit(1)


def permuted(wrapper, **options):
    """A shuffled run, before and after its permutations are taken back, beside a plain one."""
    plain, run = (shuffled(wrapper, shuffle=shuffle, **options) for shuffle in (False, True))
    contents = {
        "plain": plain.contents(),
        "shuffled": run.contents(),
        "shuffles": run.shuffler.shuffles,
    }
    run.unshuffle()
    return contents | {"unshuffled": run.contents()}


def worker(folder):
    """What one of the processes does and finds."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    seeded = {
        name: [drawn(name, engine=PrivacyEngine(accountant=name, seed=5)) for _ in range(2)]
        for name in ("subsampled_shuffle", "shuffled_checkin")
    }
    own = torch.Generator().manual_seed(rank)
    secret = [shuffled("Opacus's", shuffle=True, own_generator=False).weights() for _ in range(2)]
    fixed = {"name": "subsampled_shuffle"}
    bad = {
        "noise_multiplier differs": {"sigma": 1.0 + rank},
        "noise_generator": {"noise_generator": torch.Generator().manual_seed(0)},
        "rand_on_empty": {"rand_on_empty": True},
        "float32": {"module": network().bfloat16()},
        "the same record": {"name": "shuffle_gauss", "poisson_sampling": False},
        "drawn by all ranks alike": {
            **fixed,
            "engine": PrivacyEngine(accountant="subsampled_shuffle", secure_mode=True),
        },
        "one record for each": {**fixed, "batch": 1},
        # PyTorch's adds up gradients in every backward pass, of which ranks would have other
        # numbers.
        "DifferentiallyPrivateDistributedDataParallel": {
            "name": "shuffle_gauss",
            "wrapper": "PyTorch's",
            "batch": 12,
        },
        "nothing": LOCAL,
    }
    return {
        "noise": {
            **{name: noise_of(name, **FLAGS[name]) for name in OURS},
            "emulated": noise_of("shuffled_checkin"),
            "unshuffled": noise_of(
                "shuffled_fw",
                nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 100)),
                shuffle_weights=WeightShuffling(unshuffled_noise_multiplier=6.0),
            ),
        },
        "drawn": {
            **{name: drawn(name) for name in OURS},
            "fixed sums": drawn("shuffled_sums", poisson_sampling=False),
            "sums in epochs": drawn("shuffled_sums", sampling="random_allocation"),
            "shares": drawn(
                "subsampled_shuffle", batch=6 // size, sampler=DistributedSampler(data())
            ),
        },
        "seeded": seeded,
        "weights": {
            (wrapper, case): whole_batches(wrapper, case) for wrapper in WRAPPERS for case in WHOLE
        },
        "resumed": resumed(folder),
        "permuted": {
            "hooks": permuted("Opacus's"),
            "PyTorch's, ghost": permuted("PyTorch's", mode="ghost"),
        },
        "secret": [
            *secret,
            shuffled(
                "Opacus's", shuffle=True, own_generator=False, shuffle_generator=own
            ).weights(),
        ],
        "refused": {words: refused(**options) for words, options in bad.items()},
    }


@pytest.fixture(
    scope="module", params=[2, pytest.param(3, marks=pytest.mark.zoo)], ids="{} ranks".format
)
def ranks(request, tmp_path_factory):
    """What each rank found."""
    return found_on_ranks(worker, size=request.param, folder=tmp_path_factory.mktemp("ranks"))


def is_noise_of(sums, deviation):
    """Whether rows are draws of N(0, deviation²), one each: refused by chance once in 10⁹."""
    squares = float(((sums.double() / deviation[:, None]) ** 2).sum())
    return bool(stats.chi2(sums.numel()).ppf(5e-10) < squares < stats.chi2(sums.numel()).isf(5e-10))


@pytest.mark.parametrize("name", [*OURS, "emulated"])
def test_the_sum_carries_the_noise_that_is_accounted_once_and_all_ranks_account_alike(ranks, name):
    noises = [rank["noise"][name] for rank in ranks]
    sums, records = noises[0]["sums"], torch.tensor([rank["here"] for rank in noises]).sum(0)
    assert all(torch.equal(rank["sums"], sums) for rank in noises)
    if name in ("shuffle_gauss", "subsampled_shuffle"):
        assert set(records.tolist()) == {6}
    if name == "secret_checkin":  # of all users, whoever is in the batch
        assert is_noise_of(sums, torch.full((4 * STEPS,), 2.0 * math.sqrt(USERS)).double())
    elif FLAGS.get(name) == LOCAL:
        assert not sums[records == 0].any()
        assert is_noise_of(sums[records > 0], 2.0 * records[records > 0].double().sqrt())
    elif name == "shuffled_sums":  # on the protocol's lattice, too
        mechanism = noises[0]["rounds"][0][0]
        steps = (
            sums.double() * mechanism.granularity / 2
            + mechanism.noise_trials * mechanism.bit_probability
        )
        assert float((steps - steps.round()).abs().max()) < 1e-2
        assert is_noise_of(sums, torch.full((4 * STEPS,), mechanism.noise_std, dtype=torch.float64))
    else:
        assert is_noise_of(sums, torch.full((4 * STEPS,), 2.0, dtype=torch.float64))
    kind = "shuffled_checkin" if name == "emulated" else name
    module, still = nn.Linear(FEATURES, 3, bias=False), data(FEATURES, zero=True)
    one = private(kind, None, module=module, records=still, sigma=2.0, **FLAGS.get(name, {}))
    for rank in noises:
        assert rank["rounds"] == [(one.engine.accountant.planned, 4 * STEPS)]
        assert rank["epsilon"] == noises[0]["epsilon"] > 0


def test_parameters_that_are_not_shuffled_carry_their_larger_noise_once(ranks):
    """If it were drawn on two ranks, its variance would be 68 instead of 36."""
    sums = ranks[0]["noise"]["unshuffled"]["sums"]
    assert is_noise_of(sums, torch.full((4 * STEPS,), 6.0, dtype=torch.float64))


@pytest.mark.parametrize("name", [*OURS, "fixed sums", "sums in epochs", "shares"])
def test_a_record_is_in_no_batch_twice_and_coins_are_fair(ranks, name):
    """24 coins of rate 1/4, 16 times: refused by chance once in 10⁹."""
    batches = list(zip(*(rank["drawn"][name] for rank in ranks), strict=True))
    for pieces in batches:
        together = [record for piece in pieces for record in piece]
        assert len(set(together)) == len(together)
        if name in ("shuffle_gauss", "subsampled_shuffle", "fixed sums", "shares"):
            assert len(together) == 6
            assert max(map(len, pieces)) - min(map(len, pieces)) <= (name != "shares")
    tosses = stats.binom(4 * STEPS * USERS, 0.25)
    heads = sum(len(piece) for pieces in batches for piece in pieces)
    assert tosses.ppf(5e-10) <= heads <= tosses.isf(5e-10)


def test_a_seed_repeats_every_rank_and_no_rank_repeats_another(ranks):
    positions = []
    for rank in ranks:
        for first, second in rank["seeded"].values():
            assert first == second
        places = rank["seeded"]["shuffled_checkin"][0]
        positions.append([[record // len(ranks) for record in batch] for batch in places])
    assert positions[0] != positions[1]
    for pieces in zip(*(rank["seeded"]["subsampled_shuffle"][0] for rank in ranks), strict=True):
        assert len({record for piece in pieces for record in piece}) == 6


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("case", WHOLE)
def test_ranks_take_the_steps_of_one_process(ranks, wrapper, case):
    """Noise is LITTLE·C per record, or of the sum; units of shuffled runs may be in any order."""
    one = whole_batches(None, case)
    bits = WHOLE[case].get("name") == "shuffled_sums"
    noise = 0.1 * 0.7 * 2 * 2 / USERS if bits else LITTLE * math.sqrt(2 * 2 / USERS)
    for weights in (rank["weights"][wrapper, case] for rank in ranks):
        assert torch.equal(weights, ranks[0]["weights"][wrapper, case])
        pair = (weights.sort().values, one.sort().values) if "clipped" in case else (weights, one)
        assert float((pair[0] - pair[1]).abs().max()) < 7 * noise


def test_a_resumed_run_goes_on_alike_on_all_ranks(ranks):
    for resumed_run in (rank["resumed"] for rank in ranks):
        assert resumed_run["rounds"] == (4, 8)
        first, loaded, second = resumed_run["weights"]
        assert torch.equal(first, loaded)
        assert not torch.equal(first, second)
        assert torch.equal(second, ranks[0]["resumed"]["weights"][2])


@pytest.mark.parametrize("kind", ["hooks", "PyTorch's, ghost"])
def test_permutations_are_the_same_on_all_ranks_and_taken_back_leave_the_plain_run(ranks, kind):
    for contents in (rank["permuted"][kind] for rank in ranks):
        assert contents["shuffles"] == 4
        assert distance(contents["plain"], contents["shuffled"]) > 1e-3
        assert distance(contents["plain"], contents["unshuffled"]) <= EXACT
        for name, value in contents["shuffled"].items():
            assert "gradient" in name or torch.equal(
                value, ranks[0]["permuted"][kind]["shuffled"][name]
            )


def test_two_runs_share_no_permutation_two_ranks_all_and_of_different_generators_rank_0_s_counts(
    ranks,
):
    for rank in ranks:
        for one, other in zip(rank["secret"], ranks[0]["secret"], strict=True):
            assert distance(one, other) == 0
    assert distance(*ranks[0]["secret"][:2]) > 1e-3


def test_what_ranks_cannot_do_together_is_refused_on_all_of_them(ranks):
    for rank in ranks:
        for words, said in rank["refused"].items():
            assert words in said, (words, said)
