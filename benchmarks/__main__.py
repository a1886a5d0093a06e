"""`python -m benchmarks`: the short form of every benchmark that this machine can run."""

from benchmarks.loader.proof import main

if __name__ == "__main__":
    main(["--brief"])
