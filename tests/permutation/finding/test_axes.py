"""The algebra of labels: products and sums of axes, and what becomes one."""

import pytest

from opacus_shuffle.permutation.finding.axes import (
    Axis,
    IncompatibleError,
    atoms,
    concatenation,
    fix_all,
    grids,
    product,
    regroup,
    split_concatenation,
    terms,
    unify,
    unify_all,
)


def test_entries_of_sums_of_products_lie_where_grids_say():
    heads, width, tail = Axis(2), Axis(3), Axis(4)
    whole = concatenation([product([heads, width]), tail])
    assert grids([whole]) == [(0, ((heads, 3), (width, 1))), (6, ((tail, 1),))]
    assert terms([whole]) == [(heads, width), (tail,)]
    copies = Axis(5)
    assert grids([copies, whole]) == [
        (0, ((copies, 10), (heads, 3), (width, 1))),
        (6, ((copies, 10), (tail, 1))),
    ]


def test_views_split_atoms_and_fix_only_what_does_not_divide():
    units, places = Axis(6), Axis(35)
    one, other, rest = regroup([units, places], [2, 3, 35])
    assert [axis.size for axis in (*one, *other, *rest)] == [2, 3, 35]
    assert not any(atom.fixed for atom in atoms([units, places]))
    odd = Axis(6)
    regroup([odd, places], [10, 21])
    assert all(atom.fixed for atom in atoms([odd, places]))
    assert not any(atom.fixed for atom in atoms([units]))


def test_rows_of_factors_that_meet_are_refined_until_they_agree():
    whole, heads, width = Axis(12), Axis(3), Axis(4)
    unify_all([whole], [heads, width])
    assert atoms([whole]) == atoms([heads, width])
    fix_all([heads])
    assert [atom.fixed for atom in atoms([whole])] == [True, False]


def test_sums_that_meet_are_cut_at_the_boundaries_of_both():
    one, other = Axis(10), Axis(10)
    split_concatenation(one, [4, 6])
    split_concatenation(other, [7, 3])
    unify(one, other)
    assert atoms([one]) == atoms([other])
    assert [atom.size for atom in atoms([one])] == [4, 3, 3]


def test_of_two_atoms_that_meet_the_older_one_stays_and_a_fixed_one_fixes():
    older, younger = Axis(5), Axis(5)
    unify(younger, older)
    assert younger.root is older
    unify(Axis(5, fixed=True), younger)
    assert older.root.fixed


def test_axes_of_other_sizes_never_become_one():
    with pytest.raises(IncompatibleError):
        unify(Axis(3), Axis(4))
    three, four = Axis(3), Axis(4)
    unify_all([three], [four])
    assert three.fixed
    assert four.fixed
