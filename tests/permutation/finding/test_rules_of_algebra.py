"""Linear algebra moves what it treats alike: rows and columns of matrices that are inverted, solved or measured as a whole."""

from __future__ import annotations

import pytest
import torch
from helpers.hand_written_groups import symmetric
from helpers.labelled_operations import Function, Operation, breaks, labelled

TALL, SQUARE, SQUARES, CUBE = (5, 4), (4, 4), (2, 4, 4), (2, 3, 4)
FOUR, THREE, FIVE = symmetric(4), symmetric(3), symmetric(5)
ALL = 1 + 2 * THREE + 6 * FOUR  # entries of a cube, each axis inside of those before


def positive(x: torch.Tensor) -> torch.Tensor:
    """A symmetric matrix that has an inverse."""
    return x @ x.mT + torch.eye(x.shape[-2], dtype=x.dtype)


def solutions(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.linalg.solve(x, y)


# Of an axis that one tensor has twice there is one order, not one for each matrix.
CASES: dict[str, tuple[Function, tuple[tuple[int, ...], ...], float]] = {
    "inverse": (torch.linalg.inv, (SQUARE,), 2 * FOUR),
    "inverses": (torch.linalg.inv, (SQUARES,), 1 + 4 * FOUR),
    "with ones on the diagonal": (lambda x: torch.linalg.inv(positive(x)), ((4, 5),), FOUR + FIVE),
    "pseudoinverse": (torch.linalg.pinv, (TALL,), FIVE + FOUR),
    "pseudoinverse of one triangle": (lambda x: torch.linalg.pinv(x, hermitian=True), (SQUARE,), 0.0),
    "solution": (solutions, (SQUARE, (4, 3)), 2 * FOUR + THREE),
    "solution of a vector": (solutions, (SQUARE, (4,)), 2 * FOUR),
    "solutions of vectors": (solutions, (SQUARES, (2, 4)), 1 + 4 * FOUR),
    "solutions of one matrix": (solutions, (SQUARE, (2, 4, 3)), 1 + 2 * FOUR + 2 * THREE),
    "solution on the left": (lambda x, y: torch.linalg.solve(x, y, left=False), (SQUARE, (3, 4)), 2 * FOUR + THREE),
    "solution of a triangle": (
        lambda x, y: torch.linalg.solve_triangular(x.tril() + 3, y, upper=False),
        (SQUARE, (4, 3)),
        THREE,
    ),
    "solution by a triangle": (lambda x, y: torch.cholesky_solve(y, x.tril() + 3), (SQUARE, (4, 3)), THREE),
    "determinant": (torch.linalg.det, (SQUARE,), FOUR),
    "determinants": (torch.linalg.det, (SQUARES,), 1 + FOUR),
    "size of a determinant": (lambda x: torch.linalg.slogdet(x)[1], (SQUARE,), 2 * FOUR),
    "sign of a determinant": (lambda x: tuple(torch.linalg.slogdet(x)), (SQUARE,), FOUR),
    "logarithm of a determinant": (lambda x: torch.logdet(positive(x)), ((4, 5),), FOUR + FIVE),
    "singular values": (torch.linalg.svdvals, (TALL,), FIVE + FOUR),
    "singular values of heads": (lambda x: torch.linalg.matrix_norm(x, 2), (CUBE,), 1 + 2 * THREE + 2 * FOUR),
    "singular vectors": (lambda x: torch.linalg.svd(x)[0].abs(), ((2, 5, 4),), 1.0),
    "exponential": (torch.linalg.matrix_exp, (SQUARE,), FOUR),
    "power": (lambda x: torch.linalg.matrix_power(x, 3), (SQUARES,), 1 + FOUR),
    "triangles of heads": (lambda x: torch.linalg.cholesky(positive(x)), ((2, 4, 5),), 1 + 2 * FIVE),
    "eigenvalues of heads": (lambda x: torch.linalg.eigvalsh(x), (SQUARES,), 1.0),
    "orthogonal": (lambda x: torch.linalg.qr(x)[1], (TALL,), 0.0),
    "cross product": (torch.linalg.cross, ((5, 3), (5, 3)), FIVE),
    "cross product of columns": (lambda x, y: torch.linalg.cross(x, y, dim=0), ((3, 5), (3, 5)), FIVE),
}

LAID_OUT: dict[str, tuple[Function, tuple[tuple[int, ...], ...], float]] = {
    "ones on the diagonal": (lambda x: x * torch.eye(4).double(), (SQUARE,), FOUR),
    "ones beside the diagonal": (lambda x: x * torch.eye(4, 5).double(), ((4, 5),), 0.0),
    "corner to corner": (torch.block_diag, ((2, 3), (3, 4)), 1 + THREE + THREE + FOUR),
    "outer product": (torch.addr, ((3, 4), (3,), (4,)), THREE + FOUR),
    "sum of products": (torch.addbmm, ((3, 5), CUBE, (2, 4, 5)), THREE + FIVE + 1 + 2 * FOUR),
    "distance": (torch.dist, (CUBE, CUBE), ALL),
    "histogram": (lambda x: x.nan_to_num().histc(3, -1, 1), (CUBE,), ALL),
    "histogram with weights": (lambda x, y: torch.histogram(x, 3, range=(-1.0, 1.0), weight=y)[0], (CUBE, CUBE), ALL),
    "counts": (lambda x: torch.bincount((x > 0).long().flatten(), minlength=2), (CUBE,), ALL),
    "different values": (lambda x: torch.unique(x.nan_to_num().round().clamp(0, 0)), (CUBE,), ALL),
    "where values are": (lambda x: torch.unique((x > 0).long(), return_inverse=True)[1], (CUBE,), ALL),
    "where numbers are": (lambda x: torch.unique(x, return_inverse=True)[1], (CUBE,), 0.0),
    "some of others": (lambda x, y: torch.isin(x.round(), y.round()), (CUBE, (4,)), ALL + FOUR),
    "rounded": (
        lambda x: torch.fake_quantize_per_tensor_affine(x.nan_to_num().clamp(-9, 9).float(), 0.1, 0, -9, 9),
        (CUBE,),
        ALL,
    ),
    "rounded by channel": (
        lambda x, y: torch.fake_quantize_per_channel_affine(
            x.nan_to_num().clamp(-9, 9).float(),
            y.detach().nan_to_num().clamp(-9, 9).abs().float() + 0.1,
            torch.zeros(4).int(),
            1,
            -9,
            9,
        ),
        ((3, 4), (4,)),
        FOUR + 4 * THREE,
    ),
    "quantile": (lambda x: x.quantile(0.3, dim=1), (CUBE,), 1 + 2 * FOUR + 8 * THREE),
}


@pytest.mark.parametrize("name", CASES | LAID_OUT)
def test_rows_and_columns_that_are_treated_alike_move_and_so_does_what_is_laid_out_counted_or_rounded(name):
    function, shapes, size = (CASES | LAID_OUT)[name]
    torch.manual_seed(0)
    operation = Operation(function, shapes)
    spec = labelled(operation)
    assert spec.log2_size() == pytest.approx(size)
    assert not breaks(operation, spec, [None, 0.0] if name in LAID_OUT else [None])
