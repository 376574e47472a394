import pytest

from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum


@pytest.fixture
def silent(monkeypatch):
    """A protocol that answers the sum itself, and has no variance."""

    def exact(self, total, num_reports, generator=None):
        return total

    monkeypatch.setattr(ShuffleVectorSum, "release_sum", exact)
    monkeypatch.setattr(ShuffleVectorSum, "variance", property(lambda self: 1e-30))
