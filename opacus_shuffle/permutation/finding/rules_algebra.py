"""Rules of linear algebra: what treats the rows and the columns of a matrix alike, whatever their order.

What takes a matrix apart in the order of its rows or columns (triangles, eigenvectors, whose signs hang on it) fixes both of
them, and keeps the other axes of a batch of matrices.
"""

from __future__ import annotations

from opacus_shuffle.permutation.finding.labels import (
    Dimensions,
    Factors,
    IncompatibleError,
    fix_all,
    fixed_dimensions,
    unify_all,
)
from opacus_shuffle.permutation.finding.rules import broadcast, rule
from opacus_shuffle.permutation.finding.traced_run import Call, TracedRun


@rule("linalg_cholesky_ex linalg_qr linalg_lu linalg_lu_factor_ex linalg_ldl_factor_ex _linalg_eigh linalg_eig _linalg_eigvals")
def taken_apart(run: TracedRun, call: Call) -> None:
    """Fixes rows and columns; matrices of a batch are treated alike."""
    (matrix,) = call.inputs
    *batch, rows, columns = run.dimensions(matrix)
    fix_all(rows, columns)
    _set_by_batch(run, call, batch)


@rule("_linalg_svd")
def singular_values(run: TracedRun, call: Call) -> None:
    """Gives the same values for rows and columns in any order; vectors, if somebody uses them, are taken apart from it."""
    if any(map(call.reads, call.outputs[::2])):
        taken_apart(run, call)
        return
    *batch, rows, columns = run.dimensions(call["A"])
    _mix(run, batch, rows, columns)
    _set_by_batch(run, call, batch)


@rule("_linalg_det _linalg_slogdet")
def determinant(run: TracedRun, call: Call) -> None:
    """Changes its sign with the order of rows or of columns alone, so both must be permuted alike if anybody looks at it."""
    _require_unread(call, 1 if call.name == "aten._linalg_det" else 2)
    *batch, rows, columns = run.dimensions(call["A"])
    if call.reads(call.out):
        unify_all(rows, columns)
    _mix(run, batch, rows, columns)
    _set_by_batch(run, call, batch)


@rule("linalg_inv_ex linalg_pinv")
def inverse(run: TracedRun, call: Call) -> None:
    """Gives rows for columns and columns for rows; of a matrix that is taken for symmetric it reads one triangle alone."""
    if call.arguments.get("hermitian"):
        raise IncompatibleError
    run.fix(call.inputs[1:])
    *batch, rows, columns = run.dimensions(call.inputs[0])
    _mix(run, batch, rows, columns)
    run.set(call.out, [*batch, columns, rows])
    for tensor in call.outputs[1:]:
        run.set(tensor, batch)
    run.contraction(call.out)


@rule("linalg_matrix_exp")
def exponential(run: TracedRun, call: Call) -> None:
    """Multiplies a matrix by itself, so its rows and columns are the same."""
    *batch, rows, columns = run.dimensions(call["self"])
    unify_all(rows, columns)
    _mix(run, batch, rows)
    run.set(call.out, [*batch, rows, columns])
    run.contraction(call.out)


@rule("_linalg_solve_ex linalg_solve_triangular cholesky_solve")
def solved(run: TracedRun, call: Call) -> None:
    """Links rows of the matrix with those of the right side, columns with the solution's rows; a triangle is fixed."""
    _require_unread(call, 1, 3)
    matrix, right = reversed(call.inputs) if call.name == "aten.cholesky_solve" else call.inputs
    vectors = right.dim() == 1 or (call.name == "aten._linalg_solve_ex" and right.shape == matrix.shape[:-1])
    *batch, rows, columns = run.dimensions(matrix)
    others, (entering, free) = (known := [*run.dimensions(right), *([[]] * vectors)])[:-2], known[-2:]
    if call.name != "aten._linalg_solve_ex":
        fix_all(rows, columns)
    if call.arguments.get("left", True):
        result = [columns] if vectors else [columns, free]
    else:  # the solution stands before the matrix
        entering, free = free, entering
        rows, columns = columns, rows
        result = [free, columns]
    unify_all(rows, entering)
    batch = broadcast([batch, others], call.out.dim() - len(result))
    _mix(run, batch, rows, columns, free)
    run.set(call.out, [*batch, *result])
    for tensor in call.outputs[1:]:
        own = run.dimensions(matrix)[:-2]
        run.set(tensor, [*own, *fixed_dimensions(tensor.shape[len(own) :])])
    run.contraction(call.out)


@rule("linalg_cross")
def cross_product(run: TracedRun, call: Call) -> None:
    """Multiplies vectors along one axis of three coordinates, which have their places."""
    dims = broadcast(map(run.dimensions, call.inputs), call.out.dim())
    fix_all(dims[call["dim"]])
    run.reduced(dims, [call["dim"]])
    run.set(call.out, dims)


def _mix(run: TracedRun, batch: Dimensions, *axes: Factors) -> None:
    """Notes that every entry depends on all along these axes: where one occurs, no position along another one is known."""
    run.occurrences += [list(batch), *([*batch, each] for each in axes)]


def _require_unread(call: Call, start: int, stop: int | None = None) -> None:
    """Refuses where somebody uses what else came out, of which no rule speaks."""
    if any(map(call.reads, call.outputs[start:stop])):
        raise IncompatibleError


def _set_by_batch(run: TracedRun, call: Call, batch: Dimensions) -> None:
    """Labels results of which the axes of the batch alone are known."""
    for tensor in call.outputs:
        own = fixed_dimensions(tensor.shape[len(batch) :])
        run.set(tensor, [*batch, *own] if tensor.dim() >= len(batch) else fixed_dimensions(tensor.shape))
