"""The deployment on one machine: a shuffler, Flower's SuperLink and four SuperNodes, each a process of its own; then all end.

python tutorials/federated/deploy.py

Any Python runs it that has this package with its extras federated and tutorials, whether or not its
environment is activated.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

APP = Path(__file__).parent
sys.path.insert(0, str(APP))
NEEDED = {
    importlib.util.find_spec: ["opacus_shuffle", "flwr", "uvicorn", "mlxtend"],
    shutil.which: ["flwr", "flower-superlink", "flower-supernode"],
}
SCHEMES = sysconfig.get_default_scheme(), sysconfig.get_preferred_scheme("user")
os.environ |= {
    "FLWR_TELEMETRY_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
    # Flower's processes start others by name, also where the environment is not activated.
    "PATH": os.pathsep.join(
        [
            *(sysconfig.get_path("scripts", scheme) for scheme in SCHEMES),
            os.environ.get("PATH", ""),
        ]
    ),
}


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@contextlib.contextmanager
def running(
    folder: Path, name: str, *command: object, **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A process, with all that it starts, until the end of the block; but for the run, what it says goes into a file."""
    print("+", shlex.join(map(str, command)).replace(str(folder), "FOLDER"), flush=True)
    with (folder / f"{name}.log").open("wb") as log:
        said = None if name == "run" else log
        process = subprocess.Popen(
            list(map(str, command)),
            stdout=said,
            stderr=said,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    """Until somebody listens on a port."""
    while process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.2)
    raise RuntimeError(f"{process.args} ended: its log is above")


@contextlib.contextmanager
def shown_on_failure(folder: Path) -> Iterator[None]:
    """The end of every log, if something fails."""
    try:
        yield
    except BaseException:
        for log in sorted(folder.glob("*.log")):
            print(f"---- {log.name}\n{log.read_text(errors='replace')[-3000:]}", file=sys.stderr)
        raise


def main() -> None:
    """Start everything, train, and end everything: two to four minutes."""
    lacking = dict.fromkeys(
        name for find, names in NEEDED.items() for name in names if find(name) is None
    )
    if lacking:
        sys.exit(
            f"{sys.executable} lacks {', '.join(lacking)}: run this by a Python in whose environment "
            'pip install -c .ci/constraints.txt -e ".[federated,tutorials]" was run'
        )
    from shuffled_app.client_app import CLIENTS
    from shuffled_app.task import SETTINGS

    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(shown_on_failure(folder))
        tokens = [secrets.token_hex() for _ in range(CLIENTS + 1)]
        (folder / "clients.txt").write_text("\n".join(tokens[:-1]))
        (folder / "server.txt").write_text(tokens[-1])
        (folder / "settings.json").write_text(json.dumps(SETTINGS))
        shuffler_port, link_port = free_port(), free_port()
        home = folder / "flower"
        home.mkdir()
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{link_port}"\ninsecure = true\n'
        )

        def start(name: str, *command: object) -> subprocess.Popen[bytes]:
            path = os.pathsep.join([str(APP), os.environ.get("PYTHONPATH", "")])
            return stack.enter_context(
                running(folder, name, *command, FLWR_HOME=str(home), PYTHONPATH=path)
            )

        service = [
            sys.executable,
            "-m",
            "opacus_shuffle.federated.serve",
            "--settings",
            folder / "settings.json",
        ]
        files = ["--secrets", folder / "clients.txt", "--server-secret", folder / "server.txt"]
        wait_for(shuffler_port, start("shuffler", *service, *files, "--port", shuffler_port))
        link = ["flower-superlink", "--insecure", "--disable-runtime-dependency-installation"]
        wait_for(link_port, start("superlink", *link, "--port", link_port))
        url = f"http://127.0.0.1:{shuffler_port}"
        for client in range(CLIENTS):
            # In a file, as every user of a machine sees the command lines of all.
            secret = folder / f"secret of client {client}"
            secret.write_text(tokens[client])
            node = [
                "flower-supernode",
                "--insecure",
                "--superlink",
                f"127.0.0.1:{link_port}",
                "--port",
                free_port(),
            ]
            settings = f'partition-id={client} shuffler="{url}" secret-file="{secret}" book="{folder / f"client {client}"}"'
            start(f"node {client}", *node, "--node-config", settings)
        config = f'shuffler="{url}" secret-file="{folder / "server.txt"}" book="{folder / "book"}"'
        run = start("run", "flwr", "run", APP, "here", "--stream", "--run-config", config)
        if run.wait():
            raise RuntimeError(
                f"flwr run ended with exit code {run.returncode}: the logs are above"
            )


if __name__ == "__main__":
    main()
