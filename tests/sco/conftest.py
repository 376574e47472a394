import pytest

from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum


@pytest.fixture
def silent(monkeypatch):
    """A protocol that answers the sum itself, and has no variance."""

    def exact(self, rows, generator=None):
        return sum(block.sum(0) for block in rows)

    monkeypatch.setattr(ShuffleVectorSum, "simulate", exact)
    monkeypatch.setattr(ShuffleVectorSum, "variance", property(lambda self: 1e-30))
