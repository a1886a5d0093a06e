"""Command lines. `sent` is the program, its arguments and its environment.

`{address}` stands for the daemon's address and `{folder}` for an empty folder. All of them end with
the status, one sentence on standard error, and nothing on standard output.
"""

from tests.bad_inputs.row import SECRET, UNPRINTABLE, Row

ADDRESS = ["--address", "{address}"]
PLAN = ["plan", "tokens", "--batch-size", "8", *ADDRESS]
GYRE: dict[str, tuple[list[str], str, str]] = {
    "no command": ([], "2", "required"),
    "unknown command": (["serve"], "2", "invalid choice"),
    "no address": (["datasets"], "2", "which daemon"),
    "address of nonsense": (["datasets", "--address", "here"], "2", "here"),
    "address of port 99999": (["datasets", "--address", "tcp:localhost:99999"], "2", "99999|port"),
    "unknown dataset": (["describe", "wiki", *ADDRESS], "2", "no dataset is named 'wiki'"),
    "empty dataset": (["describe", "", *ADDRESS], "2", "empty"),
    "escape sequences": (["describe", UNPRINTABLE, *ADDRESS], "2", "no dataset is named"),
    "a password": (["describe", f"s3://u:{SECRET}@b/x", *ADDRESS], "1", "private daemon"),
    "cat unknown": (["cat", "wiki", *ADDRESS], "2", "no dataset is named"),
    "cat -1": (["cat", "tokens", "--num", "-1", *ADDRESS], "2", "num|-1"),
    "cat of text": (["cat", "tokens", "--num", "x", *ADDRESS], "2", "invalid int value"),
    "cat seed -1": (["cat", "tokens", "--seed", "-1", *ADDRESS], "2", "seed"),
    "plan without a batch size": (["plan", "tokens", *ADDRESS], "2", "batch-size"),
    "plan batch size 0": (
        ["plan", "tokens", "--batch-size", "0", "--step", "0", *ADDRESS],
        "2",
        "batch_size|batch-size",
    ),
    "plan step -1": (
        ["plan", "tokens", "--batch-size", "8", "--step", "-1", *ADDRESS],
        "2",
        "step",
    ),
    "plan transforms that are absent": (
        [*PLAN, "--step", "0", "--transforms", "{folder}/none.json"],
        "2",
        "none.json cannot be read: No such file",
    ),
    "plan transforms that are a folder": (
        [*PLAN, "--step", "0", "--transforms", "{folder}"],
        "2",
        "cannot be read: Is a directory",
    ),
    "plan transforms of another TOML": (
        [*PLAN, "--step", "0", "--transforms", "{config}"],
        "2",
        "must have the key 'transforms' and no other",
    ),
    "plan costs with transforms": (
        [*PLAN, "--cost", "--transforms", "{config}"],
        "2",
        "--transforms belongs to --step",
    ),
    "why step -1": (["why", "tokens", "--step", "-1", *ADDRESS], "2", "step|-1"),
    "why step unread": (
        ["why", "tokens", "--step", "9999999", *ADDRESS],
        "2",
        "no batch of step 9999999",
    ),
    "top interval 0": (["top", "--interval", "0", *ADDRESS], "2", "interval"),
    "top interval nan": (["top", "--interval", "nan", *ADDRESS], "2", "interval"),
    "index unknown": (["index", "wiki", *ADDRESS], "2", "no dataset is named"),
    "ad hoc on a daemon": (
        ["describe", "/etc", "--format", "tokens", *ADDRESS],
        "1",
        "private daemon",
    ),
}
GYRED: dict[str, tuple[list[str], str, str]] = {
    "no command": ([], "2", "required"),
    "unknown command": (["start"], "2", "invalid choice"),
    "a config that is absent": (
        ["check-config", "--config", "{folder}/none"],
        "2",
        "cannot read the configuration",
    ),
    "a config that is a folder": (["check-config", "--config", "{folder}"], "2", "cannot read"),
}
TRAIN: dict[str, tuple[list[str], str, str]] = {
    "no command": ([], "2", "required"),
    "a config that is absent": (["run", "{folder}/none.toml"], "2", "cannot read"),
    "a config that is a folder": (["run", "{folder}"], "2", "cannot read"),
    "nproc 0": (["run", "{config}", "--nproc", "0"], "2", "nproc"),
    "nproc of text": (["run", "{config}", "--nproc", "two"], "2", "nproc"),
    "nproc that does not divide": (["run", "{config}", "--nproc", "3"], "2", "multiple of 3"),
    "resume from nothing": (["run", "{config}", "--resume"], "2", "begin the run without"),
    "resume from a folder": (["run", "{config}", "--resume", "{folder}"], "2", "not a checkpoint"),
    "an unknown key": (["run", "{config}", "--set", "run.step=3"], "2", "did you mean `steps`"),
    "an unknown table": (["run", "{config}", "--set", "runs.steps=3"], "2", "runs"),
    "set without a value": (["run", "{config}", "--set", "run.steps"], "2", "run.steps"),
    "set of nothing": (["run", "{config}", "--set", ""], "2", "set"),
    "steps 0": (["run", "{config}", "--set", "run.steps=0"], "2", "steps"),
    "steps of text": (["run", "{config}", "--set", "run.steps=many"], "2", "steps"),
    "steps nan": (["run", "{config}", "--set", "run.steps=nan"], "2", "steps"),
    "batch size 0": (["run", "{config}", "--set", "data.batch_size=0"], "2", "batch_size"),
    "layers -1": (
        ["run", "{config}", "--set", "model.num_layers=-1"],
        "2",
        "num_layers|no address was given",
    ),
    "dim 33": (["run", "{config}", "--set", "model.dim=33"], "2", "dim|heads"),
    "dtype int8": (
        ["run", "{config}", "--set", "precision.compute_dtype=int8"],
        "2",
        "compute_dtype",
    ),
    "lr negative": (["run", "{config}", "--set", "optimizer.lr=-1"], "2", "lr"),
    "lr of text": (["run", "{config}", "--set", "optimizer.lr=fast"], "2", "lr"),
    "betas of one": (["run", "{config}", "--set", "optimizer.betas=[0.9]"], "2", "betas"),
}


def _rows(program: str, table: dict[str, tuple[list[str], str, str]]) -> list[Row]:
    return [
        Row(f"{program} {words}", (program, arguments), status, "", told)
        for words, (arguments, status, told) in table.items()
    ]


ROWS = [*_rows("gyre", GYRE), *_rows("gyred", GYRED), *_rows("gyre-train", TRAIN)]
