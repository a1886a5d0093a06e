"""The rights of each caller, by the configuration in force."""

from gyre_daemon.access.principal import Principal
from gyre_daemon.access.rules import own_user_and_group, parse_admin, parse_allow
from gyre_daemon.config import DaemonConfig, sources_below
from gyre_daemon.errors import NotAllowed


class Policy:
    """Decides for each caller. Operators may do everything."""

    def __init__(self, config: DaemonConfig) -> None:
        """Decide by the lists of this configuration.

        Raises:
            ConfigError: a list has an entry that cannot be understood.
        """
        self._admin = parse_admin(config.admin)
        self._readers = {
            name: parse_allow(dataset.allow, f"datasets.{name}.allow")
            if dataset.allow
            else own_user_and_group()
            for name, dataset in config.datasets.items()
        }
        self._sources = {name: sources_below(name, config.datasets) for name in config.datasets}
        self.has_rules = any(dataset.allow for dataset in config.datasets.values())

    def take_over(self, other: "Policy") -> None:
        """Decide as another policy does from now on; it was made where that may take its time."""
        self._readers, self._admin, self.has_rules = other._readers, other._admin, other.has_rules
        self._sources = other._sources

    def is_admin(self, caller: Principal) -> bool:
        """Whether the caller is an operator."""
        return self._admin.admits(caller)

    def may_read(self, caller: Principal, dataset: str) -> bool:
        """Whether the caller may read a dataset, with some job at least.

        Only operators may read a dataset outside of the configuration, which they define ad hoc.
        """
        rules = self._readers.get(dataset)
        return self.is_admin(caller) or (rules is not None and rules.admits(caller))

    def sources(self, dataset: str) -> tuple[str, ...]:
        """The datasets whose samples a configured mixture has; none of any other dataset."""
        return self._sources.get(dataset, ())

    def sees_all(self, caller: Principal) -> bool:
        """Whether the caller may read every dataset."""
        return self.is_admin(caller) or all(
            rules.admits(caller) for rules in self._readers.values()
        )

    def readable(self, caller: Principal) -> list[str]:
        """The configured datasets that the caller may read, in the order of their names."""
        return [name for name in sorted(self._readers) if self.may_read(caller, name)]

    def check_job(self, caller: Principal, dataset: str, job: str) -> None:
        """Refuse a job that may not read a dataset, or a source of it, which its user may read.

        Raises:
            NotAllowed: no entry `job:` matches its name; lists them.
        """
        for name in (dataset, *self.sources(dataset)):
            rules = self._readers.get(name)
            if rules is None or self.is_admin(caller) or rules.admits_job(job):
                continue
            raise NotAllowed(
                f"only jobs named {' or '.join(rules.jobs)} may read `{name}`, and this one is "
                f"named {job!r}; give it such a name, or ask the operator",
                {"dataset": name, "job": job},
            )

    def check_sources(self, caller: Principal, dataset: str) -> None:
        """Refuse a mixture with a source that the caller may not read; no source is named.

        Raises:
            NotAllowed: the caller may not read every source.
        """
        if not all(self.may_read(caller, source) for source in self.sources(dataset)):
            raise NotAllowed(
                f"{caller.name} may read the mixture `{dataset}`, but not every source of it; ask "
                "the operator",
                {"dataset": dataset},
            )

    def refusal(self, caller: Principal, dataset: str, job: str) -> str:
        """The list by which the caller may not read a dataset with this job; empty for none."""
        if self.is_admin(caller):
            return ""
        for name in (dataset, *self.sources(dataset)):
            rules = self._readers.get(name)
            if rules and not (rules.admits(caller) and rules.admits_job(job)):
                return f"datasets.{name}.allow"
        return ""

    def check_session(self, caller: Principal, dataset: str, job: str) -> None:
        """Refuse a session whose owner has lost the right to its dataset in a reload.

        A session keeps a dataset that the configuration no longer has.

        Raises:
            NotAllowed: its owner may no longer read the dataset, or not with this job.
        """
        names = (dataset, *self.sources(dataset))
        if not all(self.may_read(caller, name) for name in names if name in self._readers):
            raise NotAllowed(
                f"{caller.name} may no longer read `{dataset}`: its operator changed who may",
                {"dataset": dataset},
            )
        self.check_job(caller, dataset, job)
