"""Has the shards of one worker scanned, one at a time, by a process of the daemon."""

from gyre_daemon.datasets.formats.base import Arrays, Scan
from gyre_daemon.datasets.scans.processes import ScanProcess, ScanProcesses
from gyre_daemon.storage.base import Storage
from gyre_daemon.storage.beneath import LocalFile
from gyre_daemon.storage.local.listing import check_listed
from gyre_daemon.storage.mounts import MOUNTS
from gyre_daemon.storage.opening.shard_files import opened_file, read_ranges


class Scanner:
    """Scans one shard at a time; its process is started when its first shard is scanned."""

    def __init__(self, processes: ScanProcesses) -> None:
        """Start no process yet."""
        self._processes = processes
        self._process: ScanProcess | None = None

    async def scan(
        self,
        scan: Scan,
        source: Storage,
        shard: int,
        unpacked: LocalFile | None = None,
    ) -> Arrays:
        """Have a shard scanned by another process.

        Args:
            scan: of the format.
            source: has the shard.
            shard: its number.
            unpacked: the shard's file, if it was unpacked.

        Raises:
            CorruptSample: it is damaged, or a local one was changed meanwhile.
            ShardMissing, NotAllowed, StorageUnavailable: it cannot be read.
        """
        listed, stored = source.shards[shard], source.local_file(shard)
        local = unpacked or stored
        self._process = process = self._process or await self._processes.start()
        # A process that waits for a slow mount has no deadline; reads by the storage have.
        is_read = local is None or (local is stored and not source.is_node_local)
        if is_read and (scan.seeks or scan.skips):

            async def read(start: int, stop: int) -> bytes:
                return (await read_ranges(source, [shard], [start], [stop]))[0]

            arrays = await process.scan_ranges(
                scan.run, listed.name, listed.size_bytes, read, in_windows=scan.skips
            )
        elif is_read:
            arrays = await process.scan_stream(scan.run, listed.name, source.stream(shard))
        else:
            assert local
            async with opened_file(local, listed.name) as file:
                scanning = process.scan_file(scan.run, listed.name, file)
                arrays = await MOUNTS.at(local.root.folder).run_in(process.pid, scanning)
        if local and local is stored:
            await MOUNTS.run(local.root.folder, check_listed, local, listed)
        return arrays

    def kill(self) -> None:
        """End the process."""
        if self._process:
            self._process.kill()
            self._process = None
