"""Configurations of the daemon. `sent` is the file's text, the environment and flags.

`gyred check-config` refuses each with status 2 and one sentence. `{folder}` in the text stands for
an empty folder.
"""

from tests.bad_inputs.row import SECRET, Row

REFUSED = ("2", "ConfigError")
DATASET = '[datasets.x]\nuri = "{folder}"\nformat = "tokens"\nsequence_length = 8\n'
NUMBERS = (
    "num_io_threads",
    "num_copy_workers",
    "max_requests",
    "prefetch_batches",
    "lease_s",
    "drain_timeout_s",
    "read_deadline_s",
)
SIZES = ("memory_budget", "session_memory", "cache_memory", "cache_disk", "unpack_disk")
TEXTS = ("index_dir", "cache_dir", "unpack_dir", "metrics_listen", "health_listen")
FILES = {
    "no TOML": ("= 3", "is not valid TOML"),
    "one bracket": ("[", "is not valid TOML"),
    "a key twice": ("lease_s = 1\nlease_s = 2", "is not valid TOML"),
    "NUL": ("lease_s = 1\0", "is not valid TOML"),
    "nested 5,000 deep": ("listen = " + "[" * 5000, "is not valid TOML"),
    "a key of 200,000 parts": (".".join("a" * 200_000) + " = 1", "more than 32 parts .at line 1.*"),
    "a table of 200,000 parts": ("[" + ".".join("a" * 200_000) + "]", "more than 32 parts"),
    "an integer of 5,000 digits": ("max_requests = " + "9" * 5000, "TOML|max_requests"),
    "an integer of 400,000 bits": (
        "max_requests = 0x" + "f" * 100_000,
        "more than 64 bits .at line 1",
    ),
    "unknown key": ("leese_s = 3", "unknown key `leese_s`.*did you mean `lease_s`"),
    "unknown table": ("[data]\nx = 1", "unknown key `data`"),
    "datasets as a list": ("datasets = [1]", "datasets is"),
    "a dataset as a number": ("[datasets]\nx = 3", "datasets.x is 3"),
    "no uri": ('[datasets.x]\nformat = "tokens"', "`uri` is missing"),
    "format of a number": ('[datasets.x]\nuri = "/data"\nformat = 3', "format is 3"),
    "empty uri": ('[datasets.x]\nuri = ""\nformat = "tokens"', "uri is ''"),
    "unknown format": ('[datasets.x]\nuri = "/d"\nformat = "xls"', "format.*xls"),
    "key that no format has": (
        '[datasets.x]\nuri = "/d"\ncolumn = ["a"]',
        "unknown key `column` in dataset `x`; did you mean `columns`",
    ),
    "uri of a number": ('[datasets.x]\nuri = 3\nformat = "tokens"', "uri is 3"),
    "chained uri": ('[datasets.x]\nuri = "dir://a::/b"\nformat = "webdataset"', "chained URLs"),
    "an archive": (
        '[datasets.x]\nuri = "zip://a::/b"\nformat = "webdataset"',
        "datasets.x.uri: zip://a::/b is in an archive. Unpack it, or set archives = true",
    ),
    "pipe": ('[datasets.x]\nuri = "pipe:cat x"\nformat = "webdataset"', "chained URLs|pipes"),
    "unknown scheme": (
        '[datasets.x]\nuri = "gopher://a/b"\nformat = "webdataset"',
        "unknown scheme",
    ),
    "password in a uri": (
        f'[datasets.x]\nuri = "http://user:{SECRET}@host/x.tar"\nformat = "webdataset"',
        "must not contain a password",
    ),
    "dots in a uri": ('[datasets.x]\nuri = "s3://b/../c"\nformat = "webdataset"', "leave its root"),
    "query in a uri": (
        '[datasets.x]\nuri = "https://h/x.tar?sig=1"\nformat = "webdataset"',
        "must not have a query",
    ),
    "control character in a uri": (
        '[datasets.x]\nuri = "/data\\u001b[2J"\nformat = "webdataset"',
        "must not contain control characters",
    ),
    "relative file uri": ('[datasets.x]\nuri = "file://a"\nformat = "webdataset"', "absolute path"),
    "a million million shards": (
        '[datasets.x]\nuri = "/d/{{0..999999999999}}.tar"\nformat = "webdataset"',
        "cannot be expanded",
    ),
    "storage as text": (DATASET + 'storage = "x"', "storage is a text"),
    "cache as text": (DATASET + 'cache = "maybe"', "cache is 'maybe'"),
    "pack of no length": (DATASET + 'pack = {{ field = "x" }}', "`length` is missing in .*pack"),
    "pack of an unknown key": (
        DATASET + 'pack = {{ field = "x", length = 4, sead = 1 }}',
        "unknown key `sead` in datasets.x.pack; did you mean `seed`",
    ),
    "pack of length 0": (
        DATASET + 'pack = {{ field = "x", length = 0 }}',
        "datasets.x.pack.length is 0",
    ),
    "pack of several lengths": (
        DATASET + 'pack = {{ field = "x", length = [4, 8] }}',
        r"datasets.x.pack.length is \[4, 8\]: all sequences have one length. Give that",
    ),
    "pack as text": (DATASET + 'pack = "tokens"', "datasets.x.pack is 'tokens'"),
    "unknown option": (DATASET + "sequence_lenght = 3", "did you mean `sequence_length`"),
    "length 0": (DATASET.replace("= 8", "= 0"), "sequence_length"),
    "length of text": (DATASET.replace("= 8", '= "x"'), "sequence_length"),
    "weights as a list": ("job_weights = [1]", "job_weights is"),
    "negative weight": ("[job_weights]\na = -1", "job_weights.a is -1"),
    "weight of nan": ("[job_weights]\na = nan", "job_weights.a is nan"),
    "weight of text": ('[job_weights]\na = "x"', "job_weights.a is 'x'"),
    "empty pattern of weights": ('[job_weights]\n"" = 2', "an empty pattern matches nothing"),
    "weights of a user by name": ('[job_weights]\n"alice/*" = 2', "a user is named `uid:1004`"),
    "set without an end": ('[job_weights]\n"a-[12" = 2', "its `\\[` has no `\\]`"),
    "set of nothing": ('[job_weights]\n"a-[2-1]" = 2', "matches no character"),
    "limits of a user by name": (
        "[limits.users.alice]\nsessions = 2",
        "a user is named `uid:1004`",
    ),
    "limits of a uid of text": ('[limits.users."uid:al"]\nsessions = 2', "takes a user's number"),
    "a thousand million threads": ("num_io_threads = 1_000_000_000", "expected `int` <= 1024"),
    "a million million requests": ("max_requests = 1_000_000_000_000", "expected `int` <="),
    "a size as a float": ("cache_disk = 1e9", "expected a number of bytes such as 1073741824"),
    "probes on a Unix socket": ('health_listen = "unix:/tmp/x"', "health"),
    "listen empty": ("listen = []", "listen is empty"),
    "listen of text": ('listen = ["here"]', "listen|address|here"),
    "listen beyond loopback": ('listen = ["tcp:0.0.0.0:7000"]', "loopback|0.0.0.0"),
    "listen without a port": ('listen = ["tcp:127.0.0.1"]', "port|tcp"),
    "listen on port 99999": ('listen = ["tcp:127.0.0.1:99999"]', "port|99999"),
    "listen on nothing": ('listen = ["unix:"]', "path|address|unix"),
    "listen on a long path": (f'listen = ["unix:/{"x" * 200}"]', "(?i)long|bytes|characters"),
    "metrics beyond loopback": ('metrics_listen = "tcp:0.0.0.0:9000"', "metrics"),
    "metrics on a Unix socket": ('metrics_listen = "unix:/tmp/x"', "metrics"),
    "cache_dir without memory": ('cache_dir = "/tmp/x"\ncache_memory = 0', "cache_dir is set"),
    "log_level loud": ('log_level = "loud"', "expected one of debug, info, warning, error"),
    "log_format xml": ('log_format = "xml"', "expected one of auto, text, json"),
    "memory_budget 0": ("memory_budget = 0", "memory_budget is 0"),
    "session_memory 0": ("session_memory = 0", "session_memory is 0"),
}
ENVIRONMENT = {
    "GYRE_LEASE_S": ("soon", "GYRE_LEASE_S is 'soon'"),
    "GYRE_MAX_REQUESTS": ("-3", "GYRE_MAX_REQUESTS is '-3'"),
    "GYRE_MEMORY_BUDGET": ("much", "GYRE_MEMORY_BUDGET is 'much'"),
    "GYRE_HEDGE": ("perhaps", "GYRE_HEDGE is 'perhaps'"),
    "GYRE_LOG_LEVEL": ("", "GYRE_LOG_LEVEL is ''"),
    "GYRE_LISTEN": ("nowhere", "nowhere|address"),
}
FLAGS = {
    "--memory-budget": ("x", "--memory-budget is 'x'"),
    "--num-io-threads": ("0", "--num-io-threads is '0'"),
    "--prefetch-batches": ("-1", "--prefetch-batches is '-1'"),
    "--log-level": ("loud", "--log-level is 'loud'"),
    "--listen": ("tcp:8.8.8.8:70", "8.8.8.8"),
    "--config": ("/proc/self/mem", "cannot read|is not valid TOML"),
}


