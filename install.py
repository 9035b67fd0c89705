"""`make setup` and `make run`: install fedsub into .venv with uv or pip. Python's own library alone.

    python3 install.py EXTRA       # run, dev, or node: a SuperNode without what experiments and tests need

TORCH=cpu or TORCH=cuda chooses torch's build; without it CUDA's is taken where there is an NVIDIA driver. The index of
torch's CPU builds comes on top of the indices that pip is configured for; where it cannot be reached, those are enough.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PYTHON = Path(".venv/bin/python")
SIZES = {"cpu": "2 GB", "cuda": "6.5 GB"}  # on disk, the extra run


def has_driver() -> bool:
    """Say whether this machine has an NVIDIA driver."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def build_of_torch() -> str:
    """Return ``"cpu"`` or ``"cuda"``: what TORCH names, else what this machine can use."""
    wanted = os.environ.get("TORCH") or ("cuda" if has_driver() else "cpu")
    if wanted not in SIZES:
        sys.exit(f"TORCH={wanted}: must be {' or '.join(SIZES)}")
    return wanted


def pip(*arguments: str) -> list[str]:
    """Return a command of the environment's pip."""
    return [str(PYTHON), "-m", "pip", "--disable-pip-version-check", *arguments]


def answer(command: list[str]) -> str:
    """Return what a command prints; "" where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def has_cpu_build() -> bool:
    """Say whether the tested version of torch is offered for CPUs, by pip's own indices or by torch's."""
    version = re.search(r"(?m)^torch==(\S+)", Path("constraints.txt").read_text())
    look = pip("index", "versions", "torch", "--retries", "0", "--timeout", "8", "--extra-index-url", CPU_INDEX)
    return version is not None and f"{version[1]}+cpu" in answer(look)


def commands(target: str, build: str) -> list[list[str]]:
    """Return the commands to try, one after the other, until one succeeds."""
    what = ["-c", "constraints.txt", "-e", target]
    cpu = ["--extra-index-url", CPU_INDEX] if build == "cpu" and platform.system() == "Linux" else []
    # Bytecode of all files is a third of the time; a run compiles those that it imports. A node may not write there.
    late = [] if "node" in target else ["--no-compile"]
    tries = [[*pip("install", *late, *what), *cpu]]
    configured = any(word in answer(pip("config", "list")) for word in ("index", "find-links"))
    if (uv := shutil.which("uv")) and not configured:  # uv does not read pip's configuration
        backend = "cpu" if build == "cpu" else "auto"
        tries.insert(0, [uv, "pip", "install", "--python", str(PYTHON), f"--torch-backend={backend}", *what])
    return tries


def main() -> None:
    """Make .venv where it is missing and install this checkout into it."""
    target = f".[{sys.argv[1] if len(sys.argv) > 1 else 'run'}]"
    if not PYTHON.exists() and subprocess.run([sys.executable, "-m", "venv", ".venv"], check=False).returncode:
        shutil.rmtree(".venv", ignore_errors=True)  # Debian without python3-venv leaves an environment without pip
        sys.exit("fedsub: .venv cannot be made; the lines above say why")
    build = build_of_torch()
    if build == "cpu" and platform.system() == "Linux" and not has_cpu_build():
        print(f"fedsub: no index here offers the tested torch for CPUs ({CPU_INDEX} does)")
        build = "cuda"
    other = {"cpu": "TORCH=cuda takes CUDA's", "cuda": "it runs on CPUs as well"}[build]
    print(f"fedsub: installing into .venv, about {SIZES[build]}: torch for {build.upper()} ({other})", flush=True)
    if not any(subprocess.run(command, check=False).returncode == 0 for command in commands(target, build)):
        sys.exit("fedsub: the installation failed; the lines above say why")


if __name__ == "__main__":
    main()
