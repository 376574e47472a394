"""What reviews of shuffled DP-SGD found wrong, each kept from coming back."""

from __future__ import annotations

import copy
import json
import math

import mpmath
import opacus
import pytest
import torch
from helpers.shuffled_runs import in_record
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import opacus_shuffle
from opacus_shuffle import PrivacyEngine
from opacus_shuffle.accountants import ShuffledCheckInAccountant
from opacus_shuffle.accountants.compute import privacy_bound, privacy_report
from opacus_shuffle.analysis import gaussian
from opacus_shuffle.analysis.permuted_gaussian import pair_epsilon
from opacus_shuffle.analysis.shuffled_rounds import ShuffledRound
from opacus_shuffle.audit import audit_training
from opacus_shuffle.engine.weights.weight_shuffling import WeightShuffling
from opacus_shuffle.permutation import find_permutations

pytestmark = pytest.mark.filterwarnings("ignore::opacus_shuffle.PrivacyAssumptionWarning")
STEP = {"num_users": 10, "steps": 1, "sample_rate": 1.0, "dimension": 5}


def parts(hidden=4):
    network = nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, 3))
    data = TensorDataset(torch.randn(60, 8), torch.randint(3, (60,)))
    return network, torch.optim.SGD(network.parameters(), lr=0.1), DataLoader(data, batch_size=6)


def made(engine, **options):
    network, sgd, loader = parts()
    return engine.make_private(
        module=network, optimizer=sgd, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0, **in_record(**options)
    )


def one_step(model, optimizer, loader):
    for x, y in loader:
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        return


def test_the_exact_pair_is_about_the_places_that_the_network_s_permutations_reach():
    engine = PrivacyEngine(accountant="shuffled_fw")
    model, optimizer, loader = made(engine, shuffle_weights=True)
    one_step(model, optimizer, loader)
    # An entry of either layer can get to as many places as there are hidden units, 4, and not to all 48 that move.
    (settings,) = engine.privacy_report(1e-5).to_dict()["settings"]
    assert (settings["dimension"], settings["orbit"]) == (48, 4)
    run = {"noise_multiplier": 1.0, "num_users": 60, "steps": 1, "sample_rate": 0.1, "delta": 1e-5, "bound": "pair"}
    narrow, wide = (privacy_bound("shuffled_fw", dimension=d, **run).epsilon for d in (4, 48))
    assert engine.get_epsilon(1e-5, bound="pair") == narrow > wide


def test_the_smallest_orbit_is_one_where_some_entry_stays():
    spec = find_permutations(parts(hidden=6)[0], torch.zeros(2, 8))
    assert {name: spec.smallest_orbit(name) for name in spec.shapes} == dict.fromkeys(spec.shapes, 6)
    assert spec.smallest_orbit("no such tensor") == 1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda optimizer, model: setattr(optimizer, "batch_clip", math.inf),
        lambda optimizer, model: setattr(optimizer, "unshuffled_noise_ratio", 1.0),
        lambda optimizer, model: model.get_parameter("_module.2.weight").requires_grad_(False),
    ],
)
def test_what_changes_the_sum_after_make_private_is_refused_at_the_step(spoil):
    engine = PrivacyEngine(accountant="shuffled_fw")
    model, optimizer, loader = made(engine, shuffle_weights=True, unshuffled_noise_multiplier=5.0)
    one_step(model, optimizer, loader)
    spoil(optimizer, model)
    with pytest.raises(ValueError, match=r"after make_private: shuffled_fw accounts for what make_private found"):
        one_step(model, optimizer, loader)
    assert len(engine.accountant) == 1


def test_noise_for_parameters_that_stay_is_refused_where_none_stay():
    network = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3, bias=False))
    loader = parts()[2]
    with pytest.raises(ValueError, match=r"unshuffled_noise_multiplier=5\.0 is for parameters that stay"):
        PrivacyEngine(accountant="shuffled_fw").make_private(
            module=network,
            optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            shuffle_weights=WeightShuffling(unshuffled_noise_multiplier=5.0),
        )


@pytest.mark.parametrize(("mu", "delta"), [(1e-12, 1e-30), (1e-12, 1e-14), (1e-10, 1e-30), (1e-8, 1e-13), (1e-4, 1e-9)])
def test_epsilon_of_a_very_noisy_step_is_no_less_than_the_exact_one(mu, delta):
    epsilon = gaussian.compute_epsilon(mu=mu, delta=delta)
    with mpmath.workdps(80):
        m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)

        def exact(e):
            return mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)

        assert exact(e) <= delta
        assert exact(e * (1 - mpmath.mpf("1e-7"))) > delta  # and no more than its stated error above it


@pytest.mark.parametrize(("rate", "steps"), [(1e-6, 900), pytest.param(1e-12, 10**9, marks=pytest.mark.slow)])
def test_tiny_rates_and_deltas_have_an_epsilon_under_replacement_too(rate, steps):
    found = [
        opacus_shuffle.compute_epsilon(
            "shuffled_fw",
            noise_multiplier=1.0,
            num_users=10,
            steps=steps,
            sample_rate=rate,
            delta=1e-30,
            bound="certified",
            adjacency=adjacency,
            dimension=5,
        )
        for adjacency in ("zero_out", "replace")
    ]
    assert 0 < found[0] <= found[1] < math.inf


