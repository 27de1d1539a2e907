"""Runs benchmarks under torch's launcher."""

import os
import socket
import subprocess
import sys
import tempfile


def torchrun(world, *arguments, benchmark="allreduce"):
    """Runs a benchmark under a launcher, which ends its ranks when it is asked to end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
    command += ["--master-port", str(port), "-m", "symmpool", "bench", benchmark, *arguments]
    pipe = subprocess.PIPE
    # The launcher leaves a folder for logs behind.
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": folder}
        process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)
        try:
            # On two processors that four suites share, a benchmark takes several times as long as alone.
            output, errors = process.communicate(timeout=400)
        except subprocess.TimeoutExpired:
            process.terminate()
            output, errors = process.communicate(timeout=60)
    return process.returncode, output, errors
