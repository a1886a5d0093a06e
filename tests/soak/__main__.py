"""`python -m tests.soak [--seconds S] [--seed N] [--small]`: prints progress and a report."""

import argparse
import os
import secrets
import sys
import tempfile
from pathlib import Path

from tests.soak import checker, driver, plan


def main() -> int:
    """Runs and checks; returns 1 if something does not hold, and then keeps the histories."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--small", action="store_true", help="the jobs of CI")
    parser.add_argument("--nice", type=int, default=10)
    args = parser.parse_args()
    os.nice(args.nice)
    folder = Path(tempfile.mkdtemp(prefix="gyre-soak-"))
    print(f"seed {args.seed}, histories in {folder}", flush=True)
    jobs = plan.SMALL if args.small else plan.LARGE
    histories = driver.run(
        folder, jobs, args.seed, seconds=args.seconds, tell=lambda text: print(text, flush=True)
    )
    report = checker.check(histories)
    print("\n".join(summary(report)))
    return 1 if report.problems else 0


def summary(report: checker.Report) -> list[str]:
    """Returns the report as lines."""
    faults = ", ".join(f"{name} {count}" for name, count in sorted(report.faults.items()))
    return [
        f"faults: {sum(report.faults.values())} ({faults})",
        f"samples compared: {report.num_samples:,} in {report.num_batches:,} batches",
        f"steps lost: {report.num_lost}, doubled: {report.num_doubled}",
        f"batches with a wrong byte: {report.num_wrong}",
        f"errors that ranks were told: {report.num_errors}",
        *(f"PROBLEM {problem}" for problem in report.problems),
        "everything holds" if not report.problems else f"{len(report.problems)} problems",
    ]


if __name__ == "__main__":
    sys.exit(main())
