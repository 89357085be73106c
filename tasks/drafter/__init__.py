"""The DFlash drafter: model, loss, anchors, training loop, checkpoints."""
