"""Groups to store, and a second file system whose disk can be full."""

import errno

import fsspec
from fsspec.implementations.local import LocalFileSystem

from surefoot.rollout.protocols import Group, Sample


class SmallDisk(LocalFileSystem):
    """A second file system: local files behind another protocol, on a disk that can be full."""

    protocol = "smalldisk"
    room_bytes: int | None = None
    cachable = False

    @classmethod
    def _strip_protocol(cls, path):
        return LocalFileSystem._strip_protocol(str(path).removeprefix("smalldisk://"))

    def open(self, path, mode="rb", **kwargs):
        file = super().open(path, mode, **kwargs)
        if "w" not in mode or self.room_bytes is None:
            return file
        write, left = file.write, self.room_bytes

        def write_while_there_is_room(data):
            nonlocal left
            if len(data) > left:
                write(data[:left])
                raise OSError(errno.ENOSPC, "No space left on device")
            left -= len(data)
            return write(data)

        file.write = write_while_there_is_room
        return file


fsspec.register_implementation("smalldisk", SmallDisk, clobber=True)


def a_sample(text: str = "3", ids: bytes = b"\x07\0\0\0", reward: float = 1.0) -> Sample:
    return Sample(
        ids=ids,
        logprobs=b"\0\0\0\xbf",
        versions=b"\0" * 4,
        truncated=False,
        text=text,
        reward=reward,
        parts={},
    )


def a_group(prompt_index: int = 0, attempt: int = 1, samples: list[Sample] | None = None) -> Group:
    return Group(
        prompt_index=prompt_index,
        attempt=attempt,
        row_index=prompt_index,
        prompt_ids=b"\x01\0\0\0\x02\0\0\0",
        temperature=0.7,
        samples=samples if samples is not None else [a_sample()],
    )