def _wrong_types() -> list[Row]:
    rows = []
    sent: tuple[str, dict[str, str], list[str]]
    for key in NUMBERS:
        for value in ('"many"', "[]", "-1", "nan", "true", "{{}}"):
            sent = (f"{key} = {value}", {}, [])
            rows.append(Row(f"config {key} = {value}", sent, *REFUSED, f"{key} in .* is"))
    for key in SIZES:
        for value in ('"much"', "-1", '"1 XiB"', "1.5", "[]", "true"):
            sent = (f"{key} = {value}", {}, [])
            rows.append(Row(f"config {key} = {value}", sent, *REFUSED, f"{key} in .* is"))
    for key in TEXTS:
        for value in ("3", "[]", "true"):
            sent = (f"{key} = {value}", {}, [])
            rows.append(Row(f"config {key} = {value}", sent, *REFUSED, f"{key} in .* is"))
    return rows


ROWS = [
    *(
        Row(f"config {words}", (text, {}, []), *REFUSED, told)
        for words, (text, told) in FILES.items()
    ),
    *_wrong_types(),
    *(
        Row(f"environment {key}", ("", {key: value}, []), *REFUSED, told)
        for key, (value, told) in ENVIRONMENT.items()
    ),
    *(
        Row(f"flag {flag}", ("", {}, [flag, value]), *REFUSED, told)
        for flag, (value, told) in FLAGS.items()
    ),
]
