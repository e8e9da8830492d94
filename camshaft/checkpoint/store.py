"""Save checkpoints into a directory so that each is there whole or not at all, and find them again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import Self, TypeVar, cast

from camshaft.checkpoint import checking, planning, scanning, values
from camshaft.checkpoint.background import Flight, HostBuffers, collect_records, leave_record
from camshaft.checkpoint.checking import Check, Found, PassedOver
from camshaft.checkpoint.entries import Entries, Json
from camshaft.checkpoint.locking import Lock
from camshaft.checkpoint.manifest import MANIFEST, FileRecord, Manifest, TensorRecord
from camshaft.checkpoint.peers import Alone, Peers
from camshaft.checkpoint.places import LocalPlace, Location, place_of, split_location, told
from camshaft.checkpoint.planning import Plan
from camshaft.checkpoint.writing import write_drafts
from camshaft.errors import CheckpointError

T = TypeVar("T")
_PATIENCE_S = 3600.0


@dataclass(slots=True)
class Job:
    """One checkpoint on its way: the same on all ranks but for ``plan``."""

    step: int
    meta: dict[str, Json]
    parent: str | None
    pointers: Sequence[str]
    peers: Peers
    plan: Plan = field(default_factory=Plan)
    folder: str = ""
    final: str = ""
    spread: set[str] = field(default_factory=set)


class Store:
    """The checkpoints of one run, in a directory that all ranks share.

    All ranks call each method, except where it says otherwise; an error on one is raised on all.
    While a ``Store`` is open for writing, another run's ``Store`` on the same directory is refused, and
    what dead runs left half-written is deleted. A remote directory (``s3://...``) is not locked. With
    ``read_only`` nothing is locked, made or deleted, so that a directory can be read while a run writes to it.
    """

    def __init__(
        self,
        directory: Location,
        *,
        peers: Peers | None = None,
        strategy: str = "single",
        read_only: bool = False,
    ) -> None:
        self._peers: Peers = peers or Alone()
        self._strategy = strategy
        self._place = place_of(directory)
        self.directory: Location = self._place.location("")
        self._lock: Lock | None = None
        self._serial: int | None = None
        self._flight: Flight[Location | None] | None = None
        self._buffers = HostBuffers()
        if not read_only:
            self._agree(self._open)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.wait()
        self.close()

    def close(self, *, grace_s: float = 60.0) -> None:
        """Give the directory free. Communicates nothing; a write in flight gets ``grace_s`` to end by itself."""
        if self._flight is not None:
            self._flight.abandon(grace_s)
            self._flight = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def save(
        self,
        entries: Entries,
        *,
        step: int,
        tag: str | None = None,
        meta: dict[str, Json] | None = None,
        parent: Location | None = None,
        pointers: Sequence[str] = ("last",),
        alone: bool = False,
    ) -> Location:
        """Write a checkpoint and return its path; it is durable, and ``pointers`` name it, by then.

        ``meta["exact"]: False`` marks one that ``latest`` never picks; pointers are then left as they are.
        With ``alone`` only this rank calls, and its entries are the whole checkpoint.

        Raises:
            CheckpointError: on every rank, naming the first that failed; nothing is left behind.
        """
        if not alone:
            self.wait()
        job = self._job(step, meta, parent, pointers, Alone() if alone else self._peers)
        try:
            self._start(job, entries, tag)
            parts = self._agree(lambda: self._write(job), job.peers)
            return cast("Location", _of_main(self._agree(lambda: self._commit(job, parts), job.peers)))
        except BaseException:
            self._abort(job)
            raise

    def save_async(
        self,
        entries: Entries,
        *,
        step: int,
        tag: str | None = None,
        meta: dict[str, Json] | None = None,
        parent: Location | None = None,
        pointers: Sequence[str] = ("last",),
    ) -> None:
        """Copy ``entries`` to host memory, return, and write them in the background.

        One at a time: a write still in flight is waited for first, and its error raised here. Each rank
        writes without collectives; the main process commits once every rank has left its record.
        """
        self.wait()
        job = self._job(step, meta, parent, pointers, self._peers)
        try:
            self._start(job, entries, tag, copy=self._buffers)
        except BaseException:
            self._abort(job)
            raise
        self._flight = Flight(lambda stop: self._write_behind(job, stop))

    @property
    def in_flight(self) -> bool:
        """Whether this rank's background write has not ended. Any rank may ask; nothing is communicated."""
        return self._flight is not None and not self._flight.done

    def wait(self) -> Location | None:
        """Wait for the write in flight and return the path it committed; None when there was none.

        Raises:
            CheckpointError: it failed on some rank.
        """
        if self._flight is None:
            return None
        flight, self._flight = self._flight, None
        return cast("Location", _of_main(self._agree(flight.result)))

    def latest(self, *, check: Check = "full") -> Found | None:
        """Return the newest checkpoint that is whole, exact and passes ``check``; None when there is none.

        The ranks share the work of hashing.
        """
        everything: list[scanning.Candidate] = _of_main(
            self._agree(lambda: scanning.candidates(self._place) if self._peers.is_main else None)
        )
        skipped: list[PassedOver] = []
        for candidate in everything:
            why = candidate.why_not
            if candidate.manifest is not None and not candidate.manifest.exact:
                why = "It was saved when the run failed, and is not exact."
            if candidate.manifest is not None and not why and check == "full":
                why = self._damage(candidate.name, candidate.manifest)
            if not why:
                return scanning.found(self._place, candidate, skipped)
            skipped.append(scanning.passed_over(self._place, candidate, why))
        return None

    def resolve(self, which: Location, *, check: Check = "full") -> Found | None:
        """Return the checkpoint that ``which`` means: ``auto``, a pointer such as ``last`` or ``best``, or a path.

        Only ``auto`` may find nothing.

        Raises:
            CheckpointError: it does not exist or is damaged.
        """
        if which == "auto":
            return self.latest(check=check)

        def look() -> Found:
            word = isinstance(which, str) and which.isidentifier() and not Path(which).is_dir()
            if word and not str(which).startswith("step_"):
                place, name = self._place, scanning.read_pointer(self._place, str(which))
            elif str(which) in self._place.names():
                place, name = self._place, str(which)
            else:
                place, name = split_location(which)
            return Found(place.location(name), checking.require_valid(place, name, check))

        return _of_main(self._agree(lambda: look() if self._peers.is_main else None))

    def point(self, pointer: str, path: Location, meta: dict[str, Json] | None = None) -> None:
        """Let the file ``pointer`` (``best``, ...) name the checkpoint ``path``. The main process writes."""
        name = split_location(path)[1]

        def write() -> None:
            if self._peers.is_main:
                checking.read_manifest(self._place, name)
                scanning.write_pointer(self._place, pointer, name, meta or {})

        self._agree(write)

    def checkpoints(self) -> list[Found]:
        """Return the whole checkpoints, newest first, looked at quickly. Any rank may call it alone."""
        return [
            scanning.found(self._place, candidate, [])
            for candidate in scanning.candidates(self._place)
            if candidate.manifest is not None and not candidate.why_not
        ]

    def prune(
        self, *, keep_last: int, keep: Collection[Location] = (), keep_every: int | None = None
    ) -> list[Location]:
        """Delete old checkpoints and return their paths; on other ranks than the main process do nothing.

        Kept are the newest ``keep_last`` whole ones (at least one), those in ``keep``, those a pointer
        names, and those whose step is a multiple of ``keep_every``. Communicates nothing.
        """
        if not self._peers.is_main:
            return []
        names = {split_location(path)[1] for path in keep} | scanning.pointed(self._place)
        gone: list[Location] = []
        with told(f"Deleting old checkpoints in {self.directory}"):
            everything = scanning.candidates(self._place)
            for name in scanning.to_delete(everything, keep_last=keep_last, keep=names, keep_every=keep_every):
                self._place.discard(name)
                gone.append(self._place.location(name))
        return gone

    def _open(self) -> None:
        if not self._peers.is_main:
            return
        with told(f"Opening {self.directory}"):
            if isinstance(self._place, LocalPlace):
                self._place.root.mkdir(parents=True, exist_ok=True)
                self._lock = Lock(self._place.root)
            self._place.sweep()

    def _job(
        self,
        step: int,
        meta: dict[str, Json] | None,
        parent: Location | None,
        pointers: Sequence[str],
        peers: Peers,
    ) -> Job:
        # Through JSON and back: a copy that later changes cannot reach, and an early error for what JSON cannot hold.
        frozen = values.decode(values.encode(meta or {}, where="meta"), where="meta")
        return Job(step, frozen, None if parent is None else split_location(parent)[1], tuple(pointers), peers)

    def _start(self, job: Job, entries: Entries, tag: str | None, copy: HostBuffers | None = None) -> None:
        """Check everything on every rank before anything is written, and agree on names."""
        peers = job.peers

        def announce() -> tuple[list[str], str, str]:
            job.plan = planning.make_plan(entries, rank=peers.rank, is_main=peers.is_main)
            if copy is not None:
                job.plan.snapshot(copy.copy)
                copy.synchronize()
            if peers.is_main:
                with told(f"Starting a checkpoint in {self.directory}"):
                    job.final = scanning.new_name(self._place, job.step, tag)
                    job.folder = self._place.begin(job.final)
            return list(job.plan.groups), job.folder, job.final

        seen: set[str] = set()
        for groups, folder, final in self._agree(announce, peers):
            job.spread |= seen & set(groups)
            seen |= set(groups)
            job.folder, job.final = job.folder or folder, job.final or final

    def _write(self, job: Job) -> Manifest:
        """Write this rank's files; return the part of the manifest that describes them."""
        rank, world_size = job.peers.rank, job.peers.world_size
        with told(f"Writing {self._place.location(job.final)} on rank {rank}"):
            files = write_drafts(self._place, job.folder, job.plan.drafts(rank, world_size, job.spread))
        tensors = job.plan.index(rank, world_size, job.spread)
        return self._manifest(job, files, tensors)

    def _write_behind(self, job: Job, stop: Event) -> Location | None:
        peers = job.peers
        try:
            part = self._write(job)
            if not peers.is_main:
                with told(f"Writing {self._place.location(job.final)} on rank {peers.rank}"):
                    leave_record(self._place, job.folder, peers.rank, part)
                return None
            others = [rank for rank in range(peers.world_size) if rank != peers.rank]
            with told(f"Waiting for the other ranks' parts of {self._place.location(job.final)}"):
                parts = collect_records(self._place, job.folder, others, stop=stop, patience_s=_PATIENCE_S)
            return self._commit(job, [part, *parts])
        except Exception as error:
            if not peers.is_main:
                failure = replace(self._manifest(job, {}, {}), meta={"error": str(error)})
                # If not even that can be written, the main process hears of it in `wait`.
                with contextlib.suppress(OSError):
                    leave_record(self._place, job.folder, peers.rank, failure)
            self._abort(job)
            raise

    def _manifest(self, job: Job, files: dict[str, FileRecord], tensors: dict[str, TensorRecord]) -> Manifest:
        return Manifest(
            step=job.step,
            serial=0 if self._serial is None else self._serial + 1,
            world_size=job.peers.world_size,
            strategy=self._strategy,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            parent=job.parent,
            meta=job.meta,
            files=files,
            tensors=tensors,
        )

    def _commit(self, job: Job, parts: Sequence[Manifest]) -> Location | None:
        if not job.peers.is_main:
            return None
        with told(f"Committing {self._place.location(job.final)}"):
            if self._serial is None:
                known = [c.manifest.serial for c in scanning.candidates(self._place) if c.manifest is not None]
                self._serial = max(known, default=0)
            files = {name: record for part in parts for name, record in part.files.items()}
            manifest = self._manifest(job, files, planning.merge([part.tensors for part in parts]))
            self._place.commit(job.folder, job.final, MANIFEST, manifest.encode())
            self._serial = manifest.serial
            if manifest.exact:
                for pointer in job.pointers:
                    scanning.write_pointer(self._place, pointer, job.final, {"step": job.step})
        return self._place.location(job.final)

    def _abort(self, job: Job) -> None:
        if job.peers.is_main and job.folder:
            # The failure that led here is the one to report.
            with contextlib.suppress(OSError):
                self._place.discard(job.folder)

    def _damage(self, name: str, manifest: Manifest) -> str:
        peers = self._peers
        mine = sorted(manifest.files)[peers.rank :: peers.world_size]
        parts = self._agree(lambda: checking.hash_problems(self._place, name, manifest, mine))
        return " ".join(problem for part in parts for problem in part)

    def _agree(self, act: Callable[[], T], peers: Peers | None = None) -> list[T]:
        """Act on every rank and return all results; if any failed, raise on all."""
        peers = peers or self._peers
        error: Exception | None = None
        result: T | None = None
        try:
            result = act()
        except Exception as caught:  # noqa: BLE001, told to all ranks and raised below
            error = caught
        told_by = cast(
            "list[tuple[str | None, T]]", peers.gather_objects((None if error is None else str(error), result))
        )
        if error is not None:
            raise error
        failed = [(rank, text) for rank, (text, _) in enumerate(told_by) if text is not None]
        if failed:
            rank, text = failed[0]
            raise CheckpointError(f"Rank {rank} failed at a checkpoint: {text}", why="The other ranks stop with it.")
        return [value for _, value in told_by]


def _of_main(answers: Sequence[T | None]) -> T:
    """Return what the main process answered; the others answered None."""
    for answer in answers:
        if answer is not None:
            return answer
    raise AssertionError("no rank is the main process")
