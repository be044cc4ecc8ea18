"""An uploader that is a process of its own, beside the jobs of `runkit`: on their thread, with wires and a clock of its own."""

from __future__ import annotations

from tests.engine.runkit import SMALL, DrivenEnv, Job, Place, Request, Wire, begun
from tieredckpt.engine.uploading import Event, Uploading
from tieredckpt.errors import NotFoundError
from tieredckpt.format import keys
from tieredckpt.plan.uploads import UploadPolicy


class Beside:
    """One `Uploading` beside the jobs of a place, with wires and a clock of its own."""

    def __init__(self, place: Place, name: str = "uploader", *, policy: UploadPolicy = "all", seed: int = 900) -> None:
        self.place, self.name = place, name
        self.env = DrivenEnv(seed)
        self.events: list[Event] = []
        self.remote = Wire(place.store("remote"), name, place.journal)
        self.until = 0.0
        self.told_to_stop = False
        self.uploading = Uploading(
            self._open_local,
            self.remote,
            policy=policy,
            env=self.env,
            settings=SMALL,
            allow_unfenced=False,
            tell=self.events.append,
            stopped=lambda: self.told_to_stop or self.env.monotonic() >= self.until,
        )

    def _open_local(self) -> Wire:
        if self.place.local is None:
            raise NotFoundError("there is no directory")
        self.local = Wire(self.place.local, self.name, self.place.journal)
        return self.local

    def run_for(self, seconds: float) -> None:
        self.until = self.env.monotonic() + seconds
        self.uploading.run()

    def push(self, *, within_s: float = 1000.0) -> tuple[str, ...]:
        self.until = self.env.monotonic() + within_s
        return self.uploading.push()

    def told(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]


def external(place: Place, *steps: int, **options: object) -> Job:
    """A job with an external uploader that has resumed and saved; nothing is sent."""
    return begun(place, *steps, uploader="external", **options)


def look_again(job: Job, seconds: float = 3.0) -> None:
    """The trainer's background runs, time passes, and it runs again."""
    job.work()
    job.env.sleep(seconds)
    job.work()


def requests(place: Place, job: str, *methods: str) -> list[Request]:
    return [request for request in place.journal if request.job == job and request.method in methods]


def puts_of_packs(place: Place, job: str) -> list[str]:
    """Of a job that writes on one tier alone."""
    return [r.keys[0] for r in requests(place, job, "put") if r.keys[0].startswith(keys.DATA_PREFIX)]
