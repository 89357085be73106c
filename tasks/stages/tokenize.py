"""Chat rows to token ids and loss mask: one task for each group of source files.

Input: the target's receipt; argument `files`: what `tasks.data.sources.resolve_sources` gave, in order. Result: one
object of all kept samples in row order, a file of rejected rows, and a report. It does not compare rows with each
other: duplicates, the split and the shards are the assemble stage's. If it is killed, nothing is published; the next
try starts over.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import IO, Any

from tasks.contract.errors import DataError
from tasks.contract.receipt import Receipt, canonical_json
from tasks.data.reading import read_rows
from tasks.data.rejection import RejectReason
from tasks.data.rendering import ChatTemplate
from tasks.data.report import LengthHistogram, RejectCounts
from tasks.data.samples import RowResult, make_samples
from tasks.data.sources import SourceFile
from tasks.data.token_shard import TokenShardWriter
from tasks.progress import Progress
from tasks.stages.context import StageContext

TOKENS_OBJECT = "tokenized.safetensors"
REJECTS_OBJECT = "rejects.jsonl"
REPORT_OBJECT = "report.json"
_KILOBYTE = 1000


@dataclass
class FileReport:
    """What one source file gave."""

    uri: str
    slice: str
    counts: Counter[str] = field(default_factory=Counter)
    formats: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)

    def to_json(self) -> dict[str, Any]:
        """As in the receipt and the report."""
        return {
            "uri": self.uri,
            "slice": self.slice,
            **{name: self.counts[name] for name in _COUNTS},
            "formats": dict(sorted(self.formats.items())),
            "rejected": dict(sorted(self.rejected.items())),
        }


_COUNTS = ("read", "kept", "rejected", "repaired", "samples", "tokens", "supervised_tokens")


def run(ctx: StageContext) -> Receipt:
    """Run the stage."""
    from tasks.target.loading import open_tokenizer

    files: list[SourceFile] = ctx.args["files"]
    tokenizer = open_tokenizer(ctx, ctx.receipt("target"))
    template = ChatTemplate(tokenizer, thinking=ctx.spec.thinking == "on")
    slices = list(dict.fromkeys(file["slice"] for file in files))
    folder = ctx.scratch()
    writer = ctx.writer()
    tally = Tally()
    total = sum(file["size"] for file in files) // _KILOBYTE
    with (
        TokenShardWriter(folder / TOKENS_OBJECT) as shard,
        (folder / REJECTS_OBJECT).open("wb") as rejects,
        ctx.progress(total, "kB", "tokenize") as progress,
    ):
        for source in files:
            _tokenize_file(source, slices.index(source["slice"]), template, ctx, tally, shard, rejects, progress)
        shard.finish(slices, {"template_digest": template.digest, "thinking": ctx.spec.thinking})
    for name in (TOKENS_OBJECT, REJECTS_OBJECT):
        writer.add(name, folder / name)
    details = {
        "files": [report.to_json() for report in tally.files],
        "slices": slices,
        "rejected": dict(sorted(tally.rejects.counts.items())),
        "left_out": dict(sorted(tally.left_out.items())),
        "examples": tally.rejects.examples,
        "lengths": tally.lengths.to_json(),
        "template_digest": template.digest,
        "thinking": ctx.spec.thinking,
    }
    writer.add(REPORT_OBJECT, canonical_json(details))
    counts = {name: sum(report.counts[name] for report in tally.files) for name in _COUNTS}
    return ctx.publish(writer, counts=counts, details=details)


class Tally:
    """Counts over the files of a task."""

    def __init__(self) -> None:
        self.files: list[FileReport] = []
        self.rejects = RejectCounts()  # rows
        self.left_out: Counter[str] = Counter()  # single turns and samples of kept rows
        self.lengths = LengthHistogram()

    def add(self, result: RowResult, report: FileReport) -> dict[str, Any] | None:
        """Count one row; its entry for the rejects file, if it was rejected."""
        report.counts["read"] += 1
        report.counts["repaired"] += result.repaired
        if result.chat_format:
            report.formats[result.chat_format] += 1
        for sample in result.samples:
            report.counts["samples"] += 1
            report.counts["tokens"] += len(sample.input_ids)
            report.counts["supervised_tokens"] += int(sample.loss_mask.sum())
            self.lengths.add(len(sample.input_ids))
        if result.rejection is None:
            report.counts["kept"] += 1
            self.left_out.update(str(rejection.reason) for rejection in result.left_out)
            return None
        report.counts["rejected"] += 1
        report.rejected[result.rejection.reason] += 1
        entry = {"source": report.uri, "line": result.line, "detail": result.rejection.detail}
        self.rejects.add(result.rejection.reason, entry)
        return {**entry, "reason": str(result.rejection.reason)}


def _tokenize_file(
    source: SourceFile,
    slice_id: int,
    template: ChatTemplate,
    ctx: StageContext,
    tally: Tally,
    shard: TokenShardWriter,
    rejects: IO[bytes],
    progress: Progress,
) -> None:
    report = FileReport(source["uri"], source["slice"])
    tally.files.append(report)
    pending = 0

    def count_bytes(count: int) -> None:
        nonlocal pending
        whole, pending = divmod(pending + count, _KILOBYTE)
        progress.add(whole, rows=report.counts["read"], kept=report.counts["kept"])

    results = make_samples(
        read_rows(source, count_bytes),
        template,
        supervise=ctx.spec.supervise,
        max_length=ctx.spec.max_length,
        slice_id=slice_id,
    )
    for result in results:
        entry = tally.add(result, report)
        if entry:
            rejects.write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")
        for sample in result.samples:
            shard.add(sample)
    template_reasons = {RejectReason.TEMPLATE_REWRITES_PROMPT, RejectReason.MARKERS_DISAGREE}
    if report.counts["read"] and sum(report.rejected[reason] for reason in template_reasons) == report.counts["read"]:
        raise DataError(
            f"{source['uri']}: the target's chat template (digest {template.digest[:12]}) supervises none of its "
            f"{report.counts['read']:,} rows: {tally.rejects.examples[-1]['detail']}"
        )
