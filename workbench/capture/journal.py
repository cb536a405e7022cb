"""Which tensors of an unfinished capture are on disk already, so that a killed run can go on.

A text file beside the `.partial` one. Its first line states what is recorded; then comes one line
for each entry, after the bytes: its time and the checksums of its tensors. The last line may be
torn by a kill and is then ignored. A video is not noted: it is sampled again anyway.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from workbench.capture.format import CaptureSpec

Times = dict[tuple[int, int], float]
Digests = dict[str, str]


@dataclass
class Progress:
    """What has been written: denoising time of every entry, sha256 of every tensor."""

    times: Times = field(default_factory=dict)
    digests: Digests = field(default_factory=dict)


class Journal:
    """Reads and writes the progress of one recording.

    Args:
        path: the text file.
        spec: what is recorded.
    """

    def __init__(self, path: Path, spec: CaptureSpec) -> None:
        self.path = path
        self._facts = facts_of(spec)

    def start(self) -> None:
        """Begins an empty one."""
        self.path.write_text(_line(self._facts))

    def add(self, digests: Mapping[str, str], entry: tuple[int, int], time: float) -> None:
        """Notes an entry whose bytes have been written."""
        with self.path.open("a") as file:
            file.write(_line({"sha256": dict(digests), "entry": entry, "time": time}))

    def read(self) -> Progress:
        """What was noted.

        Raises:
            ValueError: it belongs to another recording; the message shows what differs.
        """
        found = Progress()
        lines = _lines(self.path)
        self._compare(lines[0] if lines else {})
        for line in lines[1:]:
            found.digests.update(line["sha256"])
            found.times[tuple(line["entry"])] = line["time"]
        return found

    def _compare(self, theirs: Mapping[str, object]) -> None:
        names = sorted({*theirs, *self._facts})
        different = [name for name in names if theirs.get(name) != self._facts.get(name)]
        if different:
            listing = "; ".join(
                "{}: {!r} there, {!r} now".format(
                    name, *_without_equal(theirs.get(name), self._facts.get(name))
                )
                for name in different
            )
            raise ValueError(
                f"{self.path}: the interrupted recording is another one ({listing}); record with "
                "its settings, or delete it and its .partial file"
            )


def _without_equal(theirs: object, ours: object) -> tuple[object, object]:
    """Two facts; of JSON objects, such as the settings of a scheduler, only what differs."""
    try:
        a, b = json.loads(str(theirs)), json.loads(str(ours))
    except ValueError:
        return theirs, ours
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return theirs, ours
    equal = {key for key in a.keys() & b.keys() if a[key] == b[key]}
    left = ({key: x for key, x in d.items() if key not in equal} for d in (a, b))
    first, second = map(json.dumps, left)
    return first, second


def entries_in(path: Path) -> int:
    """Entries that a journal notes; 0 where there is none."""
    return max(0, len(_lines(path)) - 1) if path.is_file() else 0


def facts_of(spec: CaptureSpec) -> dict[str, object]:
    """Everything that two runs must agree on to make one file."""
    tensors = {name: [tensor.dtype, list(tensor.shape)] for name, tensor in spec.tensors.items()}
    return {**spec.facts(), "tensors": tensors}


def _line(content: Mapping[str, object]) -> str:
    return json.dumps(content) + "\n"


def _lines(path: Path) -> list[dict]:
    """Every whole line; one without its end was being written when the run was killed."""
    whole = path.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]
