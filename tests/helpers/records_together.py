"""Networks whose records depend on each other, or come to a layer elsewhere, and their harmless neighbours."""

from __future__ import annotations

import torch
from torch import nn


class Inside(nn.Module):
    """A network with one function of the hidden batch."""

    def __init__(self, function):
        super().__init__()
        self.first, self.last, self.function = nn.Linear(5, 6), nn.Linear(6, 3), function

    def forward(self, x):
        return self.last(self.function(self.first(x)))


MIXING = {
    "centred": lambda x: x - x.mean(0),
    "scaled": lambda x: x / (1 + x.std(0, unbiased=False)),
    "batch norm by hand": lambda x: nn.functional.batch_norm(x, None, None, training=True),
    "cumulative": lambda x: x.cumsum(0),
    "reversed": lambda x: x.flip(0),
    "attention over the batch": lambda x: torch.softmax(x @ x.T, 0) @ x,
    "gradients alone": lambda x: x + x.mean(0) - x.mean(0).detach(),
    "mixed up at random": lambda x: 0.7 * x + 0.3 * x[torch.randperm(len(x))],
    "maximum": lambda x: x / x.abs().amax(),
    "ranks": lambda x: x + x.argsort(0).argsort(0),
}
APART = {
    "dropout": lambda x: nn.functional.dropout(x, 0.5),
    "layer norm": lambda x: x - x.mean(1, keepdim=True),
    "noise": lambda x: x + torch.randn_like(x),
    "attributes": lambda x: x.clone(),
}


class Between(nn.Module):
    """Three layers, of which one sees what a function makes of the batch."""

    def __init__(self, way):
        super().__init__()
        self.first, self.middle, self.last, self.way = (
            nn.Linear(5, 6),
            nn.Linear(6, 6),
            nn.Linear(6, 3),
            way,
        )

    def forward(self, x):
        return self.last(self.way(self.middle, torch.tanh(self.first(x))))


def in_order(layer, hidden, order):
    return layer(hidden[order])[order.argsort()]


def where(layer, hidden, mask):
    return hidden.index_put((mask.nonzero()[:, 0],), layer(hidden[mask]))


MISPLACED = {
    "flipped": lambda layer, hidden: layer(hidden.flip(0)).flip(0),
    "sorted": lambda layer, hidden: in_order(layer, hidden, hidden[:, 0].argsort()),
    "at random": lambda layer, hidden: in_order(layer, hidden, torch.randperm(len(hidden))),
    "gradients scaled by the largest": lambda layer, hidden: hooked(
        layer(hidden), lambda each: each / each.abs().max()
    ),
    "some once more": lambda layer, hidden: where(layer, layer(hidden), hidden[:, 0] > 0),
}
IN_PLACE = {
    "all": lambda layer, hidden: layer(hidden),
    "twice": lambda layer, hidden: layer(torch.tanh(layer(hidden))),
    "the first ones once more": lambda layer, hidden: where(
        layer, layer(hidden), torch.arange(len(hidden)) < len(hidden) // 2
    ),
    "gradients cut off": lambda layer, hidden: hooked(
        layer(hidden), lambda each: each.clamp(-1e-3, 1e-3)
    ),
    "gradients of length one": lambda layer, hidden: hooked(layer(hidden), nn.functional.normalize),
}


def hooked(hidden, hook):
    if hidden.requires_grad:
        hidden.register_hook(hook)
    return hidden
