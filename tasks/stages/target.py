"""Stage `target`: import the target. A GGUF file is dequantized once and kept in the store as safetensors; any other
checkpoint stays where it is, and the receipt holds the digests of its files."""

from __future__ import annotations

import logging

from tasks.contract.errors import ConfigurationError, Problem
from tasks.contract.receipt import Receipt
from tasks.stages.context import StageContext
from tasks.target.facts import folder_facts
from tasks.target.importing import digest_files, identities, local_checkpoint
from tasks.target.source import parse_target, target_fingerprint

log = logging.getLogger("tasks")


def run(ctx: StageContext) -> Receipt:
    """Import `spec.target`.

    Arguments of the request: `fingerprint`, as `plan` took it (`tasks.target.source.target_fingerprint`).

    Returns:
        The receipt: `identity` over weights, configuration, tokenizer and end tokens; details with `location`, `files`
        (size, SHA-256 and time of change by name), digests, and every field of `TargetFacts`.

    Raises:
        ConfigurationError: field `target`, if the checkpoint is not usable or changed since `plan` looked at it.
    """
    source = parse_target(ctx.spec)
    fingerprint = target_fingerprint(ctx.spec)
    # Without it in the key, one target's receipt would pass for another's.
    if ctx.args["fingerprint"] != fingerprint:
        raise ConfigurationError(
            Problem(
                "target", ctx.spec.target, "the checkpoint that `plan` looked at; it changed since: start a new run"
            )
        )
    if source.kind == "gguf":
        log.info("target: dequantizing %s to safetensors, once", source.path.name)
    folder, names, location = local_checkpoint(source, ctx.scratch())
    files = digest_files(folder, names, ctx.cache)
    digests = identities(folder, files)
    facts = folder_facts(folder, source.name, source.trust_remote_code)
    writer = ctx.writer()
    if location["kind"] == "store":
        for name in names:
            writer.add(name, folder / name)
    total = sum(entry["size"] for entry in files.values())
    log.info("target %s: %d files, %.1f MB, identity %s", source.name, len(files), total / 1e6, digests["identity"])
    return ctx.publish(
        writer,
        identity=digests["identity"],
        counts={"files": len(files), "bytes": total, "parameters": facts.parameters},
        details={
            **facts.to_json(),
            "location": location,
            "source": ctx.spec.target,
            "files": files,
            "weights_digest": digests["weights"],
            "tokenizer_digest": digests["tokenizer"],
            "template_digest": facts.template_digest,
        },
    )
