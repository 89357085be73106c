"""Stage `measure`: acceptance of a drafter by real speculative decoding, and by replay, on the reference prompts.

Every text is checked against plain greedy decoding: token for token in float32, within a logit margin in bfloat16.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from tasks.contract.errors import DataError
from tasks.contract.receipt import Receipt, canonical_json
from tasks.decoding.acceptance import AcceptanceCount, Step, merge
from tasks.decoding.diagnosis import diagnose
from tasks.decoding.figures import acceptance_by_slice, accepted_by_position, accepted_per_step
from tasks.decoding.greedy import greedy_decode
from tasks.decoding.losslessness import TextCheck, check_exact, check_within_margin
from tasks.decoding.prompt_page import Row, prompt_page
from tasks.decoding.proposers import DrafterProposer
from tasks.decoding.replay import ReferenceSequence, replay_steps
from tasks.decoding.speculative import Seconds, SpeculativeText, speculative_decode
from tasks.decoding.verification import Probe, probe_verification
from tasks.drafter.model import DFlashDrafter
from tasks.drafter.serialization import load_drafter
from tasks.stages.context import StageContext
from tasks.stages.reference import open_reference
from tasks.target.loading import Target, open_target

log = logging.getLogger("tasks")
PROMPTS, COUNTS, PAGE = "prompts.jsonl", "acceptance.json", "prompts.html"
_TIMED_PROMPTS = 8  # decoded plainly too, in this process, for the speedup
_PAGE_PROMPTS = 100
_LENGTH_BUCKETS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


@dataclass
class Measured:
    """One prompt, decoded with the drafter and replayed."""

    sequence: ReferenceSequence
    text: SpeculativeText
    replayed: list[Step]
    check: TextCheck
    plain_seconds: float | None = None  # of plain decoding without its prefill, where it was timed
    plain_tokens: int = 0

    @property
    def equal_steps(self) -> bool:
        """Whether replay made the very steps of real decoding."""
        return self.text.steps == self.replayed


@dataclass
class Measurement:
    """All prompts, counted."""

    block_size: int
    prompts: list[Measured] = field(default_factory=list)

    def count(self, prompts: Sequence[Measured] | None = None, *, replayed: bool = False) -> AcceptanceCount:
        """Counts of these prompts (all), by real decoding or by replay."""
        count = AcceptanceCount(self.block_size)
        for prompt in self.prompts if prompts is None else prompts:
            count.add_prompt(prompt.replayed if replayed else prompt.text.steps)
        return count

    def by_slice(self) -> dict[str, AcceptanceCount]:
        """Counts of real decoding for each slice."""
        names = sorted({prompt.sequence.slice for prompt in self.prompts})
        return {name: self.count([p for p in self.prompts if p.sequence.slice == name]) for name in names}

    def seconds(self) -> Seconds:
        """Sum over the prompts."""
        total = Seconds()
        for prompt in self.prompts:
            for name, value in asdict(prompt.text.seconds).items():
                setattr(total, name, getattr(total, name) + value)
        return total


def run(ctx: StageContext) -> Receipt:
    """Decode, check, replay, count.

    Objects: `prompts.jsonl` (steps of each prompt), `acceptance.json` (sums overall and per slice), `prompts.html`.

    Raises:
        DecodingMismatch: if a text is not the target's own.
        NoVerificationSteps: if no prompt made a step.
        DataError: if the drafter does not fit the target or the reference.
    """
    reference = ctx.receipt("reference")
    train = ctx.receipt("train")
    target = open_target(ctx, ctx.receipt("target"))
    drafter = _open_drafter(ctx, train, target)
    _require_fit(drafter, target, reference)
    sequences = open_reference(ctx, reference)
    block_size = drafter.config.block_size
    longest = max(sequences, key=lambda sequence: sequence.prompt_length)
    probe = probe_verification(target, longest.prompt_ids, block_size)
    measurement = Measurement(block_size)
    proposer = DrafterProposer(drafter, target)
    dtype = getattr(torch, ctx.spec.states_dtype)
    # Kernels are chosen and loaded outside the timing.
    speculative_decode(
        target,
        proposer,
        longest.prompt_ids,
        max_new_tokens=2 * block_size,
        states_dtype=dtype,
        verification=probe.verification,
    )
    with ctx.progress(len(sequences), "prompts", "measure") as progress:
        for index, sequence in enumerate(sequences):
            timed = index < _TIMED_PROMPTS
            measured = _measure_prompt(target, drafter, proposer, sequence, dtype, probe, timed)
            measurement.prompts.append(measured)
            so_far = measurement.count()
            progress.add(1, acceptance_length=so_far.acceptance_length if so_far.steps else 0.0)
    return _publish(ctx, measurement, probe, target)


def _measure_prompt(
    target: Target,
    drafter: DFlashDrafter,
    proposer: DrafterProposer,
    sequence: ReferenceSequence,
    states_dtype: torch.dtype,
    probe: Probe,
    timed: bool,
) -> Measured:
    prompt_ids = sequence.prompt_ids
    text = speculative_decode(
        target,
        proposer,
        prompt_ids,
        max_new_tokens=sequence.limit,
        states_dtype=states_dtype,
        verification=probe.verification,
    )
    if target.dtype == torch.float32:
        check = check_exact(sequence.prompt_id, sequence.prompt_length, text.tokens, sequence.answer)
    else:
        check = check_within_margin(target, sequence.prompt_id, prompt_ids, text.tokens, sequence.answer)
    replayed = replay_steps(drafter, proposer.head_weight, proposer.embedding_weight, sequence, proposer.block_size)
    measured = Measured(sequence, text, replayed, check)
    if timed:
        plain = greedy_decode(target, prompt_ids, max_new_tokens=sequence.limit)
        measured.plain_seconds, measured.plain_tokens = plain.decode_seconds, len(plain.tokens) - 1
    return measured


def _open_drafter(ctx: StageContext, train: Receipt, target: Target) -> DFlashDrafter:
    folder = ctx.scratch()
    prefix = "drafter/"
    for stored in train.objects:
        if stored.name.startswith(prefix):
            path = folder / stored.name.removeprefix(prefix)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(ctx.fetch(train, stored.name).resolve())
    return load_drafter(folder).to(device=target.device, dtype=target.dtype).eval()


def _require_fit(drafter: DFlashDrafter, target: Target, reference: Receipt) -> None:
    config = drafter.config
    problems = []
    if list(config.target_layer_ids) != list(reference.details["layer_ids"]):
        problems.append(f"layer ids {list(config.target_layer_ids)}, reference has {reference.details['layer_ids']}")
    if config.hidden_size != target.hidden_size:
        problems.append(f"hidden size {config.hidden_size}, target has {target.hidden_size}")
    if not 0 <= config.mask_token_id < target.vocab_size:
        problems.append(f"mask token {config.mask_token_id}, target has {target.vocab_size} embedding rows")
    if problems:
        raise DataError(f"the drafter does not fit: {'; '.join(problems)}; measure it on the target it was trained for")


# ---- results --------------------------------------------------------------------------------------------------------


def _publish(ctx: StageContext, measurement: Measurement, probe: Probe, target: Target) -> Receipt:
    by_slice = measurement.by_slice()
    real = merge(by_slice.values(), measurement.block_size)
    replay = measurement.count(replayed=True)
    exact = target.dtype == torch.float32
    notes = diagnose(
        real, replay, lossless_exact=exact, verification=probe.verification, slices=len(by_slice)
    ) + _length_notes(measurement, ctx.spec.max_length)
    for note in notes:
        log.warning("measure: %s", note)
    metrics = _metrics(measurement, real, replay)
    details = {
        "lossless": True,  # anything else has raised DecodingMismatch
        "losslessness": _losslessness(measurement, exact),
        "slices": {name: _slice_facts(count) for name, count in by_slice.items() if count.steps},
        "slices_without_steps": [name for name, count in by_slice.items() if not count.steps],
        "by_prompt_length": _by_prompt_length(measurement),
        "share_accepted_by_position": {str(k): share for k, share in real.share_by_position().items()},
        "steps_by_accepted": real.steps_by_accepted,
        "verification": asdict(probe),
        "settings": _settings(ctx, measurement, target),
        "notes": notes,
    }
    rows = [
        Row(m.sequence.prompt_id, m.sequence.slice, m.sequence.prompt_ids, m.text.tokens, m.text.steps)
        for m in measurement.prompts[:_PAGE_PROMPTS]
    ]
    page = prompt_page(rows, target.tokenizer, f"Acceptance length {real.acceptance_length:.3f}")
    writer = ctx.writer()
    writer.add(PROMPTS, "".join(json.dumps(_prompt_line(m)) + "\n" for m in measurement.prompts).encode())
    sums = {
        "overall": real.to_json(),
        "replay": replay.to_json(),
        "slices": {name: count.to_json() for name, count in by_slice.items()},
    }
    writer.add(COUNTS, canonical_json(sums))
    writer.add(PAGE, page.encode())
    ctx.figure(writer, accepted_by_position(real), "accepted_by_position.png")
    ctx.figure(writer, accepted_per_step(real), "accepted_per_step.png")
    ctx.figure(writer, acceptance_by_slice(by_slice), "acceptance_by_slice.png")
    _log(ctx, by_slice, page, notes)
    counts = {
        "prompts": len(real.prompts),
        "prompts_without_steps": sum(not prompt.steps for prompt in real.prompts),
        "steps": real.steps,
        "emitted_tokens": real.emitted,
        "accepted_draft_tokens": real.accepted,
        "near_ties": sum(m.check.near_ties for m in measurement.prompts),
    }
    return ctx.publish(writer, counts=counts, metrics=metrics, details=details)


def _metrics(measurement: Measurement, real: AcceptanceCount, replay: AcceptanceCount) -> dict[str, float]:
    low, high = real.confidence_interval()
    seconds = measurement.seconds()
    timed = [m for m in measurement.prompts if m.plain_seconds is not None and m.plain_tokens]
    plain = sum(m.plain_tokens for m in timed) / sum(m.plain_seconds or 0.0 for m in timed)
    with_drafter = sum(len(m.text.tokens) - 1 for m in timed) / sum(m.text.seconds.decode for m in timed)
    shares = {f"accepted_share_position_{k:02d}": share for k, share in real.share_by_position().items()}
    return {
        "acceptance_length": real.acceptance_length,
        "acceptance_length_low": low,
        "acceptance_length_high": high,
        "mean_of_prompt_acceptance": real.mean_of_prompt_means,
        "replay_acceptance_length": replay.acceptance_length,
        "replay_equals_decoding": float(all(m.equal_steps for m in measurement.prompts)),
        "replay_equal_prompts_share": sum(m.equal_steps for m in measurement.prompts) / len(measurement.prompts),
        "tokens_per_second_plain": plain,
        "tokens_per_second_drafter": with_drafter,
        "speedup": with_drafter / plain,
        "tokens_per_second_drafter_all_prompts": real.emitted / seconds.decode,
        "draft_share": seconds.draft / seconds.decode,
        "verify_share": seconds.verify / seconds.decode,
        "rollback_share": seconds.rollback / seconds.decode,
        **shares,
    }


def _slice_facts(count: AcceptanceCount) -> dict[str, Any]:
    low, high = count.confidence_interval()
    return {
        "acceptance_length": count.acceptance_length,
        "acceptance_length_low": low,
        "acceptance_length_high": high,
        "mean_of_prompt_acceptance": count.mean_of_prompt_means,
        "prompts": len(count.prompts),
        "steps": count.steps,
        "emitted_tokens": count.emitted,
        "share_accepted_by_position": {str(k): share for k, share in count.share_by_position().items()},
    }


def _losslessness(measurement: Measurement, exact: bool) -> dict[str, Any]:
    checks = [m.check for m in measurement.prompts]
    return {
        "method": "token for token" if exact else "teacher forcing within a logit margin",
        "equal_texts": sum(check.equal for check in checks),
        "near_ties": sum(check.near_ties for check in checks),
        "largest_gap": max(check.largest_gap for check in checks),
        "margin": max(check.margin for check in checks),
    }


def _settings(ctx: StageContext, measurement: Measurement, target: Target) -> dict[str, Any]:
    prompts = [[m.sequence.prompt_id, m.sequence.prompt_ids] for m in measurement.prompts]
    return {
        "block_size": measurement.block_size,
        "temperature": 0.0,
        "thinking": ctx.spec.thinking,
        "max_new_tokens": ctx.spec.max_new_tokens,
        "prompt_set": hashlib.sha256(canonical_json(prompts)).hexdigest(),
        "compute_dtype": str(target.dtype).removeprefix("torch."),
        "states_dtype": ctx.spec.states_dtype,
        "device": _device_name(target),
        "attention": target.attention,
        "linear_attention": target.linear_attention,
        "timed_prompts": sum(m.plain_seconds is not None for m in measurement.prompts),
    }


def _device_name(target: Target) -> str:
    return torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else "cpu"


def _bucket(length: int) -> str:
    return next((f"<={bound}" for bound in _LENGTH_BUCKETS if length <= bound), f">{_LENGTH_BUCKETS[-1]}")


def _by_prompt_length(measurement: Measurement) -> dict[str, dict[str, float]]:
    buckets: dict[str, list[Measured]] = {}
    for measured in sorted(measurement.prompts, key=lambda m: m.sequence.prompt_length):
        buckets.setdefault(_bucket(measured.sequence.prompt_length), []).append(measured)
    counts = {name: measurement.count(prompts) for name, prompts in buckets.items()}
    return {
        name: {"prompts": len(c.prompts), "steps": c.steps, "acceptance_length": c.acceptance_length}
        for name, c in counts.items()
        if c.steps
    }


def _length_notes(measurement: Measurement, trained: int) -> list[str]:
    beyond = sum(m.sequence.prompt_length > trained for m in measurement.prompts)
    if not beyond:
        return []
    return [f"{beyond} prompts are longer than the {trained} tokens trained on (max_length): see by_prompt_length"]


def _prompt_line(measured: Measured) -> dict[str, Any]:
    sequence, text = measured.sequence, measured.text
    return {
        "prompt_id": sequence.prompt_id,
        "slice": sequence.slice,
        "prompt_tokens": sequence.prompt_length,
        "answer_tokens": len(text.tokens),
        "ended": text.ended,
        "accepted": [step.accepted for step in text.steps],
        "drafted": [step.drafted for step in text.steps],
        "emitted": [step.emitted for step in text.steps],
        "replay_equal": measured.equal_steps,
        "text_equal": measured.check.equal,
        "near_ties": measured.check.near_ties,
        "seconds": {name: round(value, 6) for name, value in asdict(text.seconds).items()},
    }


def _log(ctx: StageContext, by_slice: dict[str, AcceptanceCount], page: str, notes: list[str]) -> None:
    """What the receipt's own metrics do not show: slices and the coloured texts."""
    tracker = ctx.tracker
    for name, count in by_slice.items():
        if count.steps:
            place = f"measure/slice/{re.sub(r'[^A-Za-z0-9_. -]', '_', name)}"
            tracker.log_metrics(
                {
                    f"{place}/acceptance_length": count.acceptance_length,
                    f"{place}/steps": float(count.steps),
                    f"{place}/prompts": float(len(count.prompts)),
                }
            )
    tracker.log_text(page, f"measure/{PAGE}")
    if notes:
        tracker.log_text("\n".join(notes) + "\n", "measure/notes.txt")
