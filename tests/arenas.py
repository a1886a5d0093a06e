"""What a process has of the daemon's shared memory."""

from pathlib import Path


def mapped_arena_bytes(pid: int) -> int:
    """The arenas' memory that is in a process's page table.

    `RssShmem` of the process's status would not do: the kernel only approximates it, by some dozens
    of pages, and shards on a tmpfs are in it, too.
    """
    is_arena, num_kib = False, 0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            is_arena = "gyre-arena" in line
        elif is_arena and words[0] == "Rss:":
            num_kib += int(words[1])
    return num_kib << 10
