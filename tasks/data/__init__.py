"""Chat data to token shards: sources, chat formats, the target's template, loss masks, split and shards."""
