"""`python -m tests.fuzz [TARGET ...]`: fuzz each target for FUZZ_S seconds, one after the other.

A process that finds a fault writes the input to `build/fuzz/TARGET/crash-*` and prints it. What
atheris learns goes to `build/fuzz/TARGET` too; the corpus in the tree stays as it is.
"""

import os
import subprocess
import sys
from pathlib import Path

CORPUS, BUILD = Path(__file__).parent / "corpus", Path("build/fuzz")


def fuzz(name: str) -> None:
    """Fuzz one target in this process; it ends with the process."""
    import atheris

    with atheris.instrument_imports(
        include=["gyre_daemon", "tarfile"], enable_loader_override=False
    ):
        from tests.fuzz.targets import TARGETS
    atheris.Setup(sys.argv[:1] + sys.argv[3:], TARGETS[name])
    atheris.Fuzz()


def main() -> int:
    """Fuzz the targets that were named, or all; 1 if any has a fault."""
    from tests.fuzz.targets import TARGETS

    seconds, failed = os.environ.get("FUZZ_S", "600"), []
    for name in sys.argv[1:] or TARGETS:
        (BUILD / name).mkdir(parents=True, exist_ok=True)
        print(f"fuzzing {name} for {seconds} s", flush=True)
        options = [
            f"-max_total_time={seconds}",
            "-max_len=140000",  # an ArrayRecord file has 128 KiB or more
            "-timeout=20",
            "-rss_limit_mb=4096",
        ]
        options += [f"-artifact_prefix={BUILD / name}/", "-print_final_stats=1"]
        folders = [str(BUILD / name), str(CORPUS / name)]
        command = [sys.executable, "-m", "tests.fuzz", "--one", name, *options, *folders]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    print(f"faults: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        fuzz(sys.argv[2])
    else:
        sys.exit(main())
