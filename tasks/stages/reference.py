"""Stage `reference`: the held-out prompts decoded greedily by the plain target.

Its text is what speculative decoding must reproduce, its time what it must beat, its states what replay reads.
A prompt whose first token is an end token is kept; it has no verification step.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tasks.contract.errors import ConfigurationError, DataError, Problem
from tasks.contract.receipt import Receipt
from tasks.decoding.greedy import GreedyText, greedy_decode
from tasks.decoding.reference_file import part_name, read_reference, write_reference
from tasks.decoding.replay import ReferenceSequence
from tasks.stages.context import StageContext
from tasks.target.capture import LayerCapture
from tasks.target.loading import Target, open_target

__all__ = ["Prompt", "open_reference", "read_prompts", "read_reference", "run"]

log = logging.getLogger("tasks")
PART_BYTES = 1 << 30
TEXTS = "texts.jsonl"


@dataclass(frozen=True)
class Prompt:
    """One held-out prompt."""

    prompt_id: str
    input_ids: list[int]
    slice: str


def run(ctx: StageContext) -> Receipt:
    """Decode every prompt, capture its states in one plain forward, store both.

    Objects: `reference.safetensors` (see `tasks.decoding.reference_file`), or several parts of it, and `texts.jsonl`.

    Raises:
        DataError: if there is no prompt.
        ConfigurationError: field `layer_ids`, if `plan` has not resolved it.
    """
    spec, target_receipt = ctx.spec, ctx.receipt("target")
    if spec.layer_ids is None:
        raise ConfigurationError(Problem("layer_ids", None, "ids resolved by stage plan"))
    prompts = read_prompts(ctx.fetch(ctx.receipt("assemble"), "prompts.jsonl"))
    target = open_target(ctx, target_receipt)
    writer, folder = ctx.writer(), ctx.scratch()
    greedy_decode(target, prompts[0].input_ids, max_new_tokens=4)  # kernels are chosen and loaded outside the timing
    texts: list[tuple[Prompt, GreedyText]] = []
    files: list[Path] = []
    pending: list[ReferenceSequence] = []
    with (
        LayerCapture(target, spec.layer_ids) as capture,
        (folder / TEXTS).open("w", encoding="utf-8") as lines,
        ctx.progress(len(prompts), "prompts", "reference") as progress,
    ):
        for prompt in prompts:
            text = greedy_decode(target, prompt.input_ids, max_new_tokens=spec.max_new_tokens)
            texts.append((prompt, text))
            pending.append(_sequence(target, capture, prompt, text, spec.max_new_tokens, spec.states_dtype))
            lines.write(json.dumps(_line(target, prompt, text), ensure_ascii=False) + "\n")
            if sum(s.states.nbytes for s in pending) >= PART_BYTES:
                files.append(_write_part(ctx, folder, len(files), pending, target_receipt.identity))
                pending = []
            progress.add(1, tokens_per_second=_plain_speed([text])[0])
    if pending:
        files.append(_write_part(ctx, folder, len(files), pending, target_receipt.identity))
    for index, file in enumerate(files):
        writer.add(part_name(index, len(files)), file)
    writer.add(TEXTS, folder / TEXTS)
    return ctx.publish(writer, **_results(texts, spec.layer_ids, len(files), target))


def open_reference(ctx: StageContext, receipt: Receipt) -> list[ReferenceSequence]:
    """Sequences of a receipt of stage `reference`, in the order of the prompts."""
    parts = int(receipt.details["parts"])
    return read_reference([ctx.fetch(receipt, part_name(index, parts)) for index in range(parts)])


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of `assemble`, in order.

    Raises:
        DataError: naming the line that is not a prompt, or if there is none.
    """
    prompts = list(_prompt_lines(path))
    if not prompts:
        raise DataError(f"{path.name}: found no prompt; expected at least one: raise validation_share or add data")
    return prompts


def _prompt_lines(path: Path) -> Iterator[Prompt]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                prompt = Prompt(str(row["prompt_id"]), [int(i) for i in row["input_ids"]], str(row["slice"]))
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"{path.name}, line {number}: not a prompt ({error!r}): {line[:200]!r}") from error
            if not prompt.input_ids:
                raise DataError(f"{path.name}, line {number}: prompt {prompt.prompt_id} has no tokens")
            yield prompt


@torch.inference_mode()
def _sequence(
    target: Target, capture: LayerCapture, prompt: Prompt, text: GreedyText, limit: int, states_dtype: str
) -> ReferenceSequence:
    ids = torch.tensor([*prompt.input_ids, *text.tokens])
    target.decoder(input_ids=ids[None].to(target.device), use_cache=False)
    states = capture.states()[0].to(getattr(torch, states_dtype)).cpu()
    capture.clear()
    return ReferenceSequence(
        input_ids=ids,
        prompt_length=len(prompt.input_ids),
        load_states=lambda: states,
        slice=prompt.slice,
        ended=text.ended,
        prompt_id=prompt.prompt_id,
        limit=limit,
        margins=torch.tensor(text.margins),
    )


def _write_part(ctx: StageContext, folder: Path, index: int, sequences: list[ReferenceSequence], target: str) -> Path:
    path = folder / f"part-{index:05d}.safetensors"
    assert ctx.spec.layer_ids is not None
    write_reference(path, sequences, layer_ids=ctx.spec.layer_ids, target=target)
    return path


def _line(target: Target, prompt: Prompt, text: GreedyText) -> dict[str, Any]:
    def decode(ids: list[int]) -> str:
        return str(target.tokenizer.decode(ids, skip_special_tokens=False))

    return {
        "prompt_id": prompt.prompt_id,
        "slice": prompt.slice,
        "prompt": decode(prompt.input_ids),
        "answer": decode(text.tokens),
        "ended": text.ended,
        "tokens": len(text.tokens),
        "smallest_margin": min(text.margins),
    }


def _plain_speed(texts: list[GreedyText]) -> tuple[float, float]:
    """Tokens a second without and with the prefill (0 where nothing was decoded after it)."""
    decoded = sum(len(text.tokens) - 1 for text in texts)
    decode_seconds = sum(text.decode_seconds for text in texts)
    total = sum(text.prefill_seconds for text in texts) + decode_seconds
    return decoded / decode_seconds if decoded else 0.0, (decoded + len(texts)) / total


def _results(
    texts: list[tuple[Prompt, GreedyText]], layer_ids: list[int], parts: int, target: Target
) -> dict[str, Any]:
    answers = [text for _, text in texts]
    speed, speed_with_prefill = _plain_speed(answers)
    return {
        "counts": {
            "prompts": len(texts),
            "prompt_tokens": sum(len(prompt.input_ids) for prompt, _ in texts),
            "answer_tokens": sum(len(text.tokens) for text in answers),
            "ended": sum(text.ended for text in answers),
            "ended_at_once": sum(text.ended and len(text.tokens) == 1 for text in answers),
        },
        "metrics": {
            "plain_tokens_per_second": speed,
            "plain_tokens_per_second_with_prefill": speed_with_prefill,
            "mean_answer_tokens": sum(len(text.tokens) for text in answers) / len(answers),
        },
        "details": {
            "parts": parts,
            "layer_ids": list(layer_ids),
            "slices": dict(Counter(prompt.slice for prompt, _ in texts)),
            "compute_dtype": str(target.dtype).removeprefix("torch."),
            "attention": target.attention,
            "linear_attention": target.linear_attention,
        },
    }