def test_a_tiny_batch_clip_has_every_bound_and_an_infinite_one_is_json():
    report = privacy_report("shuffled_fw", noise_multiplier=1.0, delta=1e-5, batch_clip=1e-20, **STEP)
    assert {row.bound for row in report.bounds} >= {"published", "pair", "certified"}
    unclipped = privacy_report("shuffled_fw", noise_multiplier=1.0, delta=1e-5, batch_clip=math.inf, **STEP)
    written = json.dumps(unclipped.to_dict(), allow_nan=False)
    assert json.loads(written)["settings"][0]["batch_clip"] is None


def test_a_checkpoint_of_other_weights_loads_nothing(tmp_path):
    saved = PrivacyEngine(accountant="shuffled_fw")
    model, optimizer, loader = made(saved, shuffle_weights=True, batch_clip=0.5)
    one_step(model, optimizer, loader)
    saved.save_checkpoint(path=tmp_path / "run.pt", module=model, optimizer=optimizer)
    other = PrivacyEngine(accountant="shuffled_fw")
    network, optimizer, _ = made(other, shuffle_weights=True, batch_clip=0.25)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    with pytest.raises(ValueError, match="state_dict speaks of"):
        other.load_checkpoint(path=tmp_path / "run.pt", module=network, optimizer=optimizer)
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())


@pytest.mark.parametrize("name", ["shuffled_fw", "shuffled_checkin", "subsampled_shuffle"])
@pytest.mark.parametrize("poisson_sampling", [False, None, 0])
def test_a_stock_engine_s_batches_must_be_random_samples(name, poisson_sampling):
    with pytest.raises(ValueError, match=f"{name} accounts for batches that are random samples"):
        made(opacus.PrivacyEngine(accountant=name), poisson_sampling=poisson_sampling)


def test_an_accountant_made_from_ours_looks_at_the_sampler_too():
    class Mine(ShuffledCheckInAccountant):
        def get_optimizer_hook_fn(self, sample_rate):
            return super().get_optimizer_hook_fn(sample_rate)

    engine = opacus.PrivacyEngine()
    engine.accountant = Mine()
    with pytest.raises(ValueError, match="random samples"):
        made(engine, poisson_sampling=False)


class Residual(nn.Module):
    """One weight that the same permutation moves by rows and by columns."""

    def __init__(self):
        super().__init__()
        self.a, self.w, self.b = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        x = self.a(x)
        return self.b(x + torch.relu(self.w(x)))


def test_orbits_are_those_of_sampled_permutations_where_one_factor_moves_both_axes():
    network = Residual()
    spec = find_permutations(network, torch.zeros(2, 4))
    generator = torch.Generator().manual_seed(0)
    reached = {name: [{place} for place in range(math.prod(shape))] for name, shape in spec.shapes.items()}
    for _ in range(200):
        other = Residual()
        with torch.no_grad():
            for tensor in spec.tensors(other).values():
                tensor.copy_(torch.arange(tensor.numel(), dtype=tensor.dtype).reshape(tensor.shape))
        spec.apply_(other, spec.sample(generator))
        for name, tensor in spec.tensors(other).items():
            for place, origin in enumerate(tensor.flatten().int().tolist()):
                reached[name][origin].add(place)
    for name, places in reached.items():
        sizes = [len(each) for each in places]
        assert (spec.smallest_orbit(name), spec.largest_orbit(name)) == (min(sizes), max(sizes))
    assert (spec.smallest_orbit("w.weight"), spec.largest_orbit("w.weight")) == (6, 30)


def test_clipping_of_sums_that_is_switched_off_is_noticed():
    engine = PrivacyEngine(accountant="shuffled_fw")
    model, optimizer, loader = made(engine, shuffle_weights=True)
    optimizer.shuffled = frozenset()
    with pytest.raises(ValueError, match="shuffled_fw accounts for what make_private found"):
        one_step(model, optimizer, loader)


def test_without_shuffling_the_clipping_norm_may_change():
    engine = PrivacyEngine(accountant="shuffled_fw")
    model, optimizer, loader = made(engine)
    optimizer.max_grad_norm = 0.5
    one_step(model, optimizer, loader)
    assert len(engine.accountant) == 1


@pytest.mark.parametrize("sigma", [0.29, 0.32, 0.35])
def test_the_exact_pair_is_resolved_where_its_losses_are_rare_and_large(sigma):
    step = ShuffledRound(noise_multiplier=sigma, num_users=85_800_000, sample_rate=0.02, sampling="poisson")
    lower, upper = pair_epsilon([(step, 500)], delta=5e-6)
    assert 0 < lower <= upper <= 1.1 * lower


def test_whoever_forgets_to_shuffle_is_told():
    with pytest.warns(UserWarning, match="shuffled_fw without shuffle_weights is plain DP-SGD"):
        made(PrivacyEngine(accountant="shuffled_fw"))


def test_a_copy_of_a_private_model_is_not_audited_with_the_optimizer_of_another():
    model, optimizer, loader = made(PrivacyEngine(accountant="rdp"))
    with pytest.raises(ValueError, match="optimizer does not hold this model's parameters"):
        audit_training(
            model=copy.deepcopy(model),
            optimizer=optimizer,
            data_loader=loader,
            loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
            steps=100,
            delta=1e-5,
        )
    with pytest.raises(ValueError, match="must return the loss, a scalar tensor, got NoneType"):
        audit_training(
            model=model, optimizer=optimizer, data_loader=loader, loss=lambda model, batch: None, steps=100, delta=1e-5
        )
