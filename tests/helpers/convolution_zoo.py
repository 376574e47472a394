"""Convolutional and recurrent networks of the zoo."""

import torch
import torch.nn.functional as F
from opacus.layers import DPGRU, DPLSTM
from torch import nn

from helpers.model_zoo import BATCH, Builder, Wired, collect

CONVOLUTIONS: dict[str, Builder] = {}
IMAGE = (BATCH, 3, 16, 16)

network = collect(CONVOLUTIONS)


@network
def conv_net():
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU()]
    layers += [nn.Conv2d(16, 24, 3, stride=2, padding=1), nn.GroupNorm(4, 24), nn.ReLU()]
    layers += [nn.Conv2d(24, 24, 3, padding=1, groups=24), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(24 * 16, 40), nn.Tanh(), nn.Linear(40, 5)), torch.randn(
        IMAGE
    )


@network
def conv_net_with_other_norms():
    layers = [
        nn.Conv2d(3, 8, 3),
        nn.GroupNorm(1, 8),
        nn.ReLU(),
        nn.Conv2d(8, 6, 3),
        nn.InstanceNorm2d(6, affine=True),
        nn.ELU(),
    ]
    layers += [
        nn.Conv2d(6, 10, 3),
        nn.GroupNorm(10, 10),
        nn.AvgPool2d(2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(10, 4),
    ]
    return nn.Sequential(*layers), torch.randn(IMAGE)


@network
def batch_norm():
    layers = [
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3),
        nn.BatchNorm2d(12),
        nn.ReLU(),
    ]
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 4)
    ), torch.randn(IMAGE)


@network
def grouped_conv():
    layers = [
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3, groups=2),
        nn.ReLU(),
        nn.Conv2d(12, 5, 3),
    ]
    return nn.Sequential(*layers, nn.AdaptiveMaxPool2d(1), nn.Flatten()), torch.randn(IMAGE)


class ResidualBlock(nn.Module):
    """Two convolutions with GroupNorm around a skip connection, itself one where sizes change."""

    def __init__(self, channels: int, out: int, groups: int) -> None:
        super().__init__()
        stride = 1 if channels == out else 2
        self.conv1, self.norm1 = (
            nn.Conv2d(channels, out, 3, stride, 1, bias=False),
            nn.GroupNorm(groups, out),
        )
        self.conv2, self.norm2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.GroupNorm(groups, out)
        self.skip = nn.Identity()
        if channels != out:
            self.skip = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.GroupNorm(groups, out)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        change = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(change + self.skip(x))


class ResNet(nn.Module):
    """A stem, stages of two blocks, average pooling, one linear layer."""

    def __init__(self, widths: tuple[int, ...] = (16, 32), groups: int = 4) -> None:
        super().__init__()
        self.stem, self.norm = (
            nn.Conv2d(3, widths[0], 3, padding=1, bias=False),
            nn.GroupNorm(groups, widths[0]),
        )
        blocks = [
            ResidualBlock(a, b, groups)
            for w, v in zip(widths[:1] + widths, widths, strict=False)
            for a, b in ((w, v), (v, v))
        ]
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(widths[-1], 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.blocks(F.relu(self.norm(self.stem(x)))).mean((2, 3)))


@network
def resnet():
    return ResNet(), torch.randn(IMAGE)


@network
def unet():
    def wiring(m, x):
        skip = F.relu(m.down(x))
        deep = F.relu(m.bottom(F.max_pool2d(skip, 2)))
        return m.out(F.relu(m.mix(torch.cat([skip, m.up(deep)], 1))))

    layers = {"down": nn.Conv2d(3, 8, 3, padding=1), "bottom": nn.Conv2d(8, 12, 3, padding=1)}
    layers |= {
        "up": nn.ConvTranspose2d(12, 7, 2, stride=2),
        "mix": nn.Conv2d(15, 6, 3, padding=1),
        "out": nn.Conv2d(6, 2, 1),
    }
    return Wired(wiring, **layers), torch.randn(IMAGE)


@network
def dense_net():
    def wiring(m, x):
        for layer in (m.one, m.two, m.three):
            x = torch.cat([x, F.relu(layer(x))], 1)
        return m.out(m.norm(x).mean((2, 3)))

    layers = {
        "one": nn.Conv2d(3, 5, 3, padding=1),
        "two": nn.Conv2d(8, 6, 3, padding=1),
        "three": nn.Conv2d(14, 4, 3, padding=1),
    }
    return Wired(wiring, **layers, norm=nn.GroupNorm(1, 18), out=nn.Linear(18, 4)), torch.randn(
        IMAGE
    )


@network
def squeeze_and_excitation():
    def wiring(m, x):
        x = F.relu(m.conv(x))
        gate = torch.sigmoid(m.excite(F.relu(m.squeeze(x.mean((2, 3))))))
        return m.out((x * gate[:, :, None, None]).flatten(2).amax(2))

    layers = {
        "conv": nn.Conv2d(3, 8, 3),
        "squeeze": nn.Linear(8, 4),
        "excite": nn.Linear(4, 8),
        "out": nn.Linear(8, 5),
    }
    return Wired(wiring, **layers), torch.randn(IMAGE)


@network
def pixel_shuffle():
    layers = [
        nn.Conv2d(3, 6, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(6, 5 * 4, 3, padding=1),
        nn.PixelShuffle(2),
        nn.Conv2d(5, 3, 1),
    ]
    return nn.Sequential(*layers), torch.randn(BATCH, 3, 8, 8)


@network
def text_cnn():
    def wiring(m, ids):
        x = m.embedding(ids).transpose(1, 2)
        return m.out(torch.cat([F.relu(m.three(x)).amax(2), F.relu(m.four(x)).amax(2)], 1))

    layers = {
        "embedding": nn.Embedding(30, 8),
        "three": nn.Conv1d(8, 6, 3),
        "four": nn.Conv1d(8, 5, 4),
        "out": nn.Linear(11, 3),
    }
    return Wired(wiring, **layers), torch.randint(0, 30, (BATCH, 10))


# Recurrent
# ------------------------------------------------------------------------------------------


def recurrent(layer: nn.Module) -> nn.Module:
    def wiring(m, ids):
        return m.out(m.layer(m.embedding(ids))[0][:, -1])

    return Wired(wiring, embedding=nn.Embedding(30, 6), layer=layer, out=nn.Linear(8, 3))


@network
def lstm():
    return recurrent(DPLSTM(6, 8, num_layers=2, batch_first=True)), torch.randint(0, 30, (BATCH, 5))


@network
def gru():
    return recurrent(DPGRU(6, 8, batch_first=True)), torch.randint(0, 30, (BATCH, 5))
