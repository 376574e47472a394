"""What is imported when: PyTorch and Opacus only where they are needed; accountants always."""

import subprocess
import sys

import pytest

HEAVY = (
    "print(sorted({'torch', 'opacus', 'matplotlib', 'numba', 'scipy.stats'} & sys.modules.keys()))"
)
RUN = "--num-users 60000 --steps 3 --noise-multiplier 3 --delta 1e-5"
WITHOUT_NUMBERS = [  # help and mistakes, of which a command's own need the mechanisms
    *("--version", "--help", "compar", "", "plan", "compare --help"),
    *("train --accountant shufle_gauss", "audit --help"),
]
KNOWN = (
    "print(type(opacus.PrivacyEngine(accountant='shuffle_gauss').accountant).__name__, "
    "type(opacus.__loader__).__name__)"
)
NUMBERS = [
    "epsilon --mechanism shuffle_gauss",
    "report --mechanism shuffled_checkin --sample-rate 0.1",
    "epsilon --mechanism shuffled_sums --sample-rate 0.1 --dimension 10",
]


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


def test_commands_import_what_they_need_and_no_more():
    """One process runs them all, those that need more after those that need less."""
    lines = [*WITHOUT_NUMBERS, *(f"{line} {RUN}" for line in NUMBERS)]
    heavy = after("\n".join(f"{command(line)}\n{HEAVY}" for line in lines)).splitlines()
    assert heavy == ["[]"] * len(lines)


@pytest.mark.zoo
@pytest.mark.parametrize(
    "first",
    [
        "import opacus_shuffle\nfrom importlib.util import find_spec\n"
        "find_spec('opacus').loader.is_package\nimport opacus",
        "import opacus_shuffle.accountants.compute\nfrom opacus.accountants import registry\n"
        "import opacus",
        "import opacus_shuffle, opacus",
        "import opacus_shuffle.engine.privacy_engine\nimport opacus",
    ],
)
def test_opacus_knows_the_accountants_in_any_order_of_imports(first):
    assert after(f"{first}\n{KNOWN}") == "ShuffleAccountant SourceFileLoader"


def test_an_import_that_fails_is_waited_for_again(tmp_path):
    (tmp_path / "late.py").write_text(
        "import os\nif 'READY' not in os.environ: raise ImportError('not yet')\n"
    )
    code = f"""
import os
sys.path.insert(0, {str(tmp_path)!r})
from opacus_shuffle.core.imports import after_import
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
from opacus_shuffle.core.imports import after_import
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


def test_every_public_name_is_there_and_no_other_and_opacus_knows_the_accountants():
    """Also if the module that needs Opacus first is imported first."""
    packages = "packages = [opacus_shuffle, opacus_shuffle.accountants]"
    missing = (
        "print([name for package in packages for name in package.__all__ "
        "if not (name in dir(package) and hasattr(package, name))])"
    )
    rest = "print([hasattr(package, 'NonsenseAccountant') for package in packages])"
    first = "import opacus_shuffle.core.opacus_compat\nimport opacus"
    lines = [first, KNOWN, packages, missing, rest]
    expected = ["ShuffleAccountant SourceFileLoader", "[]", f"{[False] * 2}"]
    assert after("\n".join(lines)).splitlines() == expected
