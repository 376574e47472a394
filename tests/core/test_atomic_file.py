"""Files that are whole at every moment."""

import io
import os
import stat

import pytest

from opacus_shuffle.core.atomic_file import atomic_write


@pytest.mark.skipif(os.name == "nt", reason="permissions and links of POSIX")
def test_a_file_is_replaced_for_its_owner_alone_and_no_link_is_followed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    target, link = tmp_path / "run.pt", tmp_path / "latest"
    target.write_bytes(b"old")
    target.chmod(0o644)
    link.symlink_to(target)
    before = os.umask(0)
    for path, content in ((link, b"linked"), ("run.pt", b"new")):
        with atomic_write(path) as file:
            file.write(content)
            file.flush()
            assert target.read_bytes() == b"old"
    os.umask(before)
    assert [link.is_symlink(), link.read_bytes(), target.read_bytes()] == [False, b"linked", b"new"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in (target, link)} == {0o600}
    assert sorted(os.listdir(tmp_path)) == ["latest", "run.pt"]


def test_a_failure_leaves_what_was_there_and_nothing_else(tmp_path):
    target = tmp_path / "run.pt"
    for before in ([], ["run.pt"]):
        with pytest.raises(TypeError), atomic_write(str(target)) as file:
            file.write(b"half", None)
        assert os.listdir(tmp_path) == before
        target.write_bytes(b"old")
    assert target.read_bytes() == b"old"


def test_what_is_no_file_is_written_to_directly():
    buffer = io.BytesIO()
    with atomic_write(buffer) as file:
        assert file is buffer
    with atomic_write(os.devnull) as file:
        assert file == os.devnull
    assert not os.path.isfile(os.devnull)
