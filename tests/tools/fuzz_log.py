"""Faults of a RolloutLog, of four kinds (`--kind`), one after the other by seed:

kill      processes that write are killed at random times, ROUNDS of them on the same folder, one after the other
power     power failures at every operation on the disk, with what was not synced there or not; full and failing disks;
          a reader looks before any writer
bits      flipped bits, and files that end early or are missing
readers   processes read while others append, delete, compact and are killed

After each, the log has what was acknowledged, by a dict of rows (log_model.py), or says what was damaged.
"""

from __future__ import annotations

import argparse
import os
import pickle
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from log_disk import Disk, State
from log_model import (
    Model,
    Row,
    assert_held,
    assert_log,
    assert_read,
    assert_rows,
    assert_tags,
    batch_of,
    drawn,
    opened,
    played,
    tags_for,
)

import maskpack as mp
from maskpack.errors import FieldError, MaskpackWarning, StorageError
from maskpack.store import RolloutLog
from maskpack.store.rows import deleted_rows

COUNT = 40
ROUNDS = 25
FLIPS = 60
KINDS = ("kill", "power", "bits", "readers")
_kinds = KINDS


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kind", choices=KINDS, nargs="+", default=KINDS)


def session(given: Any) -> None:
    global _kinds
    _kinds = tuple(given.kind)
    torch.set_num_threads(1)  # a fork has no threads


def play(seed: int) -> Counter[str]:
    kind = _kinds[seed % len(_kinds)]
    with folder() as root:
        return {"kill": kill, "power": power, "bits": bits, "readers": readers}[kind](random.Random(seed), root)


