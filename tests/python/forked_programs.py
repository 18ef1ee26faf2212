"""Python programs in processes forked from one that has imported torch, which takes seconds.

That process has imported nothing of mooncake, and has one thread: the program's imports of
mooncake, its threads and its exit are as in an interpreter of its own. All programs share the
seed of `hash`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import CodeType
from typing import IO

IMPORTED = [
    "pytest",
    "torch.distributed",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
]
MESSAGE_BYTES = 1 << 16
START_S = 60


class Program:
    """A running program with pipes for its streams: what tests use of `subprocess.Popen`.

    The command is what follows the interpreter on a command line: a path or `-c SOURCE`, and
    arguments. Of the variables that an interpreter reads when it starts, `PYTHONPATH` alone has an
    effect. Standard error is that of the test unless it is to be read.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        env: dict[str, str],
        cwd: Path | None = None,
        *,
        reads_stderr: bool = True,
    ) -> None:
        self.returncode: int | None = None
        self._reports, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        (stdin, to_stdin), (of_stdout, stdout), (of_stderr, stderr) = (os.pipe() for _ in range(3))
        self.stdin: IO[str] = os.fdopen(to_stdin, "w")
        self.stdout: IO[str] = os.fdopen(of_stdout)
        self.stderr: IO[str] = os.fdopen(of_stderr)
        words = [str(word) for word in command]
        request = json.dumps({"command": words, "env": env, "cwd": str(cwd or Path.cwd())}).encode()
        # The sender of a longer one would not learn that it was cut.
        assert len(request) < MESSAGE_BYTES
        errors = stderr if reads_stderr else 2
        socket.send_fds(forker(), [request], [stdin, stdout, errors, theirs.fileno()])
        theirs.close()
        for end in (stdin, stdout, stderr):
            os.close(end)
        self._reports.settimeout(START_S)
        message, files, _, _ = socket.recv_fds(self._reports, MESSAGE_BYTES, 1)
        assert files, "no process was forked"
        self.pid, self._pidfd = int(message), files[0]

    def wait(self, timeout: float) -> int:
        if self.returncode is None:
            self._reports.settimeout(timeout)
            message = self._reports.recv(MESSAGE_BYTES)
            assert message, "the process that forks the programs has ended"
            self.returncode = int(message)
            self._reports.close()
            os.close(self._pidfd)
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            # It may have ended before.
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for the end, and return what the program wrote that nobody has read."""
        texts = dict.fromkeys((self.stdout, self.stderr), "")

        def read(stream: IO[str]) -> None:
            with stream:
                texts[stream] = stream.read()

        self.stdin.close()
        readers = [
            threading.Thread(target=read, args=(stream,)) for stream in texts if not stream.closed
        ]
        for reader in readers:
            reader.start()
        try:
            self.wait(timeout)
        except TimeoutError:
            self.kill()
            raise
        finally:
            for reader in readers:
                reader.join(timeout)
        return texts[self.stdout], texts[self.stderr]


def interpreter(
    command: Sequence[str | Path], env: dict[str, str], cwd: Path | None = None
) -> subprocess.Popen[str]:
    """Start a program as `Program` does, in an interpreter of its own."""
    pipe = subprocess.PIPE
    command = [sys.executable, *command]
    return subprocess.Popen(
        command, env=env, cwd=cwd, text=True, stdin=pipe, stdout=pipe, stderr=pipe
    )


def run_snippet(source: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a snippet of the documentation to its end."""
    start = Program if "import torch" in source else interpreter
    program = start(["-c", source], dict(os.environ), cwd)
    try:
        output, errors = program.communicate(timeout=55)
    except BaseException:
        program.kill()
        raise
    assert program.returncode is not None
    return subprocess.CompletedProcess(source, program.returncode, output, errors)


@functools.cache
def forker() -> socket.socket:
    """Start the process that forks programs, and return the socket for its requests."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    source = f"import {__name__}; exec({__name__}.serve({theirs.fileno()}))"
    # Libraries for linear algebra start threads when they are loaded, otherwise.
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", source],
        env={**os.environ, **one_thread, "PYTHONPATH": str(Path(__file__).parent)},
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    theirs.close()
    atexit.register(process.wait, 10)
    atexit.register(ours.close)
    return ours


def serve(requests_fd: int) -> CodeType:
    """Fork a process for each request, and return in it, with the program to execute.

    In the process itself, return an empty program at the end of the requests.
    """
    for name in IMPORTED:
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
    requests = socket.socket(fileno=requests_fd)
    running: dict[int, tuple[int, socket.socket]] = {}
    while True:
        ready, _, _ = select.select([requests, *running], [], [])
        for pidfd in ready:
            if isinstance(pidfd, int):
                pid, reports = running.pop(pidfd)
                _, status = os.waitpid(pid, 0)
                # Nobody listens when a run of the tests was interrupted.
                with contextlib.suppress(OSError), reports:
                    reports.send(str(os.waitstatus_to_exitcode(status)).encode())
                os.close(pidfd)
        if requests not in ready:
            continue
        message, files, _, _ = socket.recv_fds(requests, MESSAGE_BYTES, 4)
        if not message:
            return compile("", "<end>", "exec")
        assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not fork"
        assert "mooncake" not in sys.modules
        *streams, report_fd = files
        reports = socket.socket(fileno=report_fd)
        if (pid := os.fork()) == 0:
            for each in (requests, reports, *(reports for _, reports in running.values())):
                each.close()
            for pidfd in running:
                os.close(pidfd)
            return become(**json.loads(message), streams=streams)
        pidfd = os.pidfd_open(pid)
        running[pidfd] = (pid, reports)
        socket.send_fds(reports, [str(pid).encode()], [pidfd])
        for stream in streams:
            os.close(stream)


def become(command: list[str], env: dict[str, str], cwd: str, streams: list[int]) -> CodeType:
    """Make this process look as the command would have been started, and return its program."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    folders = [folder for folder in env.get("PYTHONPATH", "").split(":") if folder]
    # The first two are those of the process that was forked: of its program, and `PYTHONPATH`.
    sys.path[1:2] = folders
    if command[0] == "-c":
        _, source, *arguments = command
        sys.argv, sys.path[0] = ["-c", *arguments], ""
        return compile(source, "<string>", "exec", dont_inherit=True)
    path = command[0]
    sys.argv, sys.path[0] = command, str(Path(path).parent)
    sys.modules["__main__"].__file__ = path
    return compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
