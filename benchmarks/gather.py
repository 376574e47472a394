"""Compares the time to shuffle rows and columns with a plain copy of the same bytes.

Run ``python benchmarks/gather.py [--device cuda]``.

Every table comes from one process in which the methods run alternately. A value is the median of
the runs; it is also given as a multiple of ``out.copy_(w)`` into allocated memory. "Appendix E" is
the published code: ``matrix[indices]``, then ``matrix[:, indices]``, with new indices for every
tensor. The result is copied back if a whole model is shuffled.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable

import numpy as np
import torch

from opacus_shuffle.permutation.moving.gather import Move, gather_

Shape = tuple[int, ...]
Axes = tuple[str | None, str | None]
"""Names of the permutations of rows and columns; ``*`` is a separate one for each layer."""

STREAM = "stream"


def encoder(layers: int, attention: list[tuple[Shape, Axes]]) -> list[tuple[Shape, Axes]]:
    """Returns the tensors of layers of width 768 and 3072, without the attention."""
    layer = [
        *attention,
        ((768,), (STREAM, None)),
        ((768,), (STREAM, None)),
        ((768,), (STREAM, None)),
        ((768,), (STREAM, None)),
    ]
    return [
        (shape, tuple(axis and axis.replace("*", str(i)) for axis in axes))
        for i in range(layers)
        for shape, axes in layer
    ]


LINEAR_LAYER = [
    *[((768, 768), ("qk*", STREAM)), ((768,), ("qk*", None))] * 2,
    *[
        ((768, 768), ("v*", STREAM)),
        ((768,), ("v*", None)),
        ((768, 768), (STREAM, "v*")),
        ((768,), (STREAM, None)),
    ],
    *[
        ((3072, 768), ("ff*", STREAM)),
        ((3072,), ("ff*", None)),
        ((768, 3072), (STREAM, "ff*")),
        ((768,), (STREAM, None)),
    ],
]
CONV1D_LAYER = [
    *[
        ((768, 2304), (STREAM, "qkv*")),
        ((2304,), ("qkv*", None)),
        ((768, 768), ("v*", STREAM)),
        ((768,), (STREAM, None)),
    ],
    *[
        ((768, 3072), (STREAM, "ff*")),
        ((3072,), ("ff*", None)),
        ((3072, 768), ("ff*", STREAM)),
        ((768,), (STREAM, None)),
    ],
]
MODELS: dict[str, list[tuple[Shape, Axes]]] = {
    "bert": [
        *[((30522, 768), (None, STREAM)), ((512, 768), (None, STREAM)), ((2, 768), (None, STREAM))],
        *[((768,), (STREAM, None)), ((768,), (STREAM, None)), *encoder(12, LINEAR_LAYER)],
        *[
            ((768, 768), ("pooler", STREAM)),
            ((768,), ("pooler", None)),
            ((2, 768), (None, "pooler")),
        ],
    ],
    "vit": [
        *[
            ((768, 3, 16, 16), (STREAM, None)),
            ((768,), (STREAM, None)),
            ((1, 1, 768), (STREAM, None)),
        ],
        *[((1, 197, 768), (None, STREAM)), *encoder(12, LINEAR_LAYER)],
        *[((768,), (STREAM, None)), ((768,), (STREAM, None)), ((100, 768), (None, STREAM))],
    ],
    "gpt2": [
        *[
            ((50257, 768), (None, STREAM)),
            ((1024, 768), (None, STREAM)),
            *encoder(12, CONV1D_LAYER),
        ],
        *[((768,), (STREAM, None)), ((768,), (STREAM, None))],
    ],
    "matrix": [((10_000, 10_000), ("rows", "columns"))],
    "matrix, rows": [((10_000, 10_000), ("rows", None))],
    "matrix, columns": [((10_000, 10_000), (None, "columns"))],
}


def plan(shapes: list[tuple[Shape, Axes]], tensors: list[torch.Tensor]) -> list[Move]:
    """Returns moves of these tensors that share the index of each permutation."""
    indices: dict[str, torch.Tensor] = {}

    def index(name: str | None, size: int, device: torch.device) -> torch.Tensor | None:
        return None if name is None else indices.setdefault(name, torch.randperm(size).to(device))

    moves = []
    for number, tensor in enumerate(tensors):
        shape, (row, column) = shapes[number % len(shapes)]
        if (
            row is not None and len([size for size in shape if size > 1]) == 1
        ):  # a vector, also as (1, 1, n)
            view = (tensor.numel(), 1, 1)
        elif len(shape) == 3:  # (1, n, d)
            view = (shape[1], shape[2], 1)
        else:
            view = (
                (shape[0], shape[1], tensor[0, 0].numel()) if len(shape) > 1 else (shape[0], 1, 1)
            )
        moves.append(
            Move(
                tensor,
                *view,
                index(row, view[0], tensor.device),
                index(column, view[1], tensor.device),
            )
        )
    return moves


@torch.no_grad()
def appendix_e(moves: list[Move], *, back: bool) -> None:
    """Runs the published code on every tensor."""
    for move in moves:
        matrix = move.tensor.view(move.rows, -1)
        device = matrix.device
        if move.row_index is not None:
            matrix = matrix[torch.randperm(matrix.shape[0], device=device)]
        if move.column_index is not None:
            matrix = matrix[:, torch.randperm(matrix.shape[1], device=device)]
        if back:
            move.tensor.copy_(matrix.view(move.tensor.shape))


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Returns the time of one run by the device's own clock."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def compare(
    title: str,
    shapes: list[tuple[Shape, Axes]],
    copies: int,
    device: torch.device,
    repeats: int,
    *,
    slow: bool,
) -> None:
    """Prints one table."""
    tensors = [torch.randn(shape, device=device) for _ in range(copies) for shape, _ in shapes]
    moves = plan(shapes, tensors)
    outputs = [torch.randn_like(tensor) for tensor in tensors]

    def copy() -> None:
        for output, tensor in zip(outputs, tensors, strict=True):
            output.copy_(tensor)

    methods: dict[str, Callable[[], object]] = {"copy_": copy}
    for executor in ("torch", *(["triton"] if device.type == "cuda" else [])):
        methods[executor] = lambda e=executor: gather_(moves, executor=e)
    if slow:
        methods["Appendix E" + ("" if len(tensors) == 1 else ", copied back")] = lambda: appendix_e(
            moves, back=len(tensors) > 1
        )
    for work in methods.values():
        work()
    times = {name: [] for name in methods}
    for _ in range(repeats):
        for name, work in methods.items():
            times[name].append(seconds(work, device))
    medians = {name: float(np.median(values)) for name, values in times.items()}
    size = sum(tensor.nbytes for tensor in tensors)
    print(
        f"\n{title}: {len(tensors)} tensors, {size / 1e6:.0f} "
        f"MB\n{'':<28}{'time':>12}{'x copy_':>10}{'x faster than E':>18}"
    )
    published = next(
        (value for name, value in medians.items() if name.startswith("Appendix")), float("nan")
    )
    for name, value in medians.items():
        print(
            f"{name:<28}{value * 1e3:>9.2f} "
            f"ms{value / medians['copy_']:>10.2f}{published / value:>18.1f}",
            flush=True,
        )


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--copies",
        nargs="+",
        type=int,
        default=[1, 3],
        help="1: weights; 3: weights and both of Adam's moments",
    )
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    where = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{torch.get_num_threads()} threads"
    )
    print(f"{platform.machine()}, PyTorch {torch.__version__}, {device.type}, {where}")
    for name in arguments.models:
        for copies in arguments.copies if "matrix" not in name else [1]:
            title = name + (", with both moments" if copies == 3 else "")
            compare(title, MODELS[name], copies, device, arguments.repeats, slow=copies == 1)


if __name__ == "__main__":
    main()
