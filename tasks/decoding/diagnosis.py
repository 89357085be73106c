"""What to look at when the figures of a measurement do not fit together."""

from __future__ import annotations

from tasks.decoding.acceptance import AcceptanceCount

NEAR_ONE = 1.1  # acceptance length below which a drafter saves nothing
LARGE_GAP = 0.15  # relative distance of replay to real decoding that near ties do not explain


def diagnose(
    real: AcceptanceCount, replay: AcceptanceCount, *, lossless_exact: bool, verification: str, slices: int
) -> list[str]:
    """Sentences for the log, the receipt and the run's page; none if nothing stands out.

    Args:
        real: counts of real decoding.
        replay: counts of replay on the same prompts.
        lossless_exact: whether the texts were compared token for token (fp32).
        verification: `block` or `token`.
        slices: how many slices the prompts have.
    """
    lines = []
    length = real.acceptance_length
    if length < NEAR_ONE:
        first = real.share_by_position().get(1, 0.0)
        lines.append(
            f"acceptance length is {length:.3f}, nearly 1.0: of the first draft tokens {first:.1%} are accepted. "
            "Usual causes: the drafter is hardly trained yet (look at the loss of the training); the answers it was "
            "trained on are not the target's own; layer ids, block size or mask token of drafter and extraction "
            "differ; another chat template or thinking mode than in training"
        )
    gap = abs(replay.acceptance_length - length) / length
    if gap > LARGE_GAP:
        lines.append(
            f"replay says {replay.acceptance_length:.3f} and real decoding {length:.3f}: the states that the drafter "
            "sees while decoding are not those that are stored; trust real decoding, and look for a target whose "
            "cached forward differs from its plain one, or another compute or stored dtype"
        )
    elif lossless_exact and replay != real:
        lines.append(
            f"replay ({replay.steps} steps) and real decoding ({real.steps} steps) differ in single steps although "
            "both run in float32: near ties of the drafter's own logits, or a cached forward that is not exact"
        )
    if verification == "token":
        lines.append(
            "this target's cached forward over several tokens is not exact: drafts were verified token by token, so "
            "acceptance is right and no speedup can be expected"
        )
    if slices > 1 and len(real.prompts) < 5 * slices:
        lines.append(f"{len(real.prompts)} prompts over {slices} slices: too few for figures of single slices")
    return lines