@contextmanager
def folder() -> Iterator[Path]:
    """A new folder, in memory where there is such."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as root:
        yield Path(root)


def forked(work: Callable[[], None]) -> int:
    """A process that does something; its number. Its exit status tells whether it raised."""
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


# -------------------------------------------------------------------- killed processes


def kill(rng: random.Random, root: Path, rounds: int = ROUNDS) -> Counter[str]:
    seen: Counter[str] = Counter()
    model, copied = Model(), None
    for number in range(rounds):
        ours, theirs = os.pipe()
        seed, key, dies = rng.random(), 1000 * number, rng.random() < 0.8
        child = forked(
            lambda seed=seed, key=key, dies=dies, end=theirs: _write(random.Random(seed), root, key, dies, end)
        )
        os.close(theirs)
        lines = b""
        if dies:
            if rng.random() < 0.7:
                lines = os.read(ours, 1)  # it has opened the log
            time.sleep(rng.random() ** 2 * 0.08)
            os.kill(child, signal.SIGKILL)
        while more := os.read(ours, 1 << 16):
            lines += more
        os.close(ours)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, -signal.SIGKILL), f"round {number}: exit status {status}"
        seen["rounds"] += 1
        seen["killed"] += status != 0
        flight: dict[str, Any] | None = None
        for op, result in _messages(lines[1:]):
            if flight is None:
                flight = op
                continue
            _assert_result(model, op, result)
            model, flight = model.after(op), None
            if op["do"] == "back_up":
                copied = model
            seen[op["do"]] += 1
        later = model if flight is None else model.after(flight)
        if flight is not None:
            seen["in flight"] += 1
            copied = None if flight["do"] == "back_up" else copied
        read = _read_first(root / "log", [model, later], rng, seen)
        with opened(root / "log") as log:
            assert read in (None, (log.rows.tolist(), log.next_row))
            if later is not model and log.rows.tolist() == sorted(later.live):
                seen["whole"] += 1
                model = later
            assert_log(log, model)
            assert log.next_row == model.next_row
        if copied is not None and rng.random() < 0.3:
            assert_held(root / "backup", copied, "r")
            seen["backups read"] += 1
    return seen


def _write(rng: random.Random, root: Path, key: int, dies: bool, pipe: int) -> None:
    """Plays operations, and tells before and after each. If it `dies`, it waits for its end with the log open."""
    policy = rng.choice(["always", "interval"])
    with opened(root / "log", fsync=policy, interval=0.005, segment_bytes=rng.choice([4096, 16384, 100_000])) as log:
        os.write(pipe, b"+")
        for _ in range(rng.randrange(1, 40)):
            op = drawn(rng, log.rows.tolist(), key, ("compact", "back_up", "sync"))
            key += op.get("count", 0)
            _tell(pipe, op, None)
            result = played(log, op, root / "backup")
            _tell(pipe, op, result)
        if dies:
            signal.pause()


def _tell(pipe: int, op: dict[str, Any], result: Any) -> None:
    line = pickle.dumps((op, result))
    assert len(line) < 4000  # one write, whole
    os.write(pipe, struct.pack("<I", len(line)) + line)


def _messages(lines: bytes) -> Iterator[tuple[dict[str, Any], Any]]:
    while lines:
        (size,) = struct.unpack_from("<I", lines)
        yield pickle.loads(lines[4 : 4 + size])
        lines = lines[4 + size :]


def _assert_result(model: Model, op: dict[str, Any], result: Any) -> None:
    if op["do"] == "append":
        assert result == range(model.next_row, model.next_row + op["count"])
    elif op["do"] == "delete":
        assert result == len(op["rows"])


def _read_first(path: Path, there: list[Model], rng: random.Random, seen: Counter[str]) -> Any:
    """A reader opens what is there before any writer: its rows, which are right, as are those of a copy that it makes,
    and the number of the next one. The next writer has to go on with these. None where there is no log."""
    if not (path / "log.json").exists():
        return None
    seen["readers first"] += 1
    copy = path.with_name("copy")
    with opened(path, "r") as log:
        if rng.random() < 0.2 and log.segments:
            log.back_up(copy)
        found, model = (log.rows.tolist(), log.next_row), _fitting(log, there)
    if copy.exists():
        assert_held(copy, model, rng.choice(["r", "a"]))
        shutil.rmtree(copy)
        seen["copies of readers"] += 1
    return found


def _fitting(log: RolloutLog, there: list[Model]) -> Model:
    """The last of some models that the log has the rows of, which are right."""
    numbers, following = log.rows.tolist(), log.next_row
    fits = [model for model in there if sorted(model.live) == numbers and model.next_row <= following]
    assert fits, (numbers, following, [(sorted(model.live), model.next_row) for model in there])
    assert_log(log, fits[-1])
    return fits[-1]


# -------------------------------------------------------------------- power failures


def power(rng: random.Random, root: Path, generations: int = 3, points: int = 60) -> Counter[str]:
    """A program on a disk that loses its power: at many places of it, what may be found is opened and compared. The
    next generation goes on with one of these folders."""
    seen: Counter[str] = Counter()
    model, key = Model(), 0
    for generation in range(generations):
        policy = rng.choice(["always", "always", "interval"])
        own = root / f"{generation}"
        disk, history = Disk(own), []
        with disk.attached():
            key = _program(rng, own, disk, policy, model, key, history, seen)
        state, found = State(), root / "found"
        chosen = set(rng.sample(range(len(disk.events) + 1), min(points, len(disk.events) + 1)))
        begun = sum(event[0] == "there" for event in disk.events)
        going: Path | None = None
        for at, event in enumerate([*disk.events, ("end",)]):
            if at in chosen and at >= begun:
                how = rng.choice(["killed", "none", "all", "some", "some", "some", "some"])
                state.folder(found, how, rng)
                there = _candidates(history, at, policy, how)
                kept = root / f"{generation + 1}"
                going = kept if going is None and rng.random() < 0.05 else going
                if going is kept and not kept.exists():
                    shutil.copytree(found, kept)
                    model = _found(found, there, rng, key, seen)
                else:
                    _found(found, there, rng, key, seen)
                seen["crash points"] += 1
                seen[how] += 1
                shutil.rmtree(found)
            if event[0] != "end":
                state.follow(event, rng)
        if going is None:
            break
    return seen


Step = tuple[int, int | None, Model, bool]
"""The events before an operation and at its end, None if it failed; what is there then; whether that is synced."""


def _program(
    rng: random.Random, own: Path, disk: Disk, policy: Any, model: Model, key: int, history: list[Step], seen: Any
) -> int:
    history.append((0, 0, model, True))
    size = rng.choice([4096, 12_000])

    def begin() -> RolloutLog:
        return opened(own, fsync=policy, interval=1e6, segment_bytes=size)

    log, looked = begin(), 0
    model = Model(model.live, log.next_row, model.ever)  # numbers of rows that were lost in flight are not used again
    assert_log(log, model)
    for _ in range(rng.randrange(4, 16)):
        op = drawn(rng, log.rows.tolist(), key, ("compact", "sync", "reopen"))
        key += op.get("count", 0)
        before = len(disk.events)
        if rng.random() < 0.15:
            if rng.random() < 0.6:
                disk.full = rng.choice([0, 0, 1, 2, 3, 8])
            else:
                disk.failing = rng.choice([0, 0, 1, 2, 3])
        later_fault = ("lost",) in [event[:1] for event in disk.events[looked:]]
        looked = len(disk.events)
        faulty = disk.full is not None or disk.failing is not None
        later = model.after(op)
        try:
            if op["do"] == "reopen":
                log.close()
                if faulty:
                    disk.full = disk.failing = None
                log = begin()
            else:
                result = played(log, op)
                _assert_result(model, op, result)
            done = len(disk.events)
            model = later
        except StorageError:
            assert faulty or later_fault  # an error of a call may be raised by the next
            seen["failed"] += 1
            done = None
        was_full = disk.full is not None
        disk.full = disk.failing = None
        durable = done is not None and (policy == "always" or op["do"] in ("sync", "reopen"))
        history.append((before, done, model if done is not None else later, durable))
        if done is None:
            if was_full and not later_fault and op["do"] in ("append", "delete"):  # the log goes on
                assert_log(log, model)
                if rng.random() < 0.5:
                    continue
                one = {"do": "append", "schema": 0, "width": 6, "style": 1, "count": 1, "key": key}
                key += 1
                before = len(disk.events)
                played(log, one)
                model = model.after(one)
                history.append((before, len(disk.events), model, policy == "always"))
            else:
                before = len(disk.events)
                _close(log)
                log = begin()
                assert_log(log, model)  # what raised has appended nothing
                history.append((before, len(disk.events), model, True))
    assert_log(log, model)
    before = len(disk.events)
    try:
        log.close()
        history.append((before, len(disk.events), model, True))
    except StorageError:  # of a sync that failed in a call that was acknowledged
        assert any(event[0] == "lost" for event in disk.events)
    return key


def _close(log: RolloutLog) -> None:
    try:
        log.close()
    except StorageError:
        log.close()


def _candidates(history: list[Step], at: int, policy: str, how: str) -> list[Model]:
    """What may be there after so many events: from the last that must be there to the one in flight."""
    low = high = 0
    for place, (begin, end, _, durable) in enumerate(history):
        if end is not None and end <= at and (durable or how == "killed"):
            low = place
        if begin < at:
            high = place
    high = max(low, high)
    return [model for _, _, model, _ in history[low : high + 1]]


def _found(path: Path, there: list[Model], rng: random.Random, key: int, seen: Counter[str]) -> Model:
    """Opens what a crash left behind, compares, and appends a row. Returns the model that fits."""
    read = _read_first(path, there, rng, seen)
    with opened(path) as log:
        assert read in (None, (log.rows.tolist(), log.next_row))
        model = _fitting(log, there)
        if rng.random() < 0.6:
            return model
        one = {"do": "append", "schema": 1, "width": 9, "style": 2, "count": 2, "key": key + 500_000}
        first = log.next_row
        assert played(log, one) == range(first, first + 2)
        after = Model(model.live, first, model.ever).after(one)
    if rng.random() < 0.3:
        with opened(path) as log:
            log.compact(0.0)
            assert_log(log, after)
    return model


# -------------------------------------------------------------------- flipped bits


def bits(rng: random.Random, root: Path, flips: int = FLIPS) -> Counter[str]:
    """A log whose files change: each row is right, or raises StorageError, and those that do are of one record."""
    seen: Counter[str] = Counter()
    model, key = Model(), 0
    with opened(root / "log", segment_bytes=rng.choice([4096, 16384])) as log:
        for _ in range(rng.randrange(6, 16)):
            op = drawn(rng, log.rows.tolist(), key)
            op["count"] = min(op.get("count", 0), 6)
            key += op["count"]
            played(log, op)
            model = model.after(op)
        log.append(batch_of([Row(0, key, 2, key)], 6), tags_for([Row(0, key, 2, key)]))
        model = model.after({"do": "append", "schema": 0, "key": key, "style": 2, "count": 1})
        places = _places(log)
    clean = root / "clean"
    shutil.copytree(root / "log", clean)
    names = sorted(path.name for path in clean.iterdir() if path.name != "lock")
    sizes = [(clean / name).stat().st_size for name in names]
    for _ in range(flips):
        name = rng.choice(names) if rng.random() < 0.3 else rng.choices(names, sizes)[0]
        path, data = root / "log" / name, bytearray((clean / name).read_bytes())
        how = rng.choices(["flip", "cut", "missing"], [10, 1, 0.5])[0]
        at = rng.randrange(len(data)) if data else 0
        if how == "missing":
            path.unlink()
        elif how == "cut":
            path.write_bytes(data[:at])
        else:
            data[at] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
        seen[how] += 1
        suspects = places.get((name, how), lambda at: set[int]())(at)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", MaskpackWarning)
                _read_broken(root / "log", model, suspects, name, how == "flip", seen)
                if rng.random() < 0.2:
                    _write_broken(root / "log", model, suspects, key + 1000, name)
        except Exception as error:
            raise AssertionError(f"{name}: {how} at byte {at} of {len(data)}") from error
        shutil.rmtree(root / "log")
        shutil.copytree(clean, root / "log")
    return seen


def _places(log: RolloutLog) -> dict[tuple[str, str], Callable[[int], set[int]]]:
    """Which rows may be lost by a change of a segment at a byte; or come back, if what deleted them is cut off."""
    index = log._contents.index
    out: dict[tuple[str, str], Callable[[int], set[int]]] = {}
    for segment in log._contents.segments:
        spans: list[tuple[int, int, set[int]]] = []
        gone: list[tuple[int, int, set[int]]] = []
        for chunk in segment.chunks:
            rows: set[int] = set()
            if chunk.record.has_rows:
                rows = set(chunk.rows.tolist())
            elif "digest" in chunk.parsed:
                using = [one for one in index.chunks if chunk.parsed["digest"] in one.parsed.get("blobs", {}).values()]
                rows = {row for one in using for row in one.rows.tolist()}
            else:
                gone.append((chunk.record.at, chunk.record.end, set(deleted_rows(chunk).tolist())))
            spans.append((chunk.record.at, chunk.record.end, rows))

        def flipped(at: int, spans: Any = spans) -> set[int]:
            return {row for begin, end, rows in spans if begin <= at < end for row in rows}

        def cut(at: int, spans: Any = (*spans, *gone)) -> set[int]:
            return {row for _, end, rows in spans if at < end for row in rows}

        out |= {(segment.name, "flip"): flipped, (segment.name, "cut"): cut}
        out[segment.name, "missing"] = lambda _, cut=cut: cut(0)
    return out


def _read_broken(path: Path, model: Model, suspects: set[int], name: str, flip: bool, seen: Counter[str]) -> None:
    try:
        log = RolloutLog(path, mode="r")
    except StorageError:
        assert name == "log.json"
        seen["not opened"] += 1
        return
    bad: set[int] = set()
    for number, row in sorted(model.ever.items()):
        try:
            assert_rows(mp.decompress(log.take([number])), [row])
            assert_tags(log, {number: row})
        except StorageError as error:
            if (number not in suspects and number in model.live) or ".seg, bytes" not in str(error):
                raise  # of rows that were compacted, only the range is known
            bad.add(number)
        except FieldError:
            assert number not in model.live, number
        else:
            assert number in model.live or (not flip and number in suspects), number
    assert log.damaged().tolist() == sorted(bad), (log.damaged().tolist(), bad)
    assert log.next_row == model.next_row
    seen["rows lost"] += len(bad)
    seen["harmless"] += not bad


def _write_broken(path: Path, model: Model, suspects: set[int], key: int, name: str) -> None:
    """A broken log is written to: what is whole stays, and what comes new is right."""
    try:
        log = RolloutLog(path, pad_token_id=0, segment_bytes=4096)
    except StorageError:
        assert name == "log.json"
        return
    with log:
        lost = set(log.damaged().tolist())
        assert lost & set(model.live) <= suspects
        op = {"do": "append", "schema": 1, "width": 9, "style": 3, "count": 3, "key": key}
        rows = played(log, op)
        assert rows.start == model.next_row
        keep = {number: row for number, row in model.after(op).live.items() if number not in lost}
        first = min(keep)
        played(log, {"do": "delete", "rows": [first]})
        del keep[first]
        played(log, {"do": "compact", "least": 0.0})
        assert_read(log, keep)
    with RolloutLog(path, mode="r") as log:
        assert_read(log, keep)
        assert set(keep) <= set(log.rows.tolist()) <= set(keep) | suspects
        # of rows that were compacted, only the range is known: beside a missing segment they are named, too
        compacted = {*model.ever, first} - set(keep) if not (path / name).exists() else set[int]()
        assert set(log.damaged().tolist()) <= lost | compacted


# -------------------------------------------------------------------- readers beside a writer

BLOCK = 64
"""Rows of the same schema that follow each other."""


def of_number(number: int) -> Row:
    """The row that has a number, whenever it is appended. Each third may be deleted."""
    return Row(number // BLOCK % 2, number, 2, number // BLOCK * BLOCK)


def readers(rng: random.Random, root: Path, writers: int = 7, count: int = 2) -> Counter[str]:
    """Writers, one after the other, all but the last killed; readers beside them, of which some open the log anew."""
    seen: Counter[str] = Counter()
    with opened(root / "log") as log:
        log.append(batch_of([of_number(0)], 9), tags_for([of_number(0)]))
    shared = torch.zeros(5, dtype=torch.int64).share_memory_()
    shared[0] = shared[1] = 1  # rows below the first are acknowledged; below the second, begun; the last ends it
    children = [
        forked(partial(_read, random.Random(rng.random()), root, shared, bool(place % 2))) for place in range(count)
    ]
    for left in reversed(range(writers)):
        writer = forked(partial(_append, random.Random(rng.random()), root, shared))
        time.sleep(rng.random() * 0.5)
        if left:
            os.kill(writer, signal.SIGKILL)
        else:
            shared[4] = 1
        status = os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1])
        assert status == (-signal.SIGKILL if left else 0), status
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
    with opened(root / "log", "r") as log:
        numbers = log.rows.tolist()
        assert {number for number in range(int(shared[0])) if number % 3} <= set(numbers)
        for own in (0, 1):
            some = [number for number in numbers if of_number(number).schema == own]
            assert (
                not some or assert_rows(mp.decompress(log.take(some)), [of_number(number) for number in some]) is None
            )
    seen["rows"] += int(shared[1])
    seen["looks"] += int(shared[2])
    seen["rows read"] += int(shared[3])
    return seen


def _append(rng: random.Random, root: Path, shared: torch.Tensor) -> None:
    with opened(root / "log", fsync=rng.choice(["always", "interval"]), interval=0.01) as log:
        while not shared[4]:
            first = log.next_row
            end = min(first + rng.choice([1, 3, 20]), first // BLOCK * BLOCK + BLOCK)
            shared[1] = max(int(shared[1]), end)
            rows = [of_number(number) for number in range(first, end)]
            log.append(batch_of(rows, rng.choice([6, 9])), tags_for(rows))
            shared[0] = end
            if rng.random() < 0.3:
                some = log.rows[rng.randrange(len(log)) :][:60]
                log.delete(some[some % 3 == 0])
            if rng.random() < 0.15:
                log.compact(rng.choice([0.0, 0.2]))


def _read(rng: random.Random, root: Path, shared: torch.Tensor, anew: bool) -> None:
    log, newest, looked = opened(root / "log", "r"), 0, False
    while not (shared[4] and looked):
        if anew and rng.random() < 0.5:
            log = opened(root / "log", "r")
        acknowledged = int(shared[0])
        numbers = log.rows.tolist()
        following = log.next_row
        assert acknowledged <= following <= int(shared[1])
        assert newest <= following
        newest = following
        assert {number for number in range(acknowledged) if number % 3} <= set(numbers), "a row is missing"
        assert not numbers or numbers[-1] < following
        block = rng.choice(numbers) // BLOCK
        some = [number for number in numbers if number // BLOCK == block and (number % 3 or rng.random() < 0.2)]
        kept = [number for number in some if number % 3]
        for wanted in (some, kept):
            if not wanted:
                continue
            try:
                batch = log.take(wanted)
                tags = log.tags(wanted)
            except FieldError:
                assert wanted is not kept
                continue
            assert_rows(mp.decompress(batch), [of_number(number) for number in wanted])
            assert tags == {"step": [block * BLOCK // 16] * len(wanted), "own": wanted}
            shared[3] += len(wanted)
        kind = rng.random()
        if kind < 0.2:
            own = log.where(own=acknowledged - 1).tolist()
            assert own == [acknowledged - 1] or (acknowledged - 1) % 3 == 0
        elif kind < 0.3:
            try:
                assert log.damaged().size == 0
            except StorageError as error:  # the writer compacts all the time
                if "changes faster" not in str(error):
                    raise
        shared[2] += 1
        looked = True
