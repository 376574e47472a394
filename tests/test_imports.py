"""What is imported when: PyTorch and Opacus only where they are needed; accountants always."""

from __future__ import annotations

import subprocess
import sys

import pytest

from opacus_shuffle.commands.main import COMMANDS

HEAVY = "print(sorted({'torch', 'opacus', 'matplotlib', 'scipy.stats'} & sys.modules.keys()))"
RUN = "--num-users 60000 --steps 3 --noise-multiplier 3 --delta 1e-5"


def after(code: str) -> str:
    """What a fresh process prints after so much code."""
    script = f"import contextlib, io, sys\n{code}\n"
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def command(line: str) -> str:
    """Code that runs a command and swallows what it prints."""
    quiet = (
        "contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), "
        "contextlib.suppress(SystemExit)"
    )
    return f"from opacus_shuffle.commands.main import main\nwith {quiet}: main({line.split()!r})"


@pytest.mark.parametrize("line", ["--version", "--help", "compar", ""])
def test_help_and_mistakes_need_neither_network_nor_opacus(line):
    assert eval(after(f"{command(line)}\n{HEAVY}")) == []


@pytest.mark.parametrize(
    "line",
    ["plan", "train --help", "train --accountant shufle_gauss", "compare --help", "audit --help"],
)
def test_a_commands_own_help_and_mistakes_need_mechanisms_but_neither_network_nor_opacus(line):
    assert eval(after(f"{command(line)}\n{HEAVY}")) == []


@pytest.mark.parametrize(
    "line",
    ["epsilon --mechanism shuffle_gauss", "report --mechanism shuffled_checkin --sample-rate 0.1"],
)
def test_numbers_of_gaussian_reports_need_neither_network_nor_opacus(line):
    assert eval(after(f"{command(f'{line} {RUN}')}\n{HEAVY}")) == ["scipy.stats"]


def test_a_mistake_names_the_command_whose_help_is_meant():
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "opacus_shuffle.commands.main",
            "epsilon",
            *RUN.split(),
            "--mechanism",
            "shuffle_gauss",
            "--espilon",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    assert (
        ran.stderr
        == "opacus-shuffle: unrecognized arguments: --espilon; see opacus-shuffle epsilon --help\n"
    )


@pytest.mark.parametrize(
    "first",
    [
        "import opacus_shuffle, opacus",
        pytest.param("import opacus, opacus_shuffle", marks=pytest.mark.zoo),
        pytest.param(
            "import opacus_shuffle\nfrom importlib.util import "
            "find_spec\nfind_spec('opacus').loader.is_package\nimport opacus",
            marks=pytest.mark.zoo,
        ),
        pytest.param(
            "import opacus_shuffle.accountants.compute\nfrom opacus.accountants import "
            "registry\nimport opacus",
            marks=pytest.mark.zoo,
        ),
        pytest.param(
            "from opacus_shuffle.accountants import ShuffleAccountant\nimport opacus",
            marks=pytest.mark.zoo,
        ),
    ],
)
def test_opacus_knows_the_accountants_in_any_order_of_imports(first):
    accountant = "type(opacus.PrivacyEngine(accountant='shuffle_gauss').accountant).__name__"
    code = f"print({accountant}, type(opacus.__loader__).__name__)"
    assert after(f"{first}\n{code}") == "ShuffleAccountant SourceFileLoader"


def test_an_import_that_fails_is_waited_for_again(tmp_path):
    (tmp_path / "late.py").write_text(
        "import os\nif 'READY' not in os.environ: raise ImportError('not yet')\n"
    )
    code = f"""
import os
sys.path.insert(0, {str(tmp_path)!r})
from opacus_shuffle.core.lazy_import import after_import
after_import("late", lambda: print("late is there:", "late" in sys.modules))
after_import("never", lambda: print("never"))
for _ in range(2):
    try:
        import late
    except ImportError as error:
        print(error)
    try:
        import never
    except ModuleNotFoundError:
        os.environ["READY"] = "yes"
after_import("late", lambda: print("at once"))
"""
    assert after(code).splitlines() == ["not yet", "late is there: True", "at once"]


def test_a_finder_that_fails_or_a_package_that_was_barred_is_waited_for_again(tmp_path):
    (tmp_path / "late.py").write_text("")
    code = f"""
class Failing:
    def find_spec(self, name, path, target=None):
        if name == "late":
            raise ImportError("no network")
sys.path.insert(0, {str(tmp_path)!r})
from opacus_shuffle.core.lazy_import import after_import
sys.modules["late"] = None
after_import("late", lambda: print("late is there:", sys.modules["late"] is not None))
del sys.modules["late"]
sys.meta_path.insert(1, Failing())
with contextlib.suppress(ImportError):
    import late
del sys.meta_path[1]
import late
"""
    assert after(code) == "late is there: True"


def test_every_public_name_is_there_and_no_other():
    packages = "packages = [opacus_shuffle, opacus_shuffle.accountants]"
    missing = (
        "print([name for package in packages for name in package.__all__ "
        "if not (name in dir(package) and hasattr(package, name))])"
    )
    rest = "print([hasattr(package, 'NonsenseAccountant') for package in packages])"
    assert after(f"import opacus_shuffle\n{packages}\n{missing}\n{rest}") == f"[]\n{[False] * 2}"


@pytest.mark.zoo
@pytest.mark.parametrize(
    "module",
    [
        "core.opacus_compat",
        "accountants.accountant",
        "permutation.network",
        "engine.privacy_engine",
    ],
)
def test_every_module_that_needs_opacus_may_be_imported_first(module):
    code = "print(opacus.accountants.create_accountant('shuffled_sums').mechanism())"
    assert after(f"import opacus_shuffle.{module}\nimport opacus\n{code}") == "shuffled_sums"


def test_every_command_has_flags_of_its_own():
    from opacus_shuffle.commands.main import parser

    for name in COMMANDS:
        choices = parser(name)._subparsers._group_actions[0].choices
        assert {each for each, job in choices.items() if len(job._actions) > 1} == {name}
