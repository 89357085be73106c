"""What every stage gets: its request, the store, its input receipts, a place to write, progress, MLflow."""

from __future__ import annotations

import datetime
import logging
import secrets
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tasks.contract.errors import IntegrityError
from tasks.contract.receipt import Receipt, ReceiptRef
from tasks.contract.request import StageRequest
from tasks.contract.spec import RunSpec
from tasks.contract.stages import STAGES
from tasks.progress import Progress
from tasks.provenance import versions
from tasks.storage.artifact import ArtifactWriter, fetch_object, read_receipt
from tasks.storage.base import Store
from tasks.tracking import Tracker

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger("tasks")


@dataclass
class StageContext:
    """One execution of one stage. Use as a context manager: local scratch space goes when it closes."""

    request: StageRequest
    store: Store
    tracker: Tracker
    device: str = "cpu"
    cache: Path | None = None  # local copies of verified objects; kept between stages of a process
    _stack: ExitStack = field(default_factory=ExitStack)
    _started: float = field(default_factory=time.time)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    @property
    def spec(self) -> RunSpec:
        """The resolved spec (as asked for, in `plan`)."""
        return self.request.spec

    @property
    def args(self) -> dict[str, Any]:
        """The request's arguments."""
        return self.request.args

    def scratch(self) -> Path:
        """A new local folder, removed when the stage ends."""
        return Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="drafter-")))

    # ---- inputs -----------------------------------------------------------------------------------------------------

    def refs(self, name: str) -> list[ReceiptRef]:
        """Input receipts of that name.

        Raises:
            KeyError: if the request has none.
        """
        refs = self.request.inputs.get(name)
        if not refs:
            raise KeyError(f"stage {self.request.stage} needs input {name!r}, found {sorted(self.request.inputs)}")
        return refs

    def load(self, ref: ReceiptRef) -> Receipt:
        """Read a receipt and check that it is the one meant.

        Raises:
            IntegrityError: if its digest differs from the reference's.
        """
        receipt = read_receipt(self.store, ref.kind, ref.key)
        if receipt.digest() != ref.digest:
            raise IntegrityError(
                f"receipt of {ref.kind}/{ref.key}: digest {receipt.digest()} in the store, {ref.digest} expected; "
                "it was replaced after the task that made it ended: run that task again"
            )
        return receipt

    def receipt(self, name: str) -> Receipt:
        """The only input receipt of that name."""
        return self.receipts(name)[0]

    def receipts(self, name: str) -> list[Receipt]:
        """All input receipts of that name, in the request's order."""
        return [self.load(ref) for ref in self.refs(name)]

    def fetch(self, receipt: Receipt, name: str) -> Path:
        """Local, verified copy of one object of an artifact (size and SHA-256 as its receipt says)."""
        if self.cache is None:
            self.cache = self.scratch()
        return fetch_object(self.store, receipt, name, self.cache)

    # ---- results ----------------------------------------------------------------------------------------------------

    def writer(self, kind: str | None = None, key: str | None = None) -> ArtifactWriter:
        """Writer of this stage's artifact, or of another kind that this stage makes (a shard, say)."""
        kind = kind or self.request.stage
        return ArtifactWriter(self.store, kind, key or self.request.key(), attempt=new_attempt())

    def figure(self, writer: ArtifactWriter, figure: Figure, name: str) -> None:
        """Store a plot with the artifact (`figures/NAME`) and log it to MLflow.

        A run that finds this artifact instead of making it logs the stored copy.
        """
        file = self.scratch() / name
        figure.savefig(file, dpi=120, bbox_inches="tight")
        writer.add(f"figures/{name}", file)
        self.tracker.log_file(file, "plots")

    def publish(self, writer: ArtifactWriter, **fields: Any) -> Receipt:
        """Write the receipt, last. If another attempt was faster its receipt is returned and ours is swept.

        Args:
            writer: holds the objects already written.
            fields: `counts`, `metrics`, `details`, `identity`, and `spec`/`inputs` where they are not the stage's own.
        """
        own = writer.kind == self.request.stage
        defaults: dict[str, Any] = {
            "spec": self.spec.semantic(writer.kind),
            "inputs": {n: [r.identity for r in refs] for n, refs in self.request.inputs.items()} if own else {},
            "identity": writer.key,
            "versions": versions(),
            "device": self.device,
            "started_at": datetime.datetime.fromtimestamp(self._started, datetime.UTC).isoformat(timespec="seconds"),
            "seconds": round(time.time() - self._started, 3),
        }
        return writer.commit(
            Receipt(
                kind=writer.kind,
                version=STAGES[writer.kind].version,
                key=writer.key,
                objects=writer.objects,
                attempt=writer.attempt,
                **{**defaults, **fields},
            )
        )

    def progress(self, total: int, unit: str, label: str) -> Progress:
        """Progress of something that takes more than ten seconds: a line in the log at a human rate, and an object
        that the UI page reads."""
        return Progress(self.store, self.request.run, total=total, unit=unit, label=label)


def new_attempt() -> str:
    """Name of one attempt's folder: unique, so that two live attempts never write to one path."""
    return f"{int(time.time()):x}-{secrets.token_hex(4)}"


StageFunction = Callable[[StageContext], Receipt]
